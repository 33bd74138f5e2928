#include "fuse/fatal_signal.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <string>

#include "base/file_descriptor.h"

namespace fpfs {
namespace {

// Fields of /proc/PID/stat behind the name, counted from that of the state (proc(5) counts from 1
// and has the state as the third).
constexpr size_t kFlagsField = 9 - 3;
constexpr size_t kExitCodeField = 52 - 3;

constexpr uint64_t kExiting = 0x4;      // PF_EXITING
constexpr uint64_t kSignalMask = 0x7f;  // of an exit code as wait(2) has it

// linux/pidfd.h as of Linux 6.16, which distributions do not have yet.
struct PidfdInfo {
  uint64_t mask;
  uint64_t cgroupid;
  std::array<uint32_t, 11> ids;
  int32_t exit_code;
  uint32_t coredump_mask;
  uint32_t spare;
};
static_assert(sizeof(PidfdInfo) == 72);
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);
constexpr unsigned kPidfdThread = O_EXCL;
constexpr uint64_t kInfoCoredump = 1 << 4;
// What a core dump of the process would be. Without an address space there is none of these, or
// the first: it did dump core.
constexpr uint32_t kCoredumped = 1 << 0;
constexpr uint32_t kCoredumpModes = 1 << 1 | 1 << 2 | 1 << 3;

uint64_t field(std::string_view rest, size_t index) {
  for (; index > 0; --index) {
    const size_t space = rest.find(' ');
    if (space == std::string_view::npos) return 0;
    rest.remove_prefix(space + 1);
  }
  uint64_t value = 0;
  std::from_chars(rest.data(), rest.data() + rest.size(), value);
  return value;
}

// A file of /proc; errno when it cannot be read.
int read_of(pid_t thread, const char* name, std::string* text) {
  char path[48];
  std::snprintf(path, sizeof path, "/proc/%d/%s", thread, name);
  const FileDescriptor file(::open(path, O_RDONLY | O_CLOEXEC));
  if (!file) return errno;
  char part[4096];
  for (;;) {
    const ssize_t bytes = ::read(file.get(), part, sizeof part);
    if (bytes < 0) return errno;
    if (bytes == 0) return 0;
    text->append(part, static_cast<size_t>(bytes));
  }
}

// Whether /proc has the numbers of this process's PID namespace. One of a namespace above has
// others for its threads, or another process under theirs.
bool proc_fits() {
  static const bool fits = [] {
    std::array<char, 16> self{};
    const ssize_t length = ::readlink("/proc/self", self.data(), self.size());
    return std::string_view(self.data(), length > 0 ? length : 0) == std::to_string(::getpid());
  }();
  return fits;
}

}  // namespace

bool surely_lives(pid_t thread) {
  if (thread <= 0) return false;
  const FileDescriptor pidfd(
      static_cast<int>(::syscall(SYS_pidfd_open, thread, kPidfdThread)));  // Linux 6.9
  if (!pidfd) return false;
  PidfdInfo info{};
  info.mask = kInfoCoredump;
  if (::ioctl(pidfd.get(), kPidfdGetInfo, &info) != 0) return false;
  return (info.coredump_mask & kCoredumpModes) != 0 && (info.coredump_mask & kCoredumped) == 0;
}

// The exit code is that of the whole process (the kernel's group_exit_code). The flag PF_SIGNALED
// would not do: threads that exit(3) of another thread ends have it, too, and one of them may be
// the last to close the files.
int fatal_signal_in(std::string_view stat) {
  const size_t name_end = stat.rfind(')');  // the name may contain anything
  if (name_end == std::string_view::npos || name_end + 2 > stat.size()) return 0;
  const std::string_view rest = stat.substr(name_end + 2);
  if ((field(rest, kFlagsField) & kExiting) == 0) return 0;
  const auto signal = static_cast<int>(field(rest, kExitCodeField) & kSignalMask);
  // What stopped a process, of which a thread ends with files of its own.
  const bool stops =
      signal == SIGSTOP || signal == SIGTSTP || signal == SIGTTIN || signal == SIGTTOU;
  return stops ? 0 : signal;
}

std::optional<int> fatal_signal(pid_t thread) {
  if (thread <= 0 || !proc_fits()) return 0;
  // Who has memory is not on its way out. Its stat may be held by an exec; statm takes no lock.
  std::string memory;
  std::string stat;
  int error = read_of(thread, "statm", &memory);
  if (error == 0 && !memory.starts_with("0 ")) return 0;
  if (error == 0) error = read_of(thread, "stat", &stat);
  if (error == EMFILE || error == ENFILE || error == ENOMEM) return std::nullopt;
  return fatal_signal_in(stat);
}

bool is_killed_in(std::string_view status) {
  for (const std::string_view name : {"\nSigPnd:\t", "\nShdPnd:\t"}) {
    const size_t at = status.find(name);
    if (at == std::string_view::npos) continue;
    const std::string_view digits = status.substr(at + name.size());
    uint64_t pending = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), pending, 16);
    if ((pending >> (SIGKILL - 1) & 1) != 0) return true;
  }
  return false;
}

bool is_killed(pid_t thread) {
  if (thread <= 0 || !proc_fits()) return false;
  std::string status;
  return read_of(thread, "status", &status) == 0 && is_killed_in(status);
}

}  // namespace fpfs
