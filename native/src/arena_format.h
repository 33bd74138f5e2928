// The staging arena's bytes, as a restarted server or a later mount of this boot finds them.
//
// Layout of the file: one ArenaHeader (4 KiB), then the tables that the header's directory names,
// then the slots' data from `data_offset`, `slot_count` times `slot_bytes`.
// Invariants: a record is current when its CRC matches and no newer copy of it has a matching CRC.
//   Each record has two copies, written alternately, so that a torn write leaves the older one.
#pragma once

#include <cstdint>

namespace fpfs::arena {

inline constexpr uint64_t kMagic = 0x414e455241465046;  // "FPFARENA"
inline constexpr uint32_t kFormat = 1;
inline constexpr uint32_t kRangesMax = 8;
inline constexpr uint32_t kHandlesMax = 64 * 1024;

enum class Table : uint32_t { None = 0, Slots = 1, Handles = 2 };

struct TableEntry {
  Table kind;
  uint32_t record_bytes;
  uint64_t offset;
  uint64_t count;
};

struct Header {
  uint64_t magic;
  uint32_t format;
  uint32_t header_bytes;
  char filesystem_id[64];
  char boot_id[64];
  uint64_t slot_bytes;
  uint64_t slot_count;
  uint64_t data_offset;
  TableEntry tables[8];
  uint32_t zero;
  uint32_t crc;  // of all before
};
static_assert(sizeof(Header) == 368);

enum class SlotState : uint32_t { Free = 0, Filling = 1, Sealed = 2 };

struct ByteRange {
  uint32_t begin;
  uint32_t end;
};

// What a slot holds: `ranges` of chunk `chunk` of inode `ino`, acknowledged.
struct SlotRecord {
  uint64_t sequence;  // grows with every publication in this arena
  uint64_t ino;
  uint64_t chunk;
  uint64_t chunk_bytes;
  uint64_t file_size;  // after the last write into this slot
  uint64_t mtime_ns;
  SlotState state;
  uint32_t range_count;
  ByteRange ranges[kRangesMax];
  uint32_t zero;
  uint32_t crc;
};
static_assert(sizeof(SlotRecord) == 128);

struct HandleRecord {
  uint64_t sequence;
  uint64_t handle;  // 0: free
  uint64_t ino;
  uint32_t flags;  // of open(2)
  uint32_t crc;
};
static_assert(sizeof(HandleRecord) == 32);

}  // namespace fpfs::arena
