// Moving committed blocks to other places, which the catalog decides: the map follows.
#include <algorithm>

#include "file/file.h"

namespace fpfs {

// Not while a transfer may be under way to a place on the device, or a slot has one promised there.
bool File::begin_move(uint16_t device) {
  const MutexLock lock(mutex_);
  if (draining_ || later_waits_ || !recovered_slots_.empty()) return false;
  const auto entry = appenders_.find(device);
  if (entry != appenders_.end() &&
      (entry->second->growing || entry->second->reserved_blocks != 0)) {
    return false;
  }
  for (const auto& [chunk, chain] : chains_) {
    for (const Slot* slot : chain) {
      if (slot->device == device) return false;
    }
  }
  if (!chains_.empty() && map_.has_unwritten(device)) return false;
  moving_ = device;
  return true;
}

void File::end_move(const std::vector<Move>& moves) {
  Actions actions;
  {
    const MutexLock lock(mutex_);
    const std::optional<uint16_t> device = std::exchange(moving_, std::nullopt);
    if (moves.empty() || dropped_ || !device.has_value()) return;
    for (const Move& move : moves) {
      map_.relocate(move);
      relocate(move, &garbage_);
      relocate(move, &snapshot_garbage_);
    }
    // New chunks go elsewhere. What is preallocated there goes with the object.
    if (const auto entry = appenders_.find(*device); entry != appenders_.end() &&
                                                     !entry->second->growing &&
                                                     entry->second->reserved_blocks == 0) {
      appenders_.erase(entry);
    }
    update_objects(moves);
  }
}

// Refers to the objects that were moved to, and no more to those that nothing of this file is in:
// these are not its to remove, since others may have something there.
void File::update_objects(const std::vector<Move>& moves) {
  std::set<std::pair<uint16_t, uint64_t>> used = map_.objects();
  for (const auto& [number, entry] : appenders_) {
    for (const OpenObject& each : entry->objects) used.insert({number, each.id});
  }
  for (const auto* extents : {&garbage_, &snapshot_garbage_}) {
    for (const Extent& extent : *extents) {
      used.insert({extent.place.device, extent.place.object});
    }
  }
  for (const Move& move : moves) {
    if (used.contains({move.to.device, move.to.object})) {
      (void)object_ref(move.to.device, move.to.object);
      recorded_.insert({move.to.device, move.to.object});
    }
    const std::pair from{move.from.device, move.from.object};
    // Where slots are on their way the next snapshot sees to it.
    if (used.contains(from) || !chains_.empty()) continue;
    objects_.erase(from);
    recorded_.erase(from);
  }
}

// What a list has of the old places becomes what lies at the new ones.
void File::relocate(const Move& move, std::vector<Extent>* extents) {
  std::vector<Extent> result;
  for (const Extent& extent : *extents) {
    for (const Extent& part : split_by(move, extent)) result.push_back(part);
  }
  *extents = std::move(result);
}

}  // namespace fpfs
