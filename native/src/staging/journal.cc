#include "staging/journal.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "base/available_memory.h"
#include "base/crc32c.h"
#include "base/spans.h"

namespace fpfs {
namespace {

constexpr uint64_t kStepBytes = 1024 * 1024;      // of memory that an area takes at a time
constexpr uint64_t kKeptBytes = 16 * kStepBytes;  // that it keeps for the next: 100 GiB of chunks
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

struct WholeRecord {
  arena::ChangeHead head;
  bool is_void;
};

// The record at `at`, which ends before `end`; none when it is not whole.
std::optional<WholeRecord> read_record(const char* at, const char* end, uint64_t generation) {
  arena::ChangeHead head{};
  if (static_cast<uint64_t>(end - at) < sizeof head) return std::nullopt;
  std::memcpy(&head, at, sizeof head);
  if (head.bytes > static_cast<uint64_t>(end - at) - sizeof head) return std::nullopt;
  if (head.generation != static_cast<uint32_t>(generation)) return std::nullopt;
  const uint32_t crc = checksum(at, head.bytes);
  if (head.crc != crc && head.crc != arena::void_checksum(crc)) return std::nullopt;
  return WholeRecord{head, head.crc != crc};
}

// An area's generation, or the complement of one.
bool is_possible(uint64_t word) {
  return word % arena::kGenerationStep == 0 && word >> arena::kGenerationBits == 0;
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

uint32_t ino_check(uint64_t ino) { return crc32c(0, &ino, sizeof ino); }

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
  return header;
}

// 0: the area is unused, or was about to begin anew, with nothing in it. None: it is damaged.
std::optional<uint64_t> Journal::generation_of(unsigned index) const {
  if (there_[index] < kFirst) return 0;
  const arena::JournalArea header = read_area(index);
  const uint64_t other = ~header.complement;
  if (header.generation == other) return is_possible(other) ? std::optional(other) : std::nullopt;
  // Two that are possible are what a kill between two stores leaves.
  if (is_possible(header.generation) && is_possible(other)) return 0;
  if (is_possible(header.generation)) return header.generation;
  if (is_possible(other)) return other;
  return std::nullopt;
}

// The latest generation that an area may have records of, also of one that a kill ended in between.
uint64_t Journal::latest_generation() const {
  uint64_t latest = 0;
  for (const unsigned index : {0U, 1U}) {
    if (there_[index] < kFirst) continue;
    const arena::JournalArea header = read_area(index);
    for (const uint64_t word : {header.generation, ~header.complement}) {
      if (is_possible(word)) latest = std::max(latest, word);
    }
  }
  return latest;
}

// Stored after the records before it.
void Journal::publish_end() {
  auto* header = reinterpret_cast<arena::JournalArea*>(area(current_));
  std::atomic_ref(header->end)
      .store(arena::published_word(end_ / kPayloadUnit), std::memory_order_release);
}

// 0 where it is not known.
uint64_t Journal::published_end() const {
  const uint64_t word = read_area(current_).end;
  if (!arena::is_published_word(word)) return 0;
  const uint64_t end = static_cast<uint32_t>(word) * kPayloadUnit;
  return end <= there_[current_] ? end : 0;
}

// Until the generation is written, too, the area is unused.
void Journal::announce_area(unsigned index, uint64_t generation) {
  auto* header = reinterpret_cast<arena::JournalArea*>(area(index));
  std::atomic_ref<uint64_t>(header->complement).store(~generation, std::memory_order_release);
}

void Journal::write_area(unsigned index, uint64_t generation) {
  announce_area(index, generation);
  auto* header = reinterpret_cast<arena::JournalArea*>(area(index));
  std::atomic_ref<uint64_t>(header->generation).store(generation, std::memory_order_release);
}

// Memory for the first `bytes` of an area. Asked for now, its lack is an error here and no SIGBUS.
Status Journal::extend(unsigned index, uint64_t bytes) {
  if (bytes <= there_[index]) return {};
  if (bytes > area_bytes_) return Status(ENOSPC, "the journal of pending contents is full");
  const uint64_t wanted = std::min(area_bytes_, round_up(bytes, kStepBytes));
  const uint64_t more = wanted - there_[index];
  // A tmpfs may hold more than there is: who takes that is killed for it.
  int error = more > available_memory() ? ENOMEM : EINTR;
  const auto from = static_cast<off_t>(offset_ + index * area_bytes_ + there_[index]);
  while (error == EINTR) error = posix_fallocate(fd_, from, static_cast<off_t>(more));
  if (error != 0) return Status(error, "no memory for the journal of pending contents");
  there_[index] = wanted;
  return {};
}

// Memory behind `bytes` of an area goes back.
void Journal::give_back(unsigned index, uint64_t bytes) {
  if (bytes >= area_bytes_) return;
  const auto from = static_cast<off_t>(offset_ + index * area_bytes_ + bytes);
  if (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from,
                static_cast<off_t>(area_bytes_ - bytes)) == 0) {
    there_[index] = std::min(there_[index], bytes);
  }
}

// Of an area with nothing in it, what long contents took.
void Journal::shrink(unsigned index) {
  if (there_[index] > kKeptBytes) give_back(index, kKeptBytes);
}

// Whether `bytes` fit once the rest has moved, which pays when half of the bytes need not be moved.
bool Journal::moves_for(uint64_t bytes) {
  return live_bytes_ <= (end_ - kFirst) / 2 && compact() && end_ + bytes <= there_[current_];
}

Status Journal::make_room(uint64_t bytes) {
  if (end_ + bytes <= there_[current_] || moves_for(bytes)) return {};
  // Looking at all of them pays when there are twice as many.
  const uint64_t added = live_bytes_ - unreplaced_bytes_;
  if (added >= std::max(unreplaced_bytes_, kKeptBytes)) {
    forget_replaced();
    if (moves_for(bytes)) return {};
  }
  Status status = extend(current_, end_ + bytes);
  // When it cannot grow, an eighth more is worth a look.
  if (status.ok() || live_bytes_ - unreplaced_bytes_ < (end_ - kFirst) / 8) return status;
  forget_replaced();
  return compact() ? extend(current_, end_ + bytes) : std::move(status);
}

void Journal::put(uint64_t at, arena::ChangeHead head, std::string_view payload) {
  char* to = area(current_) + at;
  head.generation = static_cast<uint32_t>(generation_);
  head.bytes = static_cast<uint32_t>(payload.size());
  head.ino_check = ino_check(head.ino);
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
  publish_end();
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

std::vector<Journal::Record> Journal::forget(uint64_t ino, uint64_t sequence) {
  const auto it = live_.find(ino);
  if (it == live_.end()) return {};
  std::vector<Record>& records = it->second;
  const auto left = std::find_if(records.begin(), records.end(),
                                 [&](const Record& r) { return r.sequence > sequence; });
  std::vector<Record> gone(records.begin(), left);
  for (const Record& record : gone) live_bytes_ -= record.bytes;
  records.erase(records.begin(), left);
  if (records.empty()) live_.erase(it);
  unreplaced_bytes_ = std::min(unreplaced_bytes_, live_bytes_);
  return gone;
}

// Records of places for which there are later ones of the same version: what comes of the others is
// the same.
void Journal::forget_replaced() {
  for (auto& [ino, records] : live_) {
    Spans later;
    for (auto record = records.rbegin(); record != records.rend(); ++record) {
      const char* at = area(current_) + record->at;
      arena::ChangeHead head{};
      std::memcpy(&head, at, sizeof head);
      if (head.kind == arena::Change::None) continue;
      if (head.kind != arena::Change::Extents && head.kind != arena::Change::Erase) {
        later.clear();
        continue;
      }
      bool is_replaced = true;
      for (const auto& [extent, checksums] : decode(head, at + sizeof head).extents) {
        if (!add_span(later, extent.block, extent.end())) is_replaced = false;
      }
      if (is_replaced) live_bytes_ -= std::exchange(record->bytes, 0);
    }
    std::erase_if(records, [](const Record& record) { return record.bytes == 0; });
  }
  unreplaced_bytes_ = live_bytes_;
}

void Journal::settle(uint64_t ino, uint64_t sequence) {
  const std::string_view payload = bytes_of(sequence);
  const MutexLock lock(mutex_);
  const std::vector<Record> settled = forget(ino, sequence);
  if (settled.empty()) return;
  if (live_bytes_ == 0) return start_over();
  const uint64_t bytes = record_bytes(payload.size());
  const uint64_t generation = generation_;
  if (!make_room(bytes).ok()) {
    if (generation_ == generation) make_void(settled);  // else the area has none of them
    return;
  }
  arena::ChangeHead head{};
  head.kind = arena::Change::Settled;
  head.sequence = sequence_.fetch_add(1, std::memory_order_relaxed);
  head.ino = ino;
  put(end_, head, payload);
  end_ += bytes;
  publish_end();
}

// Says of each record, where it is, that it does not count, which needs no room. The oldest first:
// the last ones, without those before, lead from the content that the catalog has to the same.
void Journal::make_void(const std::vector<Record>& records) {
  for (const Record& record : records) {
    auto* crc = reinterpret_cast<uint32_t*>(area(current_) + record.at);
    std::atomic_ref<uint32_t>(*crc).store(arena::void_checksum(*crc), std::memory_order_release);
  }
}

// Nothing in the journal matters any more. A new generation ends what the area held.
void Journal::start_over() {
  live_.clear();
  live_bytes_ = unreplaced_bytes_ = 0;
  end_ = kFirst;
  publish_end();  // first: records of the old generation would be missing otherwise
  write_area(current_, generation_ += arena::kGenerationStep);
  for (const unsigned index : {0U, 1U}) shrink(index);
}

// Moves what is not settled to the other area. False when there is no memory for it.
bool Journal::compact() {
  const unsigned from = current_;
  if (!extend(from ^ 1, kFirst + live_bytes_).ok()) return false;
  current_ = from ^ 1;
  generation_ += arena::kGenerationStep;
  announce_area(current_, generation_);  // whoever is killed now, nobody uses this generation again
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
  publish_end();
  write_area(current_, generation_);
  write_area(from, 0);
  shrink(from);
  return true;
}

// Goes on at the next record that is sound, or at the end.
void Journal::skip_damage(uint64_t end, std::vector<RecordDamage>* damage) {
  const char* const limit = area(current_) + there_[current_];
  arena::ChangeHead head{};
  std::memcpy(&head, area(current_) + end_, sizeof head);
  const uint64_t begin = end_;
  do {
    end_ += kPayloadUnit;
  } while (end_ < end && !read_record(area(current_) + end_, limit, generation_).has_value());
  // One record and no more, of which the length and the inode are right.
  const bool certain =
      head.ino_check == ino_check(head.ino) && begin + record_bytes(head.bytes) == end_;
  damage->push_back(
      {"journal at " + std::to_string(begin), certain ? std::optional(head.ino) : std::nullopt});
}

std::vector<JournalEntry> Journal::recover(std::vector<RecordDamage>* damage) {
  const MutexLock lock(mutex_);
  for (const unsigned index : {0U, 1U}) {
    const off_t at = static_cast<off_t>(offset_ + index * area_bytes_);
    const off_t hole = lseek(fd_, at, SEEK_HOLE);
    there_[index] = hole > at ? std::min(static_cast<uint64_t>(hole - at), area_bytes_) : 0;
    give_back(index, there_[index]);  // what was taken and never written to
  }
  const std::optional<uint64_t> first = generation_of(0);
  const std::optional<uint64_t> second = generation_of(1);
  if (!first.has_value() || !second.has_value()) damage->push_back({"journal", std::nullopt});
  current_ = second.value_or(0) > first.value_or(0) ? 1 : 0;
  generation_ = std::max(first.value_or(0), second.value_or(0));
  const uint64_t latest = latest_generation();
  const size_t known = damage->size();
  std::vector<JournalEntry> entries;
  if (generation_ != 0) read_records(entries, damage);
  std::erase_if(entries, [&](const JournalEntry& entry) {
    mutex_.assert_held();
    const auto it = live_.find(entry.state.ino);
    return it == live_.end() || entry.sequence < it->second.front().sequence;
  });
  const uint64_t own = std::exchange(generation_, std::max(generation_, latest));
  if (generation_ == own && own != 0 && damage->size() == known && !is_followed(own)) {
    return entries;
  }
  // In a generation of its own, of which there is nothing else; and what is damaged is told of
  // once.
  if (live_.empty()) {
    start_over();
  } else if (!compact()) {
    generation_ = own;
  }
  return entries;
}

// Whether there is a record behind the end: one that nobody was told of, or what a new beginning
// was about to end.
bool Journal::is_followed(uint64_t generation) const {
  const char* const area = this->area(current_);
  return read_record(area + end_, area + there_[current_], generation).has_value();
}

void Journal::read_records(std::vector<JournalEntry>& entries, std::vector<RecordDamage>* damage) {
  const char* const end = area(current_) + there_[current_];
  // What is behind it was acknowledged to nobody.
  const uint64_t published = published_end();
  for (end_ = kFirst; published == 0 || end_ < published;) {
    const char* at = area(current_) + end_;
    const auto record = read_record(at, end, generation_);
    if (!record.has_value() && published == 0) break;
    if (!record.has_value()) {
      skip_damage(published, damage);
      continue;
    }
    const auto& [head, is_void] = *record;
    const uint64_t bytes = record_bytes(head.bytes);
    if (head.kind == arena::Change::Settled) {
      uint64_t upto = 0;
      if (head.bytes == sizeof upto) std::memcpy(&upto, at + sizeof head, sizeof upto);
      forget(head.ino, upto);
    } else if (!is_void) {
      entries.push_back(decode(head, at + sizeof head));
      live_[head.ino].push_back({end_, head.sequence, static_cast<uint32_t>(bytes)});
      live_bytes_ += bytes;
    }
    end_ += bytes;
  }
}

uint64_t Journal::bytes_used() const {
  const MutexLock lock(mutex_);
  return end_ - kFirst;
}

}  // namespace fpfs
