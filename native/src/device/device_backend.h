// The two ways to move bytes (io_uring, threads) behind one interface, inside of a Device.
//
// Ownership: a submitted request is the backend's until it calls BackendOwner::finished() or
//   blocked() for it; a retired file until close_file().
// Threads: submit() and retire() from any thread, without blocking. The owner's functions are
// called
//   on the backend's threads, without locks held.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "device/device.h"
#include "device/device_open_files.h"

namespace fpfs {

class BackendOwner {
 public:
  virtual void finished(IoRequest* request, int result) = 0;
  // The kernel refuses to do this request asynchronously: do the rest on a thread that may block.
  virtual void blocked(IoRequest* request) = 0;
  // Nothing refers to the file any more.
  virtual void close_file(std::unique_ptr<OpenFile> file) = 0;

 protected:
  ~BackendOwner() = default;
};

// Requests that the kernel, or a thread, works on.
class InFlightGauge {
 public:
  void add() {
    const uint64_t now = now_.fetch_add(1, std::memory_order_relaxed) + 1;
    uint64_t max = max_.load(std::memory_order_relaxed);
    while (now > max && !max_.compare_exchange_weak(max, now, std::memory_order_relaxed)) {
    }
  }
  void remove() { now_.fetch_sub(1, std::memory_order_relaxed); }
  uint64_t now() const { return now_.load(std::memory_order_relaxed); }
  uint64_t max() const { return max_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> now_{0};
  std::atomic<uint64_t> max_{0};
};

struct BackendConfig {
  std::string name;  // for threads and log lines: "dev3"
  uint32_t depth = 16;
  uint32_t files_max = 1024;
  std::vector<MemoryRegion> regions;
  LogSink log;
};

class Backend {
 public:
  explicit Backend(BackendOwner& owner) : owner_(owner) {}
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  virtual void submit(IoRequest* request) = 0;  // Read, Write, Flush on an open file
  virtual void retire(std::unique_ptr<OpenFile> file) = 0;
  // Joins the threads. Nothing is submitted any more; retired files are handed to close_file().
  virtual void stop() = 0;
  virtual bool buffers_registered() const = 0;
  virtual const InFlightGauge& in_flight() const = 0;

 protected:
  BackendOwner& owner_;
};

Result<std::unique_ptr<Backend>> open_ring_backend(const BackendConfig& config,
                                                   BackendOwner& owner);
std::unique_ptr<Backend> open_thread_backend(const BackendConfig& config, BackendOwner& owner);

// Requests in order, linked through their own `next`. One thread at a time.
class RequestQueue {
 public:
  bool empty() const { return head_ == nullptr; }

  void push(IoRequest* request) {
    request->next = nullptr;
    if (head_ == nullptr) {
      head_ = request;
    } else {
      tail_->next = request;
    }
    tail_ = request;
  }

  IoRequest* pop() {
    IoRequest* request = head_;
    if (request != nullptr) head_ = request->next;
    return request;
  }

 private:
  IoRequest* head_ = nullptr;
  IoRequest* tail_ = nullptr;
};

// Reads go first, since a program waits for each; one of every kReadsInRow + 1 others still passes.
class TransferQueue {
 public:
  void push(IoRequest* request) { (request->op == IoOp::Read ? reads_ : others_).push(request); }

  IoRequest* pop() {
    const bool read = !reads_.empty() && (others_.empty() || reads_in_row_ < kReadsInRow);
    reads_in_row_ = read ? reads_in_row_ + 1 : 0;
    return read ? reads_.pop() : others_.pop();
  }

 private:
  static constexpr uint32_t kReadsInRow = 8;

  RequestQueue reads_;
  RequestQueue others_;
  uint32_t reads_in_row_ = 0;
};

}  // namespace fpfs
