// Objects kept ready: empty ones, so that a new file does not wait for a directory to become
// durable; and removed ones whose blocks were written before, which take new bytes a third faster
// than fresh blocks do (ext4 and XFS convert those with their first write, in the journal).
//
// Invariants:
//   * An object leaves the pool only after an fsync of the folder that names it.
//   * A removed object gets a new name before it is used again: who asks for the old one finds
//     nothing, as if it had been unlinked.
//   * Nothing is under way to an object in the pool.
// Threads: take(), take_kept(), give_up_kept() and kept_bytes() from any thread; everything else on
//   the worker given.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "base/thread_annotations.h"
#include "base/worker.h"
#include "device/device.h"
#include "device/device_directory.h"
#include "device/device_open_files.h"

namespace fpfs {

// With less than this free on the filesystem nothing is kept.
inline constexpr int64_t kFreeBytesMin = int64_t{64} << 20;

class ObjectPool {
 public:
  using Done = std::function<void(int error, ObjectRef, uint64_t id)>;

  ObjectPool(ObjectDirectory& directory, OpenFiles& files, Worker& worker, uint64_t id_first,
             uint32_t objects_ready);

  // Starts to fill the pool. Of removed objects those of at least `bytes_min` are kept, up to
  // `bytes_max` of all together: smaller ones save less than a new name costs.
  void start(uint64_t bytes_min, uint64_t bytes_max) EXCLUDES(mutex_);
  void take(Done done) EXCLUDES(mutex_);
  // Removes what nobody took. No more take() then; call it on the worker. 0 or a negative errno.
  int clear() EXCLUDES(mutex_);

  // Keeps an object that is to be removed and that nobody uses. False: it is as it was.
  bool keep(uint64_t id) EXCLUDES(mutex_);
  // The largest of those kept, of at most so many bytes.
  std::optional<KeptObject> take_kept(uint64_t bytes_max) EXCLUDES(mutex_);
  // Of those kept, the oldest: the caller removes them, so that at least `bytes` come back.
  std::vector<uint64_t> give_up_kept(uint64_t bytes) EXCLUDES(mutex_);
  uint64_t kept_bytes() const EXCLUDES(mutex_);
  uint64_t kept_surplus() const EXCLUDES(mutex_);  // bytes that are kept beyond the bound

 private:
  bool wants(uint64_t bytes) const EXCLUDES(mutex_);
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
  std::vector<KeptObject> kept_ GUARDED_BY(mutex_);  // the oldest first
  uint64_t kept_bytes_ GUARDED_BY(mutex_) = 0;
  uint64_t kept_bytes_min_ GUARDED_BY(mutex_) = 0;  // of one
  uint64_t kept_bytes_max_ GUARDED_BY(mutex_) = 0;  // of all
};

}  // namespace fpfs
