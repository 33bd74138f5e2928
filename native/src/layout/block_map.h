// Where each 64 KiB block of a file's content lies, and its encoding in catalog segments.
//
// Invariants: extents do not overlap, have count > 0, and neighbours that continue each other on
//   the same object are one extent. A block without an extent is a hole and reads as zeros. Only
//   blocks of extents that are not `unwritten` have a checksum.
// Threads: none of its own; the owner (File) locks.
#pragma once

#include <bitset>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace fpfs {

inline constexpr uint64_t kBlockBytes = 64 * 1024;
inline constexpr uint64_t kSegmentBlocks = 1024;

// A run of blocks on one object. `unwritten` blocks are allocated and read as zeros.
struct Place {
  uint64_t object = 0;
  uint32_t object_block = 0;
  uint16_t device = 0;
  bool unwritten = false;
};

struct Extent {
  uint64_t block = 0;  // first logical block
  uint64_t count = 0;
  Place place;

  uint64_t end() const { return block + count; }
  // The part of this extent from logical block `from`, `n` blocks long.
  Extent part(uint64_t from, uint64_t n) const {
    Extent result{from, n, place};
    result.place.object_block += static_cast<uint32_t>(from - block);
    return result;
  }
};

// CRC32C of a block as it is stored; what a shorter block at the end does not store counts as
// zeros. None: not known, as of blocks that were written before checksums were.
using Checksum = std::optional<uint32_t>;

// Blocks that were written, with a checksum for each, or for none of them.
struct WrittenExtent {
  Extent extent;
  std::vector<uint32_t> checksums;
};

// Blocks that lie elsewhere now: `count` of them, behind each other both before and after.
struct Move {
  Place from;
  Place to;
  uint64_t count = 0;
};

// An extent, in parts each of which was moved, and is named by its new place, or was not.
std::vector<Extent> split_by(const Move& move, const Extent& extent);

class BlockMap {
 public:
  bool empty() const { return extents_.empty(); }
  uint64_t block_count() const { return block_count_; }

  // Makes [extent.block, extent.end()) point at extent.place; appends what it replaced to
  // `replaced`.
  void assign(const WrittenExtent& written, std::vector<Extent>* replaced);
  void erase(uint64_t block, uint64_t count, std::vector<Extent>* replaced);

  // Extents that intersect [block, block + count), clipped to it, in order. Gaps are holes.
  std::vector<Extent> lookup(uint64_t block, uint64_t count) const;
  bool find(uint64_t block, Extent* extent) const;
  // Of each block in [block, block + count).
  std::vector<Checksum> checksums(uint64_t block, uint64_t count) const;

  // First block >= `block` that holds written data (or is a hole or unwritten); false if none.
  bool next_data(uint64_t block, uint64_t* found) const;
  uint64_t next_hole(uint64_t block) const;

  // Lets blocks that lie at old places lie at new ones. No segment counts as changed: the catalog
  // has it.
  void relocate(const Move& move);
  bool has_unwritten(uint16_t device) const;

  // Objects that extents refer to, as (device, object).
  std::set<std::pair<uint16_t, uint64_t>> objects() const;

  std::string encode_segment(uint32_t index) const;
  Status decode_segment(uint32_t index, std::string_view blob);

  // Segments changed since the last take; put_back() when what took them failed.
  std::set<uint32_t> take_changed() { return std::exchange(changed_, {}); }
  void put_back(const std::set<uint32_t>& segments) {
    changed_.insert(segments.begin(), segments.end());
  }
  bool changed() const { return !changed_.empty(); }

 private:
  struct SegmentChecksums {
    std::bitset<kSegmentBlocks> known;
    std::vector<uint32_t> values;  // by block in the segment, as far as any is known
  };

  void touch(uint64_t block, uint64_t count);
  void insert_merged(Extent extent);
  Checksum checksum(uint64_t block) const;
  void set_checksums(uint64_t block, const std::vector<uint32_t>& checksums);
  void forget_checksums(uint64_t block, uint64_t end);
  bool decode_checksums(std::string_view bytes, const std::vector<Extent>& verified);

  std::map<uint64_t, Extent> extents_;
  std::map<uint32_t, SegmentChecksums> checksums_;  // by segment
  std::set<uint32_t> changed_;
  uint64_t block_count_ = 0;
};

}  // namespace fpfs
