// How many bytes this process has moved in the ranks' saves and loads, for others to see that it
// goes on.
//
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>

namespace fpfs {

// Since the process began.
inline std::atomic<uint64_t>& moved_bytes() {
  static std::atomic<uint64_t> bytes{0};
  return bytes;
}

inline void count_moved(uint64_t bytes) {
  moved_bytes().fetch_add(bytes, std::memory_order_relaxed);
}

}  // namespace fpfs
