#include "fatal_signal.h"

#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <cstdio>

#include "file_descriptor.h"

namespace fpfs {
namespace {

// Fields of /proc/PID/stat behind the name, counted from that of the state (proc(5) counts from 1
// and has the state as the third).
constexpr size_t kFlagsField = 9 - 3;
constexpr size_t kExitCodeField = 52 - 3;

constexpr uint64_t kExiting = 0x4;      // PF_EXITING
constexpr uint64_t kSignalMask = 0x7f;  // of an exit code as wait(2) has it

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

}  // namespace

// The exit code is that of the whole process (the kernel's group_exit_code). The flag PF_SIGNALED
// would not do: threads that exit(3) of another thread ends have it, too, and one of them may be
// the last to close the files.
int fatal_signal_in(std::string_view stat) {
  const size_t name_end = stat.rfind(')');  // the name may contain anything
  if (name_end == std::string_view::npos || name_end + 2 > stat.size()) return 0;
  const std::string_view rest = stat.substr(name_end + 2);
  if ((field(rest, kFlagsField) & kExiting) == 0) return 0;
  return static_cast<int>(field(rest, kExitCodeField) & kSignalMask);
}

int fatal_signal(pid_t thread) {
  if (thread <= 0) return 0;
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%d/stat", thread);
  const FileDescriptor file(::open(path, O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return 0;
  char text[1024];
  const ssize_t bytes = ::read(file.get(), text, sizeof text);
  return bytes > 0 ? fatal_signal_in({text, static_cast<size_t>(bytes)}) : 0;
}

}  // namespace fpfs
