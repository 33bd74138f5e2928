// The staging arena: pinned memory in fixed slots that outlives the process, with its slot table.
//
// Ownership: take() hands a slot to the caller until give(). A slot attached to a file belongs to
//   that file's lock; a slot with I/O in flight belongs to the I/O.
// Threads: take, give and the age list lock inside; publish() is called by the slot's owner alone.
#pragma once

#include <atomic>
#include <bitset>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <linux/fuse.h>

#include "base/status.h"
#include "base/thread_annotations.h"
#include "layout/block_map.h"
#include "staging/arena_format.h"
#include "staging/journal.h"
#include "staging/requests.h"

namespace fpfs {

class File;

inline constexpr uint32_t kSlotBlocksMax = 256;  // 16 MiB slots

// Sorted, disjoint, non-adjacent byte ranges within a slot.
class RangeSet {
 public:
  using Range = arena::ByteRange;

  bool empty() const { return ranges_.empty(); }
  size_t count() const { return ranges_.size(); }
  const std::vector<Range>& all() const { return ranges_; }
  void clear() { ranges_.clear(); }
  void add(uint32_t begin, uint32_t end);
  // Whether add() would leave more than `limit` ranges.
  bool would_exceed(uint32_t begin, uint32_t end, size_t limit) const;
  void clip(uint32_t end);
  bool covers(uint32_t begin, uint32_t end) const;
  bool intersects(uint32_t begin, uint32_t end) const;
  // End of the free space that starts at `offset`, at most `limit`; `offset` if it is taken.
  uint32_t free_until(uint32_t offset, uint32_t limit) const;
  // End of the range that holds `offset`; `offset` if none does.
  uint32_t taken_until(uint32_t offset) const;
  uint32_t last_end() const { return ranges_.empty() ? 0 : ranges_.back().end; }

 private:
  std::vector<Range> ranges_;
};

struct Slot {
  char* data = nullptr;
  uint32_t index = 0;

  // Below: the owner's (a File's lock while attached).
  std::shared_ptr<File> file;
  uint64_t chunk = 0;
  uint64_t epoch = 0;                    // of the file when attached
  RangeSet ranges;                       // acknowledged bytes
  std::bitset<kSlotBlocksMax> reserved;  // blocks with space reserved on `device`
  uint16_t device = 0;
  std::vector<WrittenExtent> written;  // on the device, not yet in the file's map
  uint64_t issue_size = 0;             // the file's size when its blocks were completed
  uint32_t pending_io = 0;
  int io_error = 0;
  int lease = -1;  // channel thread that may be receiving into the unused part
  uint32_t lease_begin = 0;
  uint32_t lease_end = 0;
  bool seal_wanted = false;  // as soon as the lease ends
  bool sealed = false;       // no further bytes are added
  bool issued = false;       // I/O for it has begun
  bool orphan = false;       // detached while leased: its leaseholder gives it back
  uint32_t pins = 0;         // reads that will still copy from it
  bool give_when_unpinned = false;
  // When these happened to it, where the file is traced; 0 otherwise.
  int64_t opened_ns = 0;
  int64_t sealed_ns = 0;
  int64_t issued_ns = 0;

  // Arena's own.
  uint32_t record_copy = 0;
  Slot* older = nullptr;
  Slot* newer = nullptr;
  bool aged = false;
};

// What a slot of an earlier process holds.
struct StagedSlot {
  Slot* slot = nullptr;
  arena::SlotRecord record{};
};

// What an earlier process left in an arena.
struct Remains {
  std::vector<StagedSlot> slots;  // in the order of their last writes
  std::vector<arena::HandleRecord> handles;
  std::vector<JournalEntry> changes;
  std::vector<RecordDamage> damage;
  bool handles_damaged = false;  // one at least that may be of an open file is among them
};

// No power of two: no wrong bit makes it 0, which says that a record is being written.
inline constexpr uint64_t kSequenceFirst = uint64_t{3} << 40;

class Arena {
 public:
  // Address space, not memory: a chunk of 1 MiB takes 160 bytes, so this is for 6.5 TiB of contents
  // that are in no committed version yet.
  static constexpr uint64_t kJournalAreaBytes = uint64_t{1} << 30;

  struct Config {
    std::string path;  // "" for a memfd
    std::string filesystem_id;
    uint64_t staging_bytes = 0;
    uint64_t slot_bytes = 0;
    uint64_t journal_area_bytes = kJournalAreaBytes;  // what each of its areas may grow to
  };
  static Result<std::unique_ptr<Arena>> create(const Config& config, std::string* warning);
  // Takes over the arena at config.path, whose sizes hold, or its open file `fd` (taken over in any
  // case). ESTALE when it is none of this filesystem and boot; ENODATA when the process
  // that made it died before it was used; ENOENT when there is none.
  static Result<std::unique_ptr<Arena>> attach(const Config& config, int fd, Remains* remains,
                                               std::string* warning);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint64_t slot_bytes() const { return slot_bytes_; }
  uint64_t slot_count() const { return slots_.size(); }
  bool pinned() const { return pinned_; }
  char* data() const { return data_; }
  uint64_t data_bytes() const { return slots_.size() * slot_bytes_; }

  Slot* take() EXCLUDES(mutex_);
  void give(Slot* slot) EXCLUDES(mutex_);
  uint64_t free_count() const EXCLUDES(mutex_);
  uint64_t aged_count() const EXCLUDES(mutex_);

  // The age list: attached, unsealed slots, oldest first, for write-out under pressure.
  void age_add(Slot* slot) EXCLUDES(mutex_);
  void age_remove(Slot* slot) EXCLUDES(mutex_);
  struct Aged {
    std::shared_ptr<File> file;
    Slot* slot;
    uint64_t chunk;
  };
  // The oldest slots; the caller checks under the file's lock that they are still what they were.
  std::vector<Aged> oldest(size_t count) EXCLUDES(mutex_);

  // Makes the slot's record (ranges, state) what a restart would find.
  void publish(Slot* slot, arena::SlotState state, uint64_t ino, uint64_t chunk_bytes,
               uint64_t file_size, int64_t mtime_ns);
  // Records an open handle; ENFILE when the table is full.
  Status record_handle(const arena::HandleRecord& record) EXCLUDES(mutex_);
  void forget_handle(uint64_t handle) EXCLUDES(mutex_);
  // Of an open handle: the signal that ended its last writer.
  void record_end(uint64_t handle, int signal) EXCLUDES(mutex_);

  // The kernel's INIT, for the next process that serves the connection.
  void record_connection(const fuse_init_in& init);
  std::optional<fuse_init_in> connection() const;

  Journal& journal() { return *journal_; }
  Requests& requests() { return requests_; }
  // Of the last record of any kind.
  uint64_t sequence() const { return sequence_.load() - 1; }
  int fd() const { return fd_; }

  // Unlinks the file: nothing in it is worth keeping.
  void remove();

 private:
  Arena() = default;
  Status map(const Config& config, std::string* warning);
  Status map_existing(const Config& config, Remains* remains, std::string* warning);
  Status check_header(const arena::Header& header, const Config& config) const;
  void lay_out(uint64_t slot_count);
  void pin(std::string* warning);
  void set_up_slots(uint64_t slot_count) REQUIRES(mutex_);
  void find_slots(Remains* remains) REQUIRES(mutex_);
  // The sound record of a slot that holds; its copy is noted.
  arena::SlotRecord find_record(uint64_t slot, Remains* remains) REQUIRES(mutex_);
  void find_handles(Remains* remains) REQUIRES(mutex_);
  Status allocate();
  Status populate();
  Status cannot_allocate(int error) const;
  void write_handle(uint32_t index, arena::HandleRecord record) REQUIRES(mutex_);
  void age_unlink(Slot* slot) REQUIRES(mutex_);

  std::string path_;
  int fd_ = -1;
  char* base_ = nullptr;
  uint64_t journal_area_bytes_ = 0;  // what each of its areas may grow to
  uint64_t fixed_bytes_ = 0;         // all but the journal
  uint64_t mapped_bytes_ = 0;        // with all that the journal may grow to
  uint64_t published_at_ = 0;
  uint64_t handles_at_ = 0;
  uint64_t requests_at_ = 0;
  uint64_t data_at_ = 0;
  uint64_t slot_bytes_ = 0;
  char* data_ = nullptr;
  arena::SlotRecord* slot_records_ = nullptr;
  arena::PublishedWord* published_ = nullptr;
  arena::HandleRecord* handle_records_ = nullptr;
  bool pinned_ = false;
  std::vector<Slot> slots_;
  std::atomic<uint64_t> sequence_{kSequenceFirst};
  std::unique_ptr<Journal> journal_;
  Requests requests_;

  mutable Mutex mutex_;
  std::vector<Slot*> free_ GUARDED_BY(mutex_);
  Slot* oldest_ GUARDED_BY(mutex_) = nullptr;
  Slot* newest_ GUARDED_BY(mutex_) = nullptr;
  uint64_t aged_ GUARDED_BY(mutex_) = 0;
  std::vector<uint32_t> free_handles_ GUARDED_BY(mutex_);
  std::vector<std::pair<uint64_t, uint32_t>> handles_ GUARDED_BY(mutex_);  // sorted by handle
};

}  // namespace fpfs
