// The byte plane as one object: devices, arena, files, handles, and what they report upwards.
//
// Ownership: the engine owns everything native; Python holds the engine. Files are shared with the
//   requests in flight on them.
// Threads: all methods from any thread. Completions are queued and announced on event_fd(); no
//   thread of the engine ever calls Python.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>

#include "base/file_descriptor.h"
#include "base/thread_annotations.h"
#include "base/tracer.h"
#include "base/worker.h"
#include "device/device.h"
#include "engine/kernel_side.h"
#include "file/file.h"
#include "file/read_buffers.h"
#include "staging/arena.h"

namespace fpfs {

class ReadAhead;

struct EngineConfig {
  std::vector<std::pair<uint16_t, std::string>> devices;  // number, objects directory
  std::string arena_path;
  bool take_over = false;  // the arena is there: another process left it
  std::string filesystem_id;
  uint64_t staging_bytes = 0;
  uint64_t slot_bytes = 1 << 20;
  uint64_t journal_area_bytes = Arena::kJournalAreaBytes;
  uint32_t depth = 16;
  IoBackend backend = IoBackend::Auto;
  uint32_t channel_threads = 1;
  uint64_t object_base = 1;
  uint64_t reserve_bytes = 0;
  uint32_t kept_percent = 0;  // see DeviceConfig
  // Of a file, on each device: further ones are larger. From twice as much removed ones are kept.
  uint64_t first_object_bytes = uint64_t{8} << 20;
  Ack ack = Ack::Early;
  std::string cpu_latency_path;  // /dev/cpu_dma_latency, or none
  bool checksums = true;         // of contents: made and checked
};

inline constexpr uint32_t kDevicesMax = 65'535;  // a number in a layout has 16 bits

using ObjectKey = std::pair<uint16_t, uint64_t>;

// What Python is told; `ticket` is the number that the call which started it returned.
struct DrainedEvent {
  uint64_t ticket;
  int error;
  SnapshotData snapshot;
};
struct DroppedEvent {
  uint64_t ticket;
  std::vector<ObjectKey> objects;
};
struct DoneEvent {
  uint64_t ticket;
  int error;
};
struct SyncWriteEvent {
  uint64_t ticket;
  uint64_t ino;
};
// Blocks behind each other in one object, from `place` on, and what their checksums should be.
struct StoredRange {
  Place place;
  std::vector<uint32_t> checksums;
};
// `count` blocks, from the block `first` of a range, that cannot be read (an errno), or whose
// checksum differs (0).
struct Damage {
  uint64_t range;
  uint64_t first;
  uint64_t count;
  int error;
};
// Blocks behind each other in one object that are to be copied; those that are `unwritten` only get
// a place. Without checksums they are copied as they are.
struct CopiedRange {
  Place place;
  uint64_t count;
  std::vector<uint32_t> checksums;
};
struct CopiedEvent {
  uint64_t ticket;
  int error;
  uint64_t object;
  std::vector<Damage> damage;
};
struct VerifiedEvent {
  uint64_t ticket;
  int error;
  std::vector<Damage> damage;
};
// A write, allocation or copy found no space: it waits for room_made(), or was `refused`.
struct SpaceEvent {
  uint64_t ino;
  bool refused;
};
struct LogEvent {
  int level;
  std::string message;
  uint64_t ticket = 0;  // of a request that waits for complete_write(), when this is in the log
};
struct ClosedEvent {
  int error;
};
// take_released() has something.
struct ReleasedEvent {};
using Event = std::variant<CopiedEvent, DrainedEvent, DroppedEvent, DoneEvent, SyncWriteEvent,
                           VerifiedEvent, LogEvent, ClosedEvent, ReleasedEvent, SpaceEvent>;

// An open file description as the kernel knows it.
struct Handle {
  uint64_t id = 0;
  uint32_t flags = 0;  // of open(2)
  std::shared_ptr<File> file;
  Mutex mutex;
  uint64_t errors_seen GUARDED_BY(mutex) = 0;
  std::set<uint64_t> writers GUARDED_BY(mutex);  // who wrote through it
  // The signal that ended the last of them, when it closed because it was ended.
  std::atomic<int> killed_by{0};
  std::atomic<bool> keeps_pages{false};                // the kernel may have read some through it
  std::shared_ptr<ReadAhead> ahead GUARDED_BY(mutex);  // of one who reads in sequence

  bool writable() const;
  void keep_pages();
};

class Engine : public Plane {
 public:
  static Result<std::unique_ptr<Engine>> open(const EngineConfig& config);
  ~Engine() override;

  const EngineConfig& config() const { return config_; }
  int event_fd() const { return event_fd_.get(); }
  std::vector<Event> take_events() EXCLUDES(event_mutex_);
  void post(Event event) EXCLUDES(event_mutex_);

  // What another process left, to be taken over before anything is served: open handles, and inodes
  // with changes in the order of their last closes. Each inode is loaded and recovered, or
  // abandoned; then each handle restored, or forgotten. An inode in two parts is drained between
  // recover() and recover_later().
  struct Left {
    enum class Part : uint8_t {
      All,
      Closed,  // a version that was closed before somebody wrote on, if anybody did
      Later,   // what came after it
    };
    struct Changed {
      uint64_t ino;
      uint64_t sequence;  // of the last change
      int killed_by;      // the signal that ended the last writer that closed it, or 0
      Part part;
    };
    std::vector<arena::HandleRecord> handles;
    std::vector<Changed> changed;
    // A damaged record was of one of these inodes, or may have been of any: their changes are not
    // whole. And whether open files are missing among the handles.
    std::vector<uint64_t> suspects;
    bool all_suspect = false;
    bool handles_damaged = false;
  };
  Left left() const;
  // What was acknowledged of an inode is lost, although it is open: see File::spoil.
  void spoil(uint64_t ino) EXCLUDES(table_mutex_);
  // An inode that is loaded is about to get its first content: see File::begin.
  void begin(uint64_t ino) EXCLUDES(table_mutex_);
  uint64_t recover(uint64_t ino, bool trim);
  uint64_t recover_later(uint64_t ino, bool trim);
  void abandon(uint64_t ino);
  // Objects of all loaded files, committed or not.
  std::vector<ObjectKey> held_objects() EXCLUDES(table_mutex_);
  Status restore_handle(uint64_t handle, uint64_t ino, uint32_t flags) EXCLUDES(table_mutex_);

  Status load(uint64_t ino, Placement placement, uint64_t size, int64_t mtime_ns, int64_t ctime_ns,
              std::optional<std::string> content,
              const std::vector<std::pair<uint32_t, std::string>>& segments);
  // What has a new placement from now on: see File::place.
  Status place(uint64_t ino, Placement placement) EXCLUDES(table_mutex_);
  std::shared_ptr<File> file(uint64_t ino) EXCLUDES(table_mutex_);  // null: not loaded
  Status unload(uint64_t ino) EXCLUDES(table_mutex_);
  // See File::revert. The kernel forgets what it has of the content.
  Status revert(uint64_t ino, uint64_t size, int64_t mtime_ns, int64_t ctime_ns,
                std::optional<std::string> content,
                const std::vector<std::pair<uint32_t, std::string>>& segments);
  // The kernel forgets attributes and pages of an inode, or that a name is (or is not) there.
  void invalidate(uint64_t ino);
  void invalidate_name(uint64_t directory, std::string name);
  // Done when the kernel has dropped the names so far.
  uint64_t names_invalidated();
  // Done with ENOENT when the kernel does not refer to the inode (any more).
  uint64_t find_out_known(uint64_t ino);
  // `request`: number of the request that the handle is the answer to, 0 if that does not matter.
  Status open_handle(uint64_t handle, uint64_t ino, uint32_t flags, uint32_t request = 0)
      EXCLUDES(table_mutex_);
  // Of a directory, say: it is not served here, but a successor has to know of it.
  Status record_handle(uint64_t handle, uint64_t ino, uint32_t flags, uint32_t request);
  size_t handle_count() EXCLUDES(table_mutex_);
  // Null if there was none.
  std::shared_ptr<Handle> release_handle(uint64_t handle) EXCLUDES(table_mutex_);
  // The kernel has closed the handle. Python, which has to follow before it does anything that the
  // kernel asks for later, takes it at its next request; an event comes when there is none soon.
  bool release_and_tell(uint64_t handle) EXCLUDES(table_mutex_, released_mutex_);
  struct Released {
    uint64_t handle;
    int killed_by;  // the signal that ended its last writer, or 0
  };
  // The kernel has given a request up, whose caller was killed, that a server which has died had
  // taken: what that had opened for it is released.
  void release_given_up(uint64_t unique) EXCLUDES(table_mutex_, released_mutex_);
  std::vector<Released> take_released() EXCLUDES(released_mutex_);  // in the order of releases
  std::shared_ptr<Handle> handle(uint64_t handle) EXCLUDES(table_mutex_);
  // Readers whose pages the kernel caches, and handles that may write.
  // Lets the kernel keep the pages of a read-only handle unless the inode has writers.
  bool set_cached(const std::shared_ptr<Handle>& handle) EXCLUDES(table_mutex_);

  uint64_t drain(uint64_t ino, bool last);
  uint64_t drop(uint64_t ino);
  uint64_t truncate(uint64_t ino, uint64_t size);
  uint64_t discard(std::vector<Extent> ranges);
  uint64_t remove_objects(std::vector<ObjectKey> objects);
  // Reads what lies on the devices, past every cache, and compares it (engine_verify.cc).
  uint64_t verify(std::vector<StoredRange> ranges) EXCLUDES(verify_mutex_);

  // Copies ranges, one behind the other, to a fresh object of the device `to`, and flushes that.
  // The event names it, and what could not be read or is damaged (engine_evacuate.cc).
  uint64_t copy(uint16_t to, std::vector<CopiedRange> ranges) EXCLUDES(verify_mutex_);

  // Tells `side` of changes from now on; ends it before the devices.
  void attach(std::unique_ptr<KernelSide> side) { kernel_side_ = std::move(side); }
  KernelSide* kernel_side() { return kernel_side_.get(); }
  void complete_write(uint64_t ticket, int error);
  // Whether a change of `ino` that ended so is to be tried again. Where there is no space, but
  // something that gives way to it, Python is asked to see to that.
  Retry retry_of(uint64_t ino, const Outcome& outcome);
  // There is something that gives way from now on.
  void set_gives_way() { gives_way_ = true; }
  // What gave way is gone from the devices; `more`: there is more that would.
  void room_made(bool more);
  ReadBuffers& read_buffers() { return *read_buffers_; }
  Worker& worker() { return worker_; }
  void wake_soon() {
    waker_.post([this] { wake(); });
  }
  void retry_refused_soon() {
    waker_.post([this] { retry_refused(); });
  }
  char* copy_buffer() { return copy_buffer_; }  // the worker's
  uint64_t next_ticket() { return ticket_.fetch_add(1); }

  // Devices may come and go while others use them (engine_devices.cc). add_device() blocks; new
  // chunks may go there at once, unless it is `draining`.
  Status add_device(uint16_t number, const std::string& path, bool draining = false)
      EXCLUDES(devices_mutex_);
  // Whether new chunks avoid a device.
  void set_draining(uint16_t number, bool draining);
  // Closes a device that nothing refers to any more, when reads that are under way have ended.
  uint64_t remove_device(uint16_t number) EXCLUDES(devices_mutex_);
  std::vector<Device*> devices() const EXCLUDES(devices_mutex_);
  void close();

  // Plane
  Arena& arena() override { return *arena_; }
  Device* device(uint16_t number) override;
  bool device_failed(uint16_t number) const override;
  bool takes_chunks(uint16_t number) const override;
  std::vector<uint16_t> chunk_devices() const override EXCLUDES(devices_mutex_);
  void mark_device_failed(uint16_t number, int error) override;
  void wake() override EXCLUDES(park_mutex_);
  void park(std::function<Retry()> retry) override EXCLUDES(park_mutex_);
  void retry_refused() override EXCLUDES(park_mutex_);
  uint64_t retries() const override { return retries_.load(); }
  uint64_t first_object_bytes() const override { return config_.first_object_bytes; }
  void log(int level, const std::string& message) override;
  bool checksums() const override { return config_.checksums; }
  Tracer& tracer() override { return *tracer_; }
  const std::shared_ptr<Tracer>& shared_tracer() const { return tracer_; }
  void report_damage(uint64_t ino, uint64_t block, const Place& place) override
      EXCLUDES(damage_mutex_);
  void report_unreadable(uint64_t ino, uint16_t device, int error) override EXCLUDES(damage_mutex_);
  // How often a device did not deliver what was to be read.
  uint64_t read_errors(uint16_t device) const;
  // How often a block of a device was found not to be what was written there.
  uint64_t checksum_errors(uint16_t device) const;
  unsigned read_begin() override EXCLUDES(phase_mutex_);
  void read_end(unsigned phase) override EXCLUDES(phase_mutex_);
  void give_back(std::vector<Extent> places, std::function<void()> done) override
      EXCLUDES(phase_mutex_);

 private:
  struct Counts {
    uint32_t handles = 0;
    uint32_t writers = 0;
  };
  struct Member {
    std::unique_ptr<Device> device;
    std::atomic<int> failed{0};  // errno
    std::atomic<bool> draining{false};
    std::atomic<uint64_t> checksum_errors{0};
    std::atomic<uint64_t> read_errors{0};
  };
  Member* member(uint16_t number) const;
  explicit Engine(EngineConfig config)
      : config_(std::move(config)), worker_("fpfs-worker"), waker_("fpfs-waker") {}
  uint64_t attach_recovered(const std::shared_ptr<File>& file, uint64_t ticket);
  class Verification;
  class Copying;
  void verification_ended() EXCLUDES(verify_mutex_);
  void end_verifications() EXCLUDES(verify_mutex_);
  Status check_placement(Placement* placement) const;
  Status start();
  Status open_arena();
  Status check_arena_owner() const;
  void sort_remains(Remains remains);
  Status register_handle(uint64_t handle, uint64_t ino, uint32_t flags) EXCLUDES(table_mutex_);
  Status open_event_fd();
  void relieve_pressure();
  void say_leaving_refused();
  void retry_refused_locked() REQUIRES(park_mutex_);
  void punch(const Extent& range, std::function<void(int)> done);
  void after_reads(std::function<void()> action) EXCLUDES(phase_mutex_);

  const EngineConfig config_;
  const std::shared_ptr<Tracer> tracer_ = std::make_shared<Tracer>();
  FileDescriptor wake_;           // an eventfd: there are events
  FileDescriptor released_late_;  // a timer: a release was not taken for a while
  FileDescriptor event_fd_;       // an epoll: one of the two
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<ReadBuffers> read_buffers_;
  char* copy_buffer_ = nullptr;
  std::vector<MemoryRegion> regions_;  // of the arena and the read buffers
  std::unique_ptr<std::atomic<Member*>[]> by_number_ =
      std::make_unique<std::atomic<Member*>[]>(kDevicesMax);
  mutable Mutex devices_mutex_;
  std::vector<std::unique_ptr<Member>> members_ GUARDED_BY(devices_mutex_);  // removed ones, too
  std::unique_ptr<KernelSide> kernel_side_;
  Worker worker_;  // may wait for what the waker brings about
  Worker waker_;
  std::atomic<uint64_t> ticket_{1};
  bool closed_ = false;
  std::atomic<bool> gives_way_{false};
  std::atomic<bool> room_asked_{false};
  std::atomic<uint64_t> refused_last_{0};  // inode, told of once in a row
  // Of each inode, used by one thread, before serve(). What is in two parts is in both maps.
  std::unordered_map<uint64_t, Leftover> leftovers_;
  std::set<uint64_t> left_closed_;  // in one part, which is a version that was closed
  std::unordered_map<uint64_t, PartedLeftover> parted_;
  std::vector<arena::HandleRecord> left_handles_;
  std::set<uint64_t> suspects_;
  bool all_suspect_ = false;
  bool handles_damaged_ = false;

  Mutex event_mutex_;
  std::vector<Event> events_ GUARDED_BY(event_mutex_);

  void tell_released(Released released) EXCLUDES(released_mutex_);
  Mutex released_mutex_;
  std::vector<Released> released_ GUARDED_BY(released_mutex_);

  Mutex table_mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<File>> files_ GUARDED_BY(table_mutex_);
  std::unordered_map<uint64_t, std::shared_ptr<Handle>> handles_ GUARDED_BY(table_mutex_);
  std::unordered_map<uint64_t, Counts> counts_ GUARDED_BY(table_mutex_);

  Mutex verify_mutex_;
  CondVar verified_;
  uint64_t verifications_ GUARDED_BY(verify_mutex_) = 0;
  std::atomic<bool> closing_{false};

  Mutex damage_mutex_;
  std::set<std::tuple<uint16_t, uint64_t, uint32_t>> damage_ GUARDED_BY(damage_mutex_);  // logged
  std::set<std::pair<uint64_t, uint16_t>> unreadable_ GUARDED_BY(damage_mutex_);         // likewise

  Mutex park_mutex_;
  std::vector<std::function<Retry()>> parked_ GUARDED_BY(park_mutex_);   // until wake()
  std::vector<std::function<Retry()>> refused_ GUARDED_BY(park_mutex_);  // until retry_refused()
  bool waking_ GUARDED_BY(park_mutex_) = false;
  bool wake_again_ GUARDED_BY(park_mutex_) = false;

  std::atomic<uint64_t> retries_{1};
  // Of who runs retries. What retries() was when a small file could not leave the arena.
  uint64_t leaving_refused_ = 0;
  bool said_leaving_refused_ = false;

  Mutex phase_mutex_;
  unsigned phase_ GUARDED_BY(phase_mutex_) = 0;
  uint64_t reads_[2] GUARDED_BY(phase_mutex_) = {0, 0};
  bool flipping_ GUARDED_BY(phase_mutex_) = false;
  std::vector<std::function<void()>> now_ GUARDED_BY(phase_mutex_);
  std::vector<std::function<void()>> later_ GUARDED_BY(phase_mutex_);
};

}  // namespace fpfs
