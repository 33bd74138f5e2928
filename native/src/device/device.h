// One device directory: its objects, and asynchronous aligned I/O on them.
//
// Ownership: an IoRequest belongs to the submitter again as soon as complete() is called.
// Threads: submit() may be called from any thread and never blocks. complete() runs on one of the
//   device's own threads, without locks held; it may submit further requests but must not block.
// Errno: a `result` is 0 or a negative errno, an `error` 0 or a positive one, here and below. Short
//   transfers are continued inside, and a read past an object's end is filled with zeros.
// Order: none among requests in flight, not even on one object; wait for complete() where it
// matters.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/duration_histogram.h"
#include "base/status.h"
#include "base/tracer.h"

namespace fpfs {

inline constexpr uint64_t kIoAlignment = 4096;

enum class IoBackend { Auto, IoUring, Threads };

// How records of the native plane reach the log. Called from any thread.
using LogSink = std::function<void(int level, const std::string& message)>;

// A name for an object. It holds nothing open: the device keeps a bounded number of descriptors,
// and one that a request uses stays open until the request completes.
class Object {
 public:
  explicit Object(uint64_t id) : id_(id) {}
  uint64_t id() const { return id_; }

 private:
  uint64_t id_;
};
using ObjectRef = std::shared_ptr<Object>;

struct OpenFile;  // the device's descriptor of an object

enum class IoOp : uint8_t {
  Read,      // buffer, offset, length: multiples of kIoAlignment
  Write,     // likewise
  Flush,     // fdatasync of the object (its size too): covers requests completed before
  Allocate,  // fallocate [offset, offset + length), extending the object's size
  Punch,     // gives [offset, offset + length) back where the filesystem can; the size stays
  Truncate,  // to `length` bytes
};

struct IoRequest {
  virtual ~IoRequest() = default;
  virtual void complete(int result) = 0;

  IoOp op = IoOp::Read;
  ObjectRef object;
  uint64_t offset = 0;
  uint64_t length = 0;
  char* buffer = nullptr;
  uint64_t ino = 0;  // whose it is, and where in that file, for who traces it
  uint64_t file_offset = 0;
  bool uses_reserve = false;  // of Allocate: may take what is kept free

  // The device's own while submitted.
  IoRequest* next = nullptr;
  OpenFile* open_file = nullptr;
  uint64_t bytes_done = 0;
  int64_t submitted_ns = 0;  // only of a file that is traced
  int64_t issued_ns = 0;     // when the kernel, or a thread, got it; 0 if none did
  int64_t completed_ns = 0;
};

// An object that was removed and whose bytes [0, bytes) have blocks: rubbish, which nobody may
// read.
struct KeptObject {
  ObjectRef object;
  uint64_t id = 0;
  uint64_t bytes = 0;  // a multiple of kBlockBytes
};

struct DeviceStatistics {
  uint64_t bytes_written = 0;
  uint64_t bytes_read = 0;
  uint64_t requests_in_flight = 0;  // transfers and flushes that the kernel (or a thread) works on
  uint64_t requests_queued = 0;     // everything else that was submitted and is not complete
  uint64_t requests_in_flight_max = 0;  // the most that were in flight at once
  uint64_t errors = 0;
  uint64_t kept_bytes = 0;  // of removed objects that are kept for new bytes
  // From when the kernel got them to their completion, also of those that failed.
  DurationCounts write_latency;
  DurationCounts read_latency;
  DurationCounts flush_latency;
  bool io_uring = false;
  bool direct = false;              // O_DIRECT works on the backing filesystem
  bool buffers_registered = false;  // io_uring fixed buffers in use
};

struct MemoryRegion {
  char* base = nullptr;
  uint64_t length = 0;
};

struct DeviceConfig {
  uint16_t number = 0;
  std::string path;  // the objects directory
  uint32_t depth = 16;
  IoBackend backend = IoBackend::Auto;
  uint64_t object_id_first = 1;
  uint64_t reserve_bytes = 0;  // kept free for the catalog: Allocate answers ENOSPC below this
  uint32_t pool_objects = 8;   // objects kept ready, their directory entries durable
  uint32_t kept_percent = 0;   // of the filesystem: removed objects kept for new bytes,
  uint64_t kept_bytes_min = uint64_t{16} << 20;  // of this size or more
  uint32_t open_files_max = 1024;  // descriptors kept open; those in use may exceed it
  LogSink log;
  Tracer* tracer = nullptr;  // outlives the device
};

class Device {
 public:
  // `regions` are registered with io_uring; buffers outside them work too, unregistered.
  static Result<std::unique_ptr<Device>> open(const DeviceConfig& config,
                                              const std::vector<MemoryRegion>& regions);
  virtual ~Device() = default;

  virtual uint16_t number() const = 0;
  virtual void submit(IoRequest* request) = 0;

  // Hands out a fresh, empty object whose directory entry is durable. `done` runs on a device
  // thread (or before returning, when the pool holds one).
  virtual void create_object(std::function<void(int error, ObjectRef, uint64_t id)> done) = 0;
  // Hands out a removed object of at most `bytes_max`, if the device keeps one.
  virtual std::optional<KeptObject> take_kept_object(uint64_t bytes_max) = 0;
  // Whether removed objects are kept; otherwise those that are go.
  virtual void keep_removed(bool keeps) = 0;
  // Opens lazily: the file is opened by the first request on it (whose complete() gets the errno).
  virtual ObjectRef object(uint64_t id) = 0;
  // Unlinks an object on a device thread, or keeps it for take_kept_object() under another id.
  virtual void remove_object(uint64_t id, std::function<void(int error)> done) = 0;

  // What may still be allocated, the reserve left out and what is kept of removed objects
  // included. Any thread; one statvfs.
  virtual uint64_t bytes_free() const = 0;
  virtual DeviceStatistics statistics() const = 0;
  // Waits for everything submitted, removes unused pool objects, joins the threads. What is
  // submitted afterwards gets ENODEV.
  virtual void close() = 0;
};

}  // namespace fpfs
