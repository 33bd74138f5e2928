// Taking over an arena: what is left of each inode, brought back in the order that Python asks for.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "channel.h"
#include "engine.h"

namespace fpfs {
namespace {

constexpr uint64_t kBlocksMax = kFileBytesMax / kBlockBytes;
// What the catalog can hold: of inodes and of objects.
constexpr uint64_t kNumberEnd = uint64_t{1} << 63;

bool is_possible(const Extent& extent) {
  return extent.count > 0 && extent.count <= kBlocksMax &&
         extent.block <= kBlocksMax - extent.count && extent.place.object < kNumberEnd &&
         extent.place.object_block + extent.count <= UINT32_MAX;
}

// Whether a process that was in its right mind can have written this.
bool is_possible(const JournalEntry& entry,
                 const std::vector<std::pair<uint16_t, std::string>>& devices) {
  if (!entry.is_possible || entry.state.size > kFileBytesMax || entry.state.ino >= kNumberEnd) {
    return false;
  }
  if (entry.kind != arena::Change::Extents) return true;
  return std::all_of(entry.extents.begin(), entry.extents.end(), [&](const WrittenExtent& written) {
    const auto is_its_device = [&](const auto& device) {
      return device.first == written.extent.place.device;
    };
    return is_possible(written.extent) &&
           std::any_of(devices.begin(), devices.end(), is_its_device);
  });
}

bool is_possible(const StagedSlot& staged) {
  const arena::SlotRecord& record = staged.record;
  return record.ino < kNumberEnd && record.file_size <= kFileBytesMax && record.chunk_bytes != 0 &&
         record.chunk_bytes % kBlockBytes == 0 &&
         record.chunk <= kFileBytesMax / record.chunk_bytes &&
         staged.slot->ranges.last_end() <= record.chunk_bytes;
}

}  // namespace

// Anybody can make a file in the folder of arenas: whose devices these are is believed.
Status Engine::check_arena_owner() const {
  struct stat arena {};
  struct stat device {};
  if (::lstat(config_.arena_path.c_str(), &arena) != 0) {
    return Status::from_errno("staging arena " + config_.arena_path);
  }
  if (arena.st_uid == ::geteuid()) return {};
  const bool is_theirs = ::geteuid() == 0 && !config_.devices.empty() &&
                         ::stat(config_.devices[0].second.c_str(), &device) == 0 &&
                         device.st_uid == arena.st_uid;
  if (is_theirs) return {};
  return Status(ESTALE, "staging arena " + config_.arena_path +
                            " cannot be taken over: it belongs to user " +
                            std::to_string(arena.st_uid));
}

void Engine::sort_remains(Remains remains) {
  left_handles_ = std::move(remains.handles);
  std::erase_if(left_handles_, [](const arena::HandleRecord& record) {
    return record.ino >= kNumberEnd || record.handle >= kNumberEnd;
  });
  std::set<uint64_t> impossible;
  for (const JournalEntry& entry : remains.changes) {
    if (!is_possible(entry, config_.devices)) impossible.insert(entry.state.ino);
  }
  for (const StagedSlot& staged : remains.slots) {
    if (!is_possible(staged)) impossible.insert(staged.record.ino);
  }
  handles_damaged_ = remains.handles_damaged;
  for (const RecordDamage& damage : remains.damage) {
    const bool known = damage.ino.has_value();
    log(40, "the staging arena is damaged (" + damage.what + ")" +
                (known && damage.ino != 0
                     ? ", what it held of inode " + std::to_string(*damage.ino) + " is lost"
                     : ""));
    if (!known) all_suspect_ = true;
    if (damage.ino.value_or(0) != 0) suspects_.insert(*damage.ino);
  }
  for (JournalEntry& entry : remains.changes) {
    Remainder& remainder = remainders_[entry.state.ino];
    if (entry.kind == arena::Change::Closed) {
      remainder.closed = entry.sequence;
      remainder.killed_by = entry.killed_by;
    } else {
      remainder.changed = entry.sequence;
    }
    remainder.changes.push_back(std::move(entry));
  }
  for (const StagedSlot& staged : remains.slots) {
    Remainder& remainder = remainders_[staged.record.ino];
    remainder.changed = std::max(remainder.changed, staged.record.sequence);
    remainder.slots.push_back(staged);
  }
  for (const uint64_t ino : impossible) {
    log(40, "inode " + std::to_string(ino) +
                ": what the staging arena holds of it is impossible, " + "and is left out");
    abandon(ino);
    suspects_.insert(ino);
  }
}

Engine::Left Engine::left() const {
  Left result;
  result.handles = left_handles_;
  result.suspects.assign(suspects_.begin(), suspects_.end());
  result.all_suspect = all_suspect_;
  result.handles_damaged = handles_damaged_;
  std::vector<std::pair<uint64_t, Left::Changed>> ordered;
  for (const auto& [ino, remainder] : remainders_) {
    const uint64_t last = std::max(remainder.closed, remainder.changed);
    ordered.push_back({remainder.closed != 0 ? remainder.closed : remainder.changed,
                       {ino, last, remainder.killed_by}});
  }
  std::sort(ordered.begin(), ordered.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [order, changed] : ordered) result.changed.push_back(changed);
  return result;
}

uint64_t Engine::recover(uint64_t ino, bool trim) {
  const uint64_t ticket = next_ticket();
  const std::shared_ptr<File> found = file(ino);
  const auto it = remainders_.find(ino);
  if (found == nullptr || it == remainders_.end()) {
    post(DoneEvent{ticket, ENOENT});
    return ticket;
  }
  found->recover(it->second.changes, it->second.slots, trim);
  remainders_.erase(it);
  park([this, found, ticket] {
    const Outcome outcome = found->attach_recovered();
    if (outcome.progress == Progress::Wait) return false;
    post(DoneEvent{ticket, outcome.error});
    return true;
  });
  return ticket;
}

void Engine::abandon(uint64_t ino) {
  const auto it = remainders_.find(ino);
  if (it == remainders_.end()) return;
  for (const StagedSlot& staged : it->second.slots) arena_->give(staged.slot);
  arena_->journal().settle(ino, UINT64_MAX);
  remainders_.erase(it);
}

void Engine::spoil(uint64_t ino) {
  if (const std::shared_ptr<File> found = file(ino); found != nullptr) found->spoil();
}

std::vector<ObjectKey> Engine::held_objects() {
  std::vector<std::shared_ptr<File>> files;
  {
    const MutexLock lock(table_mutex_);
    for (const auto& [ino, file] : files_) files.push_back(file);
  }
  std::vector<ObjectKey> held;
  for (const auto& file : files) {
    const std::vector<ObjectKey> objects = file->objects();
    held.insert(held.end(), objects.begin(), objects.end());
  }
  return held;
}

Status Engine::adopt_handle(uint64_t handle, uint64_t ino, uint32_t flags) {
  const std::shared_ptr<File> found = file(ino);
  if (found == nullptr) return Status(ENOENT, "inode is not loaded");
  register_handle(handle, flags, found);
  const std::shared_ptr<Handle> adopted = this->handle(handle);
  if (adopted->writable()) {
    for (const arena::HandleRecord& record : left_handles_) {
      if (record.handle == handle) adopted->killed_by = arena::signal_of(record.killed_by);
    }
    // Who wrote through it is forgotten, unless he has come to his end: the others did not write.
    const MutexLock lock(adopted->mutex);
    adopted->writers.insert(adopted->killed_by == 0 ? kOwnerUnknown : kOwnerGone);
    return {};
  }
  // The kernel may have pages of it from before.
  const MutexLock lock(table_mutex_);
  adopted->cached = true;
  ++counts_.find(ino)->second.cached;
  return {};
}

}  // namespace fpfs
