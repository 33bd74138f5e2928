// Device: puts together the objects directory, the open files, the pool, a backend and the workers.
//
// Concurrency: `metadata_` opens files and changes their allocation, which a writer waits for;
//   `pool_worker_` makes objects, and renames those that are kept; `reaper_` removes, closes and
//   punches, which may take long.
//   No thread of the backend ever blocks on the filesystem.
#include "device/device.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <utility>

#include "base/worker.h"
#include "device/device_backend.h"
#include "device/device_directory.h"
#include "device/device_open_files.h"
#include "device/device_pool.h"
#include "device/device_transfer.h"

namespace fpfs {
namespace {

constexpr int kLogInfo = 20;
constexpr int kLogWarning = 30;

// A share of the process's descriptors, so that several devices and the rest of it fit.
uint32_t open_files_limit(uint32_t wanted) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return wanted;
  const uint64_t share = std::max<uint64_t>(limit.rlim_cur / 16, 8);
  return static_cast<uint32_t>(std::min<uint64_t>(wanted, share));
}

bool moves_bytes(IoOp op) { return op == IoOp::Read || op == IoOp::Write; }

bool writable_enough(const IoRequest& request) {
  const bool changes = request.op != IoOp::Read && request.op != IoOp::Flush;
  return !changes || request.open_file->mode == OpenMode::ReadWrite;
}

bool has_to_wait(const IoRequest& request) {
  return request.op == IoOp::Write && !request.open_file->ours;
}

bool still_linked(const IoRequest& request) {
  struct stat status {};
  return ::fstat(request.open_file->fd.get(), &status) == 0 && status.st_nlink != 0;
}

// Space that is on its way back: punches, removals, and closes of what was removed.
class SpaceComing {
 public:
  void coming() { pending_.fetch_add(1); }
  void came() {
    arrived_.fetch_add(1);
    pending_.fetch_sub(1);
  }
  uint64_t arrived() const { return arrived_.load(); }
  // Whether there may be more space now, or soon, than when arrived() was `before`.
  bool since(uint64_t before) const { return pending_.load() != 0 || arrived_.load() != before; }

 private:
  std::atomic<uint64_t> pending_{0};
  std::atomic<uint64_t> arrived_{0};
};

class NativeDevice final : public Device, private BackendOwner {
 public:
  explicit NativeDevice(const DeviceConfig& config);
  ~NativeDevice() override { close(); }

  Status start(const std::vector<MemoryRegion>& regions);

  uint16_t number() const override { return config_.number; }
  void submit(IoRequest* request) override;
  void create_object(std::function<void(int, ObjectRef, uint64_t)> done) override;
  ObjectRef object(uint64_t id) override { return std::make_shared<Object>(id); }
  std::optional<KeptObject> take_kept_object(uint64_t bytes_max) override;
  void keep_removed(bool keeps) override;
  void remove_object(uint64_t id, std::function<void(int)> done) override;
  uint64_t bytes_free() const override;
  DeviceStatistics statistics() const override;
  void close() override EXCLUDES(drained_mutex_);

 private:
  void finished(IoRequest* request, int result) override;
  void blocked(IoRequest* request) override;
  void close_file(std::unique_ptr<OpenFile> file) override;

  Status start_backend(const std::vector<MemoryRegion>& regions);
  // In one order with closing_: what came before that is waited for.
  void begin() { pending_.fetch_add(1); }
  void end() EXCLUDES(drained_mutex_);
  void wait_drained() EXCLUDES(drained_mutex_);
  void run_on_worker(IoRequest* request);
  int change(IoRequest* request);
  void measure(const IoRequest& request, int result);
  int await_others(IoRequest* request);
  int allocate(IoRequest* request);
  int allocate_with_reserve(IoRequest* request);
  void take_object(std::function<void(int, ObjectRef, uint64_t)> done);
  void after_removals(std::function<void()> task);
  uint64_t missing_for(uint64_t bytes) const;
  bool give_up_kept(uint64_t bytes);
  void log_once(std::atomic<bool>* said, const std::string& message);
  void log(int level, const std::string& message);
  std::string name() const { return "dev" + std::to_string(config_.number); }

  const DeviceConfig config_;
  ObjectDirectory directory_;
  OpenFiles files_;
  std::unique_ptr<Backend> backend_;
  bool io_uring_ = false;
  std::atomic<bool> keeps_removed_{false};

  std::atomic<uint64_t> pending_{0};  // whatever has not called back yet
  std::atomic<bool> closing_{false};  // it is over: nothing is taken any more
  std::atomic<uint64_t> bytes_written_{0};
  std::atomic<uint64_t> bytes_read_{0};
  std::atomic<uint64_t> errors_{0};
  DurationHistogram write_latency_;
  DurationHistogram read_latency_;
  DurationHistogram flush_latency_;
  SpaceComing space_;
  SpaceComing held_;  // by an attempt to allocate with the reserve, for a moment
  std::atomic<bool> said_no_allocate_{false};
  std::atomic<bool> said_no_punch_{false};

  Mutex drained_mutex_;
  CondVar drained_;
  bool closed_ = false;

  Worker metadata_;
  Worker pool_worker_;
  Worker reaper_;
  ObjectPool pool_;
};

NativeDevice::NativeDevice(const DeviceConfig& config)
    : config_(config),
      files_(directory_, open_files_limit(config.open_files_max),
             [this](std::unique_ptr<OpenFile> file) {
               space_.coming();
               backend_->retire(std::move(file));
             }),
      metadata_(name() + "-meta"),
      pool_worker_(name() + "-pool"),
      reaper_(name() + "-reap"),
      pool_(directory_, files_, pool_worker_, config.object_id_first, config.pool_objects) {}

Status NativeDevice::start(const std::vector<MemoryRegion>& regions) {
  if (Status status = directory_.open(config_.path); !status.ok()) return status;
  if (!directory_.direct()) {
    log(kLogWarning, config_.path + ": no direct I/O on this filesystem; writes go through the " +
                         "page cache, which costs memory and speed");
  }
  if (Status status = start_backend(regions); !status.ok()) return status;
  keep_removed(true);
  pool_.start(config_.kept_bytes_min, directory_.bytes_total() / 100 * config_.kept_percent);
  return {};
}

Status NativeDevice::start_backend(const std::vector<MemoryRegion>& regions) {
  const BackendConfig config{.name = name(),
                             .depth = std::max(config_.depth, 1U),
                             .files_max = open_files_limit(config_.open_files_max),
                             .regions = regions,
                             .log = [this](int level, const std::string& m) { log(level, m); }};
  if (config_.backend != IoBackend::Threads) {
    Result<std::unique_ptr<Backend>> ring = open_ring_backend(config, *this);
    if (ring.ok()) {
      backend_ = ring.take();
      io_uring_ = true;
      return {};
    }
    if (config_.backend == IoBackend::IoUring) return ring.status();
    log(kLogWarning, name() + ": no io_uring (" + ring.status().message() + "); using " +
                         std::to_string(config.depth) + " threads");
  }
  backend_ = open_thread_backend(config, *this);
  return {};
}

void NativeDevice::submit(IoRequest* request) {
  const bool transfer = moves_bytes(request->op);
  assert(!transfer || (request->length > 0 && request->length % kIoAlignment == 0 &&
                       request->offset % kIoAlignment == 0 &&
                       reinterpret_cast<uintptr_t>(request->buffer) % kIoAlignment == 0));
  begin();
  request->open_file = nullptr;
  request->issued_ns = 0;
  const bool traced = config_.tracer != nullptr && config_.tracer->watches(request->ino);
  request->submitted_ns = traced ? monotonic_ns() : 0;
  if (closing_) return finished(request, -ENODEV);
  const bool opened = files_.try_acquire(request);
  const bool at_once = transfer || request->op == IoOp::Flush;
  if (opened && at_once && writable_enough(*request) && !has_to_wait(*request)) {
    backend_->submit(request);
  } else {
    // Nobody waits for space to be given back, but writers do wait for the other changes.
    if (request->op == IoOp::Punch) {
      space_.coming();
      reaper_.post([this, request] {
        run_on_worker(request);
        space_.came();
      });
    } else {
      metadata_.post([this, request] { run_on_worker(request); });
    }
  }
}

void NativeDevice::run_on_worker(IoRequest* request) {
  const int opened = request->open_file != nullptr ? 0 : files_.acquire(request);
  if (opened < 0) {
    finished(request, opened);
  } else if (!writable_enough(*request)) {
    finished(request, -EROFS);
  } else if (const int waited = has_to_wait(*request) ? await_others(request) : 0; waited < 0) {
    finished(request, waited);
  } else if (moves_bytes(request->op) || request->op == IoOp::Flush) {
    backend_->submit(request);
  } else {
    const uint64_t arrived = space_.arrived();
    const int result = change(request);
    const bool refused = request->op == IoOp::Allocate && result == -ENOSPC;
    if (refused && (space_.since(arrived) || give_up_kept(missing_for(request->length)))) {
      // Again, when what is being given back now is there.
      after_removals([this, request] { run_on_worker(request); });
    } else {
      finished(request, result);
    }
  }
}

int NativeDevice::change(IoRequest* request) {
  if (request->op == IoOp::Allocate) return allocate(request);
  const int result = transfer_blocking(request);
  if (request->op == IoOp::Punch && result == -EOPNOTSUPP) {
    log_once(&said_no_punch_,
             "no hole punching on this filesystem; the space of rewritten ranges " +
                 std::string("comes back only with the whole object"));
    return 0;
  }
  return result;
}

// Returns when the transfers of others to the object have ended. A process that was killed may have
// left some to places that were preallocated, from memory that is used for other bytes since: its
// end does not wait for them (io_uring, kernel 6.18: of 32 MiB 26 arrived later). Allocating waits
// for all of them (ext4, XFS: inode_dio_wait), and of blocks that are there it does nothing else.
int NativeDevice::await_others(IoRequest* request) {
  const int fd = request->open_file->fd.get();
  int result = 0;
  do {
    result = ::fallocate(fd, FALLOC_FL_KEEP_SIZE, static_cast<off_t>(request->offset),
                         static_cast<off_t>(request->length));
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno == EOPNOTSUPP) {
    struct stat object {};
    result = ::fstat(fd, &object);
    if (result == 0) result = ::ftruncate(fd, object.st_size);
  }
  if (result != 0) return -errno;
  request->open_file->ours = true;
  return 0;
}

int NativeDevice::allocate(IoRequest* request) {
  const int64_t bytes_free = directory_.bytes_free();
  if (bytes_free < 0) return static_cast<int>(bytes_free);
  if (const int64_t wanted = static_cast<int64_t>(request->length) + kFreeBytesMin;
      bytes_free < wanted) {
    give_up_kept(static_cast<uint64_t>(wanted - bytes_free));
  }
  const bool enough = request->uses_reserve ||
                      static_cast<uint64_t>(bytes_free) >= request->length + config_.reserve_bytes;
  if (!enough) held_.coming();
  const int result = enough ? transfer_blocking(request) : allocate_with_reserve(request);
  if (!enough) held_.came();
  if (result != -EOPNOTSUPP) return result;
  log_once(&said_no_allocate_, "no fallocate on this filesystem; a full device is noticed late");
  return 0;
}

// What a filesystem reports as free lags behind what was given back (XFS frees in the background);
// asking for the space, and the reserve with it, makes it look for all there is. What only root
// may use (ext4 keeps some) does not count.
int NativeDevice::allocate_with_reserve(IoRequest* request) {
  const auto cut = [request](uint64_t end) {
    const int result = ::ftruncate(request->open_file->fd.get(), static_cast<off_t>(end));
    return result == 0 ? 0 : -errno;
  };
  request->length += config_.reserve_bytes;
  int result = transfer_blocking(request);
  request->length -= config_.reserve_bytes;
  if (result == 0) result = cut(request->offset + request->length);
  if (result == 0 && directory_.bytes_free() >= static_cast<int64_t>(config_.reserve_bytes)) {
    return 0;
  }
  const int undone = cut(request->offset);
  return undone != 0 ? undone : result != 0 ? result : -ENOSPC;
}

void NativeDevice::measure(const IoRequest& request, int result) {
  if (request.issued_ns == 0) return;
  DurationHistogram& latency = request.op == IoOp::Write  ? write_latency_
                               : request.op == IoOp::Read ? read_latency_
                                                          : flush_latency_;
  latency.record(request.completed_ns - request.issued_ns);
  if (request.submitted_ns == 0 || !config_.tracer->watches(request.ino)) return;
  TraceEvent event;
  event.kind = TraceKind::Transfer;
  event.op = static_cast<uint8_t>(request.op);
  event.device = config_.number;
  event.error = -result;
  event.ino = request.ino;
  event.offset = request.file_offset;
  event.length = request.length;
  event.at_ns = {request.submitted_ns, request.issued_ns, request.completed_ns, 0};
  config_.tracer->add(event);
}

void NativeDevice::finished(IoRequest* request, int result) {
  // Who removed the directory under a mount leaves open objects that take everything, and are gone
  // with their descriptors.
  if (result == 0 && request->op == IoOp::Flush && !still_linked(*request)) result = -ENODEV;
  measure(*request, result);
  const bool gives_back = request->op == IoOp::Truncate || request->op == IoOp::Punch;
  if (result == -ENOENT && gives_back) {
    // The object has been given back as a whole.
  } else if (result != 0) {
    errors_.fetch_add(1, std::memory_order_relaxed);
  } else if (request->op == IoOp::Write) {
    bytes_written_.fetch_add(request->length, std::memory_order_relaxed);
  } else if (request->op == IoOp::Read) {
    bytes_read_.fetch_add(request->length, std::memory_order_relaxed);
  }
  if (request->open_file != nullptr) files_.release(request, result);
  request->complete(result);  // from here on it is the submitter's again
  end();
}

void NativeDevice::blocked(IoRequest* request) {
  metadata_.post([this, request] {
    const int result = transfer_blocking(request);
    request->completed_ns = monotonic_ns();
    finished(request, result);
  });
}

void NativeDevice::close_file(std::unique_ptr<OpenFile> file) {
  // The last close of an unlinked object frees its blocks, which may take a while.
  reaper_.post([this, closing = std::shared_ptr<OpenFile>(std::move(file))] {
    closing->fd.reset();
    space_.came();
  });
}

void NativeDevice::create_object(std::function<void(int, ObjectRef, uint64_t)> done) {
  begin();
  if (closing_) {
    done(ENODEV, nullptr, 0);
    return end();
  }
  take_object(std::move(done));
}

void NativeDevice::take_object(std::function<void(int, ObjectRef, uint64_t)> done) {
  const uint64_t arrived = space_.arrived();
  const uint64_t tried = held_.arrived();
  pool_.take(
      [this, arrived, tried, done = std::move(done)](int error, ObjectRef object, uint64_t id) {
        if (error == -ENOSPC && (space_.since(arrived) || held_.since(tried) || give_up_kept(1))) {
          // Again, when what is being given back now is there.
          after_removals([this, done] { take_object(done); });
          return;
        }
        if (error != 0) errors_.fetch_add(1, std::memory_order_relaxed);
        done(-error, std::move(object), id);
        end();
      });
}

void NativeDevice::remove_object(uint64_t id, std::function<void(int)> done) {
  begin();
  if (closing_) {
    done(ENODEV);
    return end();
  }
  space_.coming();
  const auto removed = [this, done = std::move(done)](int result) {
    space_.came();
    if (result != 0 && result != -ENOENT) errors_.fetch_add(1, std::memory_order_relaxed);
    done(-result);
    end();
  };
  reaper_.post([this, id, removed] {
    const bool unused = files_.forget(id);
    if (!unused || !keeps_removed_) return removed(directory_.remove_object(id));
    pool_worker_.post([this, id, removed] {
      if (pool_.keep(id)) {
        give_up_kept(pool_.kept_surplus());
        return removed(0);
      }
      reaper_.post([this, id, removed] { removed(directory_.remove_object(id)); });
    });
  });
}

std::optional<KeptObject> NativeDevice::take_kept_object(uint64_t bytes_max) {
  return pool_.take_kept(bytes_max);
}

// On `metadata_`, behind what is being removed, or kept, now.
void NativeDevice::after_removals(std::function<void()> task) {
  pool_worker_.post(
      [this, task = std::move(task)] { reaper_.post([this, task] { metadata_.post(task); }); });
}

void NativeDevice::keep_removed(bool keeps) {
  keeps_removed_ = keeps && config_.kept_percent != 0 && directory_.overwrites_in_place();
  if (!keeps) give_up_kept(UINT64_MAX);
}

// What the filesystem lacks for an allocation, as far as it says; 1 byte at least.
uint64_t NativeDevice::missing_for(uint64_t bytes) const {
  const uint64_t wanted = bytes + config_.reserve_bytes;
  const auto there = static_cast<uint64_t>(std::max<int64_t>(directory_.bytes_free(), 0));
  return wanted > there ? wanted - there : 1;
}

// Whether some of what was kept of removed objects comes back.
bool NativeDevice::give_up_kept(uint64_t bytes) {
  const std::vector<uint64_t> ids = pool_.give_up_kept(bytes);
  for (const uint64_t id : ids) {
    space_.coming();
    reaper_.post([this, id] {
      files_.forget(id);
      // One that cannot be removed is found by the next mount that looks for such objects.
      (void)directory_.remove_object(id);
      space_.came();
    });
  }
  return !ids.empty();
}

uint64_t NativeDevice::bytes_free() const {
  const int64_t bytes = directory_.bytes_free();
  if (bytes < 0) return 0;
  const uint64_t all = static_cast<uint64_t>(bytes) + pool_.kept_bytes();
  return all - std::min(all, config_.reserve_bytes);
}

DeviceStatistics NativeDevice::statistics() const {
  DeviceStatistics result;
  result.bytes_written = bytes_written_.load(std::memory_order_relaxed);
  result.bytes_read = bytes_read_.load(std::memory_order_relaxed);
  const uint64_t pending = pending_.load(std::memory_order_relaxed);
  result.requests_in_flight = std::min(backend_->in_flight().now(), pending);
  result.requests_queued = pending - result.requests_in_flight;
  result.requests_in_flight_max = backend_->in_flight().max();
  result.errors = errors_.load(std::memory_order_relaxed);
  result.kept_bytes = pool_.kept_bytes();
  result.write_latency = write_latency_.read();
  result.read_latency = read_latency_.read();
  result.flush_latency = flush_latency_.read();
  result.io_uring = io_uring_;
  result.direct = directory_.direct();
  result.buffers_registered = backend_->buffers_registered();
  return result;
}

void NativeDevice::end() {
  if (pending_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  MutexLock lock(drained_mutex_);
  drained_.notify_all();
}

void NativeDevice::wait_drained() {
  MutexLock lock(drained_mutex_);
  while (pending_.load() != 0) drained_.wait(drained_mutex_);
}

void NativeDevice::close() {
  if (std::exchange(closed_, true)) return;
  wait_drained();
  closing_ = true;
  wait_drained();  // what came in between
  if (backend_ == nullptr) return;
  pool_worker_.post([this] {
    if (const int error = pool_.clear(); error != 0) {
      log(kLogWarning, name() + ": unused objects could not be removed: " + error_text(-error));
    }
  });
  pool_worker_.stop();
  metadata_.stop();
  files_.clear();
  backend_->stop();
  reaper_.stop();
  // A mount after a clean end looks for no object that came back with the loss of power.
  if (const int error = directory_.sync_removals(); error != 0) {
    log(kLogWarning, name() + ": removed objects may come back: " + error_text(-error));
  }
}

void NativeDevice::log_once(std::atomic<bool>* said, const std::string& message) {
  if (!said->exchange(true)) log(kLogInfo, config_.path + ": " + message);
}

void NativeDevice::log(int level, const std::string& message) {
  if (config_.log) config_.log(level, message);
}

}  // namespace

Result<std::unique_ptr<Device>> Device::open(const DeviceConfig& config,
                                             const std::vector<MemoryRegion>& regions) {
  auto device = std::make_unique<NativeDevice>(config);
  if (Status status = device->start(regions); !status.ok()) return status;
  return std::unique_ptr<Device>(std::move(device));
}

}  // namespace fpfs
