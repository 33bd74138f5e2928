// Reads: device extents into the buffer, holes as zeros, staged bytes on top; and SEEK_HOLE/DATA.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "file/file.h"
#include "layout/block_checksum.h"

namespace fpfs {
namespace {

struct ReadPart : IoRequest {
  ReadJob* job = nullptr;
  uint16_t device = 0;
  Extent extent;  // what it reads, where that is whole blocks
  std::vector<Checksum> expected;
  void complete(int result) override {
    ReadJob* const target = job;
    if (result == 0) {
      result = target->check(extent, expected);
    } else {
      result = target->unreadable(device, result);
    }
    delete this;
    target->part_done(result);
  }
};

uint64_t round_down(uint64_t value, uint64_t unit) { return value / unit * unit; }

}  // namespace

int ReadJob::check(const Extent& extent, const std::vector<Checksum>& expected) {
  int result = 0;
  const char* blocks = buffer + (extent.block * kBlockBytes - base);
  for (const uint64_t i : damaged_blocks(blocks, expected)) {
    const Extent damaged = extent.part(extent.block + i, 1);
    file->plane_.report_damage(file->ino(), damaged.block, damaged.place);
    if (!is_staged(damaged.block)) result = -EIO;
  }
  return result;
}

int ReadJob::unreadable(uint16_t device, int result) {
  file->plane_.report_unreadable(file->ino(), device, -result);
  return -File::told(-result);
}

bool ReadJob::is_staged(uint64_t block) const {
  uint64_t at = std::max(offset, block * kBlockBytes) - base;
  const uint64_t end = std::min(offset + length, (block + 1) * kBlockBytes) - base;
  const auto reaches_on = [&](const Overlay& overlay) {
    return overlay.job_offset <= at && at < overlay.job_offset + overlay.length;
  };
  while (at < end) {
    const auto next = std::find_if(overlays.begin(), overlays.end(), reaches_on);
    if (next == overlays.end()) return false;
    at = next->job_offset + next->length;
  }
  return true;
}

void ReadJob::part_done(int result) {
  if (result != 0) error = -result;
  if (pending.fetch_sub(1) != 1) return;
  const std::shared_ptr<File> keep = file;
  if (error == 0) {
    for (const Overlay& overlay : overlays) {
      std::memcpy(buffer + overlay.job_offset, overlay.slot->data + overlay.slot_offset,
                  overlay.length);
    }
  }
  std::vector<Slot*> pinned;
  for (const Overlay& overlay : overlays) pinned.push_back(overlay.slot);
  keep->unpin(pinned);
  keep->plane_.read_end(phase);
  done(error, buffer + (offset - base), length);
}

ObjectRef File::object_ref(uint16_t device, uint64_t id) {
  ObjectRef& object = objects_[{device, id}];
  if (object == nullptr && plane_.device(device) != nullptr) {
    object = plane_.device(device)->object(id);
  }
  return object;
}

void File::unpin(const std::vector<Slot*>& slots) {
  bool freed = false;
  {
    const MutexLock lock(mutex_);
    for (Slot* slot : slots) {
      if (--slot->pins == 0 && slot->give_when_unpinned) {
        plane_.arena().give(slot);
        freed = true;
      }
    }
  }
  if (freed) plane_.wake();
}

// The mapped part of [begin, end), and zeros for what is not. Whole blocks, where they are to be
// checked; else it is aligned to kIoAlignment.
void File::plan_extents(ReadJob* job, uint64_t begin, uint64_t end, Actions& actions) {
  const uint64_t first = begin / kBlockBytes;
  const uint64_t count = (end + kBlockBytes - 1) / kBlockBytes - first;
  uint64_t at = begin;
  for (const Extent& extent : map_.lookup(first, count)) {
    const uint64_t from = std::max(begin, extent.block * kBlockBytes);
    const uint64_t to = std::min(end, extent.end() * kBlockBytes);
    if (extent.place.unwritten) continue;
    if (from > at) std::memset(job->buffer + (at - job->base), 0, from - at);
    auto* part = new ReadPart();
    part->op = IoOp::Read;
    part->job = job;
    part->device = extent.place.device;
    part->object = object_ref(extent.place.device, extent.place.object);
    part->offset =
        uint64_t{extent.place.object_block} * kBlockBytes + (from - extent.block * kBlockBytes);
    part->buffer = job->buffer + (from - job->base);
    part->length = to - from;
    part->extent = extent;
    if (plane_.checksums()) {
      part->expected = map_.checksums(extent.block, extent.count);
    }
    ++job->pending;
    submit(extent.place.device, part, actions);
    at = to;
  }
  if (end > at) std::memset(job->buffer + (at - job->base), 0, end - at);
}

void File::plan_overlays(ReadJob* job, uint64_t begin, uint64_t end) {
  const uint64_t chunk_bytes = placement_.chunk_bytes;
  for (auto it = chains_.lower_bound(begin / chunk_bytes);
       it != chains_.end() && it->first * chunk_bytes < end; ++it) {
    const uint64_t start = it->first * chunk_bytes;
    for (Slot* slot : it->second) {
      for (const auto& range : slot->ranges.all()) {
        const uint64_t from = std::max(begin, start + range.begin);
        const uint64_t to = std::min(end, start + range.end);
        if (from >= to) continue;
        ++slot->pins;
        job->overlays.push_back({slot, static_cast<uint32_t>(from - start), from - job->base,
                                 static_cast<uint32_t>(to - from)});
      }
    }
  }
}

bool File::lost(uint64_t begin, uint64_t end) {
  return std::any_of(lost_.begin(), lost_.end(),
                     [&](const auto& range) { return range.first < end && begin < range.second; });
}

void File::read(ReadJob* job) {
  Actions actions;
  {
    const MutexLock lock(mutex_);
    job->file = shared_from_this();
    job->phase = plane_.read_begin();
    job->sequence = sequence_;
    if (job->for_page) page_read(job->offset, job->offset + job->length);
    job->length = job->offset >= size_ ? 0 : std::min<uint64_t>(job->length, size_ - job->offset);
    job->base = round_down(job->offset, kBlockBytes);
    const uint64_t end = job->offset + job->length;
    if (lost(job->offset, end)) {
      job->error = EIO;
    } else if (job->length > 0 && inline_mode_) {
      std::memset(job->buffer, 0, end - job->base);
      if (job->base < inline_.size()) {
        std::memcpy(job->buffer, inline_.data() + job->base,
                    std::min<uint64_t>(inline_.size(), end) - job->base);
      }
    } else if (job->length > 0) {
      const uint64_t unit = plane_.checksums() ? kBlockBytes : kIoAlignment;
      plan_extents(job, round_down(job->offset, unit), round_down(end + unit - 1, unit), actions);
    }
    if (job->length > 0 && job->error == 0) plan_overlays(job, job->offset, end);
  }
  actions.run();
  job->part_done(0);
}

int64_t File::seek(uint64_t offset, bool data) {
  const MutexLock lock(mutex_);
  if (offset >= size_) return -ENXIO;
  if (inline_mode_) {
    // Inline content counts as data throughout; what a truncate added behind it is a hole.
    const uint64_t end = std::min(size_, kInlineBytesMax);
    if (offset < end) return static_cast<int64_t>(data ? offset : end);
    return data ? -ENXIO : static_cast<int64_t>(offset);
  }
  const auto staged = [&](uint64_t block) {
    mutex_.assert_held();
    const auto chain = chains_.find(block * kBlockBytes / placement_.chunk_bytes);
    if (chain == chains_.end()) return false;
    const auto begin = static_cast<uint32_t>(block * kBlockBytes % placement_.chunk_bytes);
    return std::any_of(chain->second.begin(), chain->second.end(), [&](const Slot* slot) {
      return slot->ranges.intersects(begin, begin + kBlockBytes);
    });
  };
  uint64_t block = offset / kBlockBytes;
  if (!data) {
    for (;;) {
      block = map_.next_hole(block);
      if (!staged(block)) break;
      ++block;
    }
    return static_cast<int64_t>(std::min(size_, std::max(offset, block * kBlockBytes)));
  }
  uint64_t found = UINT64_MAX / kBlockBytes;
  map_.next_data(block, &found);
  const uint64_t chunk_blocks = placement_.chunk_bytes / kBlockBytes;
  for (auto it = chains_.lower_bound(block / chunk_blocks); it != chains_.end(); ++it) {
    const uint64_t first = std::max(block, it->first * chunk_blocks);
    if (first >= found) break;
    for (uint64_t b = first; b < (it->first + 1) * chunk_blocks; ++b) {
      if (staged(b)) {
        found = std::min(found, b);
        break;
      }
    }
  }
  const uint64_t at = std::max(offset, found * kBlockBytes);
  return at >= size_ ? -ENXIO : static_cast<int64_t>(at);
}

}  // namespace fpfs
