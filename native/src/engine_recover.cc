// Taking over an arena: what is left of each inode, brought back in the order that Python asks for.
#include <fcntl.h>

#include <algorithm>

#include "channel.h"
#include "engine.h"

namespace fpfs {

void Engine::sort_remains(Remains remains) {
  left_handles_ = std::move(remains.handles);
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
