// Taking over an arena: what is left of each inode, brought back in the order that Python asks for.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "base/lock_owner.h"
#include "engine/engine.h"

namespace fpfs {
namespace {

// What the catalog can hold: of inodes and of objects.
constexpr uint64_t kNumberEnd = uint64_t{1} << 63;

bool is_possible(const Extent& extent) {
  return extent.count > 0 && extent.count <= kFileBlocksMax &&
         extent.block <= kFileBlocksMax - extent.count && extent.place.object < kNumberEnd &&
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

struct Summary {
  uint64_t closed = 0;  // sequence of the last close by a last writer, if any
  int killed_by = 0;    // of that close
  uint64_t last = 0;    // of the last change
};

Summary summarize(const Leftover& left) {
  Summary summary;
  for (const JournalEntry& entry : left.changes) {
    summary.last = std::max(summary.last, entry.sequence);
    if (entry.kind != arena::Change::Closed) continue;
    summary.closed = entry.sequence;
    summary.killed_by = entry.killed_by;
  }
  for (const StagedSlot& staged : left.slots) {
    summary.last = std::max(summary.last, staged.record.sequence);
  }
  return summary;
}

// Whether bytes were lost since the file was empty.
bool misses_bytes(const Leftover& left) {
  bool lost = false;
  for (const JournalEntry& entry : left.changes) {
    if (entry.kind == arena::Change::Lost) lost = true;
    if (entry.kind == arena::Change::Truncate && entry.state.size == 0) lost = false;
  }
  return lost;
}

// Whether the bytes that a truncation cut off a block may still be there: what overwrites them with
// zeros is not on a device.
bool has_open_tail(const std::vector<JournalEntry>& changes) {
  for (auto it = changes.begin(); it != changes.end(); ++it) {
    const uint64_t block = it->state.size / kBlockBytes;
    if (it->kind != arena::Change::Truncate || it->state.size % kBlockBytes == 0) continue;
    const auto covers = [&](const JournalEntry& later) {
      return later.kind == arena::Change::Extents &&
             std::any_of(later.extents.begin(), later.extents.end(), [&](const auto& written) {
               return written.extent.block <= block && block < written.extent.end();
             });
    };
    if (std::none_of(it, changes.end(), covers)) return true;
  }
  return false;
}

// A version that was closed, and what came later, if anything; none where they cannot be told
// apart, or nothing was closed. Nobody writes on before the version's drain has begun, unless it is
// inline. Of a slot the record tells, which was written last when it was sealed for that drain.
// What the journal says of places before it says that the version is on devices is about that
// version.
std::optional<PartedLeftover> part(const Leftover& left) {
  const std::vector<JournalEntry>& changes = left.changes;
  const auto has_kind = [](arena::Change kind) {
    return [kind](const JournalEntry& entry) { return entry.kind == kind; };
  };
  auto last = std::find_if(changes.rbegin(), changes.rend(), has_kind(arena::Change::Begun));
  const auto closed = std::find_if(last == changes.rend() ? changes.rbegin() : last, changes.rend(),
                                   has_kind(arena::Change::Closed));
  // Nobody writes on what a killed writer left before it is quarantined.
  if (closed == changes.rend() || closed->killed_by != 0) return std::nullopt;
  if (last == changes.rend()) last = closed;
  const auto end = std::prev(last.base());
  const auto reached = std::find_if(end, changes.end(), has_kind(arena::Change::Reached));

  PartedLeftover parts;
  if (reached != changes.end()) parts.reached = reached->sequence;
  parts.first.changes.assign(changes.begin(), end + 1);
  for (auto it = end + 1; it != changes.end(); ++it) {
    if (it < reached && it->kind == arena::Change::Extents) {
      parts.first.changes.push_back(*it);
      parts.first.changes.back().state = end->state;
    } else if (it->kind != arena::Change::Reached) {
      parts.later.changes.push_back(*it);
    }
  }
  for (const StagedSlot& staged : left.slots) {
    const bool is_first = staged.record.sequence < end->sequence;
    (is_first ? parts.first : parts.later).slots.push_back(staged);
  }
  if (parts.later.changes.empty() && parts.later.slots.empty()) return parts;
  if (end->kind != arena::Change::Begun) return std::nullopt;
  // On devices, it has nothing staged. Should it have, nothing can be told apart.
  const bool is_staged = !parts.first.slots.empty() || has_open_tail(parts.first.changes);
  if (parts.reached != 0 && is_staged) return std::nullopt;
  return parts;
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
    const uint64_t ino = entry.state.ino;
    leftovers_[ino].changes.push_back(std::move(entry));
  }
  for (const StagedSlot& staged : remains.slots) {
    leftovers_[staged.record.ino].slots.push_back(staged);
  }
  for (const uint64_t ino : impossible) {
    log(40, "inode " + std::to_string(ino) +
                ": what the staging arena holds of it is impossible, " + "and is left out");
    abandon(ino);
    suspects_.insert(ino);
  }
  for (const auto& [ino, left] : leftovers_) {
    if (misses_bytes(left)) {
      log(40, "inode " + std::to_string(ino) +
                  ": what the server before had acknowledged of it could be written to no device");
      suspects_.insert(ino);
    }
    std::optional<PartedLeftover> parts = part(left);
    if (!parts.has_value()) continue;
    if (parts->later.changes.empty() && parts->later.slots.empty()) {
      left_closed_.insert(ino);
    } else {
      parted_.emplace(ino, std::move(*parts));
    }
  }
}

Engine::Left Engine::left() const {
  Left result;
  result.handles = left_handles_;
  result.suspects.assign(suspects_.begin(), suspects_.end());
  result.all_suspect = all_suspect_;
  result.handles_damaged = handles_damaged_;
  std::vector<std::pair<uint64_t, Left::Changed>> ordered;
  const auto tell = [&](uint64_t ino, const Leftover& left, Left::Part part) {
    const Summary summary = summarize(left);
    ordered.push_back({summary.closed != 0 ? summary.closed : summary.last,
                       {ino, summary.last, summary.killed_by, part}});
  };
  for (const auto& [ino, left] : leftovers_) {
    const auto parted = parted_.find(ino);
    if (parted == parted_.end()) {
      tell(ino, left, left_closed_.contains(ino) ? Left::Part::Closed : Left::Part::All);
    } else {
      tell(ino, parted->second.first, Left::Part::Closed);
      tell(ino, parted->second.later, Left::Part::Later);
    }
  }
  std::sort(ordered.begin(), ordered.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [order, changed] : ordered) result.changed.push_back(changed);
  return result;
}

uint64_t Engine::recover(uint64_t ino, bool trim) {
  const uint64_t ticket = next_ticket();
  const std::shared_ptr<File> found = file(ino);
  const auto it = leftovers_.find(ino);
  if (found == nullptr || it == leftovers_.end()) {
    post(DoneEvent{ticket, ENOENT});
    return ticket;
  }
  const auto parted = parted_.find(ino);
  if (parted == parted_.end()) {
    found->recover(it->second, trim);
    leftovers_.erase(it);
  } else {
    found->recover_first(parted->second, trim);
  }
  return attach_recovered(found, ticket);
}

uint64_t Engine::recover_later(uint64_t ino, bool trim) {
  const uint64_t ticket = next_ticket();
  const std::shared_ptr<File> found = file(ino);
  const auto it = parted_.find(ino);
  if (found == nullptr || it == parted_.end()) {
    post(DoneEvent{ticket, ENOENT});
    return ticket;
  }
  found->recover_later(it->second.later, trim);
  leftovers_.erase(ino);
  parted_.erase(it);
  return attach_recovered(found, ticket);
}

uint64_t Engine::attach_recovered(const std::shared_ptr<File>& file, uint64_t ticket) {
  park([this, file, ticket] {
    const Outcome outcome = file->attach_recovered();
    if (outcome.progress == Progress::Wait) return Retry::Waiting;
    post(DoneEvent{ticket, outcome.error});
    return Retry::Done;
  });
  return ticket;
}

void Engine::abandon(uint64_t ino) {
  const auto it = leftovers_.find(ino);
  if (it == leftovers_.end()) return;
  for (const StagedSlot& staged : it->second.slots) arena_->give(staged.slot);
  arena_->journal().settle(ino, UINT64_MAX);
  leftovers_.erase(it);
  parted_.erase(ino);
  wake();  // there is room in staging, and in the journal
}

void Engine::begin(uint64_t ino) {
  if (const std::shared_ptr<File> found = file(ino); found != nullptr) found->begin();
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
  for (const auto& [ino, left] : leftovers_) {  // which are going to be those of files
    for (const JournalEntry& entry : left.changes) {
      for (const WrittenExtent& written : entry.extents) {
        held.emplace_back(written.extent.place.device, written.extent.place.object);
      }
    }
  }
  return held;
}

Status Engine::restore_handle(uint64_t handle, uint64_t ino, uint32_t flags) {
  if (Status status = register_handle(handle, ino, flags); !status.ok()) return status;
  const std::shared_ptr<Handle> restored = this->handle(handle);
  if (restored->writable()) {
    for (const arena::HandleRecord& record : left_handles_) {
      if (record.handle == handle) restored->killed_by = arena::signal_of(record.killed_by);
    }
    // What was refused is forgotten: only cutting the file is known to give it up.
    if (restored->killed_by == arena::kRefusedForSpace) {
      restored->file->refused(kFileBytesMax, 1);
      restored->killed_by = 0;
    }
    // Who wrote through it is forgotten, unless he has come to his end: the others did not write.
    const MutexLock lock(restored->mutex);
    restored->writers.insert(restored->killed_by == 0 ? kOwnerUnknown : kOwnerGone);
  }
  // The kernel may have pages of it from before: of a reader, or of a map.
  if ((flags & O_ACCMODE) != O_WRONLY) restored->keep_pages();
  return {};
}

}  // namespace fpfs
