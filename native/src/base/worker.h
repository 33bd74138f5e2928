// A thread that runs posted tasks in order: where the byte plane does what may block.
//
// Threads: post() from any thread. Tasks run on the worker's thread, without locks held.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "base/thread_annotations.h"

namespace fpfs {

// Starts a thread that bears `name` (15 characters count) and takes no signals: those belong to the
// interpreter's main thread. std::system_error if there can be no thread.
std::thread start_thread(const std::string& name, std::function<void()> body);

class Worker {
 public:
  explicit Worker(const std::string& name);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void post(std::function<void()> task) EXCLUDES(mutex_);
  // Runs what was posted, tasks posted by tasks included, and joins the thread.
  void stop() EXCLUDES(mutex_);

 private:
  void run() EXCLUDES(mutex_);

  Mutex mutex_;
  CondVar posted_;
  std::deque<std::function<void()>> tasks_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace fpfs
