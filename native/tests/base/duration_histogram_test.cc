// Buckets of durations: where each falls, and that none is lost among threads.
#include "base/duration_histogram.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

namespace fpfs::testing {
namespace {

size_t bucket_of(int64_t ns) {
  DurationHistogram histogram;
  histogram.record(ns);
  const DurationCounts found = histogram.read();
  for (size_t i = 0; i < found.counts.size(); ++i) {
    if (found.counts[i] != 0) return i;
  }
  return SIZE_MAX;
}

}  // namespace

TEST_CASE("durations: a bucket ends with its bound, which is twice the one before") {
  for (size_t i = 0; i < kDurationBounds; ++i) {
    const int64_t bound_ns = int64_t{1000} << i;
    CAPTURE(i);
    CHECK(bucket_of(bound_ns) == i);
    CHECK(bucket_of(bound_ns + 1) == i + 1);
  }
  CHECK(bucket_of(0) == 0);
  CHECK(bucket_of(-1) == 0);  // a clock that went back does not count as for ever
  CHECK(bucket_of(INT64_MAX) == kDurationBounds);
}

TEST_CASE("durations: threads that record at once lose nothing") {
  constexpr int threads = 4;
  constexpr int64_t each = 20'000;
  DurationHistogram histogram;
  std::vector<std::thread> running;
  for (int t = 0; t < threads; ++t) {
    running.emplace_back([&] {
      for (int64_t ns = 1; ns <= each; ++ns) histogram.record(ns);
    });
  }
  for (std::thread& thread : running) thread.join();
  const DurationCounts found = histogram.read();
  CHECK(std::accumulate(found.counts.begin(), found.counts.end(), uint64_t{0}) == threads * each);
  CHECK(found.sum_ns == uint64_t{threads} * each * (each + 1) / 2);
  CHECK(found.counts[0] == uint64_t{threads} * 1000);
}

}  // namespace fpfs::testing
