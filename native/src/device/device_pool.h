// Fresh objects kept ready, so that a new file does not wait for a directory to become durable.
//
// Invariants: an object leaves the pool only after an fsync of the folder that names it.
// Threads: take() from any thread; making objects runs on the worker given.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "base/thread_annotations.h"
#include "base/worker.h"
#include "device/device.h"
#include "device/device_directory.h"
#include "device/device_open_files.h"

namespace fpfs {

class ObjectPool {
 public:
  using Done = std::function<void(int error, ObjectRef, uint64_t id)>;

  ObjectPool(ObjectDirectory& directory, OpenFiles& files, Worker& worker, uint64_t id_first,
             uint32_t objects_ready);

  // Starts to fill the pool.
  void start() EXCLUDES(mutex_);
  void take(Done done) EXCLUDES(mutex_);
  // Removes what nobody took. No more take() then; call it on the worker. 0 or a negative errno.
  int clear() EXCLUDES(mutex_);

 private:
  void refill_soon() REQUIRES(mutex_);
  void refill() EXCLUDES(mutex_);
  // How many objects are to be made; `asked`: all takes that waited so far, for fail().
  uint32_t missing(uint64_t* asked) const EXCLUDES(mutex_);
  int make(uint32_t count, std::vector<uint64_t>* ids);
  void deliver() EXCLUDES(mutex_);
  void fail(int error, uint64_t asked) EXCLUDES(mutex_);

  ObjectDirectory& directory_;
  OpenFiles& files_;
  Worker& worker_;
  const uint32_t objects_ready_;
  uint64_t id_next_;  // the worker's

  mutable Mutex mutex_;
  std::deque<uint64_t> ready_ GUARDED_BY(mutex_);
  std::deque<Done> waiting_ GUARDED_BY(mutex_);
  uint64_t served_ GUARDED_BY(mutex_) = 0;  // takes that waited and wait no more
  bool refilling_ GUARDED_BY(mutex_) = false;
};

}  // namespace fpfs
