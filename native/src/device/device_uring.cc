// Backend on io_uring: one ring, owned by one thread, for each device.
//
// Invariants:
//   * Only the ring's thread touches the ring, the queue and the slots of files.
//   * At most `depth` requests are in flight; the rest waits in the queue, so the kernel's queues
//     never overflow.
//   * A read of the event descriptor is always armed, so that a sleeping thread can be woken.
//
// Concurrency: submitters push onto a lock-free stack, and write the event descriptor only when the
// thread has said that it sleeps. The thread says so first and looks at the stack once more then,
// both sequentially consistent: either it sees the request, or the submitter sees it sleeping.

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <chrono>
#include <cstdlib>
#include <future>
#include <thread>
#include <utility>

#include "base/thread_annotations.h"
#include "base/worker.h"
#include "device/device_backend.h"
#include "device/device_ring.h"
#include "device/device_transfer.h"

namespace fpfs {
namespace {

constexpr uint64_t kCallBytesMax = uint64_t{1} << 30;
constexpr std::chrono::milliseconds kRefusedPause{10};
// So many refusals in a row are more than a moment's, and the log says so.
constexpr uint32_t kRefusalsSaid = 10;

class RingBackend final : public Backend {
 public:
  RingBackend(const BackendConfig& config, BackendOwner& owner) : Backend(owner), config_(config) {}
  ~RingBackend() override { stop(); }

  Status open();

  void submit(IoRequest* request) override;
  void retire(std::unique_ptr<OpenFile> file) override EXCLUDES(retired_mutex_);
  void stop() override;
  bool buffers_registered() const override { return buffers_registered_; }
  const InFlightGauge& in_flight() const override { return gauge_; }

 private:
  Status set_up();
  void run();
  void take_submitted();
  void take_retired() EXCLUDES(retired_mutex_);
  void issue();
  void prepare(IoRequest* request);
  void arm_wakeup();
  int submit_and_wait();
  bool accepted(int result);
  uint32_t transfers_under_way();
  void wait_for_room(int error);
  [[noreturn]] void fail(int result);
  void reap();
  void take_completed();
  void feed();
  void handle(IoRequest* request, int result);
  bool idle_forever() const;
  bool work_arrived() EXCLUDES(retired_mutex_);
  void wake();

  const BackendConfig config_;
  FileDescriptor event_;
  std::thread thread_;

  // Shared.
  std::atomic<IoRequest*> submitted_{nullptr};
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> stopping_{false};
  InFlightGauge gauge_;
  Mutex retired_mutex_;
  std::vector<std::unique_ptr<OpenFile>> retired_ GUARDED_BY(retired_mutex_);

  bool buffers_registered_ = false;  // constant once open() returned

  // The ring thread's.
  Ring ring_;
  TransferQueue queue_;
  uint32_t in_flight_ = 0;
  bool wakeup_armed_ = false;
  uint32_t wakeup_at_ = 0;  // its place in the kernel's queue of submissions
  uint64_t wakeups_ = 0;    // what the event descriptor's read fills
  uint32_t refusals_ = 0;   // in a row
  std::vector<std::pair<IoRequest*, int>> completed_;
};

Status RingBackend::open() {
  event_.reset(::eventfd(0, EFD_CLOEXEC));
  if (!event_) return Status::from_errno("eventfd");
  // A ring with a single issuer belongs to the thread that makes it.
  std::promise<Status> ready;
  std::future<Status> status = ready.get_future();
  thread_ = start_thread(config_.name + "-ring", [this, &ready] {
    Status result = set_up();
    const bool ok = result.ok();
    ready.set_value(std::move(result));
    if (ok) run();
  });
  Status result = status.get();
  if (!result.ok()) thread_.join();
  return result;
}

Status RingBackend::set_up() {
  if (Status status = ring_.open(config_.depth + 1); !status.ok()) return status;
  const Status buffers = ring_.register_buffers(config_.regions);
  buffers_registered_ = buffers.ok() && !config_.regions.empty();
  if (!buffers.ok()) {
    config_.log(30, config_.name + ": " + buffers.message() +
                        "; going on without (raise the memory-lock limit for full speed)");
  }
  const Status files = ring_.register_files(config_.files_max);
  if (!files.ok()) config_.log(20, config_.name + ": " + files.message() + "; going on without");
  return {};
}

void RingBackend::submit(IoRequest* request) {
  assert(!stopping_.load(std::memory_order_relaxed));
  IoRequest* head = submitted_.load(std::memory_order_relaxed);
  do {
    request->next = head;
  } while (!submitted_.compare_exchange_weak(head, request, std::memory_order_seq_cst));
  if (sleeping_.load(std::memory_order_seq_cst)) wake();
}

void RingBackend::retire(std::unique_ptr<OpenFile> file) {
  {
    MutexLock lock(retired_mutex_);
    retired_.push_back(std::move(file));
  }
  if (sleeping_.load(std::memory_order_seq_cst)) wake();
}

void RingBackend::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_seq_cst);
  const uint64_t one = 1;
  // The wakeup's read must complete whether the thread sleeps or not: it may not outlive the
  // thread.
  [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof one);
  assert(written == sizeof one);
  thread_.join();
}

void RingBackend::wake() {
  if (!sleeping_.exchange(false, std::memory_order_seq_cst)) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof one);
  assert(written == sizeof one);
}

void RingBackend::run() {
  while (true) {
    take_submitted();
    take_retired();
    issue();
    if (idle_forever()) break;
    if (!wakeup_armed_) arm_wakeup();
    if (const int result = submit_and_wait(); !accepted(result)) wait_for_room(-result);
    reap();
  }
  take_retired();  // what came between the last look and the order to stop
}

bool RingBackend::idle_forever() const {
  return stopping_.load(std::memory_order_seq_cst) && in_flight_ == 0 && !wakeup_armed_;
}

void RingBackend::take_submitted() {
  IoRequest* newest = submitted_.exchange(nullptr, std::memory_order_seq_cst);
  IoRequest* oldest = nullptr;
  while (newest != nullptr) {
    IoRequest* next = std::exchange(newest->next, oldest);
    oldest = std::exchange(newest, next);
  }
  while (oldest != nullptr) {
    IoRequest* next = oldest->next;
    queue_.push(oldest);
    oldest = next;
  }
}

void RingBackend::take_retired() {
  std::vector<std::unique_ptr<OpenFile>> files;
  {
    MutexLock lock(retired_mutex_);
    files.swap(retired_);
  }
  for (auto& file : files) {
    ring_.remove_file(file.get());
    owner_.close_file(std::move(file));
  }
}

void RingBackend::issue() {
  while (in_flight_ < config_.depth) {
    IoRequest* request = queue_.pop();
    if (request == nullptr) return;
    prepare(request);
    if (request->issued_ns == 0) request->issued_ns = monotonic_ns();
    ++in_flight_;
    gauge_.add();
  }
}

void RingBackend::prepare(IoRequest* request) {
  io_uring_sqe* entry = io_uring_get_sqe(ring_.native());
  assert(entry != nullptr);  // the ring has room for depth and the wakeup
  OpenFile* file = request->open_file;
  ring_.add_file(file);
  const int fd = file->slot >= 0 ? file->slot : file->fd.get();
  const uint64_t start = transfer_start(*request);
  char* buffer = request->buffer + start;
  const uint64_t offset = request->offset + start;
  const auto length = static_cast<unsigned>(std::min(request->length - start, kCallBytesMax));
  if (request->op == IoOp::Flush) {
    io_uring_prep_fsync(entry, fd, IORING_FSYNC_DATASYNC);
  } else {
    const int index = ring_.buffer_index(buffer, length);
    if (request->op == IoOp::Read && index >= 0) {
      io_uring_prep_read_fixed(entry, fd, buffer, length, offset, index);
    } else if (request->op == IoOp::Read) {
      io_uring_prep_read(entry, fd, buffer, length, offset);
    } else if (index >= 0) {
      io_uring_prep_write_fixed(entry, fd, buffer, length, offset, index);
    } else {
      io_uring_prep_write(entry, fd, buffer, length, offset);
    }
  }
  if (file->slot >= 0) entry->flags |= IOSQE_FIXED_FILE;
  io_uring_sqe_set_data(entry, request);
}

void RingBackend::arm_wakeup() {
  wakeup_at_ = ring_.native()->sq.sqe_tail;
  io_uring_sqe* entry = io_uring_get_sqe(ring_.native());
  assert(entry != nullptr);
  io_uring_prep_read(entry, event_.get(), &wakeups_, sizeof wakeups_, 0);
  io_uring_sqe_set_data(entry, nullptr);
  wakeup_armed_ = true;
}

bool RingBackend::work_arrived() {
  if (submitted_.load(std::memory_order_seq_cst) != nullptr) return true;
  MutexLock lock(retired_mutex_);
  return !retired_.empty();
}

// Submits what was prepared, and sleeps until something completes. With the depth used up a new
// request could not be issued anyway, so nobody needs to wake the thread then.
int RingBackend::submit_and_wait() {
  if (in_flight_ == config_.depth) return io_uring_submit_and_wait(ring_.native(), 1);
  sleeping_.store(true, std::memory_order_seq_cst);
  if (work_arrived()) {
    sleeping_.store(false, std::memory_order_seq_cst);
    return io_uring_submit_and_get_events(ring_.native());
  }
  const int result = io_uring_submit_and_wait(ring_.native(), 1);
  sleeping_.store(false, std::memory_order_seq_cst);
  return result;
}

// False: the kernel is short of memory or of room for completions, and took nothing.
bool RingBackend::accepted(int result) {
  if (result == -EAGAIN || result == -EBUSY) return false;
  if (result < 0 && result != -EINTR) fail(result);
  refusals_ = 0;
  return true;
}

// Requests in flight can neither be finished nor taken back.
void RingBackend::fail(int result) {
  config_.log(50, config_.name + ": io_uring_enter: " + error_text(-result));
  std::abort();
}

// Of those in flight, what the kernel has taken.
uint32_t RingBackend::transfers_under_way() {
  const uint32_t prepared = io_uring_sq_ready(ring_.native());
  const bool wakeup = wakeup_armed_ && ring_.native()->sq.sqe_tail - wakeup_at_ <= prepared;
  return in_flight_ - (prepared - (wakeup ? 1 : 0));
}

// A transfer that ends gives back what the kernel is short of. It is waited for in a call that
// submits nothing: one that fails to submit neither waits nor handles completions.
void RingBackend::wait_for_room(int error) {
  if (++refusals_ == kRefusalsSaid) {
    config_.log(30, config_.name + ": io_uring_enter: " + error_text(error) +
                        "; requests wait until the kernel takes them");
  }
  if (transfers_under_way() > 0) {
    io_uring_cqe* entry = nullptr;
    const int result = io_uring_wait_cqe(ring_.native(), &entry);
    if (result < 0 && result != -EINTR) fail(result);
  } else {
    std::this_thread::sleep_for(kRefusedPause);  // nothing tells when the kernel has memory again
  }
}

// What completed is handled one by one, since the answer to a READ is copied here; the device gets
// the next requests before that and in between.
void RingBackend::reap() {
  take_completed();
  for (const auto& [request, result] : completed_) {
    feed();
    handle(request, result);
  }
  completed_.clear();
}

void RingBackend::take_completed() {
  io_uring_cqe* entry = nullptr;
  int64_t now_ns = 0;
  while (io_uring_peek_cqe(ring_.native(), &entry) == 0) {
    auto* request = static_cast<IoRequest*>(io_uring_cqe_get_data(entry));
    const int result = entry->res;
    io_uring_cqe_seen(ring_.native(), entry);
    if (request == nullptr) {
      wakeup_armed_ = false;
      continue;
    }
    if (now_ns == 0) now_ns = monotonic_ns();
    request->completed_ns = now_ns;
    completed_.emplace_back(request, result);
    --in_flight_;
    gauge_.remove();
  }
}

void RingBackend::feed() {
  if (in_flight_ == config_.depth) return;
  take_submitted();
  issue();
  // What is refused here is submitted with the next wait.
  if (io_uring_sq_ready(ring_.native()) > 0) accepted(io_uring_submit(ring_.native()));
}

void RingBackend::handle(IoRequest* request, int result) {
  const TransferAdvance advance = transfer_advance(request, result);
  switch (advance.step) {
    case TransferStep::Finished:
      owner_.finished(request, advance.result);
      return;
    case TransferStep::Again:
      queue_.push(request);
      return;
    case TransferStep::Blocked:
      owner_.blocked(request);
      return;
  }
}

}  // namespace

Result<std::unique_ptr<Backend>> open_ring_backend(const BackendConfig& config,
                                                   BackendOwner& owner) {
  auto backend = std::make_unique<RingBackend>(config, owner);
  if (Status status = backend->open(); !status.ok()) return status;
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace fpfs
