// How long things took: counts in fixed buckets, each twice as wide as the one before.
//
// Threads: record() from any, without a lock: two additions. A copy may lack what is being recorded
//   meanwhile, and its sum may be a moment ahead of its counts, never behind them.
#pragma once

#include <time.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace fpfs {

// Nanoseconds of CLOCK_MONOTONIC, which is time.monotonic_ns() in Python. No system call.
inline int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Bucket i holds what took at most 2^i µs, and longer than bucket i - 1; the last one all the rest.
inline constexpr size_t kDurationBounds = 27;  // 1 µs to 67 s
inline constexpr int64_t kDurationUnitNs = 1000;

struct DurationCounts {
  std::array<uint64_t, kDurationBounds + 1> counts{};
  uint64_t sum_ns = 0;
};

class DurationHistogram {
 public:
  void record(int64_t duration_ns) {
    const uint64_t ns = duration_ns > 0 ? static_cast<uint64_t>(duration_ns) : 0;
    const uint64_t whole = ns == 0 ? 0 : (ns - 1) / kDurationUnitNs;  // a bound belongs below it
    const auto bucket = static_cast<size_t>(std::bit_width(whole));
    sum_ns_.fetch_add(ns, std::memory_order_relaxed);
    // Released: who sees it counted sees it in the sum.
    counts_[bucket < kDurationBounds ? bucket : kDurationBounds].fetch_add(
        1, std::memory_order_release);
  }

  DurationCounts read() const {
    DurationCounts result;
    for (size_t i = 0; i < counts_.size(); ++i) {
      result.counts[i] = counts_[i].load(std::memory_order_acquire);
    }
    result.sum_ns = sum_ns_.load(std::memory_order_relaxed);
    return result;
  }

 private:
  std::array<std::atomic<uint64_t>, kDurationBounds + 1> counts_{};
  std::atomic<uint64_t> sum_ns_{0};
};

}  // namespace fpfs
