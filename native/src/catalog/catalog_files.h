// One copy of the catalog as files that nobody has open: whether they are sound, and making them
// so.
//
// A copy is the database `PATH`, SQLite's log `PATH-wal` while it is in use or after a crash, and
// the sums of its pages (page_sums.h) in catalog.sums beside it. It is sound when every page of the
// database has its sum or its content is in the log, as far as the log goes. A log that was cut or
// damaged is shorter: the copy is then older than it was, which the caller sees by comparing.
//
// Threads: none of its own; an object belongs to one thread at a time. Calls block.
// Errno: ENOENT where there is no database, EUCLEAN where it is not sound; what the calls met else.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "base/file_descriptor.h"
#include "base/status.h"
#include "catalog/page_sums.h"
#include "catalog/sqlite_log.h"

namespace fpfs {

class CatalogFiles {
 public:
  explicit CatalogFiles(std::string path);

  // Reads everything, and changes nothing. Must come first, and must have succeeded for the rest.
  Status check();
  // Copies the log into the database and removes it.
  Status checkpoint_log();
  // Makes the sums of a database without any, which is believed.
  Status make_sums(const std::string& filesystem_id);
  // Makes this copy anew, the same as another, which has no log. Needs no check().
  Status copy_from(const CatalogFiles& source);

  // In how many pages two copies without a log differ.
  uint32_t count_differences(const CatalogFiles& other) const {
    return sums_.count_differences(other.sums_);
  }

  // Whether it has sums; one of an earlier format has none.
  bool has_sums() const { return has_sums_; }
  // SQLite's user version: the catalog's format.
  uint32_t format() const { return format_; }
  const PageSums& sums() const { return sums_; }
  const std::string& path() const { return path_; }
  std::string log_path() const { return path_ + "-wal"; }
  std::string sums_path() const { return sums_path_; }
  const std::string& folder() const { return folder_; }

 private:
  friend class FoundLog;

  Status read_log();
  Status check_pages(int database);
  Status check_first_page(int database);
  Status store_log_sums(int log);
  Status copy_log(int log);
  Status copy_pages(const CatalogFiles& source, int into) const;

  const std::string path_;
  const std::string folder_;
  const std::string sums_path_;
  PageSums sums_;
  bool has_sums_ = false;
  uint32_t format_ = 0;
  // What the log holds: where the latest content of a page lies.
  std::unordered_map<uint32_t, uint64_t> log_pages_;
  uint32_t page_count_ = 0;
  sqlite::LogSalts log_salts_;
  uint64_t log_frames_ = 0;
};

// Flushes a folder's entries.
Status flush_folder(const std::string& path);

}  // namespace fpfs
