// Blocks that are copied to another device, and files that follow.
#include <doctest/doctest.h>

#include <filesystem>
#include <thread>

#include "support/engine_fixture.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kChunk = 256 * 1024;

CopiedEvent copied(EngineFixture& fixture, uint16_t to, std::vector<CopiedRange> ranges) {
  Engine& engine = fixture.engine();
  const uint64_t ticket = engine.copy(to, std::move(ranges));
  for (;;) {
    pollfd wait{engine.event_fd(), POLLIN, 0};
    REQUIRE(::poll(&wait, 1, 60'000) == 1);
    for (const Event& event : engine.take_events()) {
      const auto* done = std::get_if<CopiedEvent>(&event);
      if (done != nullptr && done->ticket == ticket) return *done;
    }
  }
}

// The committed extents of an inode on a device, with their checksums.
std::vector<CopiedRange> ranges_on(EngineFixture& fixture, uint64_t ino, uint16_t device) {
  BlockMap map;
  for (const auto& [index, blob] : fixture.catalog()[ino].segments) {
    REQUIRE(map.decode_segment(index, blob).ok());
  }
  std::vector<CopiedRange> ranges;
  for (const Extent& extent : map.lookup(0, kSegmentBlocks)) {
    if (extent.place.device != device) continue;
    std::vector<uint32_t> known;
    if (!extent.place.unwritten) {
      for (const Checksum& sum : map.checksums(extent.block, extent.count)) known.push_back(*sum);
    }
    ranges.push_back({extent.place, extent.count, known});
  }
  return ranges;
}

std::vector<Move> moves_to(uint16_t device, uint64_t object,
                           const std::vector<CopiedRange>& ranges) {
  std::vector<Move> moves;
  uint32_t at = 0;
  for (const CopiedRange& range : ranges) {
    moves.push_back({range.place, Place{object, at, device, false}, range.count});
    at += static_cast<uint32_t>(range.count);
  }
  return moves;
}

// Space that a file gets ahead of need may be on its way for a while after a commit.
void begin_move(const std::shared_ptr<File>& file, uint16_t device) {
  while (!file->begin_move(device)) std::this_thread::yield();
}

// Nothing can be read from a device any more.
void empty(const std::string& path) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    if (entry.is_regular_file()) std::filesystem::resize_file(entry.path(), 0);
  }
}

}  // namespace

TEST_CASE("move: a file follows what was copied, and is as clean as before") {
  EngineFixture fixture({.devices = 2});
  const auto file = fixture.load(20);
  const std::string bytes = random_bytes(7 * kChunk + 1000, 1);
  REQUIRE(fixture.write(*file, 0, bytes) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  fixture.engine().set_draining(0, true);
  const auto ranges = ranges_on(fixture, 20, 0);
  REQUIRE(ranges.size() > 1);
  const CopiedEvent done = copied(fixture, 1, ranges);
  REQUIRE(done.error == 0);
  CHECK(done.damage.empty());
  begin_move(file, 0);
  file->end_move(moves_to(1, done.object, ranges));
  CHECK_FALSE(file->attributes().dirty);
  CHECK(file->idle());
  for (const auto& [device, object] : file->objects()) CHECK(device == 1);
  empty(fixture.device_path(0));
  CHECK(fixture.read(*file, 0, bytes.size()) == bytes);
}

TEST_CASE("move: damaged blocks are told, of others those beside them are copied") {
  EngineFixture fixture({.devices = 2});
  const auto file = fixture.load(20);
  REQUIRE(fixture.write(*file, 0, random_bytes(4 * kChunk, 2)) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  auto ranges = ranges_on(fixture, 20, 0);
  ranges[0].checksums[1] ^= 1;
  const CopiedEvent done = copied(fixture, 1, ranges);
  REQUIRE(done.error == 0);
  REQUIRE(done.damage.size() == 1);
  CHECK(done.damage[0].range == 0);
  CHECK(done.damage[0].first == 1);
  CHECK(done.damage[0].count == 1);
  CHECK(done.damage[0].error == 0);
  CHECK(copied(fixture, 9, ranges).error == ENODEV);
}

TEST_CASE("move: preallocated blocks are not written to where they were") {
  EngineFixture fixture({.devices = 2});
  const auto file = fixture.load(20);
  REQUIRE(fixture.allocate(*file, 0, 4 * kChunk, false) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  fixture.engine().set_draining(0, true);
  const auto ranges = ranges_on(fixture, 20, 0);
  REQUIRE(!ranges.empty());
  const CopiedEvent done = copied(fixture, 1, ranges);
  REQUIRE(done.error == 0);
  begin_move(file, 0);
  const std::string bytes = random_bytes(4 * kChunk, 3);
  REQUIRE(fixture.write(*file, 0, bytes) == 0);  // between the catalog's word and the file's
  SnapshotData snapshot;
  REQUIRE(fixture.drain(*file, false, &snapshot) == 0);
  file->end_move(moves_to(1, done.object, ranges));
  empty(fixture.device_path(0));
  CHECK(fixture.read(*file, 0, bytes.size()) == bytes);
}

TEST_CASE("move: not while a slot has a place promised on the device") {
  EngineFixture fixture({.devices = 2});
  const auto file = fixture.load(20);
  REQUIRE(fixture.write(*file, 0, std::string(2 * kChunk - 1, 'x')) == 0);
  CHECK((file->begin_move(0) && file->begin_move(1)) == false);
  REQUIRE(fixture.commit(*file, true) == 0);
  begin_move(file, 0);
  file->end_move({});
}

TEST_CASE("move: what is written next goes by the new places, and gives back only those") {
  EngineFixture fixture({.devices = 2});
  const auto file = fixture.load(20);
  std::string bytes = random_bytes(6 * kChunk, 4);
  REQUIRE(fixture.write(*file, 0, bytes) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  fixture.engine().set_draining(0, true);
  const auto ranges = ranges_on(fixture, 20, 0);
  REQUIRE(!ranges.empty());
  const CopiedEvent done = copied(fixture, 1, ranges);
  REQUIRE(done.error == 0);
  begin_move(file, 0);
  file->end_move(moves_to(1, done.object, ranges));
  empty(fixture.device_path(0));
  const std::string changed = random_bytes(kChunk, 5);  // halves of two chunks, one of which moved
  bytes.replace(kChunk / 2, kChunk, changed);
  REQUIRE(fixture.write(*file, kChunk / 2, changed) == 0);
  SnapshotData snapshot;
  REQUIRE(fixture.drain(*file, true, &snapshot) == 0);
  CHECK(!snapshot.garbage.empty());
  for (const Extent& extent : snapshot.garbage) CHECK(extent.place.device == 1);
  for (const auto& [device, object] : snapshot.dead) CHECK(device == 1);
  fixture.make_current(*file, snapshot);
  CHECK(ranges_on(fixture, 20, 0).empty());
  CHECK(fixture.read(*file, 0, bytes.size()) == bytes);
}

TEST_CASE("move: what was cut off since the last commit is given back where it is by then") {
  EngineFixture fixture({.devices = 2});
  const auto file = fixture.load(20);
  REQUIRE(fixture.write(*file, 0, random_bytes(6 * kChunk, 9)) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  fixture.engine().set_draining(0, true);
  const auto ranges = ranges_on(fixture, 20, 0);
  const CopiedEvent done = copied(fixture, 1, ranges);
  REQUIRE(done.error == 0);
  REQUIRE(fixture.truncate(*file, kChunk) == 0);  // the catalog refers to all of it still
  begin_move(file, 0);
  file->end_move(moves_to(1, done.object, ranges));
  SnapshotData snapshot;
  REQUIRE(fixture.drain(*file, true, &snapshot) == 0);
  uint64_t blocks = 0;
  for (const Extent& extent : snapshot.garbage) {
    if (extent.place.device == 1 && extent.place.object == done.object) blocks += extent.count;
  }
  CHECK(blocks == 2 * kChunk / kBlockBytes);  // of three chunks that were moved
  for (const auto& [device, object] : snapshot.dead) CHECK(device == 1);
}

TEST_CASE("move: where another file's blocks went is not an object of this one's") {
  EngineFixture fixture({.devices = 2});
  const auto owner = fixture.load(20);
  const auto other = fixture.load(21);
  const std::string bytes = random_bytes(4 * kChunk, 6);
  REQUIRE(fixture.write(*owner, 0, bytes) == 0);
  REQUIRE(fixture.commit(*owner, true) == 0);
  REQUIRE(fixture.write(*other, 0, random_bytes(4 * kChunk, 7)) == 0);
  REQUIRE(fixture.commit(*other, true) == 0);
  fixture.engine().set_draining(0, true);
  const auto ranges = ranges_on(fixture, 20, 0);
  REQUIRE(!ranges.empty());
  const CopiedEvent done = copied(fixture, 1, ranges);
  REQUIRE(done.error == 0);
  // Both may have shared the old object; only one refers to what was moved.
  begin_move(owner, 0);
  begin_move(other, 0);
  for (File* file : {owner.get(), other.get()}) file->end_move(moves_to(1, done.object, ranges));
  const std::pair<uint16_t, uint64_t> target{1, done.object};
  for (const auto& object : other->objects()) CHECK(object != target);
  REQUIRE(fixture.write(*other, 0, random_bytes(4 * kChunk, 8)) == 0);
  SnapshotData snapshot;
  REQUIRE(fixture.drain(*other, true, &snapshot) == 0);
  for (const auto& object : snapshot.dead) CHECK(object != target);
  fixture.make_current(*other, snapshot);
  CHECK(fixture.read(*owner, 0, bytes.size()) == bytes);
}

TEST_CASE("block map: moved blocks keep their checksums, and no segment is changed") {
  BlockMap map;
  std::vector<Extent> replaced;
  map.assign({{10, 6, {7, 100, 0, false}}, {1, 2, 3, 4, 5, 6}}, &replaced);
  (void)map.take_changed();
  map.relocate({{7, 102, 0, false}, {8, 0, 1, false}, 2});
  CHECK_FALSE(map.changed());
  CHECK(map.block_count() == 6);
  const auto extents = map.lookup(0, 100);
  REQUIRE(extents.size() == 3);
  CHECK(extents[0].place.object_block == 100);
  CHECK(extents[1].block == 12);
  CHECK(extents[1].count == 2);
  CHECK(extents[1].place.device == 1);
  CHECK(extents[1].place.object == 8);
  CHECK(extents[2].place.object_block == 104);
  CHECK(map.checksums(10, 6) == std::vector<Checksum>{1, 2, 3, 4, 5, 6});
  map.relocate({{7, 102, 1, false}, {8, 0, 1, false}, 2});  // of another device
  CHECK(map.lookup(0, 100).size() == 3);
}

}  // namespace fpfs::testing
