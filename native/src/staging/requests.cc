#include "staging/requests.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <span>

#include "base/fuse_wire.h"

namespace fpfs {
namespace {

// The kernel marks what it sends again, and the record what has become of it.
uint64_t identity(uint64_t unique) {
  return unique & ~(wire::kUniqueResent | arena::kAnswering | arena::kLeft);
}

// Uniques grow by 2.
uint64_t place(uint64_t unique) { return identity(unique) / 2 % arena::kRequestsMax; }

std::atomic_ref<uint64_t> noted(arena::RequestRecord& record) {
  return std::atomic_ref<uint64_t>(record.unique);
}

void blame(arena::RequestRecord& record, uint64_t unique, uint64_t now_ms) {
  if (record.blamed != unique) {
    record.blamed = unique;
    std::fill(std::begin(record.deaths_ms), std::end(record.deaths_ms), 0);
  }
  std::rotate(std::begin(record.deaths_ms), std::begin(record.deaths_ms) + 1,
              std::end(record.deaths_ms));
  *std::rbegin(record.deaths_ms) = now_ms;
}

bool too_often(const arena::RequestRecord& record) {
  const uint64_t first_ms = record.deaths_ms[0];
  return first_ms != 0 && *std::rbegin(record.deaths_ms) - first_ms <= kBlameMs;
}

}  // namespace

void Requests::taken(uint64_t unique) {
  arena::RequestRecord& record = records_[place(unique)];
  std::atomic_ref<uint64_t>(record.check).store(~identity(unique), std::memory_order_relaxed);
  noted(record).store(identity(unique), std::memory_order_release);
}

void Requests::answering(uint64_t unique) {
  uint64_t expected = identity(unique);
  if (expected == 0) return;  // a notification
  noted(records_[place(unique)])
      .compare_exchange_strong(expected, expected | arena::kAnswering, std::memory_order_release);
}

void Requests::answered(uint64_t unique) {
  if (identity(unique) == 0) return;  // a notification
  const auto record = noted(records_[place(unique)]);
  uint64_t found = record.load(std::memory_order_relaxed);
  while (identity(found) == identity(unique) &&
         !record.compare_exchange_weak(found, 0, std::memory_order_release)) {
  }
}

bool Requests::is_under_way(uint64_t unique) const {
  const uint64_t found = noted(records_[place(unique)]).load(std::memory_order_acquire);
  return (found & ~arena::kAnswering) == identity(unique);
}

void Requests::start_over() { std::fill_n(records_, arena::kRequestsMax, arena::RequestRecord{}); }

Requests::Left Requests::end(bool by_fault, uint64_t now_ms) {
  Left left;
  for (arena::RequestRecord& record : std::span(records_, arena::kRequestsMax)) {
    const uint64_t found = noted(record).load();
    const uint64_t unique = identity(found);
    const bool was_taken = unique != 0 && (found & arena::kLeft) == 0;
    if (was_taken) ++left.under_way;
    if (was_taken && by_fault) blame(record, unique, now_ms);
    // A wrong bit is not to make a request of what was none.
    const bool is_sure = unique != 0 && record.check == ~unique && (found & arena::kAnswering) == 0;
    if (is_sure) left.unanswered.push_back(unique);
    noted(record).store(is_sure ? unique | arena::kLeft : 0);
    // One that the last server did not come to is not forgotten: uniques are used once.
    if (too_often(record)) left.condemned.push_back(record.blamed);
  }
  return left;
}

}  // namespace fpfs
