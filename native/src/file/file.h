// One inode's content: acknowledged bytes in staging, the block map, and what moves one to the
// other.
//
// A write lands in *slots* (one open slot a chunk). A full slot is *sealed* and *issued*: the rest
// of its partly covered blocks is fetched, its blocks are written to fresh places, and when they
// are on the device the map points there and the slot is free. Slots of one chunk form a chain,
// oldest first; only the first one of a chain is issued, so that the map changes in the order of
// the writes.
//
// Invariants:
//   * The map names only places whose write has completed (or that read as zeros, `unwritten`).
//   * Bytes of a block behind the file's end read as zeros on the device.
//   * A checksum in the map is that of the whole block at its place. It is made before the block is
//     written, and goes wherever the place is named: neither truncating nor extending changes it.
//   * While a barrier is active, slots attached after it are not issued: the map then changes by
//     nothing that is newer than the barrier.
// Threads: every method may be called from any thread; state is under mutex_. What must not run
// under
//   the lock (device submissions, object creation, wake-ups) is collected in Actions and run after.
// Errno: as POSIX has it for the call that it serves.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/thread_annotations.h"
#include "base/tracer.h"
#include "device/device.h"
#include "layout/block_map.h"
#include "staging/arena.h"

namespace fpfs {

inline constexpr uint64_t kInlineBytesMax = 16 * 1024;
// What a 32-bit segment index can describe.
inline constexpr uint64_t kFileBytesMax = (uint64_t{1} << 58) - 1;
inline constexpr uint64_t kFileBlocksMax = kFileBytesMax / kBlockBytes + 1;  // one is not whole

class Actions {
 public:
  void add(std::function<void()> action) { actions_.push_back(std::move(action)); }
  void run() {
    for (size_t i = 0; i < actions_.size(); ++i) actions_[i]();
    actions_.clear();
  }

 private:
  std::vector<std::function<void()>> actions_;
};

// What an operation that is parked waits for.
enum class Retry {
  Done,     // nothing: it is over
  Waiting,  // a slot, space that is being allocated, an I/O: see Plane::wake()
  Refused,  // space, of which there was none: see Plane::retry_refused()
};

// What files need of the engine around them.
class Plane {
 public:
  virtual ~Plane() = default;
  virtual Arena& arena() = 0;
  virtual Device* device(uint16_t number) = 0;  // nullptr: not mounted
  virtual bool device_failed(uint16_t number) const = 0;
  virtual void mark_device_failed(uint16_t number, int error) = 0;
  // Whether new chunks may go to a device: it is mounted, and neither failed nor to be removed.
  virtual bool takes_chunks(uint16_t number) const = 0;
  // All such devices, for files of which none is left that they were meant for.
  virtual std::vector<uint16_t> chunk_devices() const = 0;
  // How large a file's first object on a device may become.
  virtual uint64_t first_object_bytes() const = 0;
  // Something that a parked operation may wait for has happened (slot, space or I/O).
  virtual void wake() = 0;
  // Calls `retry` again at every wake(), or at every retry_refused(), as it says.
  virtual void park(std::function<Retry()> retry) = 0;
  // A device may have more space than before: what found none is tried again.
  virtual void retry_refused() = 0;
  // How often that has been called. What was refused since needs no other attempt.
  virtual uint64_t retries() const = 0;
  virtual void log(int level, const std::string& message) = 0;
  // Whether blocks get a checksum when they are written, and are checked when they are read.
  virtual bool checksums() const = 0;
  // A block of a file was read from its place and is not what was written there.
  virtual void report_damage(uint64_t ino, uint64_t block, const Place& place) = 0;
  // A device did not deliver a part of a file; it may be missing.
  virtual void report_unreadable(uint64_t ino, uint16_t device, int error) = 0;
  // Brackets a device read, so that discarding old places waits for it.
  virtual unsigned read_begin() = 0;
  virtual void read_end(unsigned phase) = 0;
  // Frees places, or whole objects where `count` is 0, when the reads in flight have ended. What
  // fails is tried again by the commit that tells of it.
  virtual void give_back(std::vector<Extent> places, std::function<void()> done) = 0;
  virtual Tracer& tracer() = 0;
};

// Where new chunks go. A stripe chunk that is larger than a slot is staged, and written, as a run
// of several chunks that follow each other on one device.
struct Placement {
  uint64_t chunk_bytes = 0;  // what a slot holds
  std::vector<uint16_t> devices;
  uint64_t first = 0;
  uint64_t run = 1;
};

enum class Ack { Early, Close, Durable };

// How a file is written and read, as the policy of its directory has it.
struct Flow {
  Ack ack = Ack::Early;
  uint32_t depth = 0;    // chunks that may be on their way to each device; 0: as many as there are
  uint32_t buffers = 0;  // slots that it may hold for each of its devices; 0: as many as there are
  bool cached = true;    // whether the kernel may keep pages for those who only read
  uint64_t read_ahead = 0;  // bytes, beyond what the kernel reads ahead of them
};

struct SnapshotData {
  uint64_t sequence = 0;
  uint64_t noted = 0;  // the last change that it covers, as the arena counts
  uint64_t size = 0;
  int64_t mtime_ns = 0;
  int64_t ctime_ns = 0;
  std::optional<std::string> inline_content;
  std::vector<std::pair<uint32_t, std::string>> segments;
  std::vector<std::pair<uint16_t, uint64_t>> objects;
  std::vector<std::pair<uint16_t, uint64_t>> dead;
  std::vector<Extent> garbage;  // only count and place mean something
  int64_t acknowledged_ns = 0;  // when its oldest byte was (monotonic_ns()); 0: it has no new ones
};

// What another process left of a file, both in order.
struct Leftover {
  std::vector<JournalEntry> changes;
  std::vector<StagedSlot> slots;
};

// The two parts of it where a version was closed, and its drain begun, before somebody wrote on.
struct PartedLeftover {
  Leftover first;  // that version
  Leftover later;
  uint64_t reached = 0;  // where the journal says that the version was on devices, if it does
};

// A payload where it was received: up to four pieces, in stream order.
struct Payload {
  struct Piece {
    char* base = nullptr;
    size_t length = 0;
  };
  Piece pieces[4];
  size_t count = 0;

  void add(char* base, size_t length) {
    if (length != 0) pieces[count++] = {base, length};
  }
  // Copies [from, from + length) to `to`; bytes that are there already are not touched.
  void copy_to(char* to, size_t from, size_t length) const;
  // Whether byte `from` was received at `place`.
  bool lies_at(const char* place, size_t from) const;
  // The pieces of [from, from + length).
  Payload part(size_t from, size_t length) const;
};

// What a write brings: what a caller gave to write(2), or a page that a map has changed. The kernel
// writes such a page as a whole, with what it read of the rest of it before.
enum class Source { Caller, Page };

// The unused part of an open slot, lent to a channel thread as a receive buffer.
struct Lease {
  std::shared_ptr<File> file;
  Slot* slot = nullptr;
  int thread = -1;
};

// What became of a slot that is to leave the arena early.
enum class Pressure {
  Sealed,
  Placed,   // sealed, and there was space for what had no place before
  Growing,  // its place is being allocated
  Refused,  // there is no space for it
  Kept,     // somebody receives into it, or it has left already
};

enum class Progress { Done, Wait };
struct Outcome {
  Progress progress = Progress::Done;
  int error = 0;
  // The number of a write that the kernel may have older pages of: these have to go before it is
  // answered. 0: it has none.
  uint64_t overwrite = 0;
  static Outcome wait() { return {Progress::Wait, 0, 0}; }
  static Outcome failed(int error) { return {Progress::Done, error, 0}; }
};

struct ReadJob;

class File : public std::enable_shared_from_this<File> {
 public:
  struct Attributes {
    uint64_t size = 0;
    uint64_t allocated_bytes = 0;
    int64_t mtime_ns = 0;
    int64_t ctime_ns = 0;
    bool privileges_dropped = false;
    bool dirty = false;
    bool only_longer = false;  // dirty, and what is committed is a beginning of it
  };
  // Bytes since the inode was loaded, each write's counted.
  struct Unsaved {
    uint64_t bytes_acknowledged = 0;
    uint64_t bytes_uncommitted = 0;
    uint64_t bytes_staged = 0;  // now in staging alone, each once
    int64_t oldest_ns = 0;      // when the oldest of those was acknowledged; 0: there is none
  };
  using DrainDone = std::function<void(int error, SnapshotData snapshot)>;
  using Done = std::function<void(int error)>;

  File(Plane& plane, uint64_t ino, Placement placement);

  uint64_t ino() const { return ino_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  Ack ack() const { return ack_; }
  bool cached() const { return cached_; }
  uint64_t read_ahead() const { return read_ahead_; }
  uint64_t sequence() EXCLUDES(mutex_);  // grows with every change
  void set_flow(const Flow& flow) EXCLUDES(mutex_);
  // New chunks go elsewhere, or are of another size. EBUSY while anything is staged.
  Status place(Placement placement) EXCLUDES(mutex_);
  Status load(uint64_t size, int64_t mtime_ns, int64_t ctime_ns, std::optional<std::string> content,
              const std::vector<std::pair<uint32_t, std::string>>& segments) EXCLUDES(mutex_);
  Attributes attributes() EXCLUDES(mutex_);
  void set_times(std::optional<int64_t> mtime_ns, int64_t ctime_ns) EXCLUDES(mutex_);
  // Whether that is news: the kernel may still know a mode with set-uid or set-gid then.
  bool drop_privileges() EXCLUDES(mutex_);
  void privileges_restored() EXCLUDES(mutex_);
  // A write was refused for want of space. What its writer wanted there is missing until it is
  // written after all, or the file is cut off before.
  void refused(uint64_t offset, uint64_t length) EXCLUDES(mutex_);
  void accepted(uint64_t offset, uint64_t length) EXCLUDES(mutex_);
  bool lacks_refused() const { return refused_end_ != 0; }
  // Its last writable handle is being released; `killed_by` is the signal that ended the writer.
  void closed(int killed_by) EXCLUDES(mutex_);
  Unsaved unsaved() EXCLUDES(mutex_);
  bool idle() EXCLUDES(mutex_);  // nothing unsaved, nothing in flight

  // Reports an I/O error once to each `seen` counter.
  int take_error(uint64_t* seen) EXCLUDES(mutex_);
  bool has_error(uint64_t seen) EXCLUDES(mutex_);
  uint64_t error_count() EXCLUDES(mutex_);

  // --- writing (file_write.cc) ---
  // Lends the unused part of the open slot at `offset` to lease->thread. Returns its length (0:
  // none); *at is its memory.
  size_t begin_lease(uint64_t offset, Lease* lease, char** at) EXCLUDES(mutex_);
  void end_lease(Lease* lease) EXCLUDES(mutex_);
  // Takes the payload. *spare is attached, and set to null, when the payload already lies in it as
  // it should (without one, spare or *spare is null); a lease whose slot was filled up is over
  // afterwards. After Wait nothing has changed, but for bytes of a page that come again.
  // After an overwrite, bytes of pages for its range are left out until pages_dropped(), or until a
  // page is read anew: they are older than what the caller wrote.
  Outcome write(uint64_t offset, size_t length, const Payload& payload, Slot** spare, Lease* lease,
                Source source = Source::Caller) EXCLUDES(mutex_);
  void pages_dropped(uint64_t overwrite) EXCLUDES(mutex_);
  // Counts the handles through which the kernel may have read pages that it keeps. Whoever reads
  // for a page counts before that, so that a write after it knows.
  void keep_pages() { page_keepers_.fetch_add(1); }
  void keep_no_pages() { page_keepers_.fetch_sub(1); }
  bool has_kept_pages() const { return page_keepers_ != 0; }
  bool is_being_overwritten() EXCLUDES(mutex_);
  // Seals `slot` if it is still an open slot of this file (arena pressure). What is inline needs a
  // place for that, and none is looked for unless it `may_grow`.
  Pressure seal_for_pressure(Slot* slot, uint64_t chunk, bool may_grow) EXCLUDES(mutex_);

  // --- taking over what another process left (file_recover.cc) ---
  // On top of load(), before anything else. attach_recovered() has to be called until it says Done.
  // Without `trim` the objects keep what no byte of this file lies in: others refer to it.
  void recover(const Leftover& left, bool trim) EXCLUDES(mutex_);
  // Of two parts, only the first; when that has been drained, and before it is committed, the rest.
  void recover_first(const PartedLeftover& left, bool trim) EXCLUDES(mutex_);
  void recover_later(const Leftover& later, bool trim) EXCLUDES(mutex_);
  Outcome attach_recovered() EXCLUDES(mutex_);
  // Changes of this file were acknowledged and are lost: until it is emptied, its handles get EIO.
  void spoil() EXCLUDES(mutex_);

  // A content begins: it is noted how it is closed, also when nothing was written until then.
  void begin() EXCLUDES(mutex_);
  // Everything on the devices that is this file's.
  std::vector<std::pair<uint16_t, uint64_t>> objects() EXCLUDES(mutex_);

  // --- moving to the devices (file_issue.cc, file_drain.cc) ---
  void drain(bool last, DrainDone done) EXCLUDES(mutex_);
  void committed(uint64_t sequence) EXCLUDES(mutex_);
  // Forgets everything since the last commit, and begins with this content again. For a file that
  // was drained and has not been written to since; what was written is another's now.
  Status revert(uint64_t size, int64_t mtime_ns, int64_t ctime_ns,
                std::optional<std::string> content,
                const std::vector<std::pair<uint32_t, std::string>>& segments) EXCLUDES(mutex_);
  // Ends an idle file, and gives back what is preallocated or made but in no version; EBUSY when it
  // is not idle. `leave` runs under the file's lock, and may refuse.
  Status retire(const std::function<Status()>& leave) EXCLUDES(mutex_);
  // Discards everything unsaved; `done` gets every object that the file held.
  void drop(std::function<void(std::vector<std::pair<uint16_t, uint64_t>>)> done) EXCLUDES(mutex_);

  // --- moving committed blocks to another device (file_move.cc) ---
  // Keeps changes away from places on a device until end_move(). False: some are under way now.
  // The caller lets no drain begin in between.
  bool begin_move(uint16_t device) EXCLUDES(mutex_);
  // The catalog has moved these blocks; none, if it has not.
  void end_move(const std::vector<Move>& moves) EXCLUDES(mutex_);

  // --- size and space (file_space.cc) ---
  void truncate(uint64_t size, Done done) EXCLUDES(mutex_);
  // One step of fallocate(2); call again after Wait.
  Outcome allocate(uint64_t offset, uint64_t length, bool keep_size) EXCLUDES(mutex_);
  // Who waited does not call again: what was wanted for that is not preallocated by others.
  void give_up_allocating() EXCLUDES(mutex_);
  void punch(uint64_t offset, uint64_t length, Done done) EXCLUDES(mutex_);

  // --- reading (file_read.cc) ---
  // Fills in what `job` has to read; true if it is complete without device I/O.
  void read(ReadJob* job) EXCLUDES(mutex_);
  // lseek(2) SEEK_DATA / SEEK_HOLE; -ENXIO behind the end.
  int64_t seek(uint64_t offset, bool data) EXCLUDES(mutex_);

  struct SlotIo;      // one device transfer for a slot
  struct OpenObject;  // an object that new places come from
  struct Appender;    // those of one device

 private:
  friend struct ReadJob;
  using Chain = std::vector<Slot*>;
  struct Barrier {
    uint64_t epoch = 0;
    bool active = false;
    std::function<void()> begun;  // under the lock, when what it covers is fixed
    std::function<void(Actions&, int error)> reached;  // under the lock
  };
  struct ChunkPiece;  // of a write

  // file.cc
  Status set_content(uint64_t size, int64_t mtime_ns, int64_t ctime_ns,
                     std::optional<std::string> content,
                     const std::vector<std::pair<uint32_t, std::string>>& segments)
      REQUIRES(mutex_);
  bool is_idle() const REQUIRES(mutex_);
  void touch_times() REQUIRES(mutex_);
  // Bytes from `offset` on are changed: committed ones, maybe.
  void note_replaced(uint64_t offset) REQUIRES(mutex_);
  Slot* open_slot(uint64_t chunk) REQUIRES(mutex_);
  void attach(Slot* slot, uint64_t chunk) REQUIRES(mutex_);
  void detach(Slot* slot) REQUIRES(mutex_);
  void release_slot(Slot* slot, Actions& actions) REQUIRES(mutex_);
  void record_error(int error, const std::string& what) REQUIRES(mutex_);
  // Logs what went wrong, and not again until a drain has succeeded: a program may try for hours.
  void say_once(int level, const std::string& what) REQUIRES(mutex_);
  // Where bytes go next that could not be written to the devices in `tried`; null: nowhere.
  Device* next_device(const std::vector<uint16_t>& tried) REQUIRES(mutex_);
  // Why new blocks cannot go to a device, as far as this file knows (0: they can).
  int trouble_with(uint16_t device) REQUIRES(mutex_);
  void blame(uint16_t device, int error);
  // What a caller is told of a device's error: that an object or a device is not there is nothing
  // that his call could mean by that.
  static int told(int error);
  bool lost(uint64_t begin, uint64_t end) REQUIRES(mutex_);
  void publish(Slot* slot, arena::SlotState state) REQUIRES(mutex_);

  FileState state() REQUIRES(mutex_);
  // Enters what just happened into the journal, where a restart finds it. False: there is no room.
  bool note(const std::function<Status(Journal&, const FileState&)>& enter) REQUIRES(mutex_);
  void note_state_now() REQUIRES(mutex_);
  void note_acknowledged(uint64_t bytes) REQUIRES(mutex_);

  // file_recover.cc
  void replay_all(const Leftover& left, bool trim) REQUIRES(mutex_);
  void replay(const JournalEntry& entry) REQUIRES(mutex_);
  void replay_truncation(uint64_t size, uint64_t sequence) REQUIRES(mutex_);
  void find_garbage(bool gaps) REQUIRES(mutex_);
  void keep_written_in_tails() REQUIRES(mutex_);
  void settle(uint64_t sequence, Actions& actions) REQUIRES(mutex_);
  void trim_recovered(const std::pair<uint16_t, uint64_t>& key, uint64_t bytes, Actions& actions)
      REQUIRES(mutex_);
  Outcome zero_recovered_tails(Actions& actions) REQUIRES(mutex_);

  // file_write.cc
  Outcome write_page(uint64_t offset, size_t length, const Payload& payload, Slot** spare,
                     Lease* lease, Actions& actions) REQUIRES(mutex_);
  void page_read(uint64_t begin, uint64_t end) REQUIRES(mutex_);
  std::vector<ChunkPiece> pieces_of(uint64_t offset, size_t length) REQUIRES(mutex_);
  bool has_buffers(const std::vector<ChunkPiece>& pieces, Actions& actions) REQUIRES(mutex_);
  bool take_slots(std::vector<ChunkPiece>& pieces, const Payload& payload, Slot** spare, int thread,
                  Actions& actions) REQUIRES(mutex_);
  void give_slots(std::vector<ChunkPiece>& pieces, Slot** spare) REQUIRES(mutex_);
  Outcome reserve(std::vector<ChunkPiece>& pieces, Actions& actions) REQUIRES(mutex_);
  Outcome reserve_for(Slot* slot, Actions& actions) REQUIRES(mutex_);
  uint64_t blocks_needed(const ChunkPiece& piece, std::bitset<kSlotBlocksMax>* blocks)
      REQUIRES(mutex_);
  void apply(ChunkPiece& piece, const Payload& payload, Lease* lease, Actions& actions)
      REQUIRES(mutex_);
  void join_ranges(Slot* slot) REQUIRES(mutex_);
  Outcome leave_inline(int thread, Actions& actions) REQUIRES(mutex_);
  Pressure leave_inline_for_pressure(bool may_grow, Actions& actions) REQUIRES(mutex_);
  Outcome prepare(uint64_t offset, size_t length, const Payload& payload, Slot** spare, int thread,
                  std::vector<ChunkPiece>* pieces, Actions& actions) REQUIRES(mutex_);
  Outcome write_locked(uint64_t offset, size_t length, const Payload& payload, Slot** spare,
                       Lease* lease, bool extend, Actions& actions) REQUIRES(mutex_);
  // Puts a copy of the leased slot in its place; the leaseholder keeps the original. Null if no
  // slot is free.
  Slot* steal(Slot* slot) REQUIRES(mutex_);

  // file_move.cc
  void update_objects(const std::vector<Move>& moves) REQUIRES(mutex_);
  static void relocate(const Move& move, std::vector<Extent>* extents);

  // Space (file_space.cc)
  uint16_t device_for(uint64_t chunk) REQUIRES(mutex_);
  void forget_old_refusals() REQUIRES(mutex_);
  Appender& appender(uint16_t device) REQUIRES(mutex_);
  void submit(uint16_t device, IoRequest* request, Actions& actions) REQUIRES(mutex_);
  bool space_ready(uint16_t device, uint64_t blocks, Actions& actions) REQUIRES(mutex_);
  void grow(const std::shared_ptr<Appender>& appender, uint64_t blocks, Actions& actions)
      REQUIRES(mutex_);
  void submit_grow(const std::shared_ptr<Appender>& appender, uint64_t blocks, uint64_t needed,
                   Actions& actions) REQUIRES(mutex_);
  void grown(const std::shared_ptr<Appender>& appender, uint64_t blocks, uint64_t needed, int error)
      EXCLUDES(mutex_);
  void object_made(const std::shared_ptr<Appender>& appender, uint64_t needed, int error,
                   ObjectRef object, uint64_t id) EXCLUDES(mutex_);
  void want_nothing() REQUIRES(mutex_);
  void trimmed(const std::shared_ptr<Appender>& appender, int result) EXCLUDES(mutex_);
  void submit_trim(const std::shared_ptr<Appender>& appender, Actions& actions) REQUIRES(mutex_);
  void submit_truncate(uint16_t device, ObjectRef object, uint64_t bytes,
                       const std::shared_ptr<Appender>& appender, Actions& actions)
      REQUIRES(mutex_);
  uint64_t holes(uint64_t chunk, uint64_t first, uint64_t end, std::vector<Extent>* runs)
      REQUIRES(mutex_);
  // Of at most *blocks blocks, which becomes how many lie behind each other there.
  Place next_place(uint16_t device, uint64_t* blocks) REQUIRES(mutex_);
  OpenObject* open_object(uint16_t device, uint64_t id) REQUIRES(mutex_);
  uint64_t limit_blocks(const Appender& appender, uint64_t needed) REQUIRES(mutex_);
  void zero(uint64_t offset, uint64_t end, Done done);
  void shrink_staged(uint64_t size, Actions& actions) REQUIRES(mutex_);
  void shrink(uint64_t size, Actions& actions) REQUIRES(mutex_);
  void begin_anew(Actions& actions) REQUIRES(mutex_);
  bool cut(uint64_t size, const Done& done, Actions& actions) REQUIRES(mutex_);
  Retry cut_later(uint64_t size, const Done& done);
  bool note_truncated() REQUIRES(mutex_);
  bool written_at(uint64_t offset) REQUIRES(mutex_);
  Outcome allocate_locked(uint64_t offset, uint64_t length, bool keep_size, Actions& actions)
      REQUIRES(mutex_);
  Outcome allocate_chunk(uint64_t chunk, uint64_t first, uint64_t end, uint64_t ahead,
                         Actions& actions) REQUIRES(mutex_);
  void punch_blocks(uint64_t offset, uint64_t end, Done done, Actions& actions) REQUIRES(mutex_);
  void punch_inline(uint64_t offset, uint64_t end) REQUIRES(mutex_);
  void give_up(const std::vector<Extent>& gone, Actions& actions) REQUIRES(mutex_);
  bool give_back_fresh(Actions& actions, std::function<void()> done) REQUIRES(mutex_);

  // file_issue.cc
  void seal(Slot* slot, Actions& actions) REQUIRES(mutex_);
  void seal_all(Actions& actions) REQUIRES(mutex_);
  bool may_issue(const Slot* slot) REQUIRES(mutex_);
  void issue_next(uint16_t device, Actions& actions) REQUIRES(mutex_);
  void maybe_issue(Slot* slot, Actions& actions) REQUIRES(mutex_);
  void issue(Slot* slot);
  bool complete_block(Slot* slot, uint64_t index, Actions& actions) REQUIRES(mutex_);
  uint32_t block_limit(const Slot* slot, uint64_t index) const REQUIRES(mutex_);
  void place(Slot* slot, Actions& actions) REQUIRES(mutex_);
  void submit_write(Slot* slot, uint64_t block, uint64_t count, Place place, Actions& actions)
      REQUIRES(mutex_);
  void io_done(SlotIo* io, int result);
  void fetched(SlotIo* io, int result, Actions& actions) REQUIRES(mutex_);
  void write_failed(std::unique_ptr<SlotIo> io, int result, Actions& actions) REQUIRES(mutex_);
  void give_up_place(const Extent& extent, Actions& actions) REQUIRES(mutex_);
  void finish_slot(Slot* slot, Actions& actions) REQUIRES(mutex_);
  void retire_slot(Slot* slot, Actions& actions) REQUIRES(mutex_);
  bool record_written(const std::vector<WrittenExtent>& written, Actions& actions) REQUIRES(mutex_);
  void map_written(const WrittenExtent& written, Actions& actions) REQUIRES(mutex_);
  void trace_chunk(const Slot& slot) REQUIRES(mutex_);

  // file_drain.cc
  void add_barrier(
      std::function<void(Actions&, int)> reached, Actions& actions,
      std::function<void()> begun = [] {}) REQUIRES(mutex_);
  void begin_barrier(Actions& actions) REQUIRES(mutex_);
  void check_barrier(Actions& actions) REQUIRES(mutex_);
  void note_begun() REQUIRES(mutex_);
  void note_reached() REQUIRES(mutex_);
  void keep_places() REQUIRES(mutex_);
  void note_state(SnapshotData* base) REQUIRES(mutex_);
  SnapshotData snapshot(SnapshotData base, bool last) REQUIRES(mutex_);
  std::string compose_inline() REQUIRES(mutex_);
  void flush_objects(bool last, SnapshotData snapshot, DrainDone done, Actions& actions)
      REQUIRES(mutex_);

  // file_read.cc
  void plan_extents(ReadJob* job, uint64_t begin, uint64_t end, Actions& actions) REQUIRES(mutex_);
  void plan_overlays(ReadJob* job, uint64_t begin, uint64_t end) REQUIRES(mutex_);
  void unpin(const std::vector<Slot*>& slots) EXCLUDES(mutex_);
  ObjectRef object_ref(uint16_t device, uint64_t id) REQUIRES(mutex_);

  Plane& plane_;
  const uint64_t ino_;
  std::atomic<uint64_t> chunk_bytes_;  // as in placement_, for guesses
  std::atomic<Ack> ack_{Ack::Early};
  std::atomic<bool> cached_{true};
  std::atomic<uint32_t> page_keepers_{0};
  std::atomic<uint64_t> read_ahead_{0};
  std::atomic<uint64_t> refused_begin_{0};  // what is missing; its end is 0 if nothing is
  std::atomic<uint64_t> refused_end_{0};

  mutable Mutex mutex_;
  // What overwrites changed, where the kernel may have older pages.
  struct Overwritten {
    uint64_t overwrite = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  std::vector<Overwritten> overwritten_ GUARDED_BY(mutex_);
  uint64_t last_overwrite_ GUARDED_BY(mutex_) = 0;
  Placement placement_ GUARDED_BY(mutex_);
  uint32_t depth_ GUARDED_BY(mutex_) = 0;  // see Flow
  uint32_t buffers_ GUARDED_BY(mutex_) = 0;
  uint64_t slots_held_ GUARDED_BY(mutex_) = 0;              // in chains_
  std::map<uint16_t, uint32_t> issued_ GUARDED_BY(mutex_);  // slots on their way, by device
  uint64_t size_ GUARDED_BY(mutex_) = 0;
  int64_t mtime_ns_ GUARDED_BY(mutex_) = 0;
  int64_t ctime_ns_ GUARDED_BY(mutex_) = 0;
  bool privileges_dropped_ GUARDED_BY(mutex_) = false;
  // The content is inline: no extents, all bytes below kInlineBytesMax (zeros behind them).
  bool inline_mode_ GUARDED_BY(mutex_) = true;
  std::string inline_ GUARDED_BY(mutex_);  // committed inline content
  BlockMap map_ GUARDED_BY(mutex_);
  std::map<uint64_t, Chain> chains_ GUARDED_BY(mutex_);
  uint64_t epoch_ GUARDED_BY(mutex_) = 1;
  std::deque<Barrier> barriers_ GUARDED_BY(mutex_);
  bool draining_ GUARDED_BY(mutex_) = false;
  bool dropped_ GUARDED_BY(mutex_) = false;
  std::optional<uint16_t> moving_ GUARDED_BY(mutex_);  // blocks of this device, see begin_move

  std::map<uint16_t, std::shared_ptr<Appender>> appenders_ GUARDED_BY(mutex_);
  std::map<std::pair<uint16_t, uint64_t>, ObjectRef> objects_ GUARDED_BY(mutex_);  // owned
  // Those of them that the catalog may know, which removes them itself: others may share them.
  std::set<std::pair<uint16_t, uint64_t>> recorded_ GUARDED_BY(mutex_);
  // Those that were made for bytes which another device did not take, and that are on their way.
  std::set<std::pair<uint16_t, uint64_t>> retried_ GUARDED_BY(mutex_);
  std::map<std::pair<uint16_t, uint64_t>, ObjectRef> unflushed_ GUARDED_BY(mutex_);
  std::vector<Extent> garbage_ GUARDED_BY(mutex_);
  // Of that, what no version has ever had, and is not given back yet.
  std::vector<Extent> fresh_garbage_ GUARDED_BY(mutex_);
  uint64_t fresh_garbage_blocks_ GUARDED_BY(mutex_) = 0;

  uint64_t sequence_ GUARDED_BY(mutex_) = 0;            // grows with every change
  uint64_t committed_sequence_ GUARDED_BY(mutex_) = 0;  // the last change that the catalog holds
  uint64_t committed_size_ GUARDED_BY(mutex_) = 0;
  uint64_t snapshot_size_ GUARDED_BY(mutex_) = 0;
  bool replaced_ GUARDED_BY(mutex_) = false;  // some of what is committed
  bool replaced_since_snapshot_ GUARDED_BY(mutex_) = false;
  struct RecoveredTail {  // bytes that a truncation cut off, of the block that remains
    uint64_t begin;
    uint64_t end;
  };
  // Of what was left, a later part waits: the drain of the first is the one that the journal tells
  // of. How far the journal is about the first part alone, if it says so; and where the later lies.
  bool later_waits_ GUARDED_BY(mutex_) = false;
  uint64_t first_ends_ GUARDED_BY(mutex_) = 0;
  std::set<std::pair<uint16_t, uint64_t>> later_objects_ GUARDED_BY(mutex_);
  uint64_t begun_sequence_ GUARDED_BY(mutex_) = 0;  // sequence_ at the drain that was noted last
  std::vector<StagedSlot> recovered_slots_ GUARDED_BY(mutex_);  // not in chains_ yet
  std::vector<RecoveredTail> recovered_tails_ GUARDED_BY(mutex_);
  // Where each object's used part ends, in bytes: behind it lies what was preallocated.
  std::map<std::pair<uint16_t, uint64_t>, uint64_t> recovered_ends_ GUARDED_BY(mutex_);
  // Of the last snapshot that is not yet committed:
  uint64_t snapshot_noted_ GUARDED_BY(mutex_) = 0;  // changes in the journal that it covers
  std::set<uint32_t> snapshot_segments_ GUARDED_BY(mutex_);
  std::vector<Extent> snapshot_garbage_ GUARDED_BY(mutex_);
  std::vector<std::pair<uint16_t, uint64_t>> snapshot_dead_ GUARDED_BY(mutex_);

  // Since the inode was loaded: all, those of the last snapshot, those of the last commit. When the
  // oldest byte after the last snapshot was acknowledged, and the oldest in one not committed.
  uint64_t bytes_acknowledged_ GUARDED_BY(mutex_) = 0;
  uint64_t bytes_in_snapshot_ GUARDED_BY(mutex_) = 0;
  uint64_t bytes_committed_ GUARDED_BY(mutex_) = 0;
  int64_t oldest_ns_ GUARDED_BY(mutex_) = 0;
  int64_t oldest_in_snapshot_ns_ GUARDED_BY(mutex_) = 0;

  int error_ GUARDED_BY(mutex_) = 0;
  uint64_t error_count_ GUARDED_BY(mutex_) = 0;
  int drain_error_ GUARDED_BY(mutex_) = 0;  // since the last barrier
  std::set<std::string> said_ GUARDED_BY(mutex_);
  // Byte ranges that were acknowledged and could be kept nowhere: reading them is EIO.
  std::vector<std::pair<uint64_t, uint64_t>> lost_ GUARDED_BY(mutex_);
};

// The part of a write that falls into one chunk.
struct File::ChunkPiece {
  uint64_t chunk = 0;
  uint32_t begin = 0;  // within the chunk
  uint32_t end = 0;
  size_t from = 0;  // within the payload
  Slot* slot = nullptr;
  uint16_t device = 0;  // where the slot's new blocks are to go; the slot's, or another one
  bool fresh = false;   // taken for this write, not yet attached
  bool was_spare = false;
};

struct File::OpenObject {
  ObjectRef object;
  uint64_t id = 0;
  uint64_t limit_blocks = 0;      // it is not grown beyond this: another is taken
  uint64_t allocated_blocks = 0;  // preallocated on the device
  uint64_t next_block = 0;        // the next fresh place
  uint64_t fresh_block = 0;       // those before it may be in a version, see keep_places()
  uint64_t written_end = 0;       // bytes: behind the last byte written

  uint64_t blocks_left() const { return allocated_blocks - next_block; }
};

struct File::Appender {
  uint16_t device = 0;
  std::vector<OpenObject> objects;  // places come from the first that has some left
  uint64_t reserved_blocks = 0;     // promised to open slots
  uint64_t step_blocks = 1;         // next preallocation,
  uint64_t wanted_blocks = 0;       // or all that fallocate(2) was asked for
  bool growing = false;             // the last of `objects`
  unsigned trims = 0;               // under way; one that comes behind a growth would undo it
  bool trim_wanted = false;         // give back what was preallocated, when these have ended
  int error = 0;                    // why the last growth failed,
  uint64_t tried = 0;               // and Plane::retries() when it began

  bool changing() const { return growing || trims != 0; }
  uint64_t allocated_blocks() const;
  uint64_t blocks_left() const;  // that nobody was promised
};

struct File::SlotIo : IoRequest {
  std::shared_ptr<File> file;
  Slot* slot = nullptr;
  Extent extent;  // what is written, or the block that is fetched
  std::unique_ptr<char, void (*)(void*)> bounce{nullptr, nullptr};  // of a fetch
  unsigned phase = 0;                                               // likewise
  std::vector<Checksum> expected;                                   // of the block that is fetched
  std::vector<uint32_t> checksums;  // of the blocks that are written
  std::vector<uint16_t> tried;      // devices that failed
  void complete(int result) override { file->io_done(this, result); }
};

// One read in progress. The creator owns it until done() was called.
struct ReadJob {
  struct Overlay {
    Slot* slot;
    uint32_t slot_offset;
    uint64_t job_offset;  // within buffer
    uint32_t length;
  };
  virtual ~ReadJob() = default;
  // Called once, on any thread; `data` lies in `buffer`. May delete the job.
  virtual void done(int error, const char* data, size_t length) = 0;

  std::shared_ptr<File> file;
  uint64_t offset = 0;
  size_t length = 0;       // asked for; clipped to the file's end by File::read
  char* buffer = nullptr;  // 4096-aligned, of buffer_bytes(length)
  uint64_t base = 0;       // file offset of buffer[0]: where a block begins
  std::vector<Overlay> overlays;
  std::atomic<uint32_t> pending{1};
  std::atomic<int> error{0};
  unsigned phase = 0;
  uint64_t sequence = 0;  // of the file when it was planned
  bool for_page = false;  // that the kernel has not

  // What holds all blocks that a read of `length` bytes touches.
  static constexpr size_t buffer_bytes(size_t length) {
    return (length / kBlockBytes + 2) * kBlockBytes;
  }
  void part_done(int result);
  // 0, or -EIO when bytes are asked for of a block of `extent` that is not as expected. The blocks
  // lie in the buffer, whole.
  int check(const Extent& extent, const std::vector<Checksum>& expected);
  // Tells of a device that did not deliver; what the reader is told.
  int unreadable(uint16_t device, int result);
  // Whether what is asked for of a block comes from staging alone.
  bool is_staged(uint64_t block) const;
};

}  // namespace fpfs
