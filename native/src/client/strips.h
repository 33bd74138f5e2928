// Bytes of a file that lie elsewhere in memory, in the order of another tensor: what processes on
// one machine have of a whole that is cut along an inner dimension.
//
// Threads: constant once made. The processes' memory is theirs, and must stay meanwhile.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace fpfs {

// Runs of one length at equal distances in the file, which lie behind each other in memory.
struct Strip {
  pid_t process;  // 0: this one
  uintptr_t address;
  uint64_t offset;  // of the first run in the file
  uint64_t run_bytes;
  uint64_t count;
  uint64_t step;  // from the begin of a run to the begin of the next, in the file
};

class Strips {
 public:
  Strips() = default;
  // EINVAL: runs of a strip overlap.
  static Result<Strips> make(std::vector<Strip> strips);

  // Copies bytes of the file. EINVAL: not each of them is in one strip. ESRCH: a process is no
  // more; EPERM: it may not be read; EFAULT: it has nothing there.
  Status copy(uint64_t offset, uint64_t bytes, char* to) const;

 private:
  std::vector<Strip> strips_;   // by their offsets
  std::vector<uint64_t> ends_;  // the last end of each strip and those before it
};

// Lets other processes of the user read this one's memory from now on, where the kernel asks for
// that (Yama).
void allow_reading();

// Reads memory of a process; errors as above.
Result<std::string> read_process(pid_t process, uintptr_t address, uint64_t bytes);

}  // namespace fpfs
