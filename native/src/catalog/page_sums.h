// The checksums of a catalog's pages: a file beside the database, which has none of its own.
//
// In SQLite's WAL mode the database file changes only when its log is copied into it. Before that
// happens, the new sums of all pages in the log are written here and flushed, and the log is
// flushed before them. So at any moment each page of the database either has the sum that stands
// here, or its content is in the log.
//
// Format (docs/format.md): a header of one sector, then the CRC32C of each page, 4 bytes each.
//
// Threads: none of its own; an object belongs to one thread at a time.
// Errno: EUCLEAN for a file that is none of sums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "catalog/sqlite_log.h"

namespace fpfs {

class PageSums {
 public:
  static constexpr size_t kHeaderBytes = 512;
  static constexpr size_t kNameBytesMax = 32;

  PageSums() = default;
  // Of a database with no pages yet.
  explicit PageSums(std::string filesystem_id);

  // ENOENT where there is no file.
  // `pages_there` bounds what is believed: the pages of the database as long as it is.
  static Result<PageSums> load(const std::string& path, uint64_t pages_there = UINT32_MAX);
  // Writes all sums into an open file, and flushes it.
  Status store(int fd) const;
  // Replaces the file, whole or not at all; the caller flushes the folder.
  Status replace(const std::string& path) const;

  const std::string& filesystem_id() const { return filesystem_id_; }
  uint32_t page_count() const { return static_cast<uint32_t>(sums_.size()); }
  // Whether this is the content of a page. Not for one whose sum is missing from the file.
  bool fits(uint32_t page, const std::byte* content) const;
  void resize(uint32_t page_count);
  void set(uint32_t page, const std::byte* content);
  // How many pages differ, those included that only one of the databases has.
  uint32_t count_differences(const PageSums& other) const;

  // The log that was copied last: this many frames of it are in the sums.
  sqlite::LogSalts log_salts;
  uint64_t log_frames = 0;

 private:
  std::string encode() const;

  std::string filesystem_id_;
  std::vector<uint32_t> sums_;
  // Sums behind this many were not in the file: their pages were about to be added.
  size_t known_ = 0;
};

}  // namespace fpfs
