// The life of an acknowledged write: payload -> slot. The reply may go when write() says Done.
#include <algorithm>
#include <cstring>

#include "base/fuse_wire.h"
#include "file/file.h"

namespace fpfs {

void Payload::copy_to(char* to, size_t from, size_t length) const {
  for (size_t i = 0; i < count && length > 0; ++i) {
    if (from >= pieces[i].length) {
      from -= pieces[i].length;
      continue;
    }
    const size_t n = std::min(length, pieces[i].length - from);
    const char* source = pieces[i].base + from;
    if (source != to) std::memmove(to, source, n);
    to += n;
    length -= n;
    from = 0;
  }
}

bool Payload::lies_at(const char* place, size_t from) const {
  for (size_t i = 0; i < count; ++i) {
    if (from < pieces[i].length) return pieces[i].base + from == place;
    from -= pieces[i].length;
  }
  return false;
}

Payload Payload::part(size_t from, size_t length) const {
  Payload found;
  for (size_t i = 0; i < count && length > 0; ++i) {
    if (from >= pieces[i].length) {
      from -= pieces[i].length;
      continue;
    }
    const size_t n = std::min(length, pieces[i].length - from);
    found.add(pieces[i].base + from, n);
    length -= n;
    from = 0;
  }
  return found;
}

size_t File::begin_lease(uint64_t offset, Lease* lease, char** at) {
  const MutexLock lock(mutex_);
  if (placement_.chunk_bytes < wire::kMaxWriteBytes || dropped_) return 0;
  if (inline_mode_) return 0;  // what lies between the ranges of an inline slot may be filled in
  Slot* slot = open_slot(offset / placement_.chunk_bytes);
  if (slot == nullptr || slot->lease != -1) return 0;
  const auto begin = static_cast<uint32_t>(offset % placement_.chunk_bytes);
  const uint32_t end =
      slot->ranges.free_until(begin, static_cast<uint32_t>(placement_.chunk_bytes));
  if (begin == end) return 0;
  slot->lease = lease->thread;
  slot->lease_begin = begin;
  slot->lease_end = end;
  lease->file = shared_from_this();
  lease->slot = slot;
  *at = slot->data + begin;
  return end - begin;
}

void File::end_lease(Lease* lease) {
  if (lease->slot == nullptr) return;
  Actions actions;
  {
    const MutexLock lock(mutex_);
    Slot* slot = std::exchange(lease->slot, nullptr);
    slot->lease = -1;
    if (slot->orphan) {
      slot->orphan = false;
      release_slot(slot, actions);
    } else if (slot->seal_wanted) {
      seal(slot, actions);
    }
  }
  actions.run();
}

Slot* File::steal(Slot* slot) {
  Slot* copy = plane_.arena().take();
  if (copy == nullptr) return nullptr;
  for (const auto& range : slot->ranges.all()) {
    std::memcpy(copy->data + range.begin, slot->data + range.begin, range.end - range.begin);
  }
  copy->file = slot->file;
  copy->chunk = slot->chunk;
  copy->epoch = slot->epoch;
  copy->device = slot->device;
  copy->ranges = slot->ranges;
  copy->reserved = slot->reserved;
  copy->opened_ns = slot->opened_ns;
  slot->reserved.reset();
  Chain& chain = chains_.find(slot->chunk)->second;
  *std::find(chain.begin(), chain.end(), slot) = copy;
  plane_.arena().age_add(copy);
  publish(copy, arena::SlotState::Filling);
  plane_.arena().age_remove(slot);
  plane_.arena().publish(slot, arena::SlotState::Free, 0, 0, 0, 0);
  slot->orphan = true;
  slot->seal_wanted = false;
  return copy;
}

std::vector<File::ChunkPiece> File::pieces_of(uint64_t offset, size_t length) {
  std::vector<ChunkPiece> pieces;
  const uint64_t chunk_bytes = placement_.chunk_bytes;
  for (size_t from = 0; from < length;) {
    ChunkPiece piece;
    const uint64_t at = offset + from;
    piece.chunk = at / chunk_bytes;
    piece.begin = static_cast<uint32_t>(at % chunk_bytes);
    const size_t n = std::min<uint64_t>(length - from, chunk_bytes - piece.begin);
    piece.end = piece.begin + static_cast<uint32_t>(n);
    piece.from = from;
    pieces.push_back(piece);
    from += n;
  }
  return pieces;
}

// Whether the file may hold the slots that a write takes. One that holds none may always: a write
// can need more at once than a policy gives. What is full is on its way; if nothing is, the oldest
// partly filled slot has to go.
bool File::has_buffers(const std::vector<ChunkPiece>& pieces, Actions& actions) {
  if (buffers_ == 0 || slots_held_ == 0) return true;
  const auto fresh = std::count_if(pieces.begin(), pieces.end(), [&](const ChunkPiece& piece) {
    mutex_.assert_held();
    return open_slot(piece.chunk) == nullptr;
  });
  if (fresh == 0 || slots_held_ + fresh <= buffers_ * placement_.devices.size()) return true;
  Slot* oldest = nullptr;
  for (const auto& [chunk, chain] : chains_) {
    if (chain.front()->sealed) return false;
    Slot* slot = chain.front();
    if (slot->lease == -1 && (oldest == nullptr || slot->epoch < oldest->epoch)) oldest = slot;
  }
  if (oldest != nullptr) seal(oldest, actions);
  return oldest == nullptr;
}

bool File::take_slots(std::vector<ChunkPiece>& pieces, const Payload& payload, Slot** spare,
                      int thread, Actions& actions) {
  for (ChunkPiece& piece : pieces) {
    Slot* slot = open_slot(piece.chunk);
    if (slot != nullptr && slot->lease != -1 && slot->lease != thread &&
        slot->lease_begin < piece.end && piece.begin < slot->lease_end) {
      slot = steal(slot);
      if (slot == nullptr) return false;
    }
    if (slot != nullptr && slot->ranges.would_exceed(piece.begin, piece.end, arena::kRangesMax)) {
      if (inline_mode_) {
        join_ranges(slot);
      } else {
        seal(slot, actions);
        slot = nullptr;
      }
    }
    if (slot == nullptr) {
      if (spare != nullptr && *spare != nullptr &&
          payload.lies_at((*spare)->data + piece.begin, piece.from)) {
        slot = std::exchange(*spare, nullptr);
        piece.was_spare = true;
      } else {
        slot = plane_.arena().take();
      }
      if (slot == nullptr) return false;
      slot->device = device_for(piece.chunk);
      piece.fresh = true;
    }
    piece.slot = slot;
  }
  return true;
}

void File::give_slots(std::vector<ChunkPiece>& pieces, Slot** spare) {
  for (ChunkPiece& piece : pieces) {
    if (!piece.fresh) continue;
    if (piece.was_spare) {
      *spare = piece.slot;  // the payload still lies in it
    } else {
      plane_.arena().give(piece.slot);
    }
    piece.slot = nullptr;
  }
}

// Blocks of the slot, this piece included, that have no place on the piece's device yet.
uint64_t File::blocks_needed(const ChunkPiece& piece, std::bitset<kSlotBlocksMax>* blocks) {
  const uint64_t first = piece.chunk * (placement_.chunk_bytes / kBlockBytes);
  const auto chain = chains_.find(piece.chunk);
  // Whether an earlier slot fills the block's preallocated place before this one gets there.
  const auto on_its_way = [&](uint64_t b) {
    mutex_.assert_held();
    if (chain == chains_.end()) return false;
    const auto begin = static_cast<uint32_t>(b * kBlockBytes);
    return std::any_of(chain->second.begin(), chain->second.end(), [&](const Slot* slot) {
      return slot != piece.slot && slot->ranges.intersects(begin, begin + kBlockBytes);
    });
  };
  const auto mark = [&](uint32_t begin, uint32_t end) {
    mutex_.assert_held();
    for (uint64_t b = begin / kBlockBytes; b * kBlockBytes < end; ++b) {
      Extent extent;
      if (piece.slot->reserved[b] && piece.slot->device == piece.device) continue;
      // Before this one gets there a barrier may take it away, or a move put it elsewhere.
      const bool has_place = map_.find(first + b, &extent) && extent.place.unwritten &&
                             extent.place.device != moving_ && barriers_.empty();
      if (has_place && !on_its_way(b)) continue;
      blocks->set(b);
    }
  };
  mark(piece.begin, piece.end);
  if (!piece.fresh) {
    for (const auto& range : piece.slot->ranges.all()) mark(range.begin, range.end);
  }
  return blocks->count();
}

// Promises space on the devices for every block that the pieces touch. What was promised before to
// bytes that are acknowledged is given up only for a promise elsewhere.
Outcome File::reserve(std::vector<ChunkPiece>& pieces, Actions& actions) {
  forget_old_refusals();
  std::map<uint16_t, uint64_t> needed;
  for (ChunkPiece& piece : pieces) {
    piece.device = piece.slot->device;
    // No space there: the chunk goes to another device, with what it holds already.
    if (trouble_with(piece.device) != 0) piece.device = device_for(piece.chunk);
    if (const int error = trouble_with(piece.device); error != 0) {
      for (auto& [device, entry] : appenders_) entry->error = 0;  // the next write tries again
      return Outcome::failed(error);
    }
    std::bitset<kSlotBlocksMax> blocks;
    needed[piece.device] += blocks_needed(piece, &blocks);
  }
  bool ready = true;
  for (const auto& [device, blocks] : needed) {
    if (blocks != 0 && !space_ready(device, blocks, actions)) ready = false;
  }
  if (!ready) return Outcome::wait();
  for (ChunkPiece& piece : pieces) {
    std::bitset<kSlotBlocksMax> blocks;
    const uint64_t count = blocks_needed(piece, &blocks);
    if (piece.slot->device != piece.device) {
      appender(piece.slot->device).reserved_blocks -= piece.slot->reserved.count();
      piece.slot->reserved.reset();
      piece.slot->device = piece.device;
    }
    if (count == 0) continue;
    appender(piece.device).reserved_blocks += count;
    piece.slot->reserved |= blocks;
  }
  return {};
}

// Promises space for a slot that comes from another process.
Outcome File::reserve_for(Slot* slot, Actions& actions) {
  std::vector<ChunkPiece> pieces(1);
  ChunkPiece& piece = pieces[0];
  piece.chunk = slot->chunk;
  piece.begin = slot->ranges.all().front().begin;
  piece.end = slot->ranges.last_end();
  piece.slot = slot;
  piece.fresh = true;
  slot->device = device_for(slot->chunk);
  return reserve(pieces, actions);
}

void File::apply(ChunkPiece& piece, const Payload& payload, Lease* lease, Actions& actions) {
  Slot* slot = piece.slot;
  payload.copy_to(slot->data + piece.begin, piece.from, piece.end - piece.begin);
  slot->ranges.add(piece.begin, piece.end);
  if (piece.fresh) attach(slot, piece.chunk);
  publish(slot, arena::SlotState::Filling);
  if (slot->ranges.covers(0, static_cast<uint32_t>(placement_.chunk_bytes))) {
    if (lease != nullptr && lease->slot == slot) {
      slot->lease = -1;
      lease->slot = nullptr;
    }
    seal(slot, actions);
  }
}

// Makes the staged bytes of an inline file one range: between them lie inline bytes, or zeros.
void File::join_ranges(Slot* slot) {
  const auto end = static_cast<uint32_t>(std::max<size_t>(inline_.size(), slot->ranges.last_end()));
  for (uint32_t at = 0; at < end;) {
    const uint32_t gap_end = slot->ranges.free_until(at, end);
    if (gap_end > at) {
      const size_t known = at < inline_.size() ? std::min<size_t>(inline_.size(), gap_end) - at : 0;
      std::memcpy(slot->data + at, inline_.data() + at, known);
      std::memset(slot->data + at + known, 0, gap_end - at - known);
      slot->ranges.add(at, gap_end);
    }
    at = slot->ranges.taken_until(gap_end);
  }
}

// The file outgrows its inline content: that becomes bytes of chunk 0 like any others.
Outcome File::leave_inline(int thread, Actions& actions) {
  std::vector<ChunkPiece> pieces(1);
  ChunkPiece& piece = pieces[0];
  piece.slot = open_slot(0);
  if (piece.slot == nullptr && inline_.empty()) {
    inline_mode_ = false;
    return {};
  }
  piece.end = static_cast<uint32_t>(
      std::max<size_t>(inline_.size(), piece.slot != nullptr ? piece.slot->ranges.last_end() : 0));
  if (piece.slot != nullptr && piece.slot->lease != -1 && piece.slot->lease != thread &&
      piece.slot->lease_begin < piece.end) {
    piece.slot = steal(piece.slot);
    if (piece.slot == nullptr) return Outcome::wait();
  }
  if (piece.slot == nullptr) {
    piece.slot = plane_.arena().take();
    piece.fresh = true;
    if (piece.slot == nullptr) return Outcome::wait();
    piece.slot->device = device_for(0);
  }
  const Outcome outcome = reserve(pieces, actions);
  if (outcome.progress == Progress::Wait || outcome.error != 0) {
    if (piece.fresh) plane_.arena().give(piece.slot);
    return outcome;
  }
  join_ranges(piece.slot);
  if (piece.fresh) attach(piece.slot, 0);
  publish(piece.slot, arena::SlotState::Filling);
  inline_.clear();
  inline_mode_ = false;
  ++sequence_;  // an inline snapshot taken before is no longer all there is to commit
  return {};
}

// Takes what a write needs, slots and space, or nothing.
Outcome File::prepare(uint64_t offset, size_t length, const Payload& payload, Slot** spare,
                      int thread, std::vector<ChunkPiece>* pieces, Actions& actions) {
  *pieces = pieces_of(offset, length);
  if (!inline_mode_ && !has_buffers(*pieces, actions)) return Outcome::wait();
  if (!take_slots(*pieces, payload, spare, thread, actions)) {
    give_slots(*pieces, spare);
    return Outcome::wait();
  }
  if (inline_mode_) return {};
  const Outcome outcome = reserve(*pieces, actions);
  if (outcome.progress == Progress::Wait || outcome.error != 0) give_slots(*pieces, spare);
  return outcome;
}

Outcome File::write_locked(uint64_t offset, size_t length, const Payload& payload, Slot** spare,
                           Lease* lease, bool extend, Actions& actions) {
  if (dropped_) return Outcome::failed(EIO);
  if (offset > kFileBytesMax || length > kFileBytesMax - offset) return Outcome::failed(EFBIG);
  if (length == 0) return {};
  const int thread = lease != nullptr ? lease->thread : -1;
  if (inline_mode_ && offset + length > kInlineBytesMax) {
    const Outcome outcome = leave_inline(thread, actions);
    if (outcome.progress == Progress::Wait || outcome.error != 0) return outcome;
  }
  std::vector<ChunkPiece> pieces;
  const Outcome outcome = prepare(offset, length, payload, spare, thread, &pieces, actions);
  if (outcome.progress == Progress::Wait || outcome.error != 0) return outcome;
  note_replaced(offset);
  if (extend) size_ = std::max(size_, offset + length);
  touch_times();
  for (ChunkPiece& piece : pieces) apply(piece, payload, lease, actions);
  return {};
}

// Between the kernel's own dropping of the pages that a write(2) covers and the write itself a map
// may have one of them read again, and be stored to.
Outcome File::write_page(uint64_t offset, size_t length, const Payload& payload, Slot** spare,
                         Lease* lease, Actions& actions) {
  if (overwritten_.empty()) {
    return write_locked(offset, length, payload, spare, lease, true, actions);
  }
  const uint64_t end = offset + length;
  Outcome outcome;
  for (uint64_t at = offset; at < end;) {
    uint64_t until = end;
    uint64_t newer_until = at;
    for (const Overwritten& newer : overwritten_) {
      if (newer.begin <= at) newer_until = std::max(newer_until, newer.end);
      if (newer.begin > at) until = std::min(until, newer.begin);
    }
    if (newer_until > at) {
      at = newer_until;
      continue;
    }
    outcome = write_locked(at, until - at, payload.part(at - offset, until - at), nullptr, lease,
                           true, actions);
    if (outcome.progress == Progress::Wait || outcome.error != 0) break;
    at = until;
  }
  return outcome;
}

Outcome File::write(uint64_t offset, size_t length, const Payload& payload, Slot** spare,
                    Lease* lease, Source source) {
  Actions actions;
  Outcome outcome;
  {
    const MutexLock lock(mutex_);
    outcome = source == Source::Page
                  ? write_page(offset, length, payload, spare, lease, actions)
                  : write_locked(offset, length, payload, spare, lease, true, actions);
    if (outcome.progress == Progress::Done && outcome.error == 0) {
      note_acknowledged(length);
      if (source == Source::Caller && length != 0 && has_kept_pages()) {
        outcome.overwrite = ++last_overwrite_;
        overwritten_.push_back({outcome.overwrite, offset, offset + length});
      }
    }
  }
  actions.run();
  return outcome;
}

void File::pages_dropped(uint64_t overwrite) {
  const MutexLock lock(mutex_);
  std::erase_if(overwritten_, [&](const Overwritten& each) { return each.overwrite == overwrite; });
}

bool File::is_being_overwritten() {
  const MutexLock lock(mutex_);
  return !overwritten_.empty();
}

// The kernel has none of these pages, else it would not ask: what it writes of them comes later.
void File::page_read(uint64_t begin, uint64_t end) {
  std::vector<Overwritten> left;
  for (const Overwritten& each : overwritten_) {
    if (each.begin < begin) left.push_back({each.overwrite, each.begin, std::min(each.end, begin)});
    if (each.end > end) left.push_back({each.overwrite, std::max(each.begin, end), each.end});
  }
  overwritten_ = std::move(left);
}

Pressure File::seal_for_pressure(Slot* slot, uint64_t chunk, bool may_grow) {
  Actions actions;
  Pressure pressure = Pressure::Kept;
  {
    const MutexLock lock(mutex_);
    if (open_slot(chunk) == slot && slot->lease == -1) {
      pressure = inline_mode_ ? leave_inline_for_pressure(may_grow, actions) : Pressure::Sealed;
      if (pressure == Pressure::Sealed || pressure == Pressure::Placed) seal(slot, actions);
    }
  }
  actions.run();
  return pressure;
}

Pressure File::leave_inline_for_pressure(bool may_grow, Actions& actions) {
  const bool promised = std::any_of(appenders_.begin(), appenders_.end(), [](const auto& entry) {
    return entry.second->blocks_left() != 0;
  });
  if (!may_grow && !promised) return Pressure::Refused;
  const Outcome outcome = leave_inline(-1, actions);
  if (outcome.progress == Progress::Wait) return Pressure::Growing;
  return outcome.error == 0 ? Pressure::Placed : Pressure::Refused;
}

}  // namespace fpfs
