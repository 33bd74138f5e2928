// Backend of plain pread and pwrite on `depth` threads, for kernels and containers without
// io_uring.
//
// Concurrency: one mutex guards the queue; a thread holds no lock while it works on a request.

#include <cassert>
#include <thread>
#include <utility>

#include "base/thread_annotations.h"
#include "base/worker.h"
#include "device/device_backend.h"
#include "device/device_transfer.h"

namespace fpfs {
namespace {

class ThreadBackend final : public Backend {
 public:
  ThreadBackend(const BackendConfig& config, BackendOwner& owner) : Backend(owner) {
    for (uint32_t i = 0; i < config.depth; ++i) {
      threads_.push_back(start_thread(config.name + "-io" + std::to_string(i), [this] { run(); }));
    }
  }

  ~ThreadBackend() override { stop(); }

  void submit(IoRequest* request) override EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    assert(!stopping_);
    queue_.push(request);
    submitted_.notify_one();
  }

  void retire(std::unique_ptr<OpenFile> file) override { owner_.close_file(std::move(file)); }

  void stop() override EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
      submitted_.notify_all();
    }
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

  bool buffers_registered() const override { return false; }
  const InFlightGauge& in_flight() const override { return in_flight_; }

 private:
  IoRequest* take() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (true) {
      IoRequest* request = queue_.pop();
      if (request != nullptr || stopping_) return request;
      submitted_.wait(mutex_);
    }
  }

  void run() {
    while (IoRequest* request = take()) {
      in_flight_.add();
      request->issued_ns = monotonic_ns();
      const int result = transfer_blocking(request);
      request->completed_ns = monotonic_ns();
      in_flight_.remove();
      owner_.finished(request, result);
    }
  }

  InFlightGauge in_flight_;
  Mutex mutex_;
  CondVar submitted_;
  TransferQueue queue_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> open_thread_backend(const BackendConfig& config, BackendOwner& owner) {
  return std::make_unique<ThreadBackend>(config, owner);
}

}  // namespace fpfs
