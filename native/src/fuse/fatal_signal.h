// Whether the caller of a request lives, was killed, or how it ends: seen while it waits for the
// answer, so that it cannot go and its number is nobody else's.
//
// Whatever /proc tells of a process may wait for what that process holds. /proc/PID/stat takes the
// lock that exec(2) holds while it closes files, which waits for the answer to FLUSH: who must
// answer that may call surely_lives() alone, and asks the ProcessInspector for the rest.
//
// `thread` is what FUSE calls the caller's pid; 0 where the caller cannot be seen from this
// process's PID namespace. Nor is anybody seen where /proc is that of another namespace.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string_view>

namespace fpfs {

// Whether the thread has an address space, which it loses on its way out before its files are
// closed. False may also mean that the kernel does not tell (before Linux 6.16) or that there is no
// such thread. Never waits.
bool surely_lives(pid_t thread);

// The signal that ends the process of a thread, while its open files are being closed or later; 0
// when it lives, ends by itself, or cannot be seen: in another PID namespace, or another user's
// when this process may not trace it. Nothing when this process lacks a descriptor or memory for
// the look. Reads /proc.
std::optional<int> fatal_signal(pid_t thread);

// The same from the text of /proc/PID/stat.
int fatal_signal_in(std::string_view stat);

// Whether a fatal signal is pending for the thread (the kernel turns each into SIGKILL); false
// where it cannot be seen or is gone: an asynchronous write goes on when the thread that began it
// has ended. Reads /proc.
bool is_killed(pid_t thread);

// The same from the text of /proc/PID/status.
bool is_killed_in(std::string_view status);

}  // namespace fpfs
