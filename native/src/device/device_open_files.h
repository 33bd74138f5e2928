// A device's open descriptors: opened when needed, kept for the next request, bounded in number.
//
// Ownership: an OpenFile is pinned by every request that uses it; unpinned ones are given to the
//   `retire` function, which owns them then, when the bound asks for it or their object is removed.
// Invariants:
//   * A pinned file is never retired.
//   * With buffered writes, a file is retired only after a flush of all that was written through
//   it:
//     an error of writeback reaches a flush on the descriptor that wrote, and perhaps no other.
// Threads: all methods from any thread; only acquire() may block. `retire` is called without locks.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/file_descriptor.h"
#include "base/thread_annotations.h"
#include "device/device.h"
#include "device/device_directory.h"

namespace fpfs {

struct OpenFile {
  uint64_t id = 0;
  FileDescriptor fd;
  OpenMode mode = OpenMode::ReadWrite;  // ReadOnly when the filesystem has become so
  // Nobody else writes to it any more: a process that was killed may have transfers under way.
  std::atomic<bool> ours{false};

  // Owned by OpenFiles, under its mutex.
  uint32_t users = 0;
  bool removed = false;
  bool idle = false;
  std::list<OpenFile*>::iterator idle_at;
  uint64_t writes_finished = 0;
  uint64_t writes_flushed = 0;

  // Owned by the backend: its slot in the ring's table of registered files.
  int slot = -1;
};

class OpenFiles {
 public:
  using Retire = std::function<void(std::unique_ptr<OpenFile>)>;

  OpenFiles(ObjectDirectory& directory, uint32_t files_max, Retire retire);

  // Pins the request's file if it is open.
  bool try_acquire(IoRequest* request) EXCLUDES(mutex_);
  // Pins the request's file, opening it if need be. 0 or a negative errno.
  int acquire(IoRequest* request) EXCLUDES(mutex_);
  void release(IoRequest* request, int result) EXCLUDES(mutex_);

  // Takes over the descriptor of an object made just now.
  void add(uint64_t id, FileDescriptor fd) EXCLUDES(mutex_);
  // The object is no more: closes its descriptor as soon as nothing uses it. False if something
  // does.
  bool forget(uint64_t id) EXCLUDES(mutex_);
  // Retires everything. Nothing is pinned any more.
  void clear() EXCLUDES(mutex_);

  uint64_t count() const EXCLUDES(mutex_);

 private:
  using Retired = std::vector<std::unique_ptr<OpenFile>>;

  void pin(OpenFile* file, IoRequest* request) REQUIRES(mutex_);
  OpenFile* insert(uint64_t id, FileDescriptor fd, OpenMode mode) REQUIRES(mutex_);
  void update_idle(OpenFile* file) REQUIRES(mutex_);
  void set_idle(OpenFile* file, bool idle) REQUIRES(mutex_);
  void shrink(Retired* retired) REQUIRES(mutex_);
  void take(OpenFile* file, Retired* retired) REQUIRES(mutex_);
  void hand_over(Retired retired);

  ObjectDirectory& directory_;
  const uint32_t files_max_;
  const Retire retire_;

  mutable Mutex mutex_;
  // Files of objects that exist; removed ones that are in use are known by their requests alone.
  std::unordered_map<uint64_t, std::unique_ptr<OpenFile>> files_ GUARDED_BY(mutex_);
  std::list<OpenFile*> idle_ GUARDED_BY(mutex_);  // the least recently used first
};

}  // namespace fpfs
