// The staging arena's bytes, as a restarted server or a later mount of this boot finds them.
//
// Layout of the file: one ArenaHeader (4 KiB), then the tables that the header's directory names,
// then the slots' data from `data_offset`, `slot_count` times `slot_bytes`, then the two areas of
// the journal, of which as much exists as was ever needed. Invariants: a record is current when its
// CRC matches and no newer copy of it has a matching CRC.
//   A slot's record has two copies, written alternately, so that a torn write leaves the older one.
//   Of the journal's areas the one with the higher generation holds.
//   What was acknowledged can be told from what a kill tore: a slot's published word and a journal
//   area's end are stored, whole, after the record that they are about. So a record that should be
//   there and is not sound is damage, and is told of; every single bit that is wrong is noticed.
#pragma once

#include <bit>
#include <cstdint>

namespace fpfs::arena {

inline constexpr uint64_t kMagic = 0x414e455241465046;  // "FPFARENA"
inline constexpr uint32_t kFormat = 4;
inline constexpr uint32_t kRangesMax = 8;
inline constexpr uint32_t kHandlesMax = 64 * 1024;
inline constexpr uint32_t kRequestsMax = 4096;
inline constexpr uint32_t kDeathsMax = 5;

// `count` of a journal's area is what it may grow to, in bytes.
enum class Table : uint32_t {
  None = 0,
  Slots = 1,
  Handles = 2,
  Journal = 3,
  Requests = 4,
  Published = 5
};

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
  uint32_t ino_check;  // of the inode alone: whose record it was when the rest is damaged
  uint32_t crc;
};
static_assert(sizeof(SlotRecord) == 128);

// One for each slot: the lower half of the sequence of its record, beside its complement. Stored
// after the record; 0 where there never was one.
using PublishedWord = uint64_t;
constexpr PublishedWord published_word(uint64_t sequence) {
  const auto low = static_cast<uint32_t>(sequence);
  return uint64_t{static_cast<uint32_t>(~low)} << 32 | low;
}
constexpr bool is_published_word(PublishedWord word) {
  return word == published_word(static_cast<uint32_t>(word));
}

struct HandleRecord {
  uint64_t sequence;  // 0 while the record is written
  uint64_t handle;    // 0: free
  uint64_t ino;
  uint32_t flags;    // of open(2)
  uint32_t request;  // number of the request that it is the answer to
  uint32_t crc;      // of all before
  // The signal that ended its last writer, if that has closed it: see signal_word(). Changed by one
  // store, while the rest stays as it is.
  uint32_t killed_by;
};
static_assert(sizeof(HandleRecord) == 40);

// A signal's number beside its complement, which is half of the bits; few bits mean none, so that
// no wrong bit hides that there was a signal.
constexpr uint32_t signal_word(int signal) {
  const auto number = static_cast<uint16_t>(signal);
  return uint32_t{number} << 16 | static_cast<uint16_t>(~number);
}
constexpr int kSignalUnknown = 9;
// In the place of a signal: a write was refused for want of space.
constexpr int kRefusedForSpace = 126;
constexpr int signal_of(uint32_t word) {
  const auto number = static_cast<uint16_t>(word >> 16);
  if (word == signal_word(number)) return number;
  return std::popcount(word) < 8 ? 0 : kSignalUnknown;
}

// A request that was taken from the kernel, at the index of half its unique modulo kRequestsMax.
// `check` and `unique` are changed by one store each at its receipt, and `unique` before and after
// its answer; the rest by the server that takes over. There is no CRC: the deaths decide for
// nothing but that a request which was under way at kDeathsMax of them is answered with EIO.
struct RequestRecord {
  uint64_t unique;                 // as the kernel sent it first, and the flags below; 0: answered
  uint64_t blamed;                 // the request, this one or an earlier one, that the rest is of
  uint64_t deaths_ms[kDeathsMax];  // CLOCK_BOOTTIME at the takeovers from servers that it ended
  uint64_t check;                  // complement of the last `unique`, without flags
};
static_assert(sizeof(RequestRecord) == 64);
inline constexpr uint64_t kAnswering = uint64_t{1} << 61;  // perhaps answered already
inline constexpr uint64_t kLeft = uint64_t{1} << 62;       // taken by a server that has died

// The connection that is being served, 1,024 bytes behind the start of the arena.
struct Connection {
  char init[64];  // of the kernel's INIT request, without its header
  uint32_t zero;
  uint32_t crc;  // of all before
};
static_assert(sizeof(Connection) == 72);
inline constexpr uint64_t kConnectionAt = 1024;

// At the start of each area of the journal. An area without a generation is unused. Generations are
// multiples of kGenerationStep, so that two of them differ in more than one bit.
struct JournalArea {
  uint64_t generation;
  uint64_t complement;  // ~generation
  uint64_t end;         // a published_word() of where the records end, in units of 8 bytes
};
static_assert(sizeof(JournalArea) == 24);
inline constexpr uint64_t kGenerationStep = 3;
inline constexpr uint64_t kGenerationBits = 48;

// What happened to an inode's pending content beside bytes that are staged.
enum class Change : uint16_t {
  None = 0,      // only what the head says: size and times
  Extents = 1,   // blocks that lie on devices now
  Erase = 2,     // a range of blocks became a hole
  Truncate = 3,  // everything behind the size that the head says is gone
  Punch = 4,     // a range of bytes of inline content became zeros
  Closed = 5,    // the last writable handle was released
  Settled = 6,   // the catalog holds what came up to the sequence in the payload
  Begun = 7,     // a drain has begun: its version is all that came up to here
  Reached = 8,   // and is on devices now; what comes from here on is of a later version
  Lost = 9,      // staged bytes could be written to no device, and are staged no more
};

// Flags of a record. Closed has, in the upper byte, the signal that ended the writer.
inline constexpr uint16_t kPrivilegesDropped = 1;
inline constexpr unsigned kKilledByShift = 8;

// A record of the journal: this, then `bytes` of payload, at a multiple of 8.
struct ChangeHead {
  uint32_t crc;  // of all behind it, payload included
  uint32_t bytes;
  Change kind;
  uint16_t flags;
  uint32_t generation;  // lower half of the area's
  uint64_t sequence;
  uint64_t ino;
  uint64_t size;  // of the file, after the change, as are the times
  int64_t mtime_ns;
  int64_t ctime_ns;
  uint32_t ino_check;  // as a slot's
  uint32_t zero;
};
static_assert(sizeof(ChangeHead) == 64);

// What stands in place of a record's checksum when it does not count any more: all bits differ.
constexpr uint32_t void_checksum(uint32_t crc) { return ~crc; }

inline constexpr uint16_t kExtentUnwritten = 1;    // reads as zeros
inline constexpr uint16_t kExtentChecksummed = 2;  // u32 CRC32C of each block follow, to 8 bytes

// Payload of Extents, any number of them; of Erase one, of which only block and count are used.
struct ChangeExtent {
  uint64_t block;
  uint64_t count;
  uint64_t object;
  uint32_t object_block;
  uint16_t device;
  uint16_t flags;
};
static_assert(sizeof(ChangeExtent) == 32);

}  // namespace fpfs::arena
