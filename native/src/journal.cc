#include "journal.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <optional>
#include <string>

#include "crc32c.h"

namespace fpfs {
namespace {

constexpr uint64_t kStepBytes = 1024 * 1024;  // of memory that an area takes at a time
constexpr uint64_t kFirst = sizeof(arena::JournalArea);

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

uint64_t record_bytes(uint64_t payload) {
  return round_up(sizeof(arena::ChangeHead) + payload, alignof(arena::ChangeHead));
}

uint32_t checksum(const char* record, uint64_t payload) {
  constexpr size_t kSkipped = sizeof(uint32_t);
  return crc32c(0, record + kSkipped, sizeof(arena::ChangeHead) - kSkipped + payload);
}

arena::ChangeExtent encode(const Extent& extent, uint16_t flags) {
  return {extent.block,        extent.count, extent.place.object, extent.place.object_block,
          extent.place.device, flags};
}

std::string_view bytes_of(const auto& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// The record at `at`, which ends before `end`; none when it is not whole.
std::optional<arena::ChangeHead> read_head(const char* at, const char* end, uint64_t generation) {
  arena::ChangeHead head{};
  if (static_cast<uint64_t>(end - at) < sizeof head) return std::nullopt;
  std::memcpy(&head, at, sizeof head);
  if (head.bytes > static_cast<uint64_t>(end - at) - sizeof head) return std::nullopt;
  if (head.generation != static_cast<uint32_t>(generation)) return std::nullopt;
  if (head.crc != checksum(at, head.bytes)) return std::nullopt;
  return head;
}

constexpr uint64_t kPayloadUnit = 8;

std::string encode(const std::vector<WrittenExtent>& extents) {
  std::string payload;
  for (const auto& [extent, checksums] : extents) {
    const uint16_t flags = extent.place.unwritten ? arena::kExtentUnwritten
                           : checksums.empty()    ? 0
                                                  : arena::kExtentChecksummed;
    payload += bytes_of(encode(extent, flags));
    payload.append(reinterpret_cast<const char*>(checksums.data()),
                   checksums.size() * sizeof(uint32_t));
    payload.resize(round_up(payload.size(), kPayloadUnit));
  }
  return payload;
}

// False where the payload says that it is longer than it is.
bool decode_extents(std::string_view payload, std::vector<WrittenExtent>& extents) {
  arena::ChangeExtent head{};
  while (payload.size() >= sizeof head) {
    std::memcpy(&head, payload.data(), sizeof head);
    payload.remove_prefix(sizeof head);
    const bool unwritten = head.flags == arena::kExtentUnwritten;
    WrittenExtent written{
        {head.block, head.count, Place{head.object, head.object_block, head.device, unwritten}},
        {}};
    if (head.flags == arena::kExtentChecksummed) {
      if (head.count > payload.size() / sizeof(uint32_t)) return false;
      written.checksums.resize(head.count);
      std::memcpy(written.checksums.data(), payload.data(), head.count * sizeof(uint32_t));
      payload.remove_prefix(
          std::min(payload.size(), round_up(head.count * sizeof(uint32_t), kPayloadUnit)));
    }
    extents.push_back(std::move(written));
  }
  return true;
}

JournalEntry decode(const arena::ChangeHead& head, const char* payload) {
  JournalEntry entry;
  entry.kind = head.kind;
  entry.sequence = head.sequence;
  entry.state = {head.ino, head.size, head.mtime_ns, head.ctime_ns,
                 (head.flags & arena::kPrivilegesDropped) != 0};
  if (head.kind == arena::Change::Closed) entry.killed_by = head.flags >> arena::kKilledByShift;
  if (head.kind == arena::Change::Extents || head.kind == arena::Change::Erase) {
    entry.is_possible = decode_extents({payload, head.bytes}, entry.extents);
  } else if (head.kind == arena::Change::Punch && head.bytes >= 2 * sizeof(uint64_t)) {
    std::memcpy(&entry.begin, payload, sizeof(uint64_t));
    std::memcpy(&entry.end, payload + sizeof(uint64_t), sizeof(uint64_t));
  }
  return entry;
}

}  // namespace

Journal::Journal(int fd, char* base, uint64_t offset, uint64_t area_bytes,
                 std::atomic<uint64_t>& sequence)
    : fd_(fd), base_(base), offset_(offset), area_bytes_(area_bytes), sequence_(sequence) {}

Status Journal::format() {
  const MutexLock lock(mutex_);
  for (const unsigned index : {0U, 1U}) {
    if (Status status = extend(index, kFirst); !status.ok()) return status;
    write_area(index, 0);
  }
  start_over();
  return {};
}

arena::JournalArea Journal::read_area(unsigned index) const {
  arena::JournalArea header{};
  std::memcpy(&header, area(index), sizeof header);
  if (header.complement != ~header.generation) header.generation = 0;
  return header;
}

void Journal::write_area(unsigned index, uint64_t generation) {
  auto* header = reinterpret_cast<arena::JournalArea*>(area(index));
  std::atomic_ref<uint64_t>(header->complement).store(~generation, std::memory_order_release);
  std::atomic_ref<uint64_t>(header->generation).store(generation, std::memory_order_release);
}

// Memory for the first `bytes` of an area. Asked for now, its lack is an error here and no SIGBUS.
Status Journal::extend(unsigned index, uint64_t bytes) {
  if (bytes <= there_[index]) return {};
  if (bytes > area_bytes_) return Status(ENOSPC, "the journal of pending contents is full");
  const uint64_t wanted = std::min(area_bytes_, round_up(bytes, kStepBytes));
  const auto from = static_cast<off_t>(offset_ + index * area_bytes_ + there_[index]);
  if (const int error = posix_fallocate(fd_, from, static_cast<off_t>(wanted - there_[index]));
      error != 0) {
    return Status(error, "no memory for the journal of pending contents");
  }
  there_[index] = wanted;
  return {};
}

Status Journal::make_room(uint64_t bytes) {
  if (end_ + bytes <= there_[current_]) return {};
  // Moving pays when at least half of the bytes need not be moved.
  if (live_bytes_ <= (end_ - kFirst) / 2 && compact() && end_ + bytes <= there_[current_])
    return {};
  return extend(current_, end_ + bytes);
}

void Journal::put(uint64_t at, arena::ChangeHead head, std::string_view payload) {
  char* to = area(current_) + at;
  head.generation = static_cast<uint32_t>(generation_);
  head.bytes = static_cast<uint32_t>(payload.size());
  head.crc = 0;
  std::memcpy(to, &head, sizeof head);
  if (!payload.empty()) std::memcpy(to + sizeof head, payload.data(), payload.size());
  auto* crc = reinterpret_cast<uint32_t*>(to);
  std::atomic_ref<uint32_t>(*crc).store(checksum(to, payload.size()), std::memory_order_release);
}

Status Journal::append(const FileState& state, arena::Change kind, std::string_view payload,
                       int killed_by) {
  const MutexLock lock(mutex_);
  const uint64_t bytes = record_bytes(payload.size());
  if (Status status = make_room(bytes); !status.ok()) return status;
  arena::ChangeHead head{};
  head.kind = kind;
  head.flags = static_cast<uint16_t>((state.privileges_dropped ? arena::kPrivilegesDropped : 0) |
                                     killed_by << arena::kKilledByShift);
  head.sequence = sequence_.fetch_add(1, std::memory_order_relaxed);
  head.ino = state.ino;
  head.size = state.size;
  head.mtime_ns = state.mtime_ns;
  head.ctime_ns = state.ctime_ns;
  put(end_, head, payload);
  live_[state.ino].push_back({end_, head.sequence, static_cast<uint32_t>(bytes)});
  live_bytes_ += bytes;
  end_ += bytes;
  return {};
}

Status Journal::note(const FileState& state, arena::Change kind) { return append(state, kind, {}); }

Status Journal::note_closed(const FileState& state, int killed_by) {
  return append(state, arena::Change::Closed, {}, killed_by);
}

Status Journal::note_extents(const FileState& state, const std::vector<WrittenExtent>& extents) {
  return append(state, arena::Change::Extents, encode(extents));
}

Status Journal::note_erased(const FileState& state, uint64_t block, uint64_t count) {
  const arena::ChangeExtent payload = encode(Extent{block, count, {}}, 0);
  return append(state, arena::Change::Erase, bytes_of(payload));
}

Status Journal::note_punched(const FileState& state, uint64_t begin, uint64_t end) {
  const uint64_t payload[2] = {begin, end};
  return append(state, arena::Change::Punch, bytes_of(payload));
}

void Journal::forget(uint64_t ino, uint64_t sequence) {
  const auto it = live_.find(ino);
  if (it == live_.end()) return;
  std::vector<Record>& records = it->second;
  const auto settled = std::find_if(records.begin(), records.end(),
                                    [&](const Record& r) { return r.sequence > sequence; });
  for (auto gone = records.begin(); gone != settled; ++gone) live_bytes_ -= gone->bytes;
  records.erase(records.begin(), settled);
  if (records.empty()) live_.erase(it);
}

void Journal::settle(uint64_t ino, uint64_t sequence) {
  const std::string_view payload = bytes_of(sequence);
  const MutexLock lock(mutex_);
  if (!live_.contains(ino)) return;
  forget(ino, sequence);
  if (live_bytes_ == 0) return start_over();
  const uint64_t bytes = record_bytes(payload.size());
  // Without room for this record a restart would replay changes that the catalog has: the same
  // content comes of it.
  if (!make_room(bytes).ok()) return;
  arena::ChangeHead head{};
  head.kind = arena::Change::Settled;
  head.sequence = sequence_.fetch_add(1, std::memory_order_relaxed);
  head.ino = ino;
  put(end_, head, payload);
  end_ += bytes;
}

// Nothing in the journal matters any more. A new generation ends what the area held.
void Journal::start_over() {
  live_.clear();
  live_bytes_ = 0;
  end_ = kFirst;
  write_area(current_, ++generation_);
}

// Moves what is not settled to the other area. False when there is no memory for it.
bool Journal::compact() {
  const unsigned from = current_;
  if (!extend(from ^ 1, kFirst + live_bytes_).ok()) return false;
  current_ = from ^ 1;
  ++generation_;
  end_ = kFirst;
  // In the order of the old area, which is that of the changes.
  std::vector<Record*> records;
  for (auto& [ino, list] : live_) {
    for (Record& record : list) records.push_back(&record);
  }
  std::sort(records.begin(), records.end(),
            [](const Record* a, const Record* b) { return a->at < b->at; });
  for (Record* record : records) {
    const char* old = area(from) + record->at;
    arena::ChangeHead head{};
    std::memcpy(&head, old, sizeof head);
    put(end_, head, {old + sizeof head, head.bytes});
    record->at = end_;
    end_ += record->bytes;
  }
  write_area(current_, generation_);
  write_area(from, 0);
  return true;
}

std::vector<JournalEntry> Journal::recover() {
  const MutexLock lock(mutex_);
  for (const unsigned index : {0U, 1U}) {
    const off_t at = static_cast<off_t>(offset_ + index * area_bytes_);
    const off_t hole = lseek(fd_, at, SEEK_HOLE);
    there_[index] = hole > at ? std::min(static_cast<uint64_t>(hole - at), area_bytes_) : 0;
  }
  const auto generation = [&](unsigned index) {
    mutex_.assert_held();
    return there_[index] < kFirst ? 0 : read_area(index).generation;
  };
  current_ = generation(1) > generation(0) ? 1 : 0;
  generation_ = generation(current_);
  std::vector<JournalEntry> entries;
  if (generation_ == 0) {  // it ended while it began anew: there was nothing in it
    start_over();
    return entries;
  }
  const char* const end = area(current_) + there_[current_];
  for (end_ = kFirst;;) {
    const char* at = area(current_) + end_;
    const auto head = read_head(at, end, generation_);
    if (!head.has_value()) break;
    const uint64_t bytes = record_bytes(head->bytes);
    if (head->kind == arena::Change::Settled) {
      uint64_t upto = 0;
      if (head->bytes == sizeof upto) std::memcpy(&upto, at + sizeof *head, sizeof upto);
      forget(head->ino, upto);
    } else {
      entries.push_back(decode(*head, at + sizeof *head));
      live_[head->ino].push_back({end_, head->sequence, static_cast<uint32_t>(bytes)});
      live_bytes_ += bytes;
    }
    end_ += bytes;
  }
  std::erase_if(entries, [&](const JournalEntry& entry) {
    mutex_.assert_held();
    const auto it = live_.find(entry.state.ino);
    return it == live_.end() || entry.sequence < it->second.front().sequence;
  });
  return entries;
}

uint64_t Journal::bytes_used() const {
  const MutexLock lock(mutex_);
  return end_ - kFirst;
}

}  // namespace fpfs
