// Drains: barriers, the snapshot that is committed, flushes of objects, and what a commit leaves.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "file/file.h"
#include "layout/block_checksum.h"

namespace fpfs {
namespace {

// Collects the completions of several requests into one call.
struct Gather {
  std::atomic<uint32_t> pending{1};
  std::atomic<int> error{0};
  std::function<void(int error)> done;

  void part(int result) {
    if (result != 0) error = -result;
    if (pending.fetch_sub(1) == 1) {
      done(error);
      delete this;
    }
  }
};

struct GatherRequest : IoRequest {
  Gather* gather = nullptr;
  std::function<void(int error)> failed;
  void complete(int result) override {
    Gather* const target = gather;
    if (result != 0) failed(-result);
    delete this;
    target->part(result);
  }
};

}  // namespace

// --- barriers ---

void File::add_barrier(std::function<void(Actions&, int)> reached, Actions& actions,
                       std::function<void()> begun) {
  barriers_.push_back(Barrier{0, false, std::move(begun), std::move(reached)});
  if (barriers_.size() > 1) return;
  begin_barrier(actions);
  check_barrier(actions);
}

// Everything written so far is before the first barrier, and nothing else.
void File::begin_barrier(Actions& actions) {
  seal_all(actions);
  Barrier& barrier = barriers_.front();
  barrier.epoch = epoch_++;
  barrier.active = true;
  barrier.begun();
}

void File::check_barrier(Actions& actions) {
  while (!barriers_.empty() && barriers_.front().active) {
    const uint64_t epoch = barriers_.front().epoch;
    for (const auto& [chunk, chain] : chains_) {
      if (chain.front()->epoch <= epoch) return;
    }
    const auto reached = std::move(barriers_.front().reached);
    barriers_.pop_front();
    reached(actions, drain_error_);
    for (const auto& [chunk, chain] : chains_) maybe_issue(chain.front(), actions);
    if (!barriers_.empty()) begin_barrier(actions);
  }
}

// --- snapshots ---

std::string File::compose_inline() {
  std::string content(std::min(size_, kInlineBytesMax), '\0');
  std::memcpy(content.data(), inline_.data(), std::min(inline_.size(), content.size()));
  const auto chain = chains_.find(0);
  if (chain == chains_.end()) return content;
  for (const Slot* slot : chain->second) {
    for (const auto& range : slot->ranges.all()) {
      if (range.begin >= content.size()) continue;
      const size_t end = std::min<size_t>(range.end, content.size());
      std::memcpy(content.data() + range.begin, slot->data + range.begin, end - range.begin);
    }
  }
  return content;
}

void File::note_state(SnapshotData* base) {
  base->sequence = sequence_;
  base->size = size_;
  base->mtime_ns = mtime_ns_;
  base->ctime_ns = ctime_ns_;
  // What was noted before belongs to a snapshot that was never committed, or to this one.
  if (oldest_in_snapshot_ns_ == 0) oldest_in_snapshot_ns_ = oldest_ns_;
  oldest_ns_ = 0;
  bytes_in_snapshot_ = bytes_acknowledged_;
  base->acknowledged_ns = oldest_in_snapshot_ns_;
  snapshot_size_ = size_;
  replaced_since_snapshot_ = false;
}

// For who takes over when this process dies: what is written from here on is of a later version.
// Not where somebody's slot could not be sealed, whose record is going to look like a later one's.
void File::note_begun() {
  if (later_waits_ || begun_sequence_ == sequence_) return;
  for (const auto& [chunk, chain] : chains_) {
    if (!chain.back()->sealed) return;
  }
  begun_sequence_ = sequence_;
  note([](Journal& journal, const FileState& state) {
    return journal.note(state, arena::Change::Begun);
  });
}

// Up to here places belong to the version that was drained, for the catalog and for who takes over.
void File::note_reached() {
  keep_places();
  note([](Journal& journal, const FileState& state) {
    return journal.note(state, arena::Change::Reached);
  });
}

// What was placed until now is given back by a commit, and by nothing else.
void File::keep_places() {
  for (const auto& [number, entry] : appenders_) {
    for (OpenObject& each : entry->objects) each.fresh_block = each.next_block;
  }
  fresh_garbage_.clear();
  fresh_garbage_blocks_ = 0;
}

// What the catalog is to make current. `base` holds what was noted when the barrier began.
SnapshotData File::snapshot(SnapshotData base, bool last) {
  if (inline_mode_) note_state(&base);  // inline bytes are those of now
  map_.put_back(snapshot_segments_);    // of a snapshot that was never committed
  garbage_.insert(garbage_.end(), snapshot_garbage_.begin(), snapshot_garbage_.end());
  if (inline_mode_) base.inline_content = compose_inline();
  snapshot_segments_ = map_.take_changed();
  for (const uint32_t index : snapshot_segments_) {
    base.segments.emplace_back(index, map_.encode_segment(index));
  }
  std::set<std::pair<uint16_t, uint64_t>> live = map_.objects();
  base.objects.assign(live.begin(), live.end());
  recorded_.insert(live.begin(), live.end());
  live.insert(later_objects_.begin(), later_objects_.end());
  live.insert(retried_.begin(), retried_.end());
  for (auto it = appenders_.begin(); it != appenders_.end();) {
    Appender& entry = *it->second;
    const bool promised = entry.growing || entry.reserved_blocks != 0;
    std::erase_if(entry.objects, [&](const OpenObject& each) {
      mutex_.assert_held();
      const std::pair key{entry.device, each.id};
      // There may be no later snapshot to tell the catalog that nothing is left of what it knows.
      const bool ends = last || (recorded_.contains(key) && chains_.empty());
      const bool unused = ends && !promised && !live.contains(key);
      if (!unused) live.insert(key);
      return unused;
    });
    it = last && entry.objects.empty() && !promised ? appenders_.erase(it) : std::next(it);
  }
  for (const auto& [chunk, chain] : chains_) {
    for (const Slot* slot : chain) {
      for (const auto& [extent, checksums] : slot->written) {
        live.insert({extent.place.device, extent.place.object});
      }
    }
  }
  snapshot_dead_.clear();
  for (const auto& [key, object] : objects_) {
    if (!live.contains(key)) snapshot_dead_.push_back(key);
  }
  base.dead = snapshot_dead_;
  const uint64_t first_ends = std::exchange(first_ends_, 0);
  snapshot_noted_ = base.noted = first_ends != 0 ? first_ends : plane_.arena().sequence();
  // Since the barrier began, size and times may have changed: this has to survive the commit.
  if (sequence_ != base.sequence) note_state_now();
  snapshot_garbage_ = std::exchange(garbage_, {});
  for (const Extent& extent : snapshot_garbage_) {
    if (live.contains({extent.place.device, extent.place.object})) base.garbage.push_back(extent);
  }
  return base;
}

void File::drain(bool last, DrainDone done) {
  Actions actions;
  {
    const MutexLock lock(mutex_);
    if (dropped_ || draining_) {
      actions.add([done, error = dropped_ ? ENOENT : EBUSY] { done(error, {}); });
    } else if (inline_mode_ && drain_error_ != 0) {
      actions.add([done, error = drain_error_] { done(error, {}); });
    } else if (inline_mode_ && barriers_.empty()) {
      draining_ = true;
      keep_places();  // its objects are flushed, and must not be removed under that
      flush_objects(last, snapshot({}, last), done, actions);
    } else {
      draining_ = true;
      const auto base = std::make_shared<SnapshotData>();
      add_barrier(
          [this, base, last, done](Actions& after, int error) {
            mutex_.assert_held();
            note_reached();
            if (error != 0) {
              draining_ = false;
              after.add([done, error] { done(error, {}); });
              return;
            }
            flush_objects(last, snapshot(std::move(*base), last), done, after);
          },
          actions,
          [this, base] {
            mutex_.assert_held();
            note_state(base.get());
            note_begun();
          });
    }
  }
  actions.run();
}

// Makes every object written since the last flush durable, then hands the snapshot over.
void File::flush_objects(bool last, SnapshotData snapshot, DrainDone done, Actions& actions) {
  auto* gather = new Gather();
  gather->done = [self = shared_from_this(), done, snapshot = std::move(snapshot)](int error) {
    {
      const MutexLock lock(self->mutex_);
      self->draining_ = false;
      // A device that failed a flush may have lost what it took before: never trusted again.
      if (error != 0) self->record_error(error, "flushing to a device failed");
      if (error == 0) self->said_.clear();
    }
    done(told(error), snapshot);
  };
  if (last) {
    for (const auto& [number, entry] : appenders_) submit_trim(entry, actions);
  }
  for (const auto& [key, object] : std::exchange(unflushed_, {})) {
    if (std::find(snapshot_dead_.begin(), snapshot_dead_.end(), key) != snapshot_dead_.end()) {
      continue;
    }
    auto* request = new GatherRequest();
    request->op = IoOp::Flush;
    request->object = object;
    request->ino = ino_;
    request->gather = gather;
    request->failed = [self = shared_from_this(), device = key.first](int error) {
      self->blame(device, error);
    };
    ++gather->pending;
    submit(key.first, request, actions);
  }
  actions.add([gather] { gather->part(0); });
}

void File::committed(uint64_t sequence) {
  Actions actions;
  {
    const MutexLock lock(mutex_);
    committed_sequence_ = sequence;
    committed_size_ = snapshot_size_;
    bytes_committed_ = bytes_in_snapshot_;
    oldest_in_snapshot_ns_ = 0;
    replaced_ = replaced_since_snapshot_;
    snapshot_segments_.clear();
    snapshot_garbage_.clear();
    for (const auto& key : std::exchange(snapshot_dead_, {})) {
      objects_.erase(key);
      recorded_.erase(key);
    }
    // A file without changes has nothing in the journal that matters, whenever it was entered.
    const bool clean = sequence_ == sequence;
    // A slot can outlive the journal's word of a later change of the size or the times.
    if (clean && inline_mode_ && !chains_.empty()) {
      for (Slot* slot : chains_.begin()->second) publish(slot, arena::SlotState::Filling);
    }
    settle(clean ? UINT64_MAX : snapshot_noted_, actions);
    if (inline_mode_ && clean) {
      inline_ = compose_inline();
      std::vector<Slot*> done;
      for (const auto& [chunk, chain] : chains_)
        done.insert(done.end(), chain.begin(), chain.end());
      for (Slot* slot : done) {
        detach(slot);
        release_slot(slot, actions);
      }
    }
  }
  actions.run();
}

// The journal has room again for who waits for that.
void File::settle(uint64_t sequence, Actions& actions) {
  plane_.arena().journal().settle(ino_, sequence);
  actions.add([this] { plane_.wake(); });
}

Status File::retire(const std::function<Status()>& leave) {
  Actions actions;
  {
    const MutexLock lock(mutex_);
    if (!is_idle()) return Status(EBUSY, "inode has unsaved bytes");
    if (Status status = leave(); !status.ok()) return status;
    dropped_ = true;  // an object that is still being made goes at once
    std::set<std::pair<uint16_t, uint64_t>> kept = map_.objects();
    kept.insert(recorded_.begin(), recorded_.end());
    for (const auto& [number, entry] : appenders_) {
      for (OpenObject& each : entry->objects) {
        if (!kept.contains({number, each.id})) each.written_end = UINT64_MAX;  // not to be trimmed
      }
      submit_trim(entry, actions);
    }
    for (const auto& [key, object] : objects_) {
      Device* device = plane_.device(key.first);
      if (device == nullptr || kept.contains(key)) continue;
      actions.add([device, id = key.second] { device->remove_object(id, [](int) {}); });
    }
  }
  actions.run();
  return {};
}

void File::drop(std::function<void(std::vector<std::pair<uint16_t, uint64_t>>)> done) {
  Actions actions;
  {
    const MutexLock lock(mutex_);
    shrink_staged(0, actions);
    add_barrier(
        [this, done](Actions& after, int) {
          mutex_.assert_held();
          dropped_ = true;
          settle(UINT64_MAX, after);
          std::vector<std::pair<uint16_t, uint64_t>> keys;
          for (const auto& [key, object] : objects_) keys.push_back(key);
          after.add([done, keys] { done(keys); });
        },
        actions);
  }
  actions.run();
}

}  // namespace fpfs
