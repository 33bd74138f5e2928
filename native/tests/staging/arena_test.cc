// The arena's tables: what a restart would find in them.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>
#include <iterator>

#include "base/crc32c.h"
#include "base/file_descriptor.h"
#include "base/huge_pages.h"
#include "staging/arena.h"
#include "support/device_fixture.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kSlotBytes = 64 * 1024;
constexpr uint64_t kSlotCount = 4;

// An arena in a file, and that file as another process reads it.
struct Named {
  TempDirectory directory;
  std::string path = directory.path() + "/arena";
  std::string warning;
  std::unique_ptr<Arena> arena = open();

  std::unique_ptr<Arena> open() {
    auto made = Arena::create({path, "some-id", kSlotCount * kSlotBytes, kSlotBytes}, &warning);
    REQUIRE_MESSAGE(made.ok(), made.status().message());
    return made.take();
  }
  template <typename Record>
  Record record(uint64_t offset) const {
    Record result{};
    std::ifstream file(path, std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    file.read(reinterpret_cast<char*>(&result), sizeof result);
    REQUIRE(file.good());
    return result;
  }
  arena::Header header() const { return record<arena::Header>(0); }
  // The records of one slot that are whole, the newest last.
  std::vector<arena::SlotRecord> whole(uint32_t slot) const {
    std::vector<arena::SlotRecord> found;
    for (uint64_t copy = 0; copy < 2; ++copy) {
      const auto each = record<arena::SlotRecord>(header().tables[0].offset +
                                                  (slot * 2 + copy) * sizeof(arena::SlotRecord));
      const auto* bytes = reinterpret_cast<const char*>(&each);
      if (each.sequence != 0 && each.crc == crc32c(0, bytes, offsetof(arena::SlotRecord, crc))) {
        found.push_back(each);
      }
    }
    std::sort(found.begin(), found.end(),
              [](const auto& a, const auto& b) { return a.sequence < b.sequence; });
    return found;
  }
  std::vector<uint64_t> open_handles() const {
    std::vector<uint64_t> found;
    const arena::TableEntry table = header().tables[1];
    for (uint64_t i = 0; i < 4; ++i) {
      const auto each = record<arena::HandleRecord>(table.offset + i * sizeof(arena::HandleRecord));
      if (each.handle != 0) found.push_back(each.handle);
    }
    return found;
  }
};

arena::HandleRecord open_file(uint64_t handle, uint64_t ino, uint32_t flags) {
  arena::HandleRecord record{};
  record.handle = handle;
  record.ino = ino;
  record.flags = flags;
  return record;
}

}  // namespace

TEST_CASE("arena: a slot's last record and the one before are both whole") {
  Named named;
  CHECK(named.header().magic == arena::kMagic);
  CHECK(std::string(named.header().filesystem_id) == "some-id");
  Slot* slot = named.arena->take();
  slot->chunk = 5;
  slot->ranges.add(0, 100);
  named.arena->publish(slot, arena::SlotState::Filling, 7, kSlotBytes, 100, 1);
  slot->ranges.add(200, 300);
  named.arena->publish(slot, arena::SlotState::Filling, 7, kSlotBytes, 300, 2);
  auto records = named.whole(slot->index);
  REQUIRE(records.size() == 2);
  CHECK(records[0].file_size == 100);
  CHECK(records[0].range_count == 1);
  CHECK(records[1].file_size == 300);
  CHECK(records[1].range_count == 2);
  CHECK(records[1].ranges[1].begin == 200);
  CHECK(records[1].ino == 7);
  CHECK(records[1].chunk == 5);

  named.arena->give(slot);
  records = named.whole(slot->index);
  CHECK(records.back().state == arena::SlotState::Free);
  CHECK(records.back().range_count == 0);
  CHECK(named.arena->take()->ranges.empty());
}

TEST_CASE("arena: how a handle's last writer ended is recorded while the handle is open") {
  Named named;
  const auto ended = [&](uint64_t handle) {
    const arena::TableEntry table = named.header().tables[1];
    for (uint64_t i = 0; i < 4; ++i) {
      const auto each =
          named.record<arena::HandleRecord>(table.offset + i * sizeof(arena::HandleRecord));
      if (each.handle == handle) return arena::signal_of(each.killed_by);
    }
    return -1;
  };
  REQUIRE(named.arena->record_handle(open_file(5, 7, 1)).ok());
  REQUIRE(named.arena->record_handle(open_file(6, 7, 1)).ok());
  CHECK(ended(5) == 0);
  named.arena->record_end(5, 9);
  named.arena->record_end(77, 9);
  CHECK(ended(5) == 9);
  CHECK(ended(6) == 0);
  named.arena->record_end(5, 0);
  CHECK(ended(5) == 0);
  named.arena->record_end(5, 15);
  named.arena->forget_handle(5);
  REQUIRE(named.arena->record_handle(open_file(8, 7, 1)).ok());
  CHECK(ended(8) == 0);
  for (unsigned bit = 0; bit < 32; ++bit) {  // a wrong one neither hides a signal nor makes one up
    CHECK(arena::signal_of(1U << bit) == 0);
    CHECK(arena::signal_of(arena::signal_word(15) ^ 1U << bit) != 0);
  }
}

TEST_CASE("arena: handles are recorded while they are open, and their places used again") {
  Named named;
  REQUIRE(named.arena->record_handle(open_file(11, 1, O_RDWR)).ok());
  REQUIRE(named.arena->record_handle(open_file(12, 1, O_RDONLY)).ok());
  CHECK(named.open_handles() == std::vector<uint64_t>{11, 12});
  named.arena->forget_handle(11);
  CHECK(named.open_handles() == std::vector<uint64_t>{12});
  for (uint64_t handle = 100; handle < 100 + 2 * uint64_t{arena::kHandlesMax}; ++handle) {
    REQUIRE(named.arena->record_handle(open_file(handle, 1, 0)).ok());
    named.arena->forget_handle(handle);
  }
  for (uint64_t handle = 1; handle < arena::kHandlesMax; ++handle) {
    REQUIRE(named.arena->record_handle(open_file(1'000'000 + handle, 1, 0)).ok());
  }
  CHECK(named.arena->record_handle(open_file(9, 1, 0)).error() == ENFILE);
}

TEST_CASE("arena: a file that is there already is not taken over") {
  Named named;
  std::string warning;
  CHECK(Arena::create({named.path, "other", kSlotCount * kSlotBytes, kSlotBytes}, &warning)
            .status()
            .error() == EEXIST);
  named.arena->remove();
  CHECK_FALSE(std::filesystem::exists(named.path));
}

TEST_CASE("arena: more than the memory there is gets refused before any is taken") {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t memory = page * static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES));
  std::string warning;
  // No path: a memfd, whose filesystem has no limit of its own.
  const Status status = Arena::create({"", "some-id", memory, kSlotBytes}, &warning).status();
  CHECK(status.error() == ENOMEM);
  CHECK(status.message().find("cannot allocate") != std::string::npos);
}

TEST_CASE("arena: the header tells where everything is, and nothing lies over anything else") {
  constexpr uint64_t count = 300;  // so many that the slots' records fill several pages
  TempDirectory directory;
  const std::string path = directory.path() + "/arena";
  std::string warning;
  auto made = Arena::create({path, "some-id", count * kSlotBytes, kSlotBytes}, &warning);
  REQUIRE_MESSAGE(made.ok(), made.status().message());
  arena::Header header{};
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(&header), sizeof header);
  REQUIRE(file.good());
  CHECK(header.crc == crc32c(0, reinterpret_cast<char*>(&header), offsetof(arena::Header, crc)));
  CHECK(header.slot_count == count);
  CHECK(header.slot_bytes == kSlotBytes);
  CHECK(header.tables[0].count == 2 * count);
  uint64_t end = header.header_bytes;
  std::sort(std::begin(header.tables), std::end(header.tables),
            [](const auto& a, const auto& b) { return a.offset < b.offset; });
  for (const arena::TableEntry& table : header.tables) {
    if (table.kind == arena::Table::None) continue;
    CHECK(table.offset >= end);
    end = table.offset + table.count * std::max<uint64_t>(table.record_bytes, 1);
    // The slots' memory is between the tables and the journal.
    if (table.kind == arena::Table::Requests) {
      CHECK(header.data_offset >= end);
      end = header.data_offset + count * kSlotBytes;
    }
  }
  CHECK(end == std::filesystem::file_size(path));
  // The first slot's memory is where the header says.
  Slot* slot = made.value()->take();
  REQUIRE(slot->index == 0);
  std::memcpy(slot->data, "first", 5);
  std::string found(5, '\0');
  file.seekg(static_cast<std::streamoff>(header.data_offset));
  file.read(found.data(), 5);
  CHECK(found == "first");
}

TEST_CASE("arena: one whose journal may grow less far is taken over") {
  constexpr uint64_t area_bytes = Arena::kJournalAreaBytes / 4;
  Named named;
  named.arena.reset();
  arena::Header header = named.header();
  header.tables[3].count = header.tables[4].count = area_bytes;
  header.tables[4].offset = header.tables[3].offset + area_bytes;
  header.crc = crc32c(0, &header, offsetof(arena::Header, crc));
  const FileDescriptor file(open(named.path.c_str(), O_RDWR | O_CLOEXEC));
  REQUIRE(pwrite(file.get(), &header, sizeof header, 0) == sizeof header);
  REQUIRE(truncate(named.path.c_str(), static_cast<off_t>(header.tables[3].offset)) == 0);
  REQUIRE(truncate(named.path.c_str(), static_cast<off_t>(header.tables[4].offset + area_bytes)) ==
          0);
  Remains remains;
  auto taken = Arena::attach({named.path, "some-id", 0, 0}, -1, &remains, &named.warning);
  REQUIRE_MESSAGE(taken.ok(), taken.status().message());
  CHECK(remains.damage.empty());
  CHECK(taken.value()->free_count() == kSlotCount);
}

namespace {

// The sum of one line of /proc/self/smaps over the mappings whose name has `part` in it, in bytes.
uint64_t mapped_as(const std::string& part, const std::string& key) {
  std::ifstream maps("/proc/self/smaps");
  uint64_t bytes = 0;
  bool counted = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find('-') < line.find(' ')) counted = line.find(part) != std::string::npos;
    if (counted && line.rfind(key, 0) == 0) bytes += 1024 * std::stoull(line.substr(key.size()));
  }
  return bytes;
}

// Whether this kernel, with the memory it has free, makes huge pages of a file's.
bool huge_pages_are_to_be_had() {
  const FileDescriptor file(memfd_create("fpfs-probe", MFD_CLOEXEC));
  REQUIRE(ftruncate(file.get(), kHugePageBytes) == 0);
  char* const base = map_shared(file.get(), kHugePageBytes);
  REQUIRE(base != nullptr);
  allocate_huge_pages(file.get(), base, kHugePageBytes);
  const bool huge = mapped_as("fpfs-probe", "ShmemPmdMapped:") == kHugePageBytes;
  munmap(base, kHugePageBytes);
  return huge;
}

}  // namespace

TEST_CASE("arena: slots lie in huge pages") {
  if (!huge_pages_are_to_be_had()) {
    MESSAGE("skipped: no huge pages here");
    return;
  }
  std::string warning;
  auto arena = Arena::create({"", "some-id", 32 * kHugePageBytes, kHugePageBytes / 2}, &warning);
  REQUIRE_MESSAGE(arena.ok(), arena.status().message());
  CHECK(mapped_as("fpfs-staging", "Size:") >= 32 * kHugePageBytes);
  CHECK(mapped_as("fpfs-staging", "ShmemPmdMapped:") >= 31 * kHugePageBytes);
}

TEST_CASE("private memory lies in huge pages, whatever its size") {
  constexpr uint64_t bytes = 3 * kHugePageBytes + 5;
  const uint64_t before = mapped_as("", "AnonHugePages:");
  char* const base = map_private(bytes);
  REQUIRE(base != nullptr);
  CHECK(reinterpret_cast<uintptr_t>(base) % kHugePageBytes == 0);
  std::memset(base, 1, bytes);
  CHECK(base[bytes - 1] == 1);
  std::string setting;
  std::getline(std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"), setting);
  const bool never = setting.empty() || setting.find("[never]") != std::string::npos;
  if (never || !huge_pages_are_to_be_had()) {
    MESSAGE("not looked at: no huge pages here");
  } else {
    CHECK(mapped_as("", "AnonHugePages:") >= before + 4 * kHugePageBytes);
  }
  unmap_private(base, bytes);
}

TEST_CASE("arena: a handle that is not recorded is not forgotten in the place of another") {
  Named named;
  REQUIRE(named.arena->record_handle(open_file(11, 1, O_RDWR)).ok());
  REQUIRE(named.arena->record_handle(open_file(13, 1, O_RDWR)).ok());
  for (const uint64_t handle : {10, 12, 14}) named.arena->forget_handle(handle);
  CHECK(named.open_handles() == std::vector<uint64_t>{11, 13});
}

TEST_CASE("arena: a slot that was given back is as new") {
  Named named;
  Slot* slot = named.arena->take();
  slot->chunk = 5;
  slot->ranges.add(0, 100);
  slot->reserved.set(0);
  slot->written.push_back({Extent{0, 1, Place{}}, {}});
  slot->pending_io = 1;
  slot->io_error = EIO;
  slot->lease = 0;
  slot->seal_wanted = slot->sealed = slot->issued = slot->orphan = true;
  slot->give_when_unpinned = true;
  named.arena->age_add(slot);
  CHECK(named.arena->aged_count() == 1);
  named.arena->give(slot);
  CHECK(named.arena->aged_count() == 0);
  CHECK(named.arena->oldest(kSlotCount).empty());
  CHECK(named.arena->free_count() == kSlotCount);
  REQUIRE(named.arena->take() == slot);
  CHECK(slot->ranges.empty());
  CHECK(slot->reserved.none());
  CHECK(slot->written.empty());
  CHECK(slot->pending_io == 0);
  CHECK(slot->io_error == 0);
  CHECK(slot->lease == -1);
  CHECK_FALSE((slot->seal_wanted || slot->sealed || slot->issued || slot->orphan));
  CHECK_FALSE(slot->give_when_unpinned);
}

TEST_CASE("arena: slots are told oldest first, whichever go before") {
  for (uint64_t gone = 0; gone < kSlotCount; ++gone) {
    CAPTURE(gone);
    Named named;
    std::vector<Slot*> slots;
    for (uint64_t i = 0; i < kSlotCount; ++i) {
      slots.push_back(named.arena->take());
      named.arena->age_add(slots.back());
    }
    named.arena->age_remove(slots[gone]);
    slots.erase(slots.begin() + static_cast<std::ptrdiff_t>(gone));
    std::vector<Slot*> told;
    for (const Arena::Aged& aged : named.arena->oldest(kSlotCount)) told.push_back(aged.slot);
    CHECK(told == slots);
    CHECK(named.arena->aged_count() == slots.size());
    CHECK(named.arena->oldest(2).size() == 2);
    for (Slot* slot : slots) named.arena->give(slot);
    CHECK(named.arena->oldest(kSlotCount).empty());
  }
}

namespace {

// What another process finds of an arena whose file has one wrong bit, in its table of `kind`.
struct Found {
  Remains remains;
  bool is_slot_staged = false;
  explicit Found(Named& named, arena::Table kind, uint64_t at, unsigned bit) {
    const arena::Header header = named.header();
    const auto table = std::find_if(std::begin(header.tables), std::end(header.tables),
                                    [&](const auto& each) { return each.kind == kind; });
    REQUIRE(table != std::end(header.tables));
    const auto place = static_cast<off_t>(table->offset + at);
    char byte = 0;
    const auto flip = [&] {
      REQUIRE(::pread(named.arena->fd(), &byte, 1, place) == 1);
      byte = static_cast<char>(byte ^ (1 << bit));
      REQUIRE(::pwrite(named.arena->fd(), &byte, 1, place) == 1);
    };
    flip();
    std::string warning;
    const Arena::Config config{named.path, "some-id", 0, 0};
    auto second = Arena::attach(config, -1, &remains, &warning);
    REQUIRE_MESSAGE(second.ok(), second.status().message());
    is_slot_staged = !remains.slots.empty();
    flip();  // what the second one wrote itself aside, all is as it was
  }
};

}  // namespace

TEST_CASE("arena: a wrong bit of the record that holds is noticed") {
  constexpr uint64_t kBits = 8 * sizeof(arena::SlotRecord);
  for (uint64_t bit = 0; bit < kBits; bit += 11) {
    INFO("bit " << bit);
    Named named;
    Slot* slot = named.arena->take();
    slot->chunk = 5;
    slot->ranges.add(0, 100);
    named.arena->publish(slot, arena::SlotState::Filling, 7, 65536, 100, 1);
    slot->ranges.add(100, 200);
    named.arena->publish(slot, arena::SlotState::Filling, 7, 65536, 200, 1);
    const uint64_t at = (slot->index * 2 + slot->record_copy) * sizeof(arena::SlotRecord);
    const Found found(named, arena::Table::Slots, at + bit / 8, bit % 8);
    CHECK_FALSE(found.is_slot_staged);  // the older copy lacks what was acknowledged last
    REQUIRE(found.remains.damage.size() == 1);
    CHECK((!found.remains.damage[0].ino.has_value() || found.remains.damage[0].ino == 7));
  }
}

TEST_CASE("arena: a wrong bit of what does not hold changes nothing") {
  constexpr uint64_t kBits = 8 * sizeof(arena::SlotRecord);
  for (uint64_t bit = 0; bit < kBits; bit += 41) {
    for (const bool in_word : {false, true}) {
      INFO("bit " << bit);
      Named named;
      Slot* slot = named.arena->take();
      for (const uint32_t end : {100U, 200U}) {
        slot->ranges.add(0, end);
        named.arena->publish(slot, arena::SlotState::Filling, 7, 65536, end, 1);
      }
      const uint32_t copy = slot->index * 2 + (slot->record_copy ^ 1);
      const uint64_t at = in_word ? slot->index * sizeof(arena::PublishedWord) + bit / 8 % 8
                                  : copy * sizeof(arena::SlotRecord) + bit / 8;
      const arena::Table table = in_word ? arena::Table::Published : arena::Table::Slots;
      const Found found(named, table, at, bit % 8);
      CHECK(found.remains.damage.empty());
      REQUIRE(found.remains.slots.size() == 1);
      CHECK(found.remains.slots[0].record.file_size == 200);
    }
  }
}

TEST_CASE("arena: a wrong bit in the record of a file that is written is noticed") {
  constexpr uint64_t kBits = 8 * offsetof(arena::HandleRecord, killed_by);
  for (uint64_t bit = 0; bit < kBits; bit += 5) {
    INFO("bit " << bit);
    Named named;
    REQUIRE(named.arena->record_handle(open_file(1, 8, O_WRONLY)).ok());
    const Found found(named, arena::Table::Handles, bit / 8, bit % 8);
    CHECK(found.remains.handles_damaged);
    CHECK(found.remains.handles.empty());
  }
  Named named;
  REQUIRE(named.arena->record_handle(open_file(1, 8, O_WRONLY)).ok());
  named.arena->record_end(1, SIGKILL);
  for (uint64_t bit = kBits; bit < 8 * sizeof(arena::HandleRecord); bit += 5) {
    const Found found(named, arena::Table::Handles, bit / 8, bit % 8);
    REQUIRE(found.remains.handles.size() == 1);
    CHECK(arena::signal_of(found.remains.handles[0].killed_by) == SIGKILL);
  }
}

TEST_CASE("arena: a wrong bit where no file is open is none of anybody's") {
  for (uint64_t bit = 0; bit < 8 * sizeof(arena::HandleRecord); bit += 5) {
    INFO("bit " << bit);
    Named named;
    REQUIRE(named.arena->record_handle(open_file(11, 8, O_WRONLY)).ok());
    if (bit % 2 == 0) named.arena->forget_handle(11);
    const uint64_t record = bit % 2 == 0 ? 0 : 1;  // that was forgotten, or never was one
    const Found found(named, arena::Table::Handles, record * sizeof(arena::HandleRecord) + bit / 8,
                      bit % 8);
    CHECK_FALSE(found.remains.handles_damaged);
    CHECK(found.remains.damage.empty());
  }
}

TEST_CASE("ranges: a set of bytes, in few pieces") {
  RangeSet ranges;
  for (uint32_t i = 0; i < 8; ++i) ranges.add(100 * i, 100 * i + 50);
  REQUIRE(ranges.count() == 8);
  CHECK(ranges.would_exceed(860, 870, 8));
  CHECK_FALSE(ranges.would_exceed(860, 870, 9));
  CHECK_FALSE(ranges.would_exceed(750, 870, 8));  // continues the last one
  CHECK_FALSE(ranges.would_exceed(50, 60, 8));    // continues the first one
  CHECK_FALSE(ranges.would_exceed(60, 100, 8));   // is continued by the second one
  CHECK(ranges.would_exceed(51, 99, 8));
  ranges.add(50, 100);
  CHECK(ranges.count() == 7);
  CHECK(ranges.covers(0, 150));
  CHECK_FALSE(ranges.covers(0, 151));
  CHECK_FALSE(ranges.intersects(150, 200));
  CHECK(ranges.intersects(149, 150));
  CHECK(ranges.free_until(150, 1000) == 200);
  CHECK(ranges.free_until(149, 1000) == 149);
  CHECK(ranges.free_until(750, 1000) == 1000);
  CHECK(ranges.taken_until(0) == 150);
  CHECK(ranges.taken_until(150) == 150);
  ranges.clip(300);
  CHECK(ranges.count() == 2);  // none that is empty
  ranges.clip(220);
  CHECK(ranges.last_end() == 220);
}

}  // namespace fpfs::testing
