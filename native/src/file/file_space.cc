// Where new bytes will lie: objects, preallocation, reservation; and truncate, fallocate, punch.
#include <algorithm>
#include <cassert>
#include <cstring>
#include <tuple>

#include "file/file.h"

namespace fpfs {
namespace {

// As much as is needed at first: a file may stay as small as that, and keeps what it was promised
// until it is committed. Then in few steps, since a writer waits for the first, up to 64 MiB.
constexpr uint64_t kGrowBlocksMax = 1024;
constexpr uint64_t kGrowFactor = 4;

// A file whose size is known ahead gets larger objects sooner.
constexpr uint64_t kKnownSizeFactor = 16;

// An object that is kept may be larger than what is asked for, by one part in so many.
constexpr uint64_t kKeptOverParts = 8;

// A file that is rewritten takes twice its size until it is committed, but for this much (64 MiB):
// few large ranges are given back faster than many small ones, and writes to an object wait for it.
constexpr uint64_t kFreshGarbageBlocksMax = 1024;

alignas(4096) char zeros[kBlockBytes];

uint64_t blocks_up(uint64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes; }

// A device request whose completion is a function; deletes itself.
struct CallRequest : IoRequest {
  std::function<void(int)> call;
  void complete(int result) override {
    const auto function = std::move(call);
    delete this;
    function(result);
  }
};

}  // namespace

// The device of new blocks of a chunk: the layout's, or the next one that can take them. One that
// is not in the layout takes them only where none in it is left at all: space is not looked for
// there.
uint16_t File::device_for(uint64_t chunk) {
  const auto choose = [&](const std::vector<uint16_t>& numbers, uint64_t first) {
    mutex_.assert_held();
    std::optional<uint16_t> full;
    for (size_t i = 0; i < numbers.size(); ++i) {
      const uint16_t number = numbers[(first + i) % numbers.size()];
      if (!plane_.takes_chunks(number)) continue;
      const auto it = appenders_.find(number);
      if (it == appenders_.end() || it->second->error == 0) return std::optional(number);
      if (!full.has_value()) full = number;
    }
    return full;
  };
  assert(!placement_.devices.empty());
  const uint64_t first = placement_.first + chunk / placement_.run;
  if (const auto found = choose(placement_.devices, first)) return *found;
  if (const auto found = choose(plane_.chunk_devices(), first)) return *found;
  return placement_.devices[first % placement_.devices.size()];
}

// Those of the layout come first, and those that are to be removed last.
Device* File::next_device(const std::vector<uint16_t>& tried) {
  std::vector<uint16_t> numbers = placement_.devices;
  const std::vector<uint16_t> others = plane_.chunk_devices();
  numbers.insert(numbers.end(), others.begin(), others.end());
  std::stable_partition(numbers.begin(), numbers.end(),
                        [&](uint16_t number) { return plane_.takes_chunks(number); });
  for (const uint16_t number : numbers) {
    if (std::find(tried.begin(), tried.end(), number) != tried.end()) continue;
    if (Device* device = plane_.device(number); device != nullptr) return device;
  }
  return nullptr;
}

int File::trouble_with(uint16_t device) {
  if (plane_.device_failed(device)) return EIO;
  const auto it = appenders_.find(device);
  return it == appenders_.end() ? 0 : it->second->error;
}

// They are of one attempt each.
void File::forget_old_refusals() {
  for (auto& [device, entry] : appenders_) {
    if (entry->tried != plane_.retries()) entry->error = 0;
  }
}

File::Appender& File::appender(uint16_t device) {
  std::shared_ptr<Appender>& entry = appenders_[device];
  if (entry == nullptr) {
    entry = std::make_shared<Appender>();
    entry->device = device;
  }
  return *entry;
}

// A device that was removed fails what it is asked.
void File::submit(uint16_t device, IoRequest* request, Actions& actions) {
  actions.add([found = plane_.device(device), request] {
    found != nullptr ? found->submit(request) : request->complete(-EIO);
  });
}

uint64_t File::Appender::allocated_blocks() const {
  uint64_t blocks = 0;
  for (const OpenObject& each : objects) blocks += each.allocated_blocks;
  return blocks;
}

uint64_t File::Appender::blocks_left() const {
  uint64_t blocks = 0;
  for (const OpenObject& each : objects) blocks += each.blocks_left();
  return blocks - std::min(blocks, reserved_blocks);
}

bool File::space_ready(uint16_t device, uint64_t blocks, Actions& actions) {
  Appender& entry = appender(device);
  const std::shared_ptr<Appender> shared = appenders_[device];
  if (entry.blocks_left() < blocks && !entry.changing()) {
    grow(shared, blocks - entry.blocks_left(), actions);
  }
  if (entry.blocks_left() < blocks) return false;
  const uint64_t left = entry.blocks_left() - blocks;
  if (!entry.changing() && left < std::min(entry.allocated_blocks(), entry.step_blocks) / 2) {
    grow(shared, 0, actions);  // ahead of need
  }
  return true;
}

// How large the next object may become: as large as those before it together, or as what the file
// is known to need. So there are few of them, and whatever a removed file leaves is of use to a
// file of about its size, which ends in the middle of an object and cuts off the rest.
uint64_t File::limit_blocks(const Appender& entry, uint64_t needed) {
  const uint64_t so_far = entry.allocated_blocks();
  const uint64_t blocks = blocks_up(size_);
  // A size may have been set for holes: not more at once than what was written suggests.
  const uint64_t missing =
      std::min(blocks - std::min(blocks, map_.block_count()), kKnownSizeFactor * so_far);
  return std::max({blocks_up(plane_.first_object_bytes()), so_far, needed, entry.wanted_blocks,
                   missing / placement_.devices.size()});
}

// Makes place for at least `needed` more blocks (0: one step, whose failure is no error yet): on
// the last object, on a removed one whose blocks were written before, or on a new one.
void File::grow(const std::shared_ptr<Appender>& entry, uint64_t needed, Actions& actions) {
  entry->tried = plane_.retries();
  if (!entry->objects.empty()) {
    const OpenObject& last = entry->objects.back();
    if (last.allocated_blocks + std::max<uint64_t>(needed, 1) <= last.limit_blocks) {
      entry->growing = true;
      submit_grow(entry, std::max({entry->step_blocks, entry->wanted_blocks, needed}), needed,
                  actions);
      return;
    }
  }
  Device* device = plane_.device(entry->device);
  const uint64_t limit = limit_blocks(*entry, needed);
  if (device != nullptr && limit > blocks_up(plane_.first_object_bytes())) {
    // One checkpoint is a little smaller than the one before, the next a little larger: what is
    // over is cut off when the file ends.
    const uint64_t bytes_max = (limit + limit / kKeptOverParts) * kBlockBytes;
    if (auto kept = device->take_kept_object(bytes_max); kept.has_value()) {
      const uint64_t blocks = kept->bytes / kBlockBytes;
      objects_[{entry->device, kept->id}] = kept->object;
      entry->objects.push_back({std::move(kept->object), kept->id, blocks, blocks});
      entry->wanted_blocks -= std::min(entry->wanted_blocks, blocks);
      if (blocks < needed) grow(entry, needed - blocks, actions);
      return;
    }
  }
  // Ahead of need only right before the end of a large one: the file may end, too.
  const uint64_t so_far = entry->allocated_blocks();
  if (needed == 0 && (so_far < kGrowBlocksMax || entry->blocks_left() > so_far / 8)) return;
  entry->growing = true;
  actions.add([self = shared_from_this(), entry, needed, device] {
    if (device == nullptr) {
      self->object_made(entry, needed, EIO, nullptr, 0);
      return;
    }
    device->create_object([self, entry, needed](int error, ObjectRef object, uint64_t id) {
      self->object_made(entry, needed, error, std::move(object), id);
    });
  });
}

void File::object_made(const std::shared_ptr<Appender>& entry, uint64_t needed, int error,
                       ObjectRef object, uint64_t id) {
  Actions actions;
  {
    const MutexLock lock(mutex_);
    if (error != 0) {
      // A folder that is missing is made: what is missing then is the device's own.
      blame(entry->device, error == ENOENT ? ENODEV : error);
      entry->growing = false;
      entry->error = told(error);
      actions.add([this] { plane_.wake(); });
    } else if (dropped_) {
      entry->growing = false;
      if (Device* device = plane_.device(entry->device); device != nullptr) {
        actions.add([device, id] { device->remove_object(id, [](int) {}); });
      }
    } else {
      objects_[{entry->device, id}] = object;
      entry->objects.push_back({std::move(object), id, limit_blocks(*entry, needed)});
      submit_grow(entry, std::max({entry->step_blocks, entry->wanted_blocks, needed}), needed,
                  actions);
    }
  }
  actions.run();
}

void File::submit_grow(const std::shared_ptr<Appender>& entry, uint64_t blocks, uint64_t needed,
                       Actions& actions) {
  const OpenObject& last = entry->objects.back();
  blocks = std::min(blocks, last.limit_blocks - last.allocated_blocks);
  auto* request = new CallRequest();
  request->op = IoOp::Allocate;
  request->object = last.object;
  request->offset = last.allocated_blocks * kBlockBytes;
  request->length = blocks * kBlockBytes;
  // What was acknowledged had its space, which may have gone into what every takeover needs.
  request->uses_reserve = needed != 0 && blocks == needed && !recovered_slots_.empty();
  request->call = [self = shared_from_this(), entry, blocks, needed](int result) {
    self->grown(entry, blocks, needed, -result);
  };
  submit(entry->device, request, actions);
}

void File::grown(const std::shared_ptr<Appender>& entry, uint64_t blocks, uint64_t needed,
                 int error) {
  Actions actions;
  {
    const MutexLock lock(mutex_);
    blame(entry->device, error);
    const auto again = [self = shared_from_this(), entry, needed] {
      Actions after;
      {
        const MutexLock relock(self->mutex_);
        self->submit_grow(entry, needed, needed, after);
      }
      after.run();
    };
    if (error == ENOSPC && needed != 0 && give_back_fresh(actions, again)) {
      // The device may have it then.
    } else if (error != 0 && needed != 0 && blocks > needed) {
      entry->step_blocks = 1;
      entry->wanted_blocks = 0;
      submit_grow(entry, needed, needed, actions);  // nearly full: just what is needed
    } else {
      entry->growing = false;
      if (error == 0) {
        entry->objects.back().allocated_blocks += blocks;
        entry->wanted_blocks -= std::min(entry->wanted_blocks, blocks);
        entry->step_blocks =
            std::min(std::max(entry->step_blocks, blocks) * kGrowFactor, kGrowBlocksMax);
      } else if (needed != 0) {
        entry->error = told(error);
      } else {
        entry->step_blocks = 1;
      }
      if (entry->trim_wanted) submit_trim(entry, actions);
      actions.add([this] { plane_.wake(); });
    }
  }
  actions.run();
}

// Gives back what was preallocated behind the last byte written.
void File::submit_trim(const std::shared_ptr<Appender>& entry, Actions& actions) {
  entry->trim_wanted = entry->changing();
  if (entry->changing() || entry->reserved_blocks != 0) return;
  for (OpenObject& each : entry->objects) {
    if (each.allocated_blocks * kBlockBytes <= each.written_end) continue;
    each.allocated_blocks = each.next_block;
    ++entry->trims;
    submit_truncate(entry->device, each.object, each.written_end, entry, actions);
  }
  entry->step_blocks = 1;
}

void File::trim_recovered(const std::pair<uint16_t, uint64_t>& key, uint64_t bytes,
                          Actions& actions) {
  const ObjectRef object = object_ref(key.first, key.second);
  if (object != nullptr) submit_truncate(key.first, object, bytes, nullptr, actions);
}

void File::submit_truncate(uint16_t device, ObjectRef object, uint64_t bytes,
                           const std::shared_ptr<Appender>& entry, Actions& actions) {
  auto* request = new CallRequest();
  request->op = IoOp::Truncate;
  request->object = std::move(object);
  request->length = bytes;
  // Failing to give space back loses no data; the next trim or the removal gives it back.
  request->call = [self = shared_from_this(), entry](int result) { self->trimmed(entry, result); };
  submit(device, request, actions);
}

void File::trimmed(const std::shared_ptr<Appender>& entry, int result) {
  if (result != 0 && result != -ENOENT)
    plane_.log(30, "trimming an object: " + std::string(std::strerror(-result)));
  if (entry != nullptr) {
    Actions actions;
    {
      const MutexLock lock(mutex_);
      if (--entry->trims == 0 && entry->trim_wanted) submit_trim(entry, actions);
    }
    actions.run();
  }
  plane_.retry_refused();
}

// Nobody refers to these places from here on, but for versions that they were written before: those
// may become current. A file that is rewritten and not closed would fill the devices with what was
// placed after the last of them.
void File::give_up(const std::vector<Extent>& gone, Actions& actions) {
  garbage_.insert(garbage_.end(), gone.begin(), gone.end());
  for (const Extent& extent : gone) {
    const OpenObject* object = open_object(extent.place.device, extent.place.object);
    if (object == nullptr) continue;
    const uint64_t end = extent.place.object_block + extent.count;
    const uint64_t first = std::max<uint64_t>(extent.place.object_block, object->fresh_block);
    if (first >= end) continue;
    Place place = extent.place;
    place.object_block = static_cast<uint32_t>(first);
    fresh_garbage_.push_back(Extent{0, end - first, place});
    fresh_garbage_blocks_ += end - first;
  }
  if (fresh_garbage_blocks_ >= std::max(kFreshGarbageBlocksMax, size_ / kBlockBytes)) {
    give_back_fresh(actions, [] {});
  }
}

// Returns whether there was anything to give back; calls `done` when it is back. The commit does so
// once more: only what a commit tells of is given back after a crash.
bool File::give_back_fresh(Actions& actions, std::function<void()> done) {
  std::vector<Extent> fresh = std::exchange(fresh_garbage_, {});
  fresh_garbage_blocks_ = 0;
  if (fresh.empty()) return false;
  const auto where = [](const Extent& extent) {
    return std::tuple(extent.place.device, extent.place.object, extent.place.object_block);
  };
  std::sort(fresh.begin(), fresh.end(),
            [&](const Extent& a, const Extent& b) { return where(a) < where(b); });
  std::vector<Extent> merged;
  for (const Extent& extent : fresh) {
    const Place& place = extent.place;
    if (!merged.empty() && merged.back().place.device == place.device &&
        merged.back().place.object == place.object &&
        merged.back().place.object_block + merged.back().count == place.object_block) {
      merged.back().count += extent.count;
    } else {
      merged.push_back(extent);
    }
  }
  actions.add([this, self = shared_from_this(), merged = std::move(merged),
               done = std::move(done)] { plane_.give_back(merged, done); });
  return true;
}

Place File::next_place(uint16_t device, uint64_t* blocks) {
  std::vector<OpenObject>& objects = appender(device).objects;
  const auto it = std::find_if(objects.begin(), objects.end(),
                               [](const OpenObject& each) { return each.blocks_left() != 0; });
  assert(it != objects.end());  // they were promised
  *blocks = std::min(*blocks, it->blocks_left());
  const Place place{it->id, static_cast<uint32_t>(it->next_block), device, false};
  it->next_block += *blocks;
  return place;
}

File::OpenObject* File::open_object(uint16_t device, uint64_t id) {
  const auto it = appenders_.find(device);
  if (it == appenders_.end()) return nullptr;
  for (OpenObject& each : it->second->objects) {
    if (each.id == id) return &each;
  }
  return nullptr;
}

bool File::written_at(uint64_t offset) {
  Extent extent;
  return map_.find(offset / kBlockBytes, &extent) && !extent.place.unwritten;
}

// Drops staged bytes behind `size`.
void File::shrink_staged(uint64_t size, Actions& actions) {
  std::vector<Slot*> gone;
  for (auto& [chunk, chain] : chains_) {
    Slot* slot = chain.back();
    if (slot->sealed) continue;
    const uint64_t start = chunk * placement_.chunk_bytes;
    if (start >= size) {
      gone.push_back(slot);
    } else if (size - start < placement_.chunk_bytes) {
      slot->ranges.clip(static_cast<uint32_t>(size - start));
      publish(slot, arena::SlotState::Filling);
    }
  }
  for (Slot* slot : gone) {
    detach(slot);
    release_slot(slot, actions);
  }
}

void File::shrink(uint64_t size, Actions& actions) {
  note_replaced(size);
  size_ = size;
  touch_times();
  // Who takes over would look for what was cut off.
  if (!note_truncated()) keep_places();
  shrink_staged(size, actions);
  const uint64_t first = blocks_up(size);
  std::vector<Extent> gone;
  map_.erase(first, UINT64_MAX - first, &gone);
  give_up(gone, actions);
  if (size == 0 && chains_.empty()) begin_anew(actions);
}

// A new content, on objects of its own. An object that is in no version goes at once.
void File::begin_anew(Actions& actions) {
  inline_mode_ = true;
  inline_.clear();
  drain_error_ = 0;
  lost_.clear();
  std::vector<Extent> unused;
  for (auto it = appenders_.begin(); it != appenders_.end();) {
    const Appender& entry = *it->second;
    if (entry.growing) {
      ++it;
      continue;
    }
    for (const OpenObject& each : entry.objects) {
      if (each.fresh_block != 0) continue;
      unused.push_back(Extent{0, 0, Place{each.id, 0, entry.device, false}});
      std::erase_if(fresh_garbage_, [&](const Extent& extent) {
        return extent.place.device == entry.device && extent.place.object == each.id;
      });
      objects_.erase({entry.device, each.id});
      unflushed_.erase({entry.device, each.id});
    }
    it = appenders_.erase(it);
  }
  give_back_fresh(actions, [] {});
  if (unused.empty()) return;
  actions.add([this, self = shared_from_this(), unused = std::move(unused)] {
    plane_.give_back(unused, [] {});
  });
}

bool File::note_truncated() {
  return note([](Journal& journal, const FileState& state) {
    return journal.note(state, arena::Change::Truncate);
  });
}

void File::truncate(uint64_t size, Done done) {
  Actions actions;
  {
    const MutexLock lock(mutex_);
    if (size <= refused_begin_) refused_end_ = 0;
    if (size == 0 && inline_mode_) {  // a new content begins
      drain_error_ = 0;
      lost_.clear();
    }
    if (size > kFileBytesMax || dropped_) {
      actions.add([done, error = dropped_ ? EIO : EFBIG] { done(error); });
    } else if (size >= size_) {
      size_ = size;
      touch_times();
      note_state_now();
      actions.add([done] { done(0); });
    } else if (inline_mode_) {
      note_replaced(size);
      size_ = size;
      touch_times();
      note_truncated();
      inline_.resize(std::min<size_t>(inline_.size(), size));
      shrink_staged(size, actions);
      actions.add([done] { done(0); });
    } else {
      add_barrier(
          [this, size, done](Actions& after, int) {
            mutex_.assert_held();
            if (cut(size, done, after)) return;
            after.add([self = shared_from_this(), size, done] {
              self->plane_.park([self, size, done] { return self->cut_later(size, done); });
            });
          },
          actions);
    }
  }
  actions.run();
}

// What the last block holds behind the new end must not come back by extending. There has to be
// space for the zeros that replace it, or the file stays as it was. They are written after the
// truncation is noted: who takes over drops what is older. Returns false, with nothing done, when
// it has to wait.
bool File::cut(uint64_t size, const Done& done, Actions& actions) {
  const uint64_t block_end = blocks_up(size) * kBlockBytes;
  Payload payload;
  std::vector<ChunkPiece> pieces;
  if (block_end != size && written_at(size)) {
    payload.add(zeros, block_end - size);
    const Outcome outcome = prepare(size, block_end - size, payload, nullptr, -1, &pieces, actions);
    if (outcome.progress == Progress::Wait) return false;
    if (outcome.error != 0) {
      actions.add([done, error = outcome.error] { done(error); });
      return true;
    }
  }
  shrink(size, actions);
  for (ChunkPiece& piece : pieces) apply(piece, payload, nullptr, actions);
  actions.add([done] { done(0); });
  return true;
}

// What was written since the barrier may be on its way by now, and needs another one.
Retry File::cut_later(uint64_t size, const Done& done) {
  Actions actions;
  bool over = true;
  {
    const MutexLock lock(mutex_);
    bool still = barriers_.empty() && !dropped_ && !inline_mode_ && size < size_;
    for (const auto& [chunk, chain] : chains_) still = still && !chain.front()->sealed;
    if (still) {
      over = cut(size, done, actions);
    } else {
      actions.add([self = shared_from_this(), size, done] { self->truncate(size, done); });
    }
  }
  actions.run();
  return over ? Retry::Done : Retry::Waiting;
}

// Writes zeros into [offset, end), within one block, without changing the size.
void File::zero(uint64_t offset, uint64_t end, Done done) {
  auto attempt = [self = shared_from_this(), offset, end, done] {
    Payload payload;
    payload.add(zeros, end - offset);
    Actions actions;
    Outcome outcome;
    {
      const MutexLock lock(self->mutex_);
      outcome = self->write_locked(offset, end - offset, payload, nullptr, nullptr, false, actions);
    }
    actions.run();
    if (outcome.progress == Progress::Wait) return Retry::Waiting;
    done(outcome.error);
    return Retry::Done;
  };
  if (attempt() != Retry::Done) plane_.park(attempt);
}

// Runs of blocks in [first, end) of a chunk that have neither a place nor a promise of one.
uint64_t File::holes(uint64_t chunk, uint64_t first, uint64_t end, std::vector<Extent>* runs) {
  const uint64_t chunk_first = chunk * (placement_.chunk_bytes / kBlockBytes);
  const auto chain = chains_.find(chunk);
  uint64_t total = 0;
  for (uint64_t block = first; block < end; ++block) {
    Extent found;
    bool taken = map_.find(block, &found);
    if (chain != chains_.end()) {
      for (const Slot* slot : chain->second) taken = taken || slot->reserved[block - chunk_first];
    }
    if (taken) continue;
    if (!runs->empty() && runs->back().end() == block) {
      ++runs->back().count;
    } else {
      runs->push_back(Extent{block, 1, {}});
    }
    ++total;
  }
  return total;
}

Outcome File::allocate(uint64_t offset, uint64_t length, bool keep_size) {
  Actions actions;
  Outcome outcome;
  {
    const MutexLock lock(mutex_);
    outcome = allocate_locked(offset, length, keep_size, actions);
    if (outcome.progress != Progress::Wait) want_nothing();
  }
  actions.run();
  return outcome;
}

void File::give_up_allocating() {
  const MutexLock lock(mutex_);
  want_nothing();
}

void File::want_nothing() {
  for (auto& [device, entry] : appenders_) entry->wanted_blocks = 0;
}

Outcome File::allocate_locked(uint64_t offset, uint64_t length, bool keep_size, Actions& actions) {
  if (offset > kFileBytesMax || length > kFileBytesMax - offset) return Outcome::failed(EFBIG);
  const uint64_t end = offset + length;
  if (!inline_mode_ || end > kInlineBytesMax) {
    if (inline_mode_) {
      const Outcome outcome = leave_inline(-1, actions);
      if (outcome.progress == Progress::Wait || outcome.error != 0) return outcome;
    }
    const uint64_t chunk_blocks = placement_.chunk_bytes / kBlockBytes;
    const uint64_t last = blocks_up(end);
    for (uint64_t block = offset / kBlockBytes; block < last;) {
      const uint64_t chunk = block / chunk_blocks;
      const uint64_t chunk_end = std::min(last, (chunk + 1) * chunk_blocks);
      const Outcome outcome = allocate_chunk(chunk, block, chunk_end, (last - block), actions);
      if (outcome.progress == Progress::Wait || outcome.error != 0) return outcome;
      block = chunk_end;
    }
  }
  if (!keep_size) size_ = std::max(size_, end);
  touch_times();
  note_state_now();
  return {};
}

Outcome File::allocate_chunk(uint64_t chunk, uint64_t first, uint64_t end, uint64_t ahead,
                             Actions& actions) {
  std::vector<Extent> runs;
  const uint64_t blocks = holes(chunk, first, end, &runs);
  if (blocks == 0) return {};
  forget_old_refusals();
  const uint16_t number = device_for(chunk);
  Appender& entry = appender(number);
  if (entry.error != 0) {
    const int error = entry.error;
    for (auto& [device, other] : appenders_) other->error = 0;
    return Outcome::failed(error);
  }
  // One preallocation for this device's whole share of the request.
  if (!entry.growing) {
    entry.wanted_blocks = ahead / placement_.devices.size();
  }
  if (!space_ready(number, blocks, actions)) return Outcome::wait();
  std::vector<WrittenExtent> placed;
  for (const Extent& run : runs) {
    for (uint64_t at = run.block; at < run.end();) {
      Extent part{at, run.end() - at, {}};
      part.place = next_place(number, &part.count);
      part.place.unwritten = true;
      at = part.end();
      placed.push_back({part, {}});
      map_.assign(placed.back(), nullptr);
      OpenObject* object = open_object(number, part.place.object);
      object->written_end = object->next_block * kBlockBytes;
    }
  }
  note([&](Journal& journal, const FileState& state) {
    return journal.note_extents(state, placed);
  });
  ++sequence_;  // what an allocation that fails later has taken is committed, or it would be lost
  return {};
}

void File::punch_inline(uint64_t offset, uint64_t end) {
  if (offset < inline_.size()) {
    std::memset(inline_.data() + offset, 0, std::min<uint64_t>(end, inline_.size()) - offset);
  }
  note([&](Journal& journal, const FileState& state) {
    return journal.note_punched(state, offset, end);
  });
  const auto chain = chains_.find(0);
  if (chain == chains_.end()) return;
  for (Slot* slot : chain->second) {
    for (const auto& range : slot->ranges.all()) {
      const uint64_t from = std::max<uint64_t>(range.begin, offset);
      const uint64_t to = std::min<uint64_t>(range.end, end);
      if (from < to) std::memset(slot->data + from, 0, to - from);
    }
  }
}

void File::punch(uint64_t offset, uint64_t length, Done done) {
  Actions actions;
  {
    const MutexLock lock(mutex_);
    const uint64_t end = length > kFileBytesMax ? kFileBytesMax : offset + length;
    if (inline_mode_) {
      note_replaced(offset);
      touch_times();
      punch_inline(offset, end);
      actions.add([done] { done(0); });
    } else {
      add_barrier(
          [this, offset, end, done](Actions& after, int) {
            mutex_.assert_held();
            punch_blocks(offset, end, done, after);
          },
          actions);
    }
  }
  actions.run();
}

// Whole blocks become holes; the rest of the range is overwritten with zeros.
void File::punch_blocks(uint64_t offset, uint64_t end, Done done, Actions& actions) {
  const uint64_t first = blocks_up(offset);
  const uint64_t last = end / kBlockBytes;
  note_replaced(offset);
  touch_times();
  if (first < last) {
    std::vector<Extent> gone;
    map_.erase(first, last - first, &gone);
    const bool noted = note([&](Journal& journal, const FileState& state) {
      return journal.note_erased(state, first, last - first);
    });
    if (!noted) keep_places();
    give_up(gone, actions);
  }
  std::vector<std::pair<uint64_t, uint64_t>> edges;
  const uint64_t head_end = std::min(end, first * kBlockBytes);
  if (offset < head_end && written_at(offset)) edges.emplace_back(offset, head_end);
  if (last >= first && last * kBlockBytes < end && written_at(end)) {
    edges.emplace_back(last * kBlockBytes, end);
  }
  actions.add([self = shared_from_this(), edges, done] {
    if (edges.empty()) {
      done(0);
    } else if (edges.size() == 1) {
      self->zero(edges[0].first, edges[0].second, done);
    } else {
      self->zero(edges[0].first, edges[0].second, [self, edges, done](int error) {
        if (error != 0) {
          done(error);
        } else {
          self->zero(edges[1].first, edges[1].second, done);
        }
      });
    }
  });
}

}  // namespace fpfs
