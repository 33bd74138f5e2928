// What happens to one file's bytes, as events with their times: for `fpfs-ctl trace`.
//
// While nobody traces, a look whether somebody does is one relaxed load. Events go to a ring of
// fixed size, which one reader empties; what finds it full is lost, and counted. The memory is
// taken by the first trace and kept, so that nothing is ever freed under a thread that records.
//
// Ownership: the tracer owns its ring and the table of requests that are not answered.
// Threads: start(), stop() and take() from one thread at a time; all else from any, without locks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/duration_histogram.h"

namespace fpfs {

enum class TraceKind : uint8_t {
  Request = 1,   // received, answered
  Chunk = 2,     // opened, sealed, issued, on the device and in the map
  Transfer = 3,  // submitted, issued to the kernel, completed
};

struct TraceEvent {
  TraceKind kind = TraceKind::Request;
  uint8_t op = 0;       // of a transfer: an IoOp
  uint16_t device = 0;  // of a transfer; where most of a chunk goes
  uint32_t detail = 0;  // the opcode of a request, the slot of a chunk
  int32_t error = 0;    // a positive errno, or 0
  uint64_t ino = 0;
  uint64_t offset = 0;  // in the file; of a flush, nothing
  uint64_t length = 0;
  std::array<int64_t, 4> at_ns{};  // in the order above, of monotonic_ns()
};

class Tracer {
 public:
  static constexpr size_t kEventsMax = size_t{1} << 16;
  static constexpr size_t kRequestsMax = 4096;  // answers that are waited for at once

  // Whether events of this file are wanted now.
  bool watches(uint64_t ino) const {
    return watched_.load(std::memory_order_relaxed) == ino && ino != 0;
  }
  bool watches_any() const { return watched_.load(std::memory_order_relaxed) != 0; }

  void start(uint64_t ino);
  void stop() { watched_.store(0, std::memory_order_relaxed); }

  void add(const TraceEvent& event);
  // A request is kept until its answer; the event is added then.
  void request_received(uint64_t unique, const TraceEvent& event);
  void request_answered(uint64_t unique, int error);

  // Removes and returns the oldest events, at most `max`.
  std::vector<TraceEvent> take(size_t max);
  // Events that found the ring full, and requests whose answer was not seen, since start().
  uint64_t lost() const { return lost_.load(std::memory_order_relaxed); }

 private:
  struct Cell {
    std::atomic<uint64_t> turn{0};  // whose turn it is: see add() and take()
    TraceEvent event;
  };
  struct Unanswered {
    std::atomic<uint64_t> unique{0};  // 0: free; kBusy: somebody works on it
    TraceEvent event;
  };
  static constexpr uint64_t kBusy = 1;  // no request has this number: those of the kernel are even
  struct Memory {
    std::array<Cell, kEventsMax> cells;
    std::array<Unanswered, kRequestsMax> requests;
    Memory();
  };
  static size_t place_of(uint64_t unique) { return unique / 2 % kRequestsMax; }

  std::unique_ptr<Memory> owned_;
  std::atomic<Memory*> memory_{nullptr};
  std::atomic<uint64_t> watched_{0};
  std::atomic<uint64_t> head_{0};  // the next cell to be filled
  uint64_t tail_ = 0;              // the reader's: the next cell to be emptied
  std::atomic<uint64_t> lost_{0};
};

}  // namespace fpfs
