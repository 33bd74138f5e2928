#include "staging/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>

#include "base/available_memory.h"
#include "base/crc32c.h"
#include "base/huge_pages.h"

namespace fpfs {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kSlotsAt = kPage;
constexpr uint64_t kJournalAreaBytesMax = uint64_t{1} << 35;  // what its published end can tell

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
  // The word that names the other copy was stored by a release, which later stores may pass.
  std::atomic_thread_fence(std::memory_order_release);
  *slot = record;
  std::atomic_ref<uint32_t>(slot->crc).store(crc, std::memory_order_release);
}

// The magic last: without it the arena was never finished, whatever else is there.
void write_header(arena::Header* to, arena::Header header) {
  header.magic = arena::kMagic;
  header.crc = crc32c(0, &header, offsetof(arena::Header, crc));
  header.magic = 0;
  *to = header;
  std::atomic_ref(to->magic).store(arena::kMagic, std::memory_order_release);
}

// Whether an unsound record may be of an open file: not where a kill tore it, for then nobody was
// told of it, nor where nearly nothing is in it. One that may be written through has its handle,
// its inode and its flags.
bool may_be_open(const arena::HandleRecord& record) {
  if (record.sequence == 0) return false;
  return std::popcount(record.handle) + std::popcount(record.ino) + std::popcount(record.flags) +
             std::popcount(record.request) >
         1;
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

Result<std::unique_ptr<Arena>> Arena::attach(const Config& config, int fd, Remains* remains,
                                             std::string* warning) {
  std::unique_ptr<Arena> arena(new Arena());
  arena->fd_ = fd;
  if (Status status = arena->map_existing(config, remains, warning); !status.ok()) return status;
  return arena;
}

// Where everything lies, from the number of slots and their size.
void Arena::lay_out(uint64_t slot_count) {
  published_at_ = kSlotsAt + slot_count * 2 * sizeof(arena::SlotRecord);
  handles_at_ = round_up(published_at_ + slot_count * sizeof(arena::PublishedWord), kPage);
  requests_at_ = round_up(handles_at_ + arena::kHandlesMax * sizeof(arena::HandleRecord), kPage);
  data_at_ =
      round_up(requests_at_ + arena::kRequestsMax * sizeof(arena::RequestRecord), slot_bytes_);
  fixed_bytes_ = data_at_ + slot_count * slot_bytes_;
  mapped_bytes_ = fixed_bytes_ + 2 * journal_area_bytes_;
}

void Arena::pin(std::string* warning) {
  pinned_ = mlock(base_, fixed_bytes_) == 0;
  if (!pinned_) {
    *warning = "staging memory is not pinned (" + std::string(std::strerror(errno)) +
               "): raise the memory lock limit (ulimit -l) to " +
               std::to_string(fixed_bytes_ / 1024) + " KiB for steady write times";
  }
}

void Arena::set_up_slots(uint64_t slot_count) {
  slot_records_ = reinterpret_cast<arena::SlotRecord*>(base_ + kSlotsAt);
  published_ = reinterpret_cast<arena::PublishedWord*>(base_ + published_at_);
  handle_records_ = reinterpret_cast<arena::HandleRecord*>(base_ + handles_at_);
  requests_ = Requests(reinterpret_cast<arena::RequestRecord*>(base_ + requests_at_));
  data_ = base_ + data_at_;
  slots_ = std::vector<Slot>(slot_count);
  for (uint64_t i = 0; i < slot_count; ++i) {
    slots_[i].index = static_cast<uint32_t>(i);
    slots_[i].data = data_ + i * slot_bytes_;
  }
  journal_ = std::make_unique<Journal>(fd_, base_ + fixed_bytes_, fixed_bytes_, journal_area_bytes_,
                                       sequence_);
}

Status Arena::map(const Config& config, std::string* warning) {
  slot_bytes_ = config.slot_bytes;
  journal_area_bytes_ = config.journal_area_bytes;
  const uint64_t slot_count = config.staging_bytes / slot_bytes_;
  lay_out(slot_count);
  path_ = config.path;
  if (path_.empty()) {
    fd_ = memfd_create("fpfs-staging", MFD_CLOEXEC);
  } else {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  }
  if (fd_ < 0) return Status::from_errno("staging arena " + path_);
  if (Status status = allocate(); !status.ok()) return status;
  pin(warning);

  const MutexLock lock(mutex_);
  set_up_slots(slot_count);
  for (uint64_t i = slot_count; i-- > 0;) free_.push_back(&slots_[i]);
  for (uint32_t i = arena::kHandlesMax; i-- > 0;) free_handles_.push_back(i);
  if (Status status = journal_->format(); !status.ok()) return cannot_allocate(status.error());

  arena::Header header{};
  header.format = arena::kFormat;
  header.header_bytes = sizeof(arena::Header);
  copy_id(header.filesystem_id, config.filesystem_id);
  copy_id(header.boot_id, boot_id());
  header.slot_bytes = slot_bytes_;
  header.slot_count = slot_count;
  header.data_offset = data_at_;
  header.tables[0] = {arena::Table::Slots, sizeof(arena::SlotRecord), kSlotsAt, slot_count * 2};
  header.tables[1] = {arena::Table::Handles, sizeof(arena::HandleRecord), handles_at_,
                      arena::kHandlesMax};
  header.tables[2] = {arena::Table::Requests, sizeof(arena::RequestRecord), requests_at_,
                      arena::kRequestsMax};
  header.tables[3] = {arena::Table::Journal, 0, fixed_bytes_, journal_area_bytes_};
  header.tables[4] = {arena::Table::Journal, 0, fixed_bytes_ + journal_area_bytes_,
                      journal_area_bytes_};
  header.tables[5] = {arena::Table::Published, sizeof(arena::PublishedWord), published_at_,
                      slot_count};
  write_header(reinterpret_cast<arena::Header*>(base_), header);
  return {};
}

Status Arena::check_header(const arena::Header& header, const Config& config) const {
  const auto refused = [&](const char* why) {
    return Status(ESTALE, "staging arena " + path_ + " cannot be taken over: " + why);
  };
  if (header.magic != arena::kMagic) return refused("it is none");
  if (header.crc != crc32c(0, &header, offsetof(arena::Header, crc))) return refused("checksum");
  if (header.format != arena::kFormat) return refused("another version of fpfs made it");
  char expected[64];
  copy_id(expected, config.filesystem_id);
  if (std::memcmp(header.filesystem_id, expected, sizeof expected) != 0) {
    return refused("it is another filesystem's");
  }
  copy_id(expected, boot_id());
  if (std::memcmp(header.boot_id, expected, sizeof expected) != 0) {
    return refused("it was made before the machine was started");
  }
  const uint64_t slot_bytes_max = kSlotBlocksMax * kBlockBytes;
  if (header.slot_bytes == 0 || header.slot_bytes % kBlockBytes != 0 ||
      header.slot_bytes > slot_bytes_max || header.slot_count == 0 ||
      header.slot_count > UINT32_MAX || header.tables[3].kind != arena::Table::Journal ||
      header.tables[3].count % kPage != 0 || header.tables[3].count > kJournalAreaBytesMax) {
    return refused("its sizes are impossible");
  }
  return {};
}

Status Arena::map_existing(const Config& config, Remains* remains, std::string* warning) {
  path_ = config.path;
  if (fd_ < 0) fd_ = ::open(path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd_ < 0) return Status::from_errno("staging arena " + path_);
  arena::Header header{};
  const ssize_t there = pread(fd_, &header, sizeof header, 0);
  if (there < 0) return Status::from_errno("staging arena " + path_);
  // The header is written last.
  if (header.magic == 0) return Status(ENODATA, "staging arena " + path_ + " was never finished");
  if (Status status = check_header(header, config); !status.ok()) return status;
  slot_bytes_ = header.slot_bytes;
  journal_area_bytes_ = header.tables[3].count;
  lay_out(header.slot_count);
  struct stat file {};
  // Its memory is all there from the beginning: mapping it asks for none.
  const auto bytes_there = [&] { return static_cast<uint64_t>(file.st_blocks) * 512; };
  if (fstat(fd_, &file) != 0 || static_cast<uint64_t>(file.st_size) != mapped_bytes_ ||
      header.data_offset != data_at_ || bytes_there() < fixed_bytes_) {
    return Status(ESTALE, "staging arena " + path_ + " cannot be taken over: its size is wrong");
  }
  base_ = map_shared(fd_, mapped_bytes_);
  if (base_ == nullptr) return Status::from_errno("staging arena: mmap");
  if (Status status = populate(); !status.ok()) return status;
  pin(warning);
  const MutexLock lock(mutex_);
  set_up_slots(header.slot_count);
  find_slots(remains);
  find_handles(remains);
  remains->changes = journal_->recover(&remains->damage);
  for (const JournalEntry& entry : remains->changes) {
    sequence_ = std::max<uint64_t>(sequence_, entry.sequence + 1);
  }
  return {};
}

// The copy that was published, or the other one where that is newer and whole: it was about to be.
// Where the published one is not sound, what it held is lost: the other copy is older.
arena::SlotRecord Arena::find_record(uint64_t slot, Remains* remains) {
  const arena::PublishedWord word = published_[slot];
  const auto published = static_cast<uint32_t>(word);
  arena::SlotRecord found{};
  bool is_there = !arena::is_published_word(word);  // a wrong bit in the word itself, or none yet
  std::optional<uint64_t> owner;
  for (const uint32_t copy : {0U, 1U}) {
    const arena::SlotRecord record = slot_records_[slot * 2 + copy];
    const bool sound = record.crc == crc32c(0, &record, offsetof(arena::SlotRecord, crc));
    if (sound && static_cast<uint32_t>(record.sequence) == published) is_there = true;
    if (!sound && record.ino_check == ino_check(record.ino)) {
      if (static_cast<uint32_t>(record.sequence) == published) owner = record.ino;
    }
    if (!sound || record.sequence < found.sequence) continue;
    found = record;
    slots_[slot].record_copy = copy;
  }
  sequence_ = std::max<uint64_t>(sequence_, found.sequence + 1);
  if (is_there) return found;
  remains->damage.push_back({"record of slot " + std::to_string(slot), owner});
  return {};
}

// Free slots are free again, and those whose record is damaged.
void Arena::find_slots(Remains* remains) {
  std::vector<Slot*> damaged;
  for (uint64_t i = slots_.size(); i-- > 0;) {
    const size_t known = remains->damage.size();
    const arena::SlotRecord found = find_record(i, remains);
    if (found.state == arena::SlotState::Free) {
      free_.push_back(&slots_[i]);
      if (remains->damage.size() != known) damaged.push_back(&slots_[i]);
      continue;
    }
    const uint32_t count = std::min(found.range_count, arena::kRangesMax);
    for (uint32_t range = 0; range < count; ++range) {
      const auto [begin, end] = found.ranges[range];
      if (begin < end && end <= slot_bytes_) slots_[i].ranges.add(begin, end);
    }
    slots_[i].chunk = found.chunk;
    remains->slots.push_back({&slots_[i], found});
  }
  // Told of once, and not by the next one again.
  for (Slot* slot : damaged) publish(slot, arena::SlotState::Free, 0, 0, 0, 0);
  std::sort(remains->slots.begin(), remains->slots.end(),
            [](const StagedSlot& a, const StagedSlot& b) {
              return a.record.sequence < b.record.sequence;
            });
}

void Arena::find_handles(Remains* remains) {
  for (uint32_t i = arena::kHandlesMax; i-- > 0;) {
    const arena::HandleRecord record = handle_records_[i];
    const bool sound = record.crc == crc32c(0, &record, offsetof(arena::HandleRecord, crc));
    if (sound) sequence_ = std::max<uint64_t>(sequence_, record.sequence + 1);
    if (!sound || record.handle == 0) {
      free_handles_.push_back(i);
      if (!sound && may_be_open(record)) {
        remains->handles_damaged = true;
        remains->damage.push_back({"record " + std::to_string(i) + " of open files", 0});
        handle_records_[i] = {};
      }
      continue;
    }
    handles_.emplace_back(record.handle, i);
    remains->handles.push_back(record);
  }
  std::sort(handles_.begin(), handles_.end());
}

Status Arena::cannot_allocate(int error) const {
  return Status(error, "staging arena " + path_ + ": cannot allocate " +
                           std::to_string(fixed_bytes_) + " bytes: " + std::strerror(error));
}

// Allocating now turns a full tmpfs into an error here instead of a SIGBUS later. Looking first
// keeps an arena that does not fit from filling the memory before that, and a tmpfs that may hold
// more than there is (half of the memory is only its default) from having the server killed.
Status Arena::allocate() {
  if (ftruncate(fd_, static_cast<off_t>(mapped_bytes_)) != 0) return cannot_allocate(errno);
  if (!fits(fd_, fixed_bytes_)) return cannot_allocate(ENOSPC);
  if (fixed_bytes_ > available_memory()) return cannot_allocate(ENOMEM);
  base_ = map_shared(fd_, mapped_bytes_);
  if (base_ == nullptr) return Status::from_errno("staging arena: mmap");
  allocate_huge_pages(fd_, base_, fixed_bytes_);
  if (const int error = posix_fallocate(fd_, 0, static_cast<off_t>(fixed_bytes_)); error != 0) {
    return cannot_allocate(error);
  }
  return populate();
}

// The same mapping once more, with all of its pages.
Status Arena::populate() {
  void* populated = mmap(base_, fixed_bytes_, PROT_READ | PROT_WRITE,
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
  record.ino_check = ino_check(ino);
  slot->record_copy ^= 1;
  write_record(&slot_records_[slot->index * 2 + slot->record_copy], record);
  std::atomic_ref(published_[slot->index])
      .store(arena::published_word(record.sequence), std::memory_order_release);
}

// As long as the sequence is 0, the record is torn: it is 0 before the rest changes, and until all
// of it has.
void Arena::write_handle(uint32_t index, arena::HandleRecord record) {
  record.sequence = sequence_.fetch_add(1, std::memory_order_relaxed);
  record.crc = crc32c(0, &record, offsetof(arena::HandleRecord, crc));
  arena::HandleRecord& there = handle_records_[index];
  const auto store = [](auto& field, auto value) {
    std::atomic_ref(field).store(value, std::memory_order_relaxed);
  };
  store(there.sequence, uint64_t{0});
  // A release store may be passed by what follows it. Atomic stores do not pass a release fence
  // (Boehm, "Can seqlocks get along with programming language memory models?", 2012).
  std::atomic_thread_fence(std::memory_order_release);
  store(there.handle, record.handle);
  store(there.ino, record.ino);
  store(there.flags, record.flags);
  store(there.request, record.request);
  store(there.crc, record.crc);
  store(there.killed_by, record.killed_by);
  std::atomic_ref(there.sequence).store(record.sequence, std::memory_order_release);
}

Status Arena::record_handle(const arena::HandleRecord& record) {
  const MutexLock lock(mutex_);
  if (free_handles_.empty()) {
    return Status(ENFILE, "more than " + std::to_string(arena::kHandlesMax) + " open handles");
  }
  const uint32_t index = free_handles_.back();
  free_handles_.pop_back();
  const auto entry = std::make_pair(record.handle, index);
  handles_.insert(std::upper_bound(handles_.begin(), handles_.end(), entry), entry);
  write_handle(index, record);
  return {};
}

void Arena::record_connection(const fuse_init_in& init) {
  static_assert(sizeof init == sizeof(arena::Connection::init));
  arena::Connection record{};
  std::memcpy(record.init, &init, sizeof init);
  write_record(reinterpret_cast<arena::Connection*>(base_ + arena::kConnectionAt), record);
}

std::optional<fuse_init_in> Arena::connection() const {
  arena::Connection record{};
  std::memcpy(&record, base_ + arena::kConnectionAt, sizeof record);
  if (record.crc != crc32c(0, &record, offsetof(arena::Connection, crc))) return std::nullopt;
  fuse_init_in init{};
  std::memcpy(&init, record.init, sizeof init);
  return init;
}

void Arena::record_end(uint64_t handle, int signal) {
  const MutexLock lock(mutex_);
  const auto it =
      std::lower_bound(handles_.begin(), handles_.end(), std::make_pair(handle, uint32_t{0}));
  if (it == handles_.end() || it->first != handle) return;
  std::atomic_ref<uint32_t>(handle_records_[it->second].killed_by)
      .store(arena::signal_word(signal), std::memory_order_release);
}

void Arena::forget_handle(uint64_t handle) {
  const MutexLock lock(mutex_);
  const auto it =
      std::lower_bound(handles_.begin(), handles_.end(), std::make_pair(handle, uint32_t{0}));
  if (it == handles_.end() || it->first != handle) return;
  write_handle(it->second, {});
  free_handles_.push_back(it->second);
  handles_.erase(it);
}

}  // namespace fpfs
