// The log of a recorder: what was asked of the device directories, by all processes, in one order.
//
// A file that every recorded process maps. A record takes its place by an atomic addition to the
// log's tail, so the places of records are one order over all processes and threads; the bytes
// follow, the flag `written` last. tests/crash/power/recording.py reads it.
//
// An operation has two records: its begin, with everything that was asked, written before the
// kernel gets to know of it, and its end, with the result, written when it has returned (or its
// completion has arrived) and before the program sees that. What is between the two may be on the
// disk or not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace fpfs::recorder {

enum class Kind : uint16_t {
  End = 0,         // of the operation whose record is at `begin`: a: result or negative errno
  Create = 1,      // path; its end has the file
  MakeFolder = 2,  // path
  Link = 3,        // path: the file as it is named, other: its new name
  Rename = 4,      // path, other
  Remove = 5,      // path: of a file
  RemoveFolder = 6,
  Write = 7,        // file, a: offset, b: count, data; `mode` 1: durable when it returns (O_DSYNC)
  Truncate = 8,     // file, a: size
  Allocate = 9,     // file, a: offset, b: count, mode: that of fallocate(2)
  SyncFile = 10,    // file
  SyncFolder = 11,  // path
  Mark = 12,        // data: a word of the workload
  Unknown = 13,     // path: what was done that no replay can do
};

struct RecordHead {
  uint32_t bytes;  // of the record, a multiple of 8
  Kind kind;
  uint16_t written;  // 1 when everything is there; else its process was killed before it went on
  uint64_t begin;
  uint64_t file;  // inode number
  uint64_t a;
  uint64_t b;
  uint64_t time_ns;  // CLOCK_MONOTONIC
  uint32_t mode;
  uint32_t path_bytes;
  uint32_t other_bytes;
  uint32_t data_bytes;
};
static_assert(sizeof(RecordHead) == 64);

struct LogHead {
  uint64_t magic;
  uint64_t bytes;  // of the file
  uint64_t tail;   // where the next record goes; beyond `bytes`: records are missing
};

inline constexpr uint64_t kMagic = 0x474f4c4352465046;  // "FPFRCLOG"
inline constexpr uint64_t kFirstRecord = 4096;

struct Entry {
  Kind kind = Kind::End;
  uint64_t begin = 0;
  uint64_t file = 0;
  uint64_t a = 0;
  uint64_t b = 0;
  uint32_t mode = 0;
  std::string_view path = {};
  std::string_view other = {};
};

// A run of bytes of a write.
struct Piece {
  const void* base;
  size_t bytes;
};

// Maps the log that the environment names. Without one nothing is recorded.
bool open_log();

// Appends a record and returns its place, 0 if there is no log. Any thread, without locks.
uint64_t append(const Entry& entry, const Piece* pieces = nullptr, size_t piece_count = 0);

}  // namespace fpfs::recorder
