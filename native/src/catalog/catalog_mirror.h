// Two copies of the catalog in use: SQLite writes one, the leader, and its pages go to the other.
//
// After each transaction `CatalogLeader::collect` reads from the leader's log what the transaction
// wrote there, and hands it to the mirror, which keeps the latest content of each page in memory.
// `CatalogMirror::write` appends what gathered to the mirror's own log, as one transaction. So the
// mirror is at each moment the leader as it was at the end of some transaction, bit for bit, and
// takes a page once that many transactions changed; both are databases that SQLite can open.
//
// Invariants:
//   * Before SQLite copies a log into its database, `store_sums` must have been called since the
//   last
//     transaction; the mirror does the same for itself.
//   * Pages that the mirror could not write stay in memory: they are what the leader's log had.
// Threads: a leader belongs to one thread at a time; a mirror's methods may be called from any.
// Errno: what the calls below met.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/file_descriptor.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "catalog/catalog_files.h"
#include "catalog/sqlite_log.h"

namespace fpfs {

class CatalogMirror {
 public:
  // The files of a copy without a log.
  explicit CatalogMirror(CatalogFiles files);

  Status open() EXCLUDES(file_mutex_);
  // Gathers every page in which another copy without a log differs.
  Status gather_differences(const CatalogFiles& leader) EXCLUDES(pending_mutex_);
  // Gathers the pages of one or several transactions.
  void add(sqlite::PageSet&& pages) EXCLUDES(pending_mutex_);

  // Appends what gathered to the log.
  Status write() EXCLUDES(file_mutex_, pending_mutex_);
  // The same, and flushes the log.
  Status flush() EXCLUDES(file_mutex_, pending_mutex_);
  // The same, then copies the log into the database. Afterwards the log begins anew.
  Status checkpoint() EXCLUDES(file_mutex_, pending_mutex_);
  // The same, then removes the log. Nothing may be written afterwards.
  Status close() EXCLUDES(file_mutex_, pending_mutex_);

  uint64_t pending_pages() EXCLUDES(pending_mutex_);
  uint64_t log_bytes() EXCLUDES(file_mutex_);

 private:
  Status write_locked() REQUIRES(file_mutex_) EXCLUDES(pending_mutex_);
  Status flush_locked() REQUIRES(file_mutex_) EXCLUDES(pending_mutex_);
  Status checkpoint_locked() REQUIRES(file_mutex_) EXCLUDES(pending_mutex_);
  Status store_sums() REQUIRES(file_mutex_);
  Status copy_log() REQUIRES(file_mutex_);

  Mutex file_mutex_;
  const CatalogFiles files_;
  PageSums sums_ GUARDED_BY(file_mutex_);
  FileDescriptor database_ GUARDED_BY(file_mutex_);
  FileDescriptor log_ GUARDED_BY(file_mutex_);
  FileDescriptor sums_file_ GUARDED_BY(file_mutex_);
  sqlite::LogWriter writer_ GUARDED_BY(file_mutex_);
  std::unordered_map<uint32_t, uint64_t> places_ GUARDED_BY(file_mutex_);
  uint32_t page_count_ GUARDED_BY(file_mutex_) = 0;
  bool flushed_ GUARDED_BY(file_mutex_) = true;

  Mutex pending_mutex_ ACQUIRED_AFTER(file_mutex_);
  sqlite::PageSet pending_ GUARDED_BY(pending_mutex_);
};

class CatalogLeader {
 public:
  // The files of a sound copy, whose log, if there is one, SQLite goes on with.
  explicit CatalogLeader(CatalogFiles files);

  // Takes up the transactions that were committed since the last call, and returns how many they
  // are. `mirror` may be null.
  Result<uint64_t> collect(CatalogMirror* mirror);
  // Flushes the log and then the sums of all pages in it: SQLite may copy it now.
  Status store_sums();

 private:
  friend class Collector;

  const CatalogFiles files_;
  PageSums sums_;
  FileDescriptor log_;
  FileDescriptor sums_file_;
  sqlite::LogReader reader_;
  std::unordered_map<uint32_t, uint64_t> places_;
  uint32_t page_count_ = 0;
};

}  // namespace fpfs
