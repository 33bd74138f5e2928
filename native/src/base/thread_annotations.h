// Locks that clang's thread safety analysis understands: Mutex, MutexLock, CondVar and GUARDED_BY.
//
// A field shared between threads is either atomic or carries GUARDED_BY(mutex). `make lint`
// compiles with clang -Wthread-safety; other compilers see plain std::mutex and
// std::condition_variable.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define FPFS_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define FPFS_THREAD_ATTRIBUTE(x)
#endif

#define CAPABILITY(x) FPFS_THREAD_ATTRIBUTE(capability(x))
#define SCOPED_CAPABILITY FPFS_THREAD_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(x) FPFS_THREAD_ATTRIBUTE(guarded_by(x))
#define PT_GUARDED_BY(x) FPFS_THREAD_ATTRIBUTE(pt_guarded_by(x))
#define ACQUIRED_BEFORE(...) FPFS_THREAD_ATTRIBUTE(acquired_before(__VA_ARGS__))
#define ACQUIRED_AFTER(...) FPFS_THREAD_ATTRIBUTE(acquired_after(__VA_ARGS__))
#define REQUIRES(...) FPFS_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) FPFS_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) FPFS_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define EXCLUDES(...) FPFS_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define ASSERT_CAPABILITY(x) FPFS_THREAD_ATTRIBUTE(assert_capability(x))
#define RETURN_CAPABILITY(x) FPFS_THREAD_ATTRIBUTE(lock_returned(x))
#define NO_THREAD_SAFETY_ANALYSIS FPFS_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace fpfs {

class CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() ACQUIRE() { native_.lock(); }
  void unlock() RELEASE() { native_.unlock(); }
  // Tells the analysis, in a lambda that runs under the lock, that it does.
  void assert_held() const ASSERT_CAPABILITY(this) {}

 private:
  friend class CondVar;
  std::mutex native_;
};

// Holds a Mutex for a scope; unlock() and lock() in between are understood by the analysis.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() RELEASE() {
    if (held_) mutex_.unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() RELEASE() {
    held_ = false;
    mutex_.unlock();
  }
  void lock() ACQUIRE() {
    mutex_.lock();
    held_ = true;
  }

 private:
  Mutex& mutex_;
  bool held_ = true;
};

// Waits may wake without reason: loop on the condition (that keeps it under the analysis, too).
class CondVar {
 public:
  void wait(Mutex& mutex) REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.native_, std::adopt_lock);
    native_.wait(lock);
    lock.release();
  }

  // False when the deadline passed.
  bool wait_until(Mutex& mutex, std::chrono::steady_clock::time_point deadline) REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.native_, std::adopt_lock);
    const bool in_time = native_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }

  void notify_one() { native_.notify_one(); }
  void notify_all() { native_.notify_all(); }

 private:
  std::condition_variable native_;
};

}  // namespace fpfs
