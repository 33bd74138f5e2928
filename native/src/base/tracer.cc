// The ring of events: a bounded queue of many writers and one reader (D. Vyukov's), by turns.
#include "base/tracer.h"

namespace fpfs {

// Cell i may be filled in turn i, and emptied in turn i + 1; then it waits for turn i + kEventsMax.
Tracer::Memory::Memory() {
  for (size_t i = 0; i < cells.size(); ++i) cells[i].turn.store(i, std::memory_order_relaxed);
}

void Tracer::start(uint64_t ino) {
  stop();
  if (owned_ == nullptr) {
    owned_ = std::make_unique<Memory>();
    memory_.store(owned_.get(), std::memory_order_release);
  }
  while (!take(kEventsMax).empty()) {  // of the trace before
  }
  lost_.store(0, std::memory_order_relaxed);
  watched_.store(ino, std::memory_order_relaxed);
}

void Tracer::add(const TraceEvent& event) {
  Memory* memory = memory_.load(std::memory_order_acquire);
  if (memory == nullptr) return;
  uint64_t position = head_.load(std::memory_order_relaxed);
  for (;;) {
    Cell& cell = memory->cells[position % kEventsMax];
    const uint64_t turn = cell.turn.load(std::memory_order_acquire);
    if (turn == position) {
      if (!head_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) continue;
      cell.event = event;
      cell.turn.store(position + 1, std::memory_order_release);
      return;
    }
    if (turn < position) {  // it was not emptied since the round before
      lost_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    position = head_.load(std::memory_order_relaxed);
  }
}

std::vector<TraceEvent> Tracer::take(size_t max) {
  std::vector<TraceEvent> events;
  Memory* memory = memory_.load(std::memory_order_acquire);
  if (memory == nullptr) return events;
  while (events.size() < max) {
    Cell& cell = memory->cells[tail_ % kEventsMax];
    if (cell.turn.load(std::memory_order_acquire) != tail_ + 1) break;
    events.push_back(cell.event);
    cell.turn.store(tail_ + kEventsMax, std::memory_order_release);
    ++tail_;
  }
  return events;
}

// What is still there of another request is of one that was received before that trace was over, or
// of one that is kRequestsMax behind: its answer will not be known.
void Tracer::request_received(uint64_t unique, const TraceEvent& event) {
  Memory* memory = memory_.load(std::memory_order_acquire);
  if (memory == nullptr) return;
  Unanswered& place = memory->requests[place_of(unique)];
  uint64_t found = place.unique.load(std::memory_order_relaxed);
  if (found == kBusy ||
      !place.unique.compare_exchange_strong(found, kBusy, std::memory_order_acquire)) {
    lost_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  place.event = event;
  place.unique.store(unique, std::memory_order_release);
}

void Tracer::request_answered(uint64_t unique, int error) {
  Memory* memory = memory_.load(std::memory_order_acquire);
  if (memory == nullptr) return;
  Unanswered& place = memory->requests[place_of(unique)];
  uint64_t expected = unique;
  if (!place.unique.compare_exchange_strong(expected, kBusy, std::memory_order_acquire)) return;
  TraceEvent event = place.event;
  place.unique.store(0, std::memory_order_release);
  event.error = error;
  event.at_ns[1] = monotonic_ns();
  if (watches(event.ino)) add(event);
}

}  // namespace fpfs
