// What goes through io_uring: the library's functions that submit and take completions, recorded.
//
// Requests are read from the ring just before the kernel is told of them, with their bytes;
// completions just after the kernel was asked for some, before the program looks. That is exact
// where completions come only when asked for (IORING_SETUP_DEFER_TASKRUN, Linux 6.1): elsewhere a
// completion may be recorded late, so such a ring is recorded as Unknown.
//
// Threads: one at a time for each ring, as liburing wants it; the table of rings has a lock.
#include <liburing.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "log.h"
#include "next.h"
#include "target.h"

namespace fpfs::recorder {
namespace {

struct RingState {
  std::vector<Target> files;  // of the registered slots
  unsigned completions_seen = 0;
  std::unordered_map<uint64_t, uint64_t> begun;  // user data of requests in flight: their records
};

class Rings {
 public:
  RingState& of(const io_uring* ring) {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<RingState>& state = states_[ring];
    if (state == nullptr) state = std::make_unique<RingState>();
    return *state;
  }
  void forget(const io_uring* ring) {
    const std::lock_guard lock(mutex_);
    states_.erase(ring);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const io_uring*, std::unique_ptr<RingState>> states_;
};

Rings& rings() {
  static auto* all = new Rings;
  return *all;
}

Target target_of_request(const RingState& state, const io_uring_sqe& request) {
  if ((request.flags & IOSQE_FIXED_FILE) == 0) return target_of(request.fd);
  const auto slot = static_cast<size_t>(request.fd);
  return slot < state.files.size() ? state.files[slot] : Target();
}

uint64_t request_begins(const RingState& state, const io_uring_sqe& request) {
  switch (request.opcode) {
    case IORING_OP_NOP:
    case IORING_OP_READ:
    case IORING_OP_READ_FIXED:
      return 0;
    default:
      break;
  }
  const Target target = target_of_request(state, request);
  if (!target.recorded) return 0;
  Entry entry{.file = target.file, .path = target.path};
  if (request.opcode == IORING_OP_FSYNC) {
    entry.kind = target.folder ? Kind::SyncFolder : Kind::SyncFile;
    return append(entry);
  }
  if (request.opcode == IORING_OP_WRITE || request.opcode == IORING_OP_WRITE_FIXED) {
    entry.kind = Kind::Write;
    entry.a = request.off;
    entry.b = request.len;
    const Piece piece{reinterpret_cast<const void*>(request.addr), request.len};
    return append(entry, &piece, 1);
  }
  append({.kind = Kind::Unknown, .path = "io_uring request", .other = target.path});
  return 0;
}

void requests_begin(RingState& state, const io_uring& ring) {
  for (unsigned i = ring.sq.sqe_head; i != ring.sq.sqe_tail; ++i) {
    const io_uring_sqe& request = ring.sq.sqes[i & ring.sq.ring_mask];
    if (const uint64_t begun = request_begins(state, request); begun != 0) {
      state.begun[request.user_data] = begun;
    }
  }
}

void requests_end(RingState& state, const io_uring& ring) {
  const unsigned tail = io_uring_smp_load_acquire(ring.cq.ktail);
  for (; state.completions_seen != tail; ++state.completions_seen) {
    const io_uring_cqe& done = ring.cq.cqes[state.completions_seen & ring.cq.ring_mask];
    const auto found = state.begun.find(done.user_data);
    if (found == state.begun.end()) continue;
    append(
        {.kind = Kind::End, .begin = found->second, .a = static_cast<uint64_t>(int64_t{done.res})});
    state.begun.erase(found);
  }
}

// What every call that enters the kernel does before and after it.
template <typename Call>
int entering(io_uring* ring, Call call) {
  RingState& state = rings().of(ring);
  requests_begin(state, *ring);
  const int result = call();
  requests_end(state, *ring);
  return result;
}

void files_registered(RingState& state, unsigned first, const int* files, unsigned count) {
  if (state.files.size() < first + count) state.files.resize(first + count);
  for (unsigned i = 0; i < count; ++i) {
    state.files[first + i] = files[i] < 0 ? Target() : target_of(files[i]);
  }
}

}  // namespace
}  // namespace fpfs::recorder

using fpfs::recorder::rings;

extern "C" {

int io_uring_queue_init(unsigned entries, io_uring* ring, unsigned flags) {
  rings().forget(ring);  // one that was at the same place
  const int result = FPFS_NEXT(io_uring_queue_init)(entries, ring, flags);
  if (result == 0 && (flags & IORING_SETUP_DEFER_TASKRUN) == 0) {
    fpfs::recorder::append({.kind = fpfs::recorder::Kind::Unknown,
                            .path = "completions of this kernel are recorded late"});
  }
  return result;
}

void io_uring_queue_exit(io_uring* ring) {
  rings().forget(ring);
  FPFS_NEXT(io_uring_queue_exit)(ring);
}

int io_uring_register_files(io_uring* ring, const int* files, unsigned count) {
  const int result = FPFS_NEXT(io_uring_register_files)(ring, files, count);
  if (result >= 0) fpfs::recorder::files_registered(rings().of(ring), 0, files, count);
  return result;
}

int io_uring_register_files_update(io_uring* ring, unsigned first, const int* files,
                                   unsigned count) {
  const int result = FPFS_NEXT(io_uring_register_files_update)(ring, first, files, count);
  if (result > 0) {
    fpfs::recorder::files_registered(rings().of(ring), first, files, static_cast<unsigned>(result));
  }
  return result;
}

int io_uring_submit(io_uring* ring) {
  return fpfs::recorder::entering(ring, [&] { return FPFS_NEXT(io_uring_submit)(ring); });
}

int io_uring_submit_and_wait(io_uring* ring, unsigned count) {
  return fpfs::recorder::entering(ring,
                                  [&] { return FPFS_NEXT(io_uring_submit_and_wait)(ring, count); });
}

int io_uring_submit_and_get_events(io_uring* ring) {
  return fpfs::recorder::entering(ring,
                                  [&] { return FPFS_NEXT(io_uring_submit_and_get_events)(ring); });
}

int __io_uring_get_cqe(io_uring* ring, io_uring_cqe** entry, unsigned submit, unsigned count,
                       sigset_t* mask) {
  return fpfs::recorder::entering(
      ring, [&] { return FPFS_NEXT(__io_uring_get_cqe)(ring, entry, submit, count, mask); });
}

}  // extern "C"
