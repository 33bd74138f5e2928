// Processes that end in all ways, seen from outside while they are zombies, and from their files'
// last moments by the FUSE tests.
#include "fuse/fatal_signal.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <string>
#include <thread>

namespace fpfs::testing {
namespace {

// What `look` finds of a child that runs `live`, when it has ended and nobody has reaped it.
int verdict_on(
    const std::function<void()>& live,
    const std::function<int(pid_t)>& look = [](pid_t pid) { return fatal_signal(pid).value(); }) {
  const pid_t pid = ::fork();
  REQUIRE(pid >= 0);
  if (pid == 0) {
    const rlimit none{0, 0};
    ::setrlimit(RLIMIT_CORE, &none);
    live();
    ::_exit(0);
  }
  siginfo_t info{};
  REQUIRE(::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT) == 0);
  const int verdict = look(pid);
  REQUIRE(::waitpid(pid, nullptr, 0) == pid);
  return verdict;
}

// Whether surely_lives() can be true: from Linux 6.16 on.
bool kernel_tells() {
  utsname system{};
  REQUIRE(::uname(&system) == 0);
  int major = 0;
  int minor = 0;
  REQUIRE(std::sscanf(system.release, "%d.%d", &major, &minor) == 2);
  return major > 6 || (major == 6 && minor >= 16);
}

// doctest's handlers would report the signal as a failure of the child.
void die_of(int signal) {
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

}  // namespace

TEST_CASE("fatal_signal: processes that signals end") {
  for (const int signal : {SIGKILL, SIGTERM, SIGINT, SIGHUP, SIGSEGV, SIGABRT, SIGXCPU}) {
    CAPTURE(signal);
    CHECK(verdict_on([signal] { die_of(signal); }) == signal);
  }
}

TEST_CASE("fatal_signal: processes that end by themselves, with any status") {
  for (const int status : {0, 1, 9, 127, 137, 255}) {
    CAPTURE(status);
    CHECK(verdict_on([status] { ::_exit(status); }) == 0);
  }
}

TEST_CASE("fatal_signal: threads that end with their process are not killed") {
  const auto with_thread = [](const std::function<void()>& end) {
    return [end] {
      std::thread([] { ::pause(); }).detach();
      end();
    };
  };
  CHECK(verdict_on(with_thread([] { ::_exit(3); })) == 0);
  CHECK(verdict_on(with_thread([] { die_of(SIGTERM); })) == SIGTERM);
  // Not the thread that ends the process, but one that goes with it.
  CHECK(verdict_on([] {
          std::thread([] { ::_exit(0); }).detach();
          ::pause();
        }) == 0);
}

TEST_CASE("fatal_signal: who lives, or is not there") {
  CHECK(fatal_signal(::getpid()) == 0);
  CHECK(fatal_signal(0) == 0);
  CHECK(fatal_signal(-1) == 0);
  CHECK(fatal_signal(0x7fffffff) == 0);
}

TEST_CASE("fatal_signal: any name, and texts that are cut off") {
  const std::string head = "12 (a) Z 9 (b)) Z 1 2 3 4 5 ";
  const std::string middle =
      " 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31"
      " 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 ";
  CHECK(fatal_signal_in(head + "4228356" + middle + "11\n") == 11);
  CHECK(fatal_signal_in(head + "4228356" + middle + "139\n") == 11);  // with a core
  CHECK(fatal_signal_in(head + "4228356" + middle + "2816\n") == 0);  // exit(11)
  CHECK(fatal_signal_in(head + "4228352" + middle + "11\n") == 0);    // not exiting
  CHECK(fatal_signal_in(head + "4228356" + middle + "19\n") == 0);    // stopped
  CHECK(fatal_signal_in(head + "4228356" + middle) == 0);
  CHECK(fatal_signal_in(head) == 0);
  CHECK(fatal_signal_in("12 (a)") == 0);
  CHECK(fatal_signal_in("") == 0);
}

TEST_CASE("fatal_signal: nothing is known without a descriptor for the look") {
  const pid_t pid = ::fork();
  REQUIRE(pid >= 0);
  if (pid == 0) {
    const rlimit none{0, 0};
    ::setrlimit(RLIMIT_NOFILE, &none);
    ::_exit(fatal_signal(::getppid()) == std::nullopt && !surely_lives(::getppid()) ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  CHECK(status == 0);
}

TEST_CASE("surely_lives: who has an address space, and nobody else") {
  REQUIRE(surely_lives(::getpid()) == kernel_tells());
  if (!kernel_tells()) return;  // of nobody
  std::thread([] { CHECK(surely_lives(::gettid())); }).join();
  CHECK_FALSE(surely_lives(0));
  CHECK_FALSE(surely_lives(-1));
  CHECK_FALSE(surely_lives(0x7fffffff));
  for (const int signal : {0, SIGKILL, SIGSEGV}) {
    CAPTURE(signal);
    CHECK(verdict_on([signal] { signal == 0 ? ::_exit(0) : die_of(signal); },
                     [](pid_t pid) { return surely_lives(pid) ? 1 : 0; }) == 0);
  }
}

TEST_CASE("surely_lives: a process that is stopped, or that execs, lives") {
  const pid_t pid = ::fork();
  REQUIRE(pid >= 0);
  if (pid == 0) {
    ::raise(SIGSTOP);
    ::execlp("sleep", "sleep", "100", nullptr);
    ::_exit(127);
  }
  int status = 0;
  REQUIRE(::waitpid(pid, &status, WUNTRACED) == pid);
  CHECK(surely_lives(pid) == kernel_tells());
  CHECK(fatal_signal(pid) == 0);
  ::kill(pid, SIGCONT);
  for (int look = 0; look < 1000; ++look) {
    REQUIRE(surely_lives(pid) == kernel_tells());
    REQUIRE(fatal_signal(pid) == 0);
  }
  ::kill(pid, SIGKILL);
  REQUIRE(::waitpid(pid, &status, 0) == pid);
}

TEST_CASE("is_killed: a pending SIGKILL; not who is gone or cannot be seen") {
  CHECK_FALSE(is_killed(::getpid()));
  CHECK_FALSE(is_killed(0));
  CHECK_FALSE(is_killed(0x7fffffff));
  const std::string head = "Name:\tSigPnd:\t100\nGroups:\t" + std::string(100'000, '1') + "\n";
  CHECK(is_killed_in(head + "SigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n"));
  CHECK(is_killed_in(head + "SigPnd:\t0000000000000000\nShdPnd:\t0000000000004100\n"));
  CHECK_FALSE(is_killed_in(head + "SigPnd:\t0000000000004000\nShdPnd:\t0000000000000000\n"));
  CHECK_FALSE(is_killed_in(head));
  CHECK_FALSE(is_killed_in(""));
}

}  // namespace fpfs::testing
