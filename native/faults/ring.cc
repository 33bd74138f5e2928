// Requests on io_uring that fail: they are replaced before the kernel gets them.
//
// A NOP takes the place of one that is to fail, and the kernel lets it end with the result that it
// is given (Linux 6.10). Of one that is to be short a part is asked for.
#include <liburing.h>

#include <mutex>
#include <unordered_map>

#include "../recorder/next.h"
#include "control.h"

namespace fpfs::faults {
namespace {

constexpr uint32_t kInjectResult = 1;  // IORING_NOP_INJECT_RESULT
constexpr uint32_t kAlignment = 4096;

void apply(io_uring_sqe& request) {
  Kind kind = Kind::None;
  switch (request.opcode) {
    case IORING_OP_WRITE:
    case IORING_OP_WRITE_FIXED:
      kind = Kind::RingWrite;
      break;
    case IORING_OP_FSYNC:
      kind = Kind::RingFlush;
      break;
    case IORING_OP_READ_FIXED:
      kind = Kind::RingRead;
      break;
    default:
      return;
  }
  const int error = fault(kind);
  if (error == kNone) return;
  if (error == 0) {
    request.len = request.len / 2 / kAlignment * kAlignment;
    if (request.len != 0) return;
  }
  const uint64_t user_data = request.user_data;
  request = {};
  request.opcode = IORING_OP_NOP;
  request.user_data = user_data;
  request.rw_flags = kInjectResult;
  request.len = static_cast<uint32_t>(-error);
}

// Where in each ring the requests begin that were not looked at.
std::mutex seen_mutex;
std::unordered_map<const io_uring*, unsigned>& seen() {
  static auto* all = new std::unordered_map<const io_uring*, unsigned>;
  return *all;
}

void look(io_uring* ring) {
  unsigned at = 0;
  {
    const std::lock_guard lock(seen_mutex);
    at = seen()[ring];
    seen()[ring] = ring->sq.sqe_tail;
  }
  for (; at != ring->sq.sqe_tail; ++at) apply(ring->sq.sqes[at & ring->sq.ring_mask]);
}

}  // namespace
}  // namespace fpfs::faults

using fpfs::faults::look;

extern "C" {

void io_uring_queue_exit(io_uring* ring) {
  {
    const std::lock_guard lock(fpfs::faults::seen_mutex);
    fpfs::faults::seen().erase(ring);
  }
  FPFS_NEXT(io_uring_queue_exit)(ring);
}

int io_uring_submit(io_uring* ring) {
  look(ring);
  return FPFS_NEXT(io_uring_submit)(ring);
}

int io_uring_submit_and_wait(io_uring* ring, unsigned count) {
  look(ring);
  return FPFS_NEXT(io_uring_submit_and_wait)(ring, count);
}

int io_uring_submit_and_get_events(io_uring* ring) {
  look(ring);
  return FPFS_NEXT(io_uring_submit_and_get_events)(ring);
}

}  // extern "C"
