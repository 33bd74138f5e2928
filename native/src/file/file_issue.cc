// Slots -> devices -> map: sealing a slot, completing its blocks, writing them, and what failed.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "file/file.h"
#include "layout/block_checksum.h"

namespace fpfs {
namespace {

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

// --- sealing and issuing ---

void File::seal(Slot* slot, Actions& actions) {
  if (slot->ranges.empty()) {
    detach(slot);
    release_slot(slot, actions);
    return;
  }
  if (slot->lease != -1) {
    Slot* copy = steal(slot);
    if (copy == nullptr) {
      slot->seal_wanted = true;
      // The leaseholder may sleep for long; try again when a slot is free.
      plane_.park([self = shared_from_this(), slot, chunk = slot->chunk] {
        Actions after;
        {
          const MutexLock lock(self->mutex_);
          const auto chain = self->chains_.find(chunk);
          if (chain == self->chains_.end() ||
              std::find(chain->second.begin(), chain->second.end(), slot) == chain->second.end() ||
              slot->sealed) {
            return Retry::Done;
          }
          Slot* taken = slot->lease == -1 ? slot : self->steal(slot);
          if (taken == nullptr) return Retry::Waiting;
          self->seal(taken, after);
        }
        after.run();
        return Retry::Done;
      });
      return;
    }
    slot = copy;
  }
  slot->seal_wanted = false;
  slot->sealed = true;
  if (slot->opened_ns != 0) slot->sealed_ns = monotonic_ns();
  plane_.arena().age_remove(slot);
  publish(slot, arena::SlotState::Sealed);
  maybe_issue(slot, actions);
}

void File::seal_all(Actions& actions) {
  std::vector<Slot*> open;
  for (const auto& [chunk, chain] : chains_) {
    if (!chain.back()->sealed) open.push_back(chain.back());
  }
  for (Slot* slot : open) seal(slot, actions);
}

bool File::may_issue(const Slot* slot) {
  if (!slot->sealed || slot->issued) return false;
  if (chains_.find(slot->chunk)->second.front() != slot) return false;
  if (depth_ != 0) {
    const auto issued = issued_.find(slot->device);
    if (issued != issued_.end() && issued->second >= depth_) return false;
  }
  return barriers_.empty() || !barriers_.front().active || slot->epoch <= barriers_.front().epoch;
}

void File::maybe_issue(Slot* slot, Actions& actions) {
  if (!may_issue(slot)) return;
  slot->issued = true;
  ++issued_[slot->device];
  actions.add([self = shared_from_this(), slot] { self->issue(slot); });
}

// A slot has left the device's queue, as deep as the policy has it: another may follow.
void File::issue_next(uint16_t device, Actions& actions) {
  --issued_[device];
  if (depth_ == 0) return;
  for (const auto& [chunk, chain] : chains_) {
    if (chain.front()->device == device && may_issue(chain.front())) {
      maybe_issue(chain.front(), actions);
      return;
    }
  }
}

// Bytes of block `index` of the slot that exist in the file, up to the device's alignment.
uint32_t File::block_limit(const Slot* slot, uint64_t index) const {
  const uint64_t start = slot->chunk * placement_.chunk_bytes + index * kBlockBytes;
  if (start >= slot->issue_size) return 0;
  return static_cast<uint32_t>(
      std::min(kBlockBytes, round_up(slot->issue_size - start, kIoAlignment)));
}

void File::issue(Slot* slot) {
  Actions actions;
  {
    const MutexLock lock(mutex_);
    slot->issue_size = size_;
    if (slot->opened_ns != 0) slot->issued_ns = monotonic_ns();
    bool complete = true;
    for (uint64_t i = 0; i * kBlockBytes < placement_.chunk_bytes; ++i) {
      if (!complete_block(slot, i, actions)) complete = false;
    }
    if (complete) place(slot, actions);
  }
  actions.run();
}

// Fills the bytes of a touched block that the slot does not hold: with zeros at once, or with the
// block's old content by a device read. True if nothing has to be read.
bool File::complete_block(Slot* slot, uint64_t index, Actions& actions) {
  const auto begin = static_cast<uint32_t>(index * kBlockBytes);
  const uint32_t end = begin + block_limit(slot, index);
  if (!slot->ranges.intersects(begin, begin + kBlockBytes)) return true;
  if (end == begin || slot->ranges.covers(begin, end)) return true;
  const uint64_t block = slot->chunk * (placement_.chunk_bytes / kBlockBytes) + index;
  Extent old;
  if (map_.find(block, &old) && !old.place.unwritten) {
    auto io = std::make_unique<SlotIo>();
    io->op = IoOp::Read;
    io->file = shared_from_this();
    io->slot = slot;
    io->extent = old;
    io->bounce = {static_cast<char*>(std::aligned_alloc(kIoAlignment, kBlockBytes)), std::free};
    io->buffer = io->bounce.get();
    io->object = object_ref(old.place.device, old.place.object);
    io->offset = uint64_t{old.place.object_block} * kBlockBytes;
    io->length = kBlockBytes;
    io->ino = ino_;
    io->file_offset = block * kBlockBytes;
    if (plane_.checksums()) io->expected = map_.checksums(block, 1);
    // Blocks may be moved meanwhile, which gives the old place back.
    io->phase = plane_.read_begin();
    ++slot->pending_io;
    submit(old.place.device, io.release(), actions);
    return false;
  }
  for (uint32_t at = begin; at < end;) {
    const uint32_t free = slot->ranges.free_until(at, end);
    std::memset(slot->data + at, 0, free - at);
    at = slot->ranges.taken_until(free);
  }
  return true;
}

void File::fetched(SlotIo* io, int result, Actions& actions) {
  Slot* slot = io->slot;
  // Wrong bytes must not get a fresh checksum.
  if (result == 0 && !damaged_blocks(io->buffer, io->expected).empty()) {
    plane_.report_damage(ino_, io->extent.block, io->extent.place);
    result = -EIO;
  }
  if (result != 0) {
    slot->io_error = -result;
    say_once(40, "reading from device " + std::to_string(io->extent.place.device) +
                     " what a write leaves of a block failed: " + std::strerror(-result));
  } else {
    const uint64_t chunk_first = slot->chunk * (placement_.chunk_bytes / kBlockBytes);
    const auto index = io->extent.block - chunk_first;
    const auto begin = static_cast<uint32_t>(index * kBlockBytes);
    const uint32_t end = begin + block_limit(slot, index);
    // Bytes behind the file's end are zeros, whatever the old block held there.
    const uint64_t start = io->extent.block * kBlockBytes;
    if (slot->issue_size < start + kBlockBytes) {
      const auto valid = static_cast<size_t>(slot->issue_size - start);
      std::memset(io->buffer + valid, 0, kBlockBytes - valid);
    }
    RangeSet have = slot->ranges;
    for (uint32_t at = begin; at < end;) {
      const uint32_t free = have.free_until(at, end);
      if (free > at) {
        std::memcpy(slot->data + at, io->buffer + (at - begin), free - at);
        have.add(at, free);
      }
      at = have.taken_until(free);
    }
  }
  if (--slot->pending_io > 0) return;
  if (slot->io_error != 0) {
    finish_slot(slot, actions);
  } else {
    place(slot, actions);
  }
}

// --- writing to fresh places ---

void File::place(Slot* slot, Actions& actions) {
  const uint64_t chunk_first = slot->chunk * (placement_.chunk_bytes / kBlockBytes);
  const uint64_t count = placement_.chunk_bytes / kBlockBytes;
  const auto touched = [&](uint64_t i) {
    mutex_.assert_held();
    const auto begin = static_cast<uint32_t>(i * kBlockBytes);
    return block_limit(slot, i) != 0 && slot->ranges.intersects(begin, begin + kBlockBytes);
  };
  const auto reserved_place = [&](uint64_t i, Place* place) {
    mutex_.assert_held();
    Extent extent;
    if (!map_.find(chunk_first + i, &extent) || !extent.place.unwritten) return false;
    if (moving_ == extent.place.device) return false;
    *place = extent.place;
    return true;
  };
  for (uint64_t i = 0; i < count;) {
    if (!touched(i)) {
      ++i;
      continue;
    }
    uint64_t end = i + 1;
    Place first;
    if (reserved_place(i, &first)) {
      // Preallocated by fallocate: nothing was ever written there, so it is a fresh place.
      Place next;
      while (end < count && touched(end) && reserved_place(end, &next) &&
             next.device == first.device && next.object == first.object &&
             next.object_block == first.object_block + (end - i)) {
        ++end;
      }
      first.unwritten = false;
      submit_write(slot, chunk_first + i, end - i, first, actions);
    } else {
      Place other;
      while (end < count && touched(end) && !reserved_place(end, &other)) ++end;
      uint64_t blocks = end - i;
      const Place next = next_place(slot->device, &blocks);
      end = i + blocks;
      Appender& entry = appender(slot->device);
      for (uint64_t b = i; b < end; ++b) {
        if (!slot->reserved[b]) continue;
        slot->reserved[b] = false;
        --entry.reserved_blocks;
      }
      submit_write(slot, chunk_first + i, blocks, next, actions);
    }
    i = end;
  }
  if (slot->pending_io == 0) finish_slot(slot, actions);
}

void File::submit_write(Slot* slot, uint64_t block, uint64_t count, Place place, Actions& actions) {
  const uint64_t index = block - slot->chunk * (placement_.chunk_bytes / kBlockBytes);
  auto io = std::make_unique<SlotIo>();
  io->op = IoOp::Write;
  io->file = shared_from_this();
  io->slot = slot;
  io->extent = Extent{block, count, place};
  io->object = object_ref(place.device, place.object);
  io->offset = uint64_t{place.object_block} * kBlockBytes;
  io->buffer = slot->data + index * kBlockBytes;
  io->ino = ino_;
  io->file_offset = block * kBlockBytes;
  // Whole blocks: what a removed object has behind the bytes of the last one must not be read.
  const uint64_t stored = (count - 1) * kBlockBytes + block_limit(slot, index + count - 1);
  io->length = count * kBlockBytes;
  std::memset(io->buffer + stored, 0, io->length - stored);
  if (OpenObject* object = open_object(place.device, place.object); object != nullptr) {
    object->written_end = std::max(object->written_end, io->offset + stored);
  }
  ++slot->pending_io;
  Device* device = plane_.device(place.device);
  // The blocks are complete, and nobody changes them any more. They are summed here and not by the
  // device's thread because here, mostly, is the channel thread that has just received them: they
  // are in its cache. Saves with fsync (2 processors, November 2026): 2.06 GB/s, 2.10 without
  // checksums, 1.4 to 1.7 where the device's thread fetched them again.
  actions.add([device, sum = plane_.checksums(), request = io.release()] {
    if (sum) request->checksums = checksum_blocks(request->buffer, request->length);
    device != nullptr && request->object != nullptr ? device->submit(request)
                                                    : request->complete(-EIO);
  });
}

void File::io_done(SlotIo* io, int result) {
  Actions actions;
  {
    const MutexLock lock(mutex_);
    std::unique_ptr<SlotIo> owned(io);
    // From here on it is in the list of what was written, or nothing will be there.
    if (!io->tried.empty()) retried_.erase({io->extent.place.device, io->extent.place.object});
    if (io->op == IoOp::Read) {
      actions.add([this, phase = io->phase] { plane_.read_end(phase); });
      fetched(io, result, actions);
    } else if (result != 0) {
      write_failed(std::move(owned), result, actions);
    } else {
      Slot* slot = io->slot;
      slot->written.push_back({io->extent, std::move(io->checksums)});
      unflushed_[{io->extent.place.device, io->extent.place.object}] = io->object;
      if (--slot->pending_io == 0) finish_slot(slot, actions);
    }
    // The request may hold the last reference to this file: it goes after the lock.
    if (owned != nullptr) actions.add([keep = std::shared_ptr<SlotIo>(std::move(owned))] {});
  }
  actions.run();
}

// The same bytes go to a new object on the next device that has not failed for them.
void File::write_failed(std::unique_ptr<SlotIo> io, int result, Actions& actions) {
  Slot* slot = io->slot;
  // Of a later try the object goes as a whole: nothing else is in it.
  if (io->tried.empty()) give_up_place(io->extent, actions);
  const uint16_t failed = io->extent.place.device;
  io->tried.push_back(failed);
  blame(failed, -result);
  if (Device* device = next_device(io->tried); device != nullptr) {
    const uint16_t number = device->number();
    say_once(30, "writing to device " + std::to_string(failed) + " failed (" +
                     std::strerror(-result) + "), its bytes go to device " +
                     std::to_string(number));
    actions.add([self = shared_from_this(), request = io.release(), device, number] {
      device->create_object(
          [self, request, device, number](int error, ObjectRef object, uint64_t id) {
            if (error == 0) {
              const MutexLock lock(self->mutex_);
              self->objects_[{number, id}] = object;
              self->retried_.insert({number, id});
            }
            request->extent.place = Place{id, 0, number, false};
            request->object = std::move(object);
            request->offset = 0;
            error == 0 ? device->submit(request) : self->io_done(request, -error);
          });
    });
    return;
  }
  slot->io_error = -result;
  actions.add([keep = std::shared_ptr<SlotIo>(std::move(io))] {});
  if (--slot->pending_io == 0) finish_slot(slot, actions);
}

// Nobody is going to name this place of a write, unless the map does: fallocate(2) was promised it.
void File::give_up_place(const Extent& extent, Actions& actions) {
  Extent named;
  const Place& place = extent.place;
  const bool promised = map_.find(extent.block, &named) && named.place.unwritten &&
                        named.place.device == place.device && named.place.object == place.object &&
                        named.place.object_block == place.object_block;
  if (!promised) give_up({extent}, actions);
}

// The map learns of places whose bytes are on the device. False: the journal has no room for them.
bool File::record_written(const std::vector<WrittenExtent>& written, Actions& actions) {
  const bool noted = note([&](Journal& journal, const FileState& state) {
    return journal.note_extents(state, written);
  });
  if (!noted) return false;
  for (const WrittenExtent& each : written) map_written(each, actions);
  return true;
}

void File::map_written(const WrittenExtent& written, Actions& actions) {
  const Extent& extent = written.extent;
  std::vector<Extent> replaced;
  map_.assign(written, &replaced);
  std::erase_if(replaced, [&](const Extent& old) {
    const Place& place = old.place;
    const uint64_t shift = old.block - extent.block;
    return place.unwritten && place.device == extent.place.device &&
           place.object == extent.place.object &&
           place.object_block == extent.place.object_block + shift;
  });
  give_up(replaced, actions);
}

void File::finish_slot(Slot* slot, Actions& actions) {
  if (slot->io_error != 0) {
    record_error(slot->io_error, "staged bytes could be written to no device");
    for (const WrittenExtent& written : slot->written) give_up_place(written.extent, actions);
    const uint64_t start = slot->chunk * placement_.chunk_bytes;
    for (const auto& range : slot->ranges.all()) {
      lost_.emplace_back(start + range.begin, start + range.end);
    }
    note([](Journal& journal, const FileState& state) {
      return journal.note(state, arena::Change::Lost);
    });
  } else if (!record_written(slot->written, actions)) {
    // The slot keeps the bytes; commits of other files make room.
    plane_.park([self = shared_from_this(), slot] {
      Actions after;
      {
        const MutexLock lock(self->mutex_);
        if (!self->record_written(slot->written, after)) return Retry::Waiting;
        self->retire_slot(slot, after);
      }
      after.run();
      return Retry::Done;
    });
    return;
  }
  retire_slot(slot, actions);
}

// The slot's bytes are on the device, or given up.
void File::retire_slot(Slot* slot, Actions& actions) {
  const uint64_t chunk = slot->chunk;
  const uint16_t device = slot->device;
  if (slot->opened_ns != 0) trace_chunk(*slot);
  detach(slot);
  release_slot(slot, actions);
  issue_next(device, actions);
  if (const auto next = chains_.find(chunk); next != chains_.end()) {
    maybe_issue(next->second.front(), actions);
  }
  check_barrier(actions);
}

void File::trace_chunk(const Slot& slot) {
  TraceEvent event;
  event.kind = TraceKind::Chunk;
  event.detail = slot.index;
  event.device = slot.device;
  event.error = slot.io_error;
  event.ino = ino_;
  event.offset = slot.chunk * placement_.chunk_bytes;
  for (const auto& range : slot.ranges.all()) event.length += range.end - range.begin;
  event.at_ns = {slot.opened_ns, slot.sealed_ns, slot.issued_ns, monotonic_ns()};
  if (plane_.tracer().watches(ino_)) plane_.tracer().add(event);
}

}  // namespace fpfs
