// The journal of pending contents: what comes back, what is forgotten, what a torn record ends.
#include <doctest/doctest.h>
#include <signal.h>

#include <algorithm>
#include <map>
#include <random>

#include "staging/journal.h"
#include "support/engine_fixture.h"
#include "support/journal_memory.h"

namespace fpfs::testing {
namespace {

WrittenExtent extent_at(uint64_t block) {
  const bool unwritten = block % 2 == 1;
  WrittenExtent written{{block, 3, Place{block + 100, 7, 2, unwritten}}, {}};
  if (!unwritten) written.checksums = {1, static_cast<uint32_t>(block), UINT32_MAX};
  return written;
}

// What comes of records of one inode: where each block lies at each change that is not of places.
using Places = std::map<uint64_t, std::pair<uint64_t, uint64_t>>;
std::vector<std::pair<arena::Change, Places>> come_of(const std::vector<JournalEntry>& entries,
                                                      uint64_t ino) {
  std::vector<std::pair<arena::Change, Places>> result;
  Places now;
  for (const JournalEntry& entry : entries) {
    if (entry.state.ino != ino) continue;
    for (const auto& [extent, checksums] : entry.extents) {
      for (uint64_t i = 0; i < extent.count; ++i) {
        now.erase(extent.block + i);
        if (entry.kind == arena::Change::Erase) continue;
        now[extent.block + i] = {extent.place.object, extent.place.object_block + i};
      }
    }
    if (entry.kind == arena::Change::Extents || entry.kind == arena::Change::Erase) continue;
    result.emplace_back(entry.kind, now);
  }
  result.emplace_back(arena::Change::None, now);
  return result;
}

}  // namespace

TEST_CASE("journal: another process finds every change, in order and whole") {
  JournalMemory memory;
  Journal& journal = *memory.journal;
  REQUIRE(journal.note_extents(state_of(3, 100), {extent_at(4), extent_at(9)}).ok());
  REQUIRE(journal.note_erased(state_of(4, 200), 8, 5).ok());
  REQUIRE(journal.note(state_of(3, 300), arena::Change::Truncate).ok());
  REQUIRE(journal.note_punched(state_of(3, 400), 17, 23).ok());
  REQUIRE(journal.note(state_of(4, 500), arena::Change::Closed).ok());

  const auto entries = memory.recovered();
  REQUIRE(sizes(entries) == std::vector<uint64_t>{100, 200, 300, 400, 500});
  CHECK(entries[0].kind == arena::Change::Extents);
  CHECK(entries[0].state.ino == 3);
  CHECK(entries[0].state.mtime_ns == 11);
  CHECK(entries[0].state.ctime_ns == 12);
  CHECK(entries[0].state.privileges_dropped);
  CHECK_FALSE(entries[1].state.privileges_dropped);
  REQUIRE(entries[0].extents.size() == 2);
  CHECK(entries[0].extents[1].extent.block == 9);
  CHECK(entries[0].extents[1].extent.count == 3);
  CHECK(entries[0].extents[1].extent.place.object == 109);
  CHECK(entries[0].extents[1].extent.place.object_block == 7);
  CHECK(entries[0].extents[1].extent.place.device == 2);
  CHECK(entries[0].extents[1].extent.place.unwritten);
  CHECK(entries[0].extents[1].checksums.empty());
  CHECK_FALSE(entries[0].extents[0].extent.place.unwritten);
  CHECK(entries[0].extents[0].checksums == std::vector<uint32_t>{1, 4, UINT32_MAX});
  CHECK(entries[1].extents.at(0).extent.block == 8);
  CHECK(entries[1].extents.at(0).extent.count == 5);
  CHECK(entries[3].begin == 17);
  CHECK(entries[3].end == 23);
  for (size_t i = 1; i < entries.size(); ++i) CHECK(entries[i - 1].sequence < entries[i].sequence);
}

TEST_CASE("journal: a close says which signal ended the writer") {
  JournalMemory memory;
  FileState dropped = state_of(3, 100);
  dropped.privileges_dropped = true;
  FileState kept = state_of(3, 100);
  kept.privileges_dropped = false;
  REQUIRE(memory.journal->note_closed(dropped, SIGKILL).ok());
  REQUIRE(memory.journal->note_closed(state_of(3, 100), 0).ok());
  REQUIRE(memory.journal->note_closed(kept, 64).ok());
  const auto entries = memory.recovered();
  REQUIRE(entries.size() == 3);
  CHECK(entries[0].kind == arena::Change::Closed);
  CHECK(entries[0].killed_by == SIGKILL);
  CHECK(entries[0].state.privileges_dropped);
  CHECK(entries[1].killed_by == 0);
  CHECK(entries[2].killed_by == 64);
  CHECK_FALSE(entries[2].state.privileges_dropped);
}

TEST_CASE("journal: what the catalog holds is forgotten, and all of it is a new beginning") {
  JournalMemory memory;
  Journal& journal = *memory.journal;
  REQUIRE(journal.note(state_of(3, 100), arena::Change::None).ok());
  REQUIRE(journal.note(state_of(4, 200), arena::Change::None).ok());
  const uint64_t upto = memory.sequence - 1;
  REQUIRE(journal.note(state_of(3, 300), arena::Change::None).ok());
  journal.settle(3, upto);
  CHECK(sizes(memory.recovered()) == std::vector<uint64_t>{200, 300});
  journal.settle(3, UINT64_MAX);
  CHECK(sizes(memory.recovered()) == std::vector<uint64_t>{200});
  journal.settle(4, UINT64_MAX);
  CHECK(journal.bytes_used() == 0);
  CHECK(memory.recovered().empty());
  // What lies behind the new beginning is of an older generation.
  REQUIRE(journal.note(state_of(5, 500), arena::Change::None).ok());
  CHECK(sizes(memory.recovered()) == std::vector<uint64_t>{500});
}

TEST_CASE("journal: one that is taken over goes on where it was") {
  JournalMemory memory;
  REQUIRE(memory.journal->note(state_of(3, 100), arena::Change::None).ok());
  const auto second = memory.open();
  CHECK(second->recover(&memory.damage).size() == 1);
  REQUIRE(second->note(state_of(3, 200), arena::Change::None).ok());
  const auto third = memory.open();
  CHECK(sizes(third->recover(&memory.damage)) == std::vector<uint64_t>{100, 200});
  third->settle(3, UINT64_MAX);
  CHECK(memory.recovered().empty());
}

namespace {

// Records of inodes 3, 4 and 5; returns where that of 4 is.
uint64_t three_records(JournalMemory& memory) {
  REQUIRE(memory.journal->note(state_of(3, 100), arena::Change::None).ok());
  const uint64_t at = sizeof(arena::JournalArea) + memory.journal->bytes_used();
  REQUIRE(memory.journal->note_extents(state_of(4, 200), {extent_at(4)}).ok());
  REQUIRE(memory.journal->note(state_of(5, 300), arena::Change::None).ok());
  return at;
}

void flip(JournalMemory& memory, uint64_t at, unsigned bit) {
  memory.base[at] = static_cast<char>(memory.base[at] ^ (1 << bit));
}

}  // namespace

TEST_CASE("journal: a record that a kill tore ends it, and is no damage") {
  JournalMemory memory;
  const uint64_t at = three_records(memory);
  // As it is before the end behind it is told.
  reinterpret_cast<arena::JournalArea*>(memory.base)->end = arena::published_word(at / 8);
  SUBCASE("in its middle") { memory.base[at + 60] = 1; }
  SUBCASE("before anybody was told of it") {}
  CHECK(sizes(memory.recovered()) == std::vector<uint64_t>{100});
  CHECK(memory.damage.empty());
}

TEST_CASE("journal: every wrong bit of a record is noticed, and the others hold") {
  constexpr uint64_t kInoAt = offsetof(arena::ChangeHead, ino);
  for (uint64_t bit = 0;; ++bit) {
    JournalMemory memory(64 * 1024);
    const uint64_t at = three_records(memory);
    arena::ChangeHead head{};
    std::memcpy(&head, memory.base + at, sizeof head);
    if (bit == 8 * (sizeof head + head.bytes)) break;
    flip(memory, at + bit / 8, bit % 8);
    INFO("bit " << bit);
    CHECK(sizes(memory.recovered()) == std::vector<uint64_t>{100, 300});
    REQUIRE(memory.damage.size() == 1);
    // Whose it was is known unless that is what is wrong.
    const std::optional<uint64_t> ino = memory.damage[0].ino;
    CHECK((!ino.has_value() || ino == 4));
    if (bit / 8 > kInoAt + 8 && bit / 8 < offsetof(arena::ChangeHead, ino_check)) CHECK(ino == 4);
    // Once is enough.
    CHECK(sizes(memory.recovered()) == std::vector<uint64_t>{100, 300});
    CHECK(memory.damage.empty());
  }
}

TEST_CASE("journal: a wrong bit in an area's head loses nothing, or is told of") {
  for (uint64_t bit = 0; bit < 8 * sizeof(arena::JournalArea); ++bit) {
    for (const unsigned index : {0U, 1U}) {
      JournalMemory memory(64 * 1024);
      three_records(memory);
      flip(memory, index * memory.area_bytes + bit / 8, bit % 8);
      INFO("bit " << bit << " of area " << index);
      CHECK(sizes(memory.recovered()) == std::vector<uint64_t>{100, 200, 300});
      CHECK(memory.damage.empty());
    }
  }
}

TEST_CASE("journal: records that lie there in ruins are all told of") {
  JournalMemory memory;
  const uint64_t at = three_records(memory);
  std::memset(memory.base + at, 0xff, 300);
  CHECK(sizes(memory.recovered()) == std::vector<uint64_t>{100});
  REQUIRE(memory.damage.size() == 1);
  CHECK_FALSE(memory.damage[0].ino.has_value());
}

TEST_CASE("journal: it does not grow with what is settled") {
  JournalMemory memory;
  Journal& journal = *memory.journal;
  REQUIRE(journal.note(state_of(3, 1), arena::Change::None).ok());
  for (uint64_t i = 0; i < 200'000; ++i) {  // 18 MB of records, in areas of 4 MiB
    REQUIRE(journal.note_extents(state_of(4, i), {extent_at(i)}).ok());
    if (i % 1000 == 999) journal.settle(4, UINT64_MAX);
    if (i % 50'000 == 0) REQUIRE(journal.note(state_of(3, 2 + i), arena::Change::None).ok());
  }
  CHECK(memory.memory_bytes() <= 4 * 1024 * 1024);
  CHECK(sizes(memory.recovered()) == std::vector<uint64_t>{1, 2, 50'002, 100'002, 150'002});
}

TEST_CASE("journal: what long contents took of memory goes back when they are settled") {
  JournalMemory memory(64 * 1024 * 1024);
  Journal& journal = *memory.journal;
  constexpr uint64_t kRecords = 50'000;
  const auto fill = [&](uint64_t ino) {
    for (uint64_t i = 0; i < kRecords; ++i) {  // 22 MB
      std::vector<WrittenExtent> extents;
      for (uint64_t each = 0; each < 8; ++each) extents.push_back(extent_at(40 * i + 4 * each));
      REQUIRE(journal.note_extents(state_of(ino, i), extents).ok());
    }
  };
  fill(4);
  CHECK(memory.memory_bytes() > 20 * 1024 * 1024);
  SUBCASE("all of them") {
    journal.settle(4, UINT64_MAX);
    CHECK(memory.recovered().empty());
    CHECK(memory.memory_bytes() <= (16 + 1) * 1024 * 1024);
  }
  SUBCASE("not the others") {
    REQUIRE(journal.note(state_of(3, 1), arena::Change::None).ok());
    for (const uint64_t ino : {4, 5, 6}) {
      if (ino != 4) fill(ino);
      if (ino != 6) journal.settle(ino, UINT64_MAX);
    }
    CHECK(memory.memory_bytes() <= (16 + 24) * 1024 * 1024);
    const auto entries = memory.recovered();
    REQUIRE(entries.size() == 1 + kRecords);
    CHECK(entries.front().state.ino == 3);
    CHECK(entries.back().state.size == kRecords - 1);
  }
}

TEST_CASE("journal: it does not grow with what is written over and over") {
  JournalMemory memory(256 * 1024 * 1024);
  for (uint64_t i = 0; i < 500'000; ++i) {  // 50 MB
    REQUIRE(memory.journal->note_extents(state_of(4, i), {extent_at(i % 1000)}).ok());
  }
  CHECK(memory.memory_bytes() <= 2 * 16 * 1024 * 1024);
  CHECK(memory.recovered().back().state.size == 499'999);
}

TEST_CASE("journal: a full one says so, and takes records again when others are settled") {
  JournalMemory memory(64 * 1024);
  Journal& journal = *memory.journal;
  REQUIRE(journal.note(state_of(3, 1), arena::Change::None).ok());
  Status status;
  uint64_t taken = 0;
  while ((status = journal.note(state_of(4, taken), arena::Change::None)).ok()) ++taken;
  CHECK(status.error() == ENOSPC);
  CHECK(taken > 1000);
  CHECK(memory.recovered().size() == taken + 1);
  journal.settle(4, UINT64_MAX);
  REQUIRE(journal.note(state_of(3, 2), arena::Change::None).ok());
  CHECK(sizes(memory.recovered()) == std::vector<uint64_t>{1, 2});
}

TEST_CASE("journal: what is settled without room to say so does not come back") {
  JournalMemory memory(64 * 1024);
  Journal& journal = *memory.journal;
  uint64_t kept = 0;
  for (uint64_t i = 0; i < 3; ++i) {
    if (i == 2) kept = memory.sequence;
    REQUIRE(journal.note_extents(state_of(3, i), {extent_at(2 * i)}).ok());
  }
  uint64_t taken = 0;
  while (journal.note(state_of(4, 100 + taken), arena::Change::None).ok()) ++taken;
  SUBCASE("all of it") { journal.settle(3, UINT64_MAX); }
  SUBCASE("up to a change") { journal.settle(3, kept - 1); }
  for (int server = 0; server < 2; ++server) {
    auto found = sizes(memory.recovered());
    CHECK(memory.damage.empty());
    CHECK(std::count_if(found.begin(), found.end(), [](uint64_t size) { return size < 2; }) == 0);
    CHECK(found.size() >= taken);
  }
  // The others are settled, and one is told of that has to come.
  journal.settle(4, UINT64_MAX);
  REQUIRE(journal.note(state_of(3, 9), arena::Change::None).ok());
  CHECK(sizes(memory.recovered()).back() == 9);
}

TEST_CASE("journal: of what is written over and over it has the last places, and room for more") {
  constexpr arena::Change kOthers[] = {arena::Change::Begun, arena::Change::Reached,
                                       arena::Change::Closed, arena::Change::Truncate,
                                       arena::Change::Lost};
  JournalMemory memory(256 * 1024);
  JournalMemory all(16 * 1024 * 1024);
  const uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (uint64_t i = 0; i < 30'000; ++i) {  // 3 MB of records, in areas of 256 KiB
    const FileState state = state_of(3 + random() % 2, i);
    const uint64_t block = random() % 50;
    const bool is_other = i % 1500 == 0;
    for (Journal* journal : {memory.journal.get(), all.journal.get()}) {
      if (is_other) {
        REQUIRE(journal->note(state, kOthers[i / 1500 % 5]).ok());
      } else if (i % 3 == 0) {
        REQUIRE(journal->note_erased(state, block, 1 + i % 7).ok());
      } else {
        WrittenExtent first = extent_at(block);
        WrittenExtent second = extent_at(block + 20);
        first.extent.place.object = second.extent.place.object = i;
        REQUIRE(journal->note_extents(state, {first, second}).ok());
      }
    }
  }
  const auto found = memory.recovered();
  const auto expected = all.recovered();
  CHECK(found.size() < expected.size() / 10);
  CHECK(found.back().state.size == expected.back().state.size);
  for (const uint64_t ino : {3, 4}) CHECK(come_of(found, ino) == come_of(expected, ino));
}

}  // namespace fpfs::testing
