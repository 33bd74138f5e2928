// How a process that is on its way out ends: by itself, or by a signal.
#pragma once

#include <sys/types.h>

#include <string_view>

namespace fpfs {

// The signal that ends the process of a thread, while its open files are being closed or later; 0
// when it lives, ends by itself, or cannot be seen: in another PID namespace, or another user's
// when this process may not trace it. `thread` is what FUSE calls the caller's pid.
int fatal_signal(pid_t thread);

// The same from the text of /proc/PID/stat.
int fatal_signal_in(std::string_view stat);

}  // namespace fpfs
