// Runs one test case of this executable in a process of its own, prepared before it starts.
//
// For what cannot be undone in a process (seccomp filters, limits, dropping root, a sanitizer's
// report). The case to run is decorated with doctest::skip(), so that it runs in no other way.
#pragma once

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <string>

namespace fpfs::testing {

struct ChildResult {
  int status = 0;  // as waitpid gives it
  std::string output;
  bool passed() const { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }
};

// `prepare` runs in the child between fork and exec: only calls that are safe there.
inline ChildResult run_child(const std::string& test_case, const std::function<bool()>& prepare) {
  std::array<int, 2> pipe{};
  REQUIRE(::pipe(pipe.data()) == 0);
  const std::string filter = "--test-case=" + test_case;
  const pid_t pid = ::fork();
  REQUIRE(pid >= 0);
  if (pid == 0) {
    ::dup2(pipe[1], STDOUT_FILENO);
    ::dup2(pipe[1], STDERR_FILENO);
    ::close(pipe[0]);
    if (!prepare()) ::_exit(99);
    ::execl("/proc/self/exe", "fpfs_native_tests", "--no-skip", filter.c_str(), nullptr);
    ::_exit(98);
  }
  ::close(pipe[1]);
  ChildResult result;
  std::array<char, 4096> buffer;
  ssize_t bytes = 0;
  while ((bytes = ::read(pipe[0], buffer.data(), buffer.size())) > 0) {
    result.output.append(buffer.data(), static_cast<size_t>(bytes));
  }
  ::close(pipe[0]);
  REQUIRE(::waitpid(pid, &result.status, 0) == pid);
  return result;
}

}  // namespace fpfs::testing
