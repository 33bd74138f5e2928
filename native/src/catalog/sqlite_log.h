// SQLite's write-ahead log, as its file format documents it (sqlite.org/fileformat2.html, section
// 4).
//
// A log is a header and frames; a frame is the new content of a page. The last frame of a
// transaction carries the database's size. Each frame's checksum covers all frames before it, so
// what is left behind the end, or torn, is told from what was written by the checksums alone.
//
// Invariants: only whole transactions are told of.
// Threads: none of its own; an object belongs to one thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "base/status.h"

namespace fpfs::sqlite {

inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kLogHeaderBytes = 32;
inline constexpr size_t kFrameHeaderBytes = 24;
inline constexpr size_t kFrameBytes = kFrameHeaderBytes + kPageBytes;

using Page = std::array<std::byte, kPageBytes>;

// Pages of a database by number (from 1), each with its latest content, and the size in pages that
// the database has with them (0: nothing was added).
struct PageSet {
  std::unordered_map<uint32_t, std::unique_ptr<Page>> pages;
  uint32_t page_count = 0;

  void put(uint32_t number, const std::byte* content);
  // Adds what another set has and this one lacks: its pages are older.
  void put_older(PageSet&& older);
};

// What tells one log from the next at the same place.
struct LogSalts {
  uint32_t first = 0;
  uint32_t second = 0;
  bool operator==(const LogSalts&) const = default;
};

struct LogChecksum {
  uint32_t first = 0;
  uint32_t second = 0;
  bool operator==(const LogChecksum&) const = default;
};

// Continues a checksum over `bytes` bytes, a multiple of 8.
LogChecksum log_checksum(LogChecksum sum, const std::byte* data, size_t bytes);

// Takes what a reader finds.
class LogSink {
 public:
  virtual ~LogSink() = default;
  // The log began anew: what it held before is in the database.
  virtual void restarted() = 0;
  // A page of a transaction; `offset` is where its content lies in the log.
  virtual void frame(uint32_t page, uint64_t offset, const std::byte* content) = 0;
  // The frames since the last call are a transaction, which leaves the database this large.
  virtual void committed(uint32_t page_count) = 0;
  // The frames since the last call are not, or not yet.
  virtual void abandoned() = 0;
};

// Reads a log that may grow and begin anew between two calls.
class LogReader {
 public:
  // Tells of everything behind what the last call told of. An empty, torn or foreign log is no
  // error: there is nothing in it.
  Status read(int fd, LogSink& sink);

  LogSalts salts() const { return salts_; }
  // Whole transactions' frames that were found in the log with these salts.
  uint64_t frames() const { return frames_; }

 private:
  Status read_header(int fd, LogSink& sink);
  // Checks the frame and tells of it; false when it is none.
  bool take(const std::byte* frame, uint64_t offset, LogSink& sink);

  bool has_header_ = false;
  LogSalts salts_;
  LogChecksum header_sum_;
  LogChecksum committed_sum_;
  LogChecksum sum_;
  uint64_t frames_ = 0;
  uint64_t frames_read_ = 0;
};

// Writes a log that SQLite can read.
class LogWriter {
 public:
  LogWriter();

  // Appends the pages as one transaction. `placed` gets where each page's content lies. After an
  // error nothing counts as written, and the next call writes to the same place.
  Status append(int fd, const PageSet& pages, std::unordered_map<uint32_t, uint64_t>* placed);
  // The next transaction begins a new log at the start of the file. What was there must be in the
  // database, and flushed.
  void restart();

  LogSalts salts() const { return salts_; }
  uint64_t frames() const { return frames_; }

 private:
  std::string header();

  LogSalts salts_;
  LogChecksum sum_;
  uint32_t generation_ = 0;
  uint64_t frames_ = 0;
};

// pread(2) and pwrite(2) of everything. Reading stops early at the file's end: the count is in
// `bytes_read`.
Status read_at(int fd, void* data, size_t bytes, uint64_t offset, size_t* bytes_read);
Status write_at(int fd, const void* data, size_t bytes, uint64_t offset);

// A big-endian number, as SQLite's formats have them.
uint32_t load_big_endian(const std::byte* data);

}  // namespace fpfs::sqlite
