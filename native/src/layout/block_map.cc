#include "layout/block_map.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"

namespace fpfs {
namespace {

constexpr uint32_t kSegmentMagic = 0x47455346;  // "FSEG"
constexpr uint16_t kSegmentFormat = 2;
constexpr uint16_t kFormatWithoutChecksums = 1;
constexpr uint16_t kRunUnwritten = 1;
constexpr uint16_t kRunUnverified = 2;

struct SegmentHeader {
  uint32_t magic;
  uint16_t format;
  uint16_t zero;
  uint32_t index;
  uint32_t run_count;
};
static_assert(sizeof(SegmentHeader) == 16);

struct SegmentRun {
  uint32_t block;  // within the segment
  uint32_t count;
  uint32_t object_block;
  uint16_t device;
  uint16_t flags;
  uint64_t object;
};
static_assert(sizeof(SegmentRun) == 24);

template <typename T>
void append(std::string* out, const T& value) {
  out->append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <typename T>
bool read(std::string_view blob, size_t* position, T* value) {
  if (blob.size() - *position < sizeof *value) return false;
  std::memcpy(value, blob.data() + *position, sizeof *value);
  *position += sizeof *value;
  return true;
}

bool continues(const Extent& left, const Extent& right) {
  return left.end() == right.block && left.place.device == right.place.device &&
         left.place.object == right.place.object && left.place.unwritten == right.place.unwritten &&
         left.place.object_block + left.count == right.place.object_block;
}

}  // namespace

std::vector<Extent> split_by(const Move& move, const Extent& extent) {
  const Place& place = extent.place;
  if (place.device != move.from.device || place.object != move.from.object) return {extent};
  const uint64_t first = place.object_block;
  const uint64_t begin = std::max<uint64_t>(first, move.from.object_block);
  const uint64_t end = std::min(first + extent.count, move.from.object_block + move.count);
  if (begin >= end) return {extent};
  std::vector<Extent> parts;
  if (begin > first) parts.push_back(extent.part(extent.block, begin - first));
  Extent moved = extent.part(extent.block + (begin - first), end - begin);
  moved.place = move.to;
  moved.place.object_block += static_cast<uint32_t>(begin - move.from.object_block);
  moved.place.unwritten = place.unwritten;
  parts.push_back(moved);
  if (end < first + extent.count) {
    parts.push_back(extent.part(extent.block + (end - first), first + extent.count - end));
  }
  return parts;
}

void BlockMap::relocate(const Move& move) {
  std::vector<Extent> affected;
  for (const auto& [block, extent] : extents_) {
    if (extent.place.device == move.from.device && extent.place.object == move.from.object) {
      affected.push_back(extent);
    }
  }
  for (const Extent& extent : affected) {
    extents_.erase(extent.block);
    for (const Extent& part : split_by(move, extent)) insert_merged(part);
  }
}

bool BlockMap::has_unwritten(uint16_t device) const {
  return std::any_of(extents_.begin(), extents_.end(), [device](const auto& entry) {
    return entry.second.place.unwritten && entry.second.place.device == device;
  });
}

void BlockMap::touch(uint64_t block, uint64_t count) {
  if (count == 0) return;
  const uint64_t last = (block + count - 1) / kSegmentBlocks;
  // Wider than an index: the last one that there can be must end it.
  for (uint64_t index = block / kSegmentBlocks; index <= last; ++index) {
    changed_.insert(static_cast<uint32_t>(index));
  }
}

void BlockMap::erase(uint64_t block, uint64_t count, std::vector<Extent>* replaced) {
  if (count == 0) return;
  const uint64_t end = count > UINT64_MAX - block ? UINT64_MAX : block + count;
  auto it = extents_.upper_bound(block);
  if (it != extents_.begin() && std::prev(it)->second.end() > block) --it;
  while (it != extents_.end() && it->second.block < end) {
    const Extent old = it->second;
    it = extents_.erase(it);
    const uint64_t from = std::max(old.block, block);
    const uint64_t to = std::min(old.end(), end);
    if (from > old.block) {
      extents_.emplace(old.block, old.part(old.block, from - old.block));
    }
    if (to < old.end()) {
      it = std::next(extents_.emplace(to, old.part(to, old.end() - to)).first);
    }
    block_count_ -= to - from;
    touch(from, to - from);
    forget_checksums(from, to);
    if (replaced != nullptr) replaced->push_back(old.part(from, to - from));
  }
}

void BlockMap::insert_merged(Extent extent) {
  auto next = extents_.lower_bound(extent.block);
  if (next != extents_.begin()) {
    auto previous = std::prev(next);
    if (continues(previous->second, extent)) {
      extent = Extent{previous->second.block, previous->second.count + extent.count,
                      previous->second.place};
      extents_.erase(previous);
    }
  }
  if (next != extents_.end() && continues(extent, next->second)) {
    extent.count += next->second.count;
    extents_.erase(next);
  }
  extents_.emplace(extent.block, extent);
}

void BlockMap::assign(const WrittenExtent& written, std::vector<Extent>* replaced) {
  const Extent& extent = written.extent;
  erase(extent.block, extent.count, replaced);
  insert_merged(extent);
  set_checksums(extent.block, written.checksums);
  block_count_ += extent.count;
  touch(extent.block, extent.count);
}

void BlockMap::set_checksums(uint64_t block, const std::vector<uint32_t>& checksums) {
  for (const uint32_t value : checksums) {
    SegmentChecksums& segment = checksums_[static_cast<uint32_t>(block / kSegmentBlocks)];
    const uint64_t index = block++ % kSegmentBlocks;
    if (segment.values.size() <= index) segment.values.resize(index + 1);
    segment.values[index] = value;
    segment.known.set(index);
  }
}

void BlockMap::forget_checksums(uint64_t block, uint64_t end) {
  auto it = checksums_.lower_bound(static_cast<uint32_t>(block / kSegmentBlocks));
  while (it != checksums_.end() && it->first * kSegmentBlocks < end) {
    const uint64_t first = it->first * kSegmentBlocks;
    const uint64_t to = std::min(end - first, kSegmentBlocks);
    for (uint64_t i = std::max(block, first) - first; i < to; ++i) it->second.known.reset(i);
    it = it->second.known.none() ? checksums_.erase(it) : std::next(it);
  }
}

Checksum BlockMap::checksum(uint64_t block) const {
  const auto it = checksums_.find(static_cast<uint32_t>(block / kSegmentBlocks));
  const uint64_t index = block % kSegmentBlocks;
  if (it == checksums_.end() || !it->second.known[index]) return std::nullopt;
  return it->second.values[index];
}

std::vector<Checksum> BlockMap::checksums(uint64_t block, uint64_t count) const {
  std::vector<Checksum> result;
  result.reserve(count);
  for (uint64_t i = 0; i < count; ++i) result.push_back(checksum(block + i));
  return result;
}

std::vector<Extent> BlockMap::lookup(uint64_t block, uint64_t count) const {
  std::vector<Extent> result;
  const uint64_t end = block + count;
  auto it = extents_.upper_bound(block);
  if (it != extents_.begin() && std::prev(it)->second.end() > block) --it;
  for (; it != extents_.end() && it->second.block < end; ++it) {
    const uint64_t from = std::max(it->second.block, block);
    result.push_back(it->second.part(from, std::min(it->second.end(), end) - from));
  }
  return result;
}

bool BlockMap::find(uint64_t block, Extent* extent) const {
  auto it = extents_.upper_bound(block);
  if (it == extents_.begin() || std::prev(it)->second.end() <= block) return false;
  *extent = std::prev(it)->second.part(block, 1);
  return true;
}

bool BlockMap::next_data(uint64_t block, uint64_t* found) const {
  auto it = extents_.upper_bound(block);
  if (it != extents_.begin() && std::prev(it)->second.end() > block) --it;
  for (; it != extents_.end(); ++it) {
    if (it->second.place.unwritten) continue;
    *found = std::max(block, it->second.block);
    return true;
  }
  return false;
}

uint64_t BlockMap::next_hole(uint64_t block) const {
  auto it = extents_.upper_bound(block);
  if (it != extents_.begin() && std::prev(it)->second.end() > block) --it;
  for (; it != extents_.end() && it->second.block <= block; ++it) {
    if (it->second.place.unwritten) break;
    block = it->second.end();
  }
  return block;
}

std::set<std::pair<uint16_t, uint64_t>> BlockMap::objects() const {
  std::set<std::pair<uint16_t, uint64_t>> result;
  for (const auto& [block, extent] : extents_) {
    result.emplace(extent.place.device, extent.place.object);
  }
  return result;
}

// A run ends, too, where blocks with a checksum and blocks without meet.
std::string BlockMap::encode_segment(uint32_t index) const {
  const uint64_t first = index * kSegmentBlocks;
  std::string runs;
  std::string checksums;
  for (const Extent& extent : lookup(first, kSegmentBlocks)) {
    for (uint64_t block = extent.block; block < extent.end();) {
      const bool known = checksum(block).has_value();
      const Extent rest = extent.part(block, extent.end() - block);
      uint32_t count = 0;
      for (; block < extent.end() && checksum(block).has_value() == known; ++block, ++count) {
        if (known) append(&checksums, *checksum(block));
      }
      const uint16_t flags = rest.place.unwritten ? kRunUnwritten : known ? 0 : kRunUnverified;
      append(&runs,
             SegmentRun{static_cast<uint32_t>(rest.block - first), count, rest.place.object_block,
                        rest.place.device, flags, rest.place.object});
    }
  }
  if (runs.empty()) return {};
  std::string blob;
  blob.reserve(sizeof(SegmentHeader) + runs.size() + checksums.size() + 8);
  append(&blob, SegmentHeader{kSegmentMagic, kSegmentFormat, 0, index,
                              static_cast<uint32_t>(runs.size() / sizeof(SegmentRun))});
  blob += runs;
  append(&blob, static_cast<uint32_t>(checksums.size() / sizeof(uint32_t)));
  blob += checksums;
  append(&blob, crc32c(0, blob.data(), blob.size()));
  return blob;
}

Status BlockMap::decode_segment(uint32_t index, std::string_view blob) {
  const auto damaged = [&](const char* why) {
    return Status(EIO, "layout segment " + std::to_string(index) + " is damaged: " + why);
  };
  if (blob.empty()) return {};
  size_t position = 0;
  SegmentHeader header{};
  uint32_t stored_crc = 0;
  if (blob.size() < sizeof header + 2 * sizeof stored_crc) return damaged("too short");
  std::memcpy(&stored_crc, blob.data() + blob.size() - sizeof stored_crc, sizeof stored_crc);
  blob.remove_suffix(sizeof stored_crc);
  if (crc32c(0, blob.data(), blob.size()) != stored_crc) return damaged("checksum");
  if (!read(blob, &position, &header) || header.magic != kSegmentMagic) return damaged("magic");
  if (header.format != kSegmentFormat && header.format != kFormatWithoutChecksums) {
    return damaged("format");
  }
  if (header.index != index) return damaged("index");
  std::vector<Extent> verified;
  for (uint32_t i = 0; i < header.run_count; ++i) {
    SegmentRun run{};
    if (!read(blob, &position, &run)) return damaged("runs");
    if (run.count == 0 || run.block + uint64_t{run.count} > kSegmentBlocks) return damaged("run");
    if (run.flags > kRunUnverified) return damaged("flags");
    const Extent extent{
        index * kSegmentBlocks + run.block, run.count,
        Place{run.object, run.object_block, run.device, run.flags == kRunUnwritten}};
    if (!lookup(extent.block, extent.count).empty()) return damaged("overlap");
    insert_merged(extent);
    block_count_ += extent.count;
    if (run.flags == 0 && header.format != kFormatWithoutChecksums) verified.push_back(extent);
  }
  return decode_checksums(blob.substr(position), verified) ? Status() : damaged("checksums");
}

// Those of the blocks of `verified`, in their order, behind their number; nothing follows.
bool BlockMap::decode_checksums(std::string_view bytes, const std::vector<Extent>& verified) {
  size_t position = 0;
  uint32_t count = 0;
  if (!read(bytes, &position, &count)) return false;
  if (bytes.size() - position != count * sizeof(uint32_t)) return false;
  for (const Extent& extent : verified) {
    std::vector<uint32_t> values(extent.count);
    for (uint32_t& value : values) {
      if (!read(bytes, &position, &value)) return false;
    }
    set_checksums(extent.block, values);
  }
  return position == bytes.size();
}

}  // namespace fpfs
