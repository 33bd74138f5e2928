// The journal of pending contents: what a restart needs to know of them beside what is staged.
//
// A chunk that has reached its device leaves staging, but the catalog learns of its place only at
// the commit. Until then the journal says where it lies; and that a file was truncated, punched,
// closed. Records are in the arena's file, in one of two areas. When most of the used one is about
// contents that have been committed meanwhile, what is left moves to the other; of one that grows
// with what has not, as of a file that is written at random places, what later records replace
// goes.
//
// Invariants: records of one inode are in the order of its changes. A record is whole before it is
//   believed: its checksum is stored last.
// Threads: any; a lock inside. Callers hold the lock of the file that a record is about.
// Errno: ENOSPC or ENOMEM when the arena's filesystem has no room for another record.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "base/thread_annotations.h"
#include "layout/block_map.h"
#include "staging/arena_format.h"

namespace fpfs {

// What every record says of its file.
struct FileState {
  uint64_t ino = 0;
  uint64_t size = 0;
  int64_t mtime_ns = 0;
  int64_t ctime_ns = 0;
  bool privileges_dropped = false;
};

// A record as recovery reads it.
struct JournalEntry {
  arena::Change kind = arena::Change::None;
  uint64_t sequence = 0;
  FileState state;
  std::vector<WrittenExtent> extents;  // of Extents and Erase
  uint64_t begin = 0;                  // of Punch: bytes
  uint64_t end = 0;
  int killed_by = 0;  // of Closed: the signal that ended the writer
  bool is_possible = true;
};

// A record in the arena that should be there and is not sound. What was acknowledged with it is
// lost.
struct RecordDamage {
  std::string what;
  std::optional<uint64_t> ino;  // whose it was, where that is certain; 0: nobody's
};

// Tells, of a damaged record, whether at least the inode in it is right.
uint32_t ino_check(uint64_t ino);

class Journal {
 public:
  // `area_bytes` is what each area may grow to. The areas lie behind each other at `base`, and at
  // `offset` in the file `fd`, which belongs to the caller, as does the memory.
  Journal(int fd, char* base, uint64_t offset, uint64_t area_bytes,
          std::atomic<uint64_t>& sequence);
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // Begins an empty journal.
  Status format() EXCLUDES(mutex_);
  // Takes over what another process left. Entries of contents that are settled are left out; those
  // that are damaged are added to `damage`, and dropped.
  std::vector<JournalEntry> recover(std::vector<RecordDamage>* damage) EXCLUDES(mutex_);

  Status note(const FileState& state, arena::Change kind) EXCLUDES(mutex_);
  Status note_closed(const FileState& state, int killed_by) EXCLUDES(mutex_);
  Status note_extents(const FileState& state, const std::vector<WrittenExtent>& extents)
      EXCLUDES(mutex_);
  Status note_erased(const FileState& state, uint64_t block, uint64_t count) EXCLUDES(mutex_);
  Status note_punched(const FileState& state, uint64_t begin, uint64_t end) EXCLUDES(mutex_);
  // The catalog holds all changes of the inode up to `sequence`.
  void settle(uint64_t ino, uint64_t sequence) EXCLUDES(mutex_);

  uint64_t bytes_used() const EXCLUDES(mutex_);

 private:
  struct Record {  // one that is not settled
    uint64_t at;
    uint64_t sequence;
    uint32_t bytes;
  };
  using Live = std::unordered_map<uint64_t, std::vector<Record>>;

  Status append(const FileState& state, arena::Change kind, std::string_view payload,
                int killed_by = 0) EXCLUDES(mutex_);
  char* area(unsigned index) const { return base_ + index * area_bytes_; }
  arena::JournalArea read_area(unsigned index) const;
  std::optional<uint64_t> generation_of(unsigned index) const REQUIRES(mutex_);
  void publish_end() REQUIRES(mutex_);
  uint64_t published_end() const REQUIRES(mutex_);
  void skip_damage(uint64_t end, std::vector<RecordDamage>* damage) REQUIRES(mutex_);
  uint64_t latest_generation() const REQUIRES(mutex_);
  void announce_area(unsigned index, uint64_t generation);
  void write_area(unsigned index, uint64_t generation);
  bool moves_for(uint64_t bytes) REQUIRES(mutex_);
  Status make_room(uint64_t bytes) REQUIRES(mutex_);
  Status extend(unsigned index, uint64_t bytes) REQUIRES(mutex_);
  void give_back(unsigned index, uint64_t bytes) REQUIRES(mutex_);
  void shrink(unsigned index) REQUIRES(mutex_);
  void put(uint64_t at, arena::ChangeHead head, std::string_view payload) REQUIRES(mutex_);
  std::vector<Record> forget(uint64_t ino, uint64_t sequence) REQUIRES(mutex_);
  void make_void(const std::vector<Record>& records) REQUIRES(mutex_);
  void forget_replaced() REQUIRES(mutex_);
  void start_over() REQUIRES(mutex_);
  bool compact() REQUIRES(mutex_);
  bool is_followed(uint64_t generation) const REQUIRES(mutex_);
  void read_records(std::vector<JournalEntry>& entries, std::vector<RecordDamage>* damage)
      REQUIRES(mutex_);

  const int fd_;
  char* const base_;
  const uint64_t offset_;
  const uint64_t area_bytes_;
  std::atomic<uint64_t>& sequence_;

  mutable Mutex mutex_;
  unsigned current_ GUARDED_BY(mutex_) = 0;  // which area
  uint64_t generation_ GUARDED_BY(mutex_) = 0;
  uint64_t end_ GUARDED_BY(mutex_) = 0;            // of the records in the current area
  uint64_t there_[2] GUARDED_BY(mutex_) = {0, 0};  // bytes of each area that have memory
  uint64_t live_bytes_ GUARDED_BY(mutex_) = 0;
  uint64_t unreplaced_bytes_ GUARDED_BY(mutex_) = 0;  // of these, when it was looked last
  Live live_ GUARDED_BY(mutex_);
};

}  // namespace fpfs
