#include "client/crew.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <system_error>
#include <utility>

#include "base/worker.h"

namespace fpfs {

Crew::~Crew() {
  stop(Status(ECANCELED, "cancelled"));
  for (std::thread& thread : threads_) thread.join();
}

void Crew::start(const std::string& name, size_t threads, size_t jobs, Job job) {
  job_ = std::move(job);
  jobs_ = jobs;
  const size_t count = std::min(threads, jobs);
  {
    const MutexLock lock(mutex_);
    running_ = count;
  }
  try {
    for (size_t thread = 0; thread < count; ++thread) {
      threads_.push_back(
          start_thread(name + std::to_string(thread), [this, thread] { work(thread); }));
    }
  } catch (const std::system_error& error) {
    const MutexLock lock(mutex_);
    running_ -= count - threads_.size();
    if (threads_.empty()) {
      status_ = Status(error.code().value(), std::string("no thread can be started: ") +
                                                 error_text(error.code().value()));
    }
  }
}

void Crew::work(size_t thread) {
  while (!stopping_.load(std::memory_order_relaxed)) {
    const size_t index = next_.fetch_add(1, std::memory_order_relaxed);
    if (index >= jobs_) break;
    if (Status status = job_(index, thread); !status.ok()) stop(std::move(status));
  }
  const MutexLock lock(mutex_);
  --running_;
  changed_.notify_all();
}

bool Crew::wait(double seconds) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::microseconds(std::llround(seconds * 1e6));
  const MutexLock lock(mutex_);
  while (running_ > 0) {
    if (!changed_.wait_until(mutex_, deadline)) break;
  }
  return running_ == 0;
}

void Crew::stop(Status why) {
  const MutexLock lock(mutex_);
  if (running_ > 0 && status_.ok()) status_ = std::move(why);
  stopping_.store(true, std::memory_order_relaxed);
  changed_.notify_all();
}

Status Crew::status() const {
  const MutexLock lock(mutex_);
  return status_;
}

bool Crew::meet(const std::function<bool()>& condition) {
  if (condition()) return true;
  const MutexLock lock(mutex_);
  while (!condition()) {
    if (stopping_.load(std::memory_order_relaxed)) return false;
    changed_.wait(mutex_);
  }
  return true;
}

void Crew::told() {
  const MutexLock lock(mutex_);
  changed_.notify_all();
}

}  // namespace fpfs
