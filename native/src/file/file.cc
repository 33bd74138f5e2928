// Lifecycle and attributes of a file; slots entering and leaving its chains.
#include "file/file.h"

#include <algorithm>
#include <cstring>
#include <ctime>

namespace fpfs {

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME_COARSE, &now);  // as the kernel's own file times
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

File::File(Plane& plane, uint64_t ino, Placement placement)
    : plane_(plane),
      ino_(ino),
      chunk_bytes_(placement.chunk_bytes),
      placement_(std::move(placement)) {}

Status File::load(uint64_t size, int64_t mtime_ns, int64_t ctime_ns,
                  std::optional<std::string> content,
                  const std::vector<std::pair<uint32_t, std::string>>& segments) {
  const MutexLock lock(mutex_);
  return set_content(size, mtime_ns, ctime_ns, std::move(content), segments);
}

Status File::set_content(uint64_t size, int64_t mtime_ns, int64_t ctime_ns,
                         std::optional<std::string> content,
                         const std::vector<std::pair<uint32_t, std::string>>& segments) {
  size_ = committed_size_ = size;
  replaced_ = false;
  mtime_ns_ = mtime_ns;
  ctime_ns_ = ctime_ns;
  for (const auto& [index, blob] : segments) {
    if (Status status = map_.decode_segment(index, blob); !status.ok()) return status;
  }
  recorded_ = map_.objects();
  for (const auto& key : recorded_) objects_[key] = nullptr;  // opened by its first read
  inline_mode_ = map_.empty();
  inline_ = std::move(content).value_or(std::string());
  return {};
}

Status File::revert(uint64_t size, int64_t mtime_ns, int64_t ctime_ns,
                    std::optional<std::string> content,
                    const std::vector<std::pair<uint32_t, std::string>>& segments) {
  Actions actions;
  Status status;
  {
    const MutexLock lock(mutex_);
    if (draining_ || !barriers_.empty() || (!chains_.empty() && !inline_mode_)) {
      return Status(EBUSY, "inode has unsaved bytes");
    }
    shrink_staged(0, actions);  // inline content
    for (const auto& [number, entry] : appenders_) submit_trim(entry, actions);
    appenders_.clear();
    map_ = {};
    objects_.clear();
    unflushed_.clear();
    garbage_.clear();
    snapshot_segments_.clear();
    snapshot_garbage_.clear();
    snapshot_dead_.clear();
    lost_.clear();
    drain_error_ = 0;
    privileges_dropped_ = false;
    committed_sequence_ = ++sequence_;
    bytes_committed_ = bytes_in_snapshot_ = bytes_acknowledged_;
    oldest_ns_ = oldest_in_snapshot_ns_ = 0;
    settle(UINT64_MAX, actions);
    status = set_content(size, mtime_ns, ctime_ns, std::move(content), segments);
  }
  actions.run();
  return status;
}

File::Attributes File::attributes() {
  const MutexLock lock(mutex_);
  Attributes result;
  result.size = size_;
  result.mtime_ns = mtime_ns_;
  result.ctime_ns = ctime_ns_;
  result.privileges_dropped = privileges_dropped_;
  result.dirty = sequence_ != committed_sequence_;
  result.only_longer = result.dirty && !replaced_;
  uint64_t blocks = map_.block_count();
  for (const auto& [chunk, chain] : chains_) {
    for (const Slot* slot : chain) blocks += slot->reserved.count();
  }
  result.allocated_bytes = blocks * kBlockBytes;
  if (inline_mode_) {
    result.allocated_bytes = std::min<uint64_t>(size_, kInlineBytesMax);
  } else if (const uint64_t tail = size_ % kBlockBytes; tail != 0) {
    // The last block takes only what its bytes need.
    Extent last;
    if (map_.find(size_ / kBlockBytes, &last) && !last.place.unwritten) {
      result.allocated_bytes -=
          kBlockBytes - (tail + kIoAlignment - 1) / kIoAlignment * kIoAlignment;
    }
  }
  return result;
}

void File::set_times(std::optional<int64_t> mtime_ns, int64_t ctime_ns) {
  const MutexLock lock(mutex_);
  if (mtime_ns.has_value()) mtime_ns_ = *mtime_ns;
  ctime_ns_ = ctime_ns;
  // Those of a file without changes are the catalog's.
  if (sequence_ != committed_sequence_) note_state_now();
}

bool File::drop_privileges() {
  const MutexLock lock(mutex_);
  if (std::exchange(privileges_dropped_, true)) return false;
  note_state_now();
  return true;
}

void File::privileges_restored() {
  const MutexLock lock(mutex_);
  privileges_dropped_ = false;
}

File::Unsaved File::unsaved() {
  const MutexLock lock(mutex_);
  Unsaved result;
  result.bytes_acknowledged = bytes_acknowledged_;
  result.bytes_uncommitted = bytes_acknowledged_ - bytes_committed_;
  for (const auto& [chunk, chain] : chains_) {
    for (const Slot* slot : chain) {
      for (const auto& range : slot->ranges.all()) result.bytes_staged += range.end - range.begin;
    }
  }
  result.oldest_ns = oldest_in_snapshot_ns_ != 0 ? oldest_in_snapshot_ns_ : oldest_ns_;
  return result;
}

bool File::idle() {
  const MutexLock lock(mutex_);
  return is_idle();
}

bool File::is_idle() const {
  return sequence_ == committed_sequence_ && chains_.empty() && !draining_ && barriers_.empty();
}

int File::take_error(uint64_t* seen) {
  const MutexLock lock(mutex_);
  if (*seen == error_count_) return 0;
  *seen = error_count_;
  return error_;
}

bool File::has_error(uint64_t seen) {
  const MutexLock lock(mutex_);
  return seen != error_count_;
}

uint64_t File::error_count() {
  const MutexLock lock(mutex_);
  return error_count_;
}

void File::touch_times() {
  mtime_ns_ = ctime_ns_ = now_ns();
  ++sequence_;
}

void File::note_acknowledged(uint64_t bytes) {
  bytes_acknowledged_ += bytes;
  if (oldest_ns_ == 0) oldest_ns_ = monotonic_ns();
}

void File::note_replaced(uint64_t offset) {
  if (offset < committed_size_) replaced_ = true;
  if (offset < std::max(committed_size_, snapshot_size_)) replaced_since_snapshot_ = true;
}

Slot* File::open_slot(uint64_t chunk) {
  const auto it = chains_.find(chunk);
  if (it == chains_.end() || it->second.back()->sealed || it->second.back()->seal_wanted) {
    return nullptr;
  }
  return it->second.back();
}

void File::attach(Slot* slot, uint64_t chunk) {
  slot->file = shared_from_this();
  slot->chunk = chunk;
  slot->epoch = epoch_;
  slot->opened_ns = plane_.tracer().watches(ino_) ? monotonic_ns() : 0;
  chains_[chunk].push_back(slot);
  ++slots_held_;
  plane_.arena().age_add(slot);
}

void File::detach(Slot* slot) {
  const auto it = chains_.find(slot->chunk);
  Chain& chain = it->second;
  chain.erase(std::find(chain.begin(), chain.end(), slot));
  --slots_held_;
  if (chain.empty()) chains_.erase(it);
}

// The slot's bytes are elsewhere or unwanted: back to the arena, unless a reader or a leaseholder
// still needs its memory.
void File::release_slot(Slot* slot, Actions& actions) {
  if (const auto it = appenders_.find(slot->device); it != appenders_.end()) {
    it->second->reserved_blocks -=
        std::min<uint64_t>(it->second->reserved_blocks, slot->reserved.count());
  }
  slot->reserved.reset();
  plane_.arena().age_remove(slot);
  if (slot->lease == -1 && slot->pins == 0) {
    plane_.arena().give(slot);
    actions.add([this] { plane_.wake(); });
    return;
  }
  // Who takes the arena over must not put it over what is written until then.
  plane_.arena().publish(slot, arena::SlotState::Free, 0, 0, 0, 0);
  if (slot->lease != -1) {
    slot->orphan = true;
  } else {
    slot->give_when_unpinned = true;
  }
}

void File::record_error(int error, const std::string& what) {
  error_ = told(error);
  ++error_count_;
  drain_error_ = error_;
  say_once(40, what + ": " + std::strerror(error));
}

void File::say_once(int level, const std::string& what) {
  if (!said_.insert(what).second) return;
  plane_.log(level, "inode " + std::to_string(ino_) + ": " + what);
}

// Takes a device out of use for errors that are its own. Space, missing objects and descriptors are
// no verdict on it.
void File::blame(uint16_t device, int error) {
  switch (error) {
    case EIO:
    case EROFS:
    case ENXIO:
    case ENODEV:
    case ESHUTDOWN:
    case EUCLEAN:
    case ESTALE:
      return plane_.mark_device_failed(device, error);
    default:
      return;
  }
}

int File::told(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
    case ENXIO:
    case ENODEV:
    case ESHUTDOWN:
    case EUCLEAN:
    case ESTALE:
      return EIO;
    default:
      return error;
  }
}

FileState File::state() { return {ino_, size_, mtime_ns_, ctime_ns_, privileges_dropped_}; }

bool File::note(const std::function<Status(Journal&, const FileState&)>& enter) {
  const Status status = enter(plane_.arena().journal(), state());
  if (!status.ok()) {
    say_once(40, "what would happen to its changes if the server died is not known: " +
                     status.message());
  }
  return status.ok();
}

void File::note_state_now() {
  note([](Journal& journal, const FileState& state) {
    return journal.note(state, arena::Change::None);
  });
}

void File::set_flow(const Flow& flow) {
  ack_ = flow.ack;
  cached_ = flow.cached;
  read_ahead_ = flow.read_ahead;
  Actions actions;
  {
    const MutexLock lock(mutex_);
    depth_ = flow.depth;
    buffers_ = flow.buffers;
    for (const auto& [chunk, chain] : chains_) maybe_issue(chain.front(), actions);
  }
  actions.run();
}

uint64_t File::sequence() {
  const MutexLock lock(mutex_);
  return sequence_;
}

Status File::place(Placement placement) {
  const MutexLock lock(mutex_);
  if (!chains_.empty() || !recovered_slots_.empty()) {
    return Status(EBUSY, "chunks of another place are staged");
  }
  chunk_bytes_ = placement.chunk_bytes;
  placement_ = std::move(placement);
  return {};
}

void File::begin() {
  const MutexLock lock(mutex_);
  if (sequence_ != committed_sequence_) return;
  ++sequence_;
  note_state_now();
}

void File::refused(uint64_t offset, uint64_t length) {
  const MutexLock lock(mutex_);
  refused_begin_ = lacks_refused() ? std::min<uint64_t>(refused_begin_, offset) : offset;
  refused_end_ = std::max<uint64_t>(refused_end_, offset + length);
}

void File::accepted(uint64_t offset, uint64_t length) {
  if (!lacks_refused()) return;
  const MutexLock lock(mutex_);
  if (offset > refused_begin_ || offset + length <= refused_begin_) return;
  refused_begin_ = offset + length;
  if (refused_begin_ >= refused_end_) refused_end_ = 0;
}

void File::closed(int killed_by) {
  const MutexLock lock(mutex_);
  refused_end_ = 0;
  if (sequence_ == committed_sequence_) return;
  note([killed_by](Journal& journal, const FileState& state) {
    return journal.note_closed(state, killed_by);
  });
}

void File::publish(Slot* slot, arena::SlotState state) {
  plane_.arena().publish(slot, state, ino_, placement_.chunk_bytes, size_, mtime_ns_);
}

}  // namespace fpfs
