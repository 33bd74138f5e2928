// How much memory a process can take before somebody is killed for it.
#pragma once

#include <cstdint>
#include <string>

namespace fpfs {

// In bytes, the least of what is left of the machine's memory (MemAvailable) and of the limits of
// this process's memory cgroup and of those above it, of either version. Pages of files, which can
// be dropped, count as left. More than there can be where the kernel does not say. `root` stands
// before every path: another machine's files, for tests.
uint64_t available_memory(const std::string& root = "");

}  // namespace fpfs
