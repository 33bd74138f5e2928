// Threads that do numbered jobs, each taking the next one, until all are done or one fails.
//
// Threads: start() once. wait(), stop() and status() from any thread; meet() and told() from jobs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/thread_annotations.h"

namespace fpfs {

class Crew {
 public:
  // Does job `index` on thread `thread`. A failure stops all.
  using Job = std::function<Status(size_t index, size_t thread)>;

  Crew() = default;
  // Stops, and waits for the jobs under way.
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // No more threads than jobs are made. Where the system has fewer, these do all jobs; EAGAIN is
  // the status where it has none.
  void start(const std::string& name, size_t threads, size_t jobs, Job job) EXCLUDES(mutex_);
  // Waits until no job is under way and none begins any more. Whether that is so now.
  bool wait(double seconds) EXCLUDES(mutex_);
  // No job begins after that. `why` is the status, unless something failed before or all had ended.
  void stop(Status why) EXCLUDES(mutex_);
  // The first failure.
  Status status() const EXCLUDES(mutex_);

  // Waits until `condition` holds, which what other jobs told() makes true. False: all are to stop.
  bool meet(const std::function<bool()>& condition) EXCLUDES(mutex_);
  void told() EXCLUDES(mutex_);

 private:
  void work(size_t thread) EXCLUDES(mutex_);

  // Constant once the threads run.
  Job job_;
  size_t jobs_ = 0;
  std::vector<std::thread> threads_;

  std::atomic<size_t> next_{0};
  std::atomic<bool> stopping_{false};
  mutable Mutex mutex_;
  CondVar changed_;
  Status status_ GUARDED_BY(mutex_);
  size_t running_ GUARDED_BY(mutex_) = 0;
};

}  // namespace fpfs
