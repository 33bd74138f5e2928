// Taking over what another process left: its journal replayed over the catalog's version, and its
// slots put back into the chains.
//
// Replaying is idempotent: entries that the catalog knew of already lead to the same map, since for
// every block the last entry holds. What is no longer referred to is found at the end, by comparing
// with all places that were ever seen.
#include <algorithm>
#include <map>

#include "base/spans.h"
#include "file/file.h"

namespace fpfs {
namespace {

alignas(4096) char zeros[kBlockBytes];

uint64_t blocks_up(uint64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes; }

}  // namespace

void File::recover(const Leftover& left, bool trim) {
  const MutexLock lock(mutex_);
  replay_all(left, trim);
  sequence_ = 1;
  committed_sequence_ = 0;
}

void File::recover_first(const PartedLeftover& left, bool trim) {
  const MutexLock lock(mutex_);
  later_waits_ = true;
  replay_all(left.first, trim);
  sequence_ = 1;
  committed_sequence_ = 0;
  first_ends_ = left.reached;
  for (const JournalEntry& entry : left.later.changes) {
    if (entry.kind != arena::Change::Extents) continue;
    for (const auto& [extent, checksums] : entry.extents) {
      const std::pair key{extent.place.device, extent.place.object};
      later_objects_.insert(key);
      // Where both parts lie in an object, it is cut behind the later one.
      const auto it = recovered_ends_.find(key);
      if (it == recovered_ends_.end()) continue;
      it->second = std::max(it->second, (extent.place.object_block + extent.count) * kBlockBytes);
    }
  }
}

void File::recover_later(const Leftover& later, bool trim) {
  const MutexLock lock(mutex_);
  later_waits_ = false;
  first_ends_ = 0;
  later_objects_.clear();
  const std::vector<Extent> garbage = std::exchange(garbage_, {});
  replay_all(later, trim);
  // What this process has allocated is not what another left.
  for (const auto& [number, entry] : appenders_) {
    for (const OpenObject& each : entry->objects) recovered_ends_.erase({number, each.id});
  }
  garbage_.insert(garbage_.end(), garbage.begin(), garbage.end());
  ++sequence_;
  // The commit of the first part may settle what the journal has said of this one's size and close.
  note_state_now();
  for (const JournalEntry& entry : later.changes) {
    if (entry.kind != arena::Change::Closed) continue;
    note([&](Journal& journal, const FileState& state) {
      return journal.note_closed(state, entry.killed_by);
    });
  }
}

void File::replay_all(const Leftover& left, bool trim) {
  const std::vector<StagedSlot>& slots = left.slots;
  recovered_slots_ = slots;
  for (const StagedSlot& staged : slots) {
    if (staged.record.chunk_bytes == placement_.chunk_bytes) continue;
    say_once(40, "the staging arena holds chunks of another size of it: they are left out");
    staged.slot->ranges = {};
  }
  for (const StagedSlot& staged : slots) {
    const uint64_t start = staged.record.chunk * placement_.chunk_bytes;
    for (const auto& range : staged.slot->ranges.all()) note_replaced(start + range.begin);
  }
  for (const Extent& extent : map_.lookup(0, kFileBlocksMax)) {
    garbage_.push_back(extent);  // for now: all places ever seen
  }
  auto next = slots.begin();
  const auto take_slots_before = [&](uint64_t sequence) {
    mutex_.assert_held();
    for (; next != slots.end() && next->record.sequence < sequence; ++next) {
      size_ = next->record.file_size;
      mtime_ns_ = static_cast<int64_t>(next->record.mtime_ns);
      ctime_ns_ = std::max(ctime_ns_, mtime_ns_);
    }
  };
  for (const JournalEntry& entry : left.changes) {
    take_slots_before(entry.sequence);
    replay(entry);
  }
  take_slots_before(UINT64_MAX);
  find_garbage(trim && !later_waits_);
  if (!trim) recovered_ends_.clear();
  std::erase_if(recovered_slots_, [&](const StagedSlot& staged) {
    if (!staged.slot->ranges.empty()) return false;
    plane_.arena().give(staged.slot);
    return true;
  });
  keep_written_in_tails();
  for (const StagedSlot& staged : recovered_slots_) {
    if (staged.record.chunk != 0 || staged.slot->ranges.last_end() > kInlineBytesMax) {
      inline_mode_ = false;  // what was inline is part of a slot, or lies on a device
    }
  }
  if (!inline_mode_) inline_.clear();
}

void File::replay(const JournalEntry& entry) {
  switch (entry.kind) {
    case arena::Change::Extents:
      for (const WrittenExtent& written : entry.extents) {
        const Extent& extent = written.extent;
        map_.assign(written, nullptr);
        garbage_.push_back(extent);
        // Of the block with the old end one cannot tell: mostly it has become longer.
        if (extent.block < committed_size_ / kBlockBytes) note_replaced(0);
        const std::pair key{extent.place.device, extent.place.object};
        objects_.emplace(key, nullptr);
        if (!extent.place.unwritten) unflushed_[key] = object_ref(key.first, key.second);
        std::erase_if(recovered_tails_, [&](const RecoveredTail& tail) {
          const uint64_t block = tail.begin / kBlockBytes;
          return extent.block <= block && block < extent.end();
        });
      }
      inline_mode_ = false;
      break;
    case arena::Change::Erase:
      for (const auto& [range, checksums] : entry.extents) {
        map_.erase(range.block, range.count, nullptr);
        note_replaced(range.block * kBlockBytes);
      }
      inline_mode_ = false;  // places that it replaces may be gone from the journal
      break;
    case arena::Change::Truncate:
      note_replaced(entry.state.size);
      replay_truncation(entry.state.size, entry.sequence);
      break;
    case arena::Change::Punch:
      note_replaced(entry.begin);
      for (uint64_t at = entry.begin; at < std::min<uint64_t>(entry.end, inline_.size()); ++at) {
        inline_[at] = '\0';
      }
      break;
    case arena::Change::None:
    case arena::Change::Closed:
    case arena::Change::Settled:
    case arena::Change::Begun:
    case arena::Change::Reached:
    case arena::Change::Lost:
      break;
  }
  size_ = entry.state.size;
  mtime_ns_ = entry.state.mtime_ns;
  ctime_ns_ = entry.state.ctime_ns;
  privileges_dropped_ = entry.state.privileges_dropped;
}

void File::replay_truncation(uint64_t size, uint64_t sequence) {
  for (const StagedSlot& staged : recovered_slots_) {
    if (staged.record.sequence > sequence) continue;
    const uint64_t start = staged.record.chunk * placement_.chunk_bytes;
    const uint64_t left = size > start ? size - start : 0;
    if (left < placement_.chunk_bytes) staged.slot->ranges.clip(static_cast<uint32_t>(left));
  }
  map_.erase(blocks_up(size), UINT64_MAX - blocks_up(size), nullptr);
  inline_.resize(std::min<size_t>(inline_.size(), size));
  std::erase_if(recovered_tails_, [&](const RecoveredTail& tail) { return tail.begin >= size; });
  if (size == 0) {
    inline_mode_ = true;
  } else if (size % kBlockBytes != 0 && written_at(size)) {
    recovered_tails_.push_back({size, blocks_up(size) * kBlockBytes});
  }
}

// Of all places that were seen, those that the map does not refer to. `gaps`: and those between
// them, to which transfers were under way whose end nobody has noted.
void File::find_garbage(bool gaps) {
  std::map<std::pair<uint16_t, uint64_t>, Spans> spans;
  for (const Extent& extent : garbage_) {
    const uint64_t begin = extent.place.object_block;
    const std::pair key{extent.place.device, extent.place.object};
    add_span(spans[key], begin, begin + extent.count);
    recovered_ends_[key] = std::max(recovered_ends_[key], (begin + extent.count) * kBlockBytes);
  }
  for (auto& [key, ranges] : spans) {
    // Those of this process are noted when they end.
    if (gaps && open_object(key.first, key.second) == nullptr) {
      ranges = {{0, ranges.rbegin()->second}};
    }
  }
  for (const Extent& extent : map_.lookup(0, kFileBlocksMax)) {
    const uint64_t begin = extent.place.object_block;
    cut_span(spans[{extent.place.device, extent.place.object}], begin, begin + extent.count);
  }
  garbage_.clear();
  for (const auto& [key, ranges] : spans) {
    for (const auto& [begin, end] : ranges) {
      const Place place{key.second, static_cast<uint32_t>(begin), key.first, false};
      garbage_.push_back(Extent{0, end - begin, place});
    }
  }
}

// What was written behind a truncation is newer than its zeros. Found before the first slot is put
// back: it may be on a device, and out of the chains, before the last one is.
void File::keep_written_in_tails() {
  for (const RecoveredTail& tail : std::exchange(recovered_tails_, {})) {
    const uint64_t start = tail.begin / placement_.chunk_bytes * placement_.chunk_bytes;
    RangeSet newer;
    for (const StagedSlot& staged : recovered_slots_) {
      if (staged.record.chunk * placement_.chunk_bytes != start) continue;
      for (const auto& range : staged.slot->ranges.all()) newer.add(range.begin, range.end);
    }
    const auto end = static_cast<uint32_t>(tail.end - start);
    for (auto at = static_cast<uint32_t>(tail.begin - start); at < end;) {
      const uint32_t free = newer.free_until(at, end);
      if (free > at) recovered_tails_.push_back({start + at, start + free});
      at = newer.taken_until(free);
    }
  }
}

void File::spoil() {
  const MutexLock lock(mutex_);
  record_error(EIO, "what was acknowledged of it is lost");
  lost_.emplace_back(0, UINT64_MAX);
  ++sequence_;
}

std::vector<std::pair<uint16_t, uint64_t>> File::objects() {
  const MutexLock lock(mutex_);
  std::vector<std::pair<uint16_t, uint64_t>> keys;
  keys.reserve(objects_.size());
  for (const auto& [key, object] : objects_) keys.push_back(key);
  return keys;
}

// One step: attaches the slots, with space for them on a device, oldest first.
Outcome File::attach_recovered() {
  Actions actions;
  Outcome outcome;
  {
    const MutexLock lock(mutex_);
    // What the dead process had preallocated may be the space that the slots need.
    const bool trimming = !recovered_ends_.empty();
    for (const auto& [key, end] : std::exchange(recovered_ends_, {})) {
      trim_recovered(key, end, actions);
    }
    while (!recovered_slots_.empty()) {
      Slot* slot = recovered_slots_.front().slot;
      if (!inline_mode_) {
        outcome = reserve_for(slot, actions);
        if (outcome.progress == Progress::Wait || outcome.error != 0) break;
      }
      recovered_slots_.erase(recovered_slots_.begin());
      attach(slot, slot->chunk);
      uint64_t bytes = 0;
      for (const auto& range : slot->ranges.all()) bytes += range.end - range.begin;
      note_acknowledged(bytes);  // long ago, by a clock that this process cannot ask
      if (!inline_mode_) seal(slot, actions);
    }
    if (recovered_slots_.empty()) outcome = zero_recovered_tails(actions);
    if (trimming && outcome.error != 0) outcome = Outcome::wait();
  }
  actions.run();
  return outcome;
}

// What a truncation cut off of a block must not come back by extending, and the dead process may
// not have come to overwrite it with zeros.
Outcome File::zero_recovered_tails(Actions& actions) {
  for (; !recovered_tails_.empty(); recovered_tails_.pop_back()) {
    const RecoveredTail& tail = recovered_tails_.back();
    const uint64_t length = tail.end - tail.begin;
    Payload payload;
    payload.add(zeros, length);
    const Outcome outcome =
        write_locked(tail.begin, length, payload, nullptr, nullptr, false, actions);
    if (outcome.progress == Progress::Wait || outcome.error != 0) return outcome;
  }
  return {};
}

}  // namespace fpfs
