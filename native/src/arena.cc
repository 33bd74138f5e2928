#include "arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "available_memory.h"
#include "crc32c.h"
#include "huge_pages.h"

namespace fpfs {
namespace {

constexpr uint64_t kPage = 4096;

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

void copy_id(char (&to)[64], const std::string& from) {
  const size_t n = std::min(from.size(), sizeof to - 1);
  std::memcpy(to, from.data(), n);
  std::memset(to + n, 0, sizeof to - n);
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

// Writes `record` into the older of its two copies: the CRC last, so that a torn copy is not taken.
template <typename Record>
void write_record(Record* slot, Record record) {
  record.crc = crc32c(0, reinterpret_cast<const char*>(&record), offsetof(Record, crc));
  const uint32_t crc = record.crc;
  record.crc = ~crc;
  *slot = record;
  std::atomic_ref<uint32_t>(slot->crc).store(crc, std::memory_order_release);
}

// Whether the file's filesystem has so much free. One without blocks of its own has no limit.
bool fits(int fd, uint64_t bytes) {
  struct statvfs space {};
  if (fstatvfs(fd, &space) != 0 || space.f_blocks == 0) return true;
  return uint64_t{space.f_bavail} * space.f_frsize >= bytes;
}

}  // namespace

void RangeSet::add(uint32_t begin, uint32_t end) {
  // The streaming case: the new range continues the last one.
  if (!ranges_.empty() && ranges_.back().end == begin) {
    ranges_.back().end = end;
    return;
  }
  auto first =
      std::find_if(ranges_.begin(), ranges_.end(), [&](const Range& r) { return r.end >= begin; });
  auto last = first;
  for (; last != ranges_.end() && last->begin <= end; ++last) {
    begin = std::min(begin, last->begin);
    end = std::max(end, last->end);
  }
  first = ranges_.erase(first, last);
  ranges_.insert(first, Range{begin, end});
}

bool RangeSet::would_exceed(uint32_t begin, uint32_t end, size_t limit) const {
  if (ranges_.size() < limit) return false;
  return std::none_of(ranges_.begin(), ranges_.end(),
                      [&](const Range& r) { return r.end >= begin && r.begin <= end; });
}

void RangeSet::clip(uint32_t end) {
  while (!ranges_.empty() && ranges_.back().begin >= end) ranges_.pop_back();
  if (!ranges_.empty()) ranges_.back().end = std::min(ranges_.back().end, end);
}

bool RangeSet::covers(uint32_t begin, uint32_t end) const {
  return std::any_of(ranges_.begin(), ranges_.end(),
                     [&](const Range& r) { return r.begin <= begin && end <= r.end; });
}

bool RangeSet::intersects(uint32_t begin, uint32_t end) const {
  return std::any_of(ranges_.begin(), ranges_.end(),
                     [&](const Range& r) { return r.begin < end && begin < r.end; });
}

uint32_t RangeSet::free_until(uint32_t offset, uint32_t limit) const {
  for (const Range& r : ranges_) {
    if (r.begin <= offset && offset < r.end) return offset;
    if (r.begin > offset) return std::min(limit, r.begin);
  }
  return limit;
}

uint32_t RangeSet::taken_until(uint32_t offset) const {
  for (const Range& r : ranges_) {
    if (r.begin <= offset && offset < r.end) return r.end;
  }
  return offset;
}

Result<std::unique_ptr<Arena>> Arena::create(const Config& config, std::string* warning) {
  std::unique_ptr<Arena> arena(new Arena());
  if (Status status = arena->map(config, warning); !status.ok()) {
    // Only a file of our own: an existing one was not opened.
    if (arena->fd_ >= 0) arena->remove();
    return status;
  }
  return arena;
}

Status Arena::map(const Config& config, std::string* warning) {
  slot_bytes_ = config.slot_bytes;
  const uint64_t slot_count = config.staging_bytes / slot_bytes_;
  const uint64_t slots_at = kPage;
  const uint64_t handles_at =
      round_up(slots_at + slot_count * 2 * sizeof(arena::SlotRecord), kPage);
  const uint64_t data_at =
      round_up(handles_at + arena::kHandlesMax * sizeof(arena::HandleRecord), slot_bytes_);
  mapped_bytes_ = data_at + slot_count * slot_bytes_;

  path_ = config.path;
  if (path_.empty()) {
    fd_ = memfd_create("fpfs-staging", MFD_CLOEXEC);
  } else {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  }
  if (fd_ < 0) return Status::from_errno("staging arena " + path_);
  if (Status status = allocate(); !status.ok()) return status;
  pinned_ = mlock(base_, mapped_bytes_) == 0;
  if (!pinned_) {
    *warning = "staging memory is not pinned (" + std::string(std::strerror(errno)) +
               "): raise the memory lock limit (ulimit -l) to " +
               std::to_string(mapped_bytes_ / 1024) + " KiB for steady write times";
  }

  slot_records_ = reinterpret_cast<arena::SlotRecord*>(base_ + slots_at);
  handle_records_ = reinterpret_cast<arena::HandleRecord*>(base_ + handles_at);
  data_ = base_ + data_at;
  auto* header = reinterpret_cast<arena::Header*>(base_);
  *header = arena::Header{};
  header->magic = arena::kMagic;
  header->format = arena::kFormat;
  header->header_bytes = sizeof(arena::Header);
  copy_id(header->filesystem_id, config.filesystem_id);
  copy_id(header->boot_id, boot_id());
  header->slot_bytes = slot_bytes_;
  header->slot_count = slot_count;
  header->data_offset = data_at;
  header->tables[0] = {arena::Table::Slots, sizeof(arena::SlotRecord), slots_at, slot_count * 2};
  header->tables[1] = {arena::Table::Handles, sizeof(arena::HandleRecord), handles_at,
                       arena::kHandlesMax};
  header->crc = crc32c(0, base_, offsetof(arena::Header, crc));

  const MutexLock lock(mutex_);
  slots_ = std::vector<Slot>(slot_count);
  for (uint64_t i = slot_count; i-- > 0;) {
    slots_[i].index = static_cast<uint32_t>(i);
    slots_[i].data = data_ + i * slot_bytes_;
    free_.push_back(&slots_[i]);
  }
  for (uint32_t i = arena::kHandlesMax; i-- > 0;) free_handles_.push_back(i);
  return {};
}

Status Arena::cannot_allocate(int error) const {
  return Status(error, "staging arena " + path_ + ": cannot allocate " +
                           std::to_string(mapped_bytes_) + " bytes: " + std::strerror(error));
}

// Allocating now turns a full tmpfs into an error here instead of a SIGBUS later. Looking first
// keeps an arena that does not fit from filling the memory before that, and a tmpfs that may hold
// more than there is (half of the memory is only its default) from having the server killed.
Status Arena::allocate() {
  if (ftruncate(fd_, static_cast<off_t>(mapped_bytes_)) != 0) return cannot_allocate(errno);
  if (!fits(fd_, mapped_bytes_)) return cannot_allocate(ENOSPC);
  if (mapped_bytes_ > available_memory()) return cannot_allocate(ENOMEM);
  base_ = map_shared(fd_, mapped_bytes_);
  if (base_ == nullptr) return Status::from_errno("staging arena: mmap");
  allocate_huge_pages(fd_, base_, mapped_bytes_);
  if (const int error = posix_fallocate(fd_, 0, static_cast<off_t>(mapped_bytes_)); error != 0) {
    return cannot_allocate(error);
  }
  // The same mapping once more, with all of its pages.
  void* populated = mmap(base_, mapped_bytes_, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd_, 0);
  return populated == MAP_FAILED ? Status::from_errno("staging arena: mmap") : Status();
}

Arena::~Arena() {
  if (base_ != nullptr) munmap(base_, mapped_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

void Arena::remove() {
  if (!path_.empty()) ::unlink(path_.c_str());
}

Slot* Arena::take() {
  const MutexLock lock(mutex_);
  if (free_.empty()) return nullptr;
  Slot* slot = free_.back();
  free_.pop_back();
  return slot;
}

void Arena::give(Slot* slot) {
  age_remove(slot);  // before the file goes: oldest() reads it under the lock
  publish(slot, arena::SlotState::Free, 0, 0, 0, 0);
  slot->file.reset();
  slot->chunk = 0;
  slot->ranges.clear();
  slot->reserved.reset();
  slot->written.clear();
  slot->pending_io = 0;
  slot->io_error = 0;
  slot->lease = -1;
  slot->seal_wanted = slot->sealed = slot->issued = slot->orphan = slot->give_when_unpinned = false;
  const MutexLock lock(mutex_);
  free_.push_back(slot);
}

uint64_t Arena::free_count() const {
  const MutexLock lock(mutex_);
  return free_.size();
}

uint64_t Arena::aged_count() const {
  const MutexLock lock(mutex_);
  return aged_;
}

void Arena::age_add(Slot* slot) {
  const MutexLock lock(mutex_);
  if (slot->aged) return;
  slot->aged = true;
  ++aged_;
  slot->older = newest_;
  slot->newer = nullptr;
  (newest_ != nullptr ? newest_->newer : oldest_) = slot;
  newest_ = slot;
}

void Arena::age_unlink(Slot* slot) {
  if (!slot->aged) return;
  slot->aged = false;
  --aged_;
  (slot->older != nullptr ? slot->older->newer : oldest_) = slot->newer;
  (slot->newer != nullptr ? slot->newer->older : newest_) = slot->older;
  slot->older = slot->newer = nullptr;
}

void Arena::age_remove(Slot* slot) {
  const MutexLock lock(mutex_);
  age_unlink(slot);
}

std::vector<Arena::Aged> Arena::oldest(size_t count) {
  std::vector<Aged> result;
  const MutexLock lock(mutex_);
  for (Slot* slot = oldest_; slot != nullptr && result.size() < count; slot = slot->newer) {
    result.push_back({slot->file, slot, slot->chunk});
  }
  return result;
}

void Arena::publish(Slot* slot, arena::SlotState state, uint64_t ino, uint64_t chunk_bytes,
                    uint64_t file_size, int64_t mtime_ns) {
  arena::SlotRecord record{};
  record.sequence = sequence_.fetch_add(1, std::memory_order_relaxed);
  record.ino = ino;
  record.chunk = slot->chunk;
  record.chunk_bytes = chunk_bytes;
  record.file_size = file_size;
  record.mtime_ns = static_cast<uint64_t>(mtime_ns);
  record.state = state;
  if (state != arena::SlotState::Free) {
    record.range_count = static_cast<uint32_t>(slot->ranges.count());
    std::copy(slot->ranges.all().begin(), slot->ranges.all().end(), record.ranges);
  }
  slot->record_copy ^= 1;
  write_record(&slot_records_[slot->index * 2 + slot->record_copy], record);
}

void Arena::write_handle(uint32_t index, uint64_t handle, uint64_t ino, uint32_t flags) {
  arena::HandleRecord record{};
  record.sequence = sequence_.fetch_add(1, std::memory_order_relaxed);
  record.handle = handle;
  record.ino = ino;
  record.flags = flags;
  write_record(&handle_records_[index], record);
}

Status Arena::record_handle(uint64_t handle, uint64_t ino, uint32_t flags) {
  const MutexLock lock(mutex_);
  if (free_handles_.empty()) {
    return Status(ENFILE, "more than " + std::to_string(arena::kHandlesMax) + " open handles");
  }
  const uint32_t index = free_handles_.back();
  free_handles_.pop_back();
  const auto entry = std::make_pair(handle, index);
  handles_.insert(std::upper_bound(handles_.begin(), handles_.end(), entry), entry);
  write_handle(index, handle, ino, flags);
  return {};
}

void Arena::forget_handle(uint64_t handle) {
  const MutexLock lock(mutex_);
  const auto it =
      std::lower_bound(handles_.begin(), handles_.end(), std::make_pair(handle, uint32_t{0}));
  if (it == handles_.end() || it->first != handle) return;
  write_handle(it->second, 0, 0, 0);
  free_handles_.push_back(it->second);
  handles_.erase(it);
}

}  // namespace fpfs
