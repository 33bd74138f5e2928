// The arena's tables: what a restart would find in them.
#include <fcntl.h>
#include <sys/stat.h>

#include <array>
#include <cstring>
#include <fstream>
#include <iterator>

#include "arena.h"
#include "crc32c.h"
#include "device_fixture.h"

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

TEST_CASE("arena: handles are recorded while they are open, and their places used again") {
  Named named;
  REQUIRE(named.arena->record_handle(11, 1, O_RDWR).ok());
  REQUIRE(named.arena->record_handle(12, 1, O_RDONLY).ok());
  CHECK(named.open_handles() == std::vector<uint64_t>{11, 12});
  named.arena->forget_handle(11);
  CHECK(named.open_handles() == std::vector<uint64_t>{12});
  for (uint64_t handle = 100; handle < 100 + 2 * uint64_t{arena::kHandlesMax}; ++handle) {
    REQUIRE(named.arena->record_handle(handle, 1, 0).ok());
    named.arena->forget_handle(handle);
  }
  for (uint64_t handle = 1; handle < arena::kHandlesMax; ++handle) {
    REQUIRE(named.arena->record_handle(1'000'000 + handle, 1, 0).ok());
  }
  CHECK(named.arena->record_handle(9, 1, 0).error() == ENFILE);
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

}  // namespace fpfs::testing
