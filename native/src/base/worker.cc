#include "base/worker.h"

#include <pthread.h>
#include <signal.h>

#include <utility>

namespace fpfs {

namespace {

// Blocks all signals for a scope.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

std::thread start_thread(const std::string& name, std::function<void()> body) {
  // A new thread inherits the mask: blocking around the start leaves no moment without it.
  const SignalsBlocked blocked;
  return std::thread([name, run = std::move(body)] {
    // Of itself, which does not need a /proc that knows this process by the same number.
    pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
    run();
  });
}

Worker::Worker(const std::string& name) : thread_(start_thread(name, [this] { run(); })) {}

Worker::~Worker() { stop(); }

void Worker::post(std::function<void()> task) {
  MutexLock lock(mutex_);
  tasks_.push_back(std::move(task));
  posted_.notify_one();
}

void Worker::stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    posted_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Worker::run() {
  MutexLock lock(mutex_);
  while (true) {
    while (tasks_.empty() && !stopping_) posted_.wait(mutex_);
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it holds goes without the lock
    lock.lock();
  }
}

}  // namespace fpfs
