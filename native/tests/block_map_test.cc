// The block map against an array of places, and its segments against what a disk can do to them.
#include <doctest/doctest.h>

#include <cstring>
#include <random>

#include "block_map.h"
#include "crc32c.h"
#include "engine_fixture.h"

namespace fpfs::testing {

TEST_CASE("a block map equals an array under random changes, also through its segments") {
  const uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  constexpr uint64_t kBlocks = 3 * kSegmentBlocks;
  std::vector<std::optional<std::tuple<uint16_t, uint64_t, uint32_t, bool>>> model(kBlocks);
  BlockMap map;
  for (int step = 0; step < 2000; ++step) {
    const uint64_t block = random() % kBlocks;
    const uint64_t count = 1 + random() % std::min<uint64_t>(200, kBlocks - block);
    if (random() % 3 == 0) {
      map.erase(block, count, nullptr);
      for (uint64_t i = 0; i < count; ++i) model[block + i].reset();
      continue;
    }
    // Places that often continue each other, so that extents merge.
    const Place place{random() % 3, static_cast<uint32_t>(block + random() % 2),
                      static_cast<uint16_t>(random() % 2), random() % 4 == 0};
    map.assign(Extent{block, count, place}, nullptr);
    for (uint64_t i = 0; i < count; ++i) {
      model[block + i] = {place.device, place.object, place.object_block + static_cast<uint32_t>(i),
                          place.unwritten};
    }
  }
  BlockMap copy;
  for (uint32_t index = 0; index < 3; ++index) {
    REQUIRE(copy.decode_segment(index, map.encode_segment(index)).ok());
  }
  for (const BlockMap* each : {&map, &copy}) {
    uint64_t mapped = 0;
    for (uint64_t block = 0; block < kBlocks; ++block) {
      Extent extent;
      REQUIRE(each->find(block, &extent) == model[block].has_value());
      if (!model[block].has_value()) continue;
      ++mapped;
      const Place& p = extent.place;
      REQUIRE(std::tuple(p.device, p.object, p.object_block, p.unwritten) == *model[block]);
    }
    CHECK(each->block_count() == mapped);
  }
}

TEST_CASE("a damaged segment is refused, whatever bit is wrong") {
  BlockMap map;
  map.assign(Extent{3, 10, Place{77, 5, 1, false}}, nullptr);
  map.assign(Extent{20, 1, Place{78, 0, 0, true}}, nullptr);
  const std::string blob = map.encode_segment(0);
  BlockMap good;
  REQUIRE(good.decode_segment(0, blob).ok());
  for (size_t bit = 0; bit < blob.size() * 8; ++bit) {
    std::string damaged = blob;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    BlockMap victim;
    CHECK(victim.decode_segment(0, damaged).error() == EIO);
  }
  for (size_t n = 1; n < blob.size(); ++n) {
    BlockMap victim;
    CHECK(victim.decode_segment(0, std::string_view(blob).substr(0, n)).error() == EIO);
  }
  BlockMap elsewhere;
  CHECK(elsewhere.decode_segment(1, blob).error() == EIO);
}

TEST_CASE("changed segments are taken once, and again when they were put back") {
  BlockMap map;
  map.assign(Extent{kSegmentBlocks - 1, 2, Place{1, 0, 0, false}}, nullptr);
  const std::set<uint32_t> changed = map.take_changed();
  CHECK(changed == std::set<uint32_t>{0, 1});
  CHECK_FALSE(map.changed());
  map.put_back(changed);
  CHECK(map.take_changed() == changed);
  map.erase(0, UINT64_MAX, nullptr);
  CHECK(map.take_changed() == changed);
  CHECK(map.encode_segment(0).empty());
}

TEST_CASE("a segment whose checksum is right and whose runs are not is refused") {
  // Of the format: a header of 16 bytes, the last four the count of runs; runs of 24 bytes, that
  // begin with the block and the count; four bytes of zero; the checksum.
  BlockMap map;
  map.assign(Extent{3, 10, Place{77, 5, 1, false}}, nullptr);
  map.assign(Extent{20, 2, Place{78, 0, 0, true}}, nullptr);
  const std::string blob = map.encode_segment(0);
  REQUIRE(blob.size() == 16 + 2 * 24 + 8);
  const auto with = [&](size_t position, uint32_t value) {
    std::string changed = blob.substr(0, blob.size() - sizeof value);
    std::memcpy(changed.data() + position, &value, sizeof value);
    const uint32_t crc = crc32c(0, changed.data(), changed.size());
    return changed.append(reinterpret_cast<const char*>(&crc), sizeof crc);
  };
  constexpr size_t kFormat = 4;
  constexpr size_t kRunCount = 12;
  constexpr size_t kFirst = 16;
  constexpr size_t kSecond = kFirst + 24;
  constexpr size_t kCount = 4;
  for (const std::string& damaged : {
           with(0, 0),
           with(kFormat, 2),
           with(kRunCount, 3),
           with(kFirst + kCount, 0),
           with(kFirst, kSegmentBlocks - 9),
           with(kFirst, kSegmentBlocks),
           with(kFirst, UINT32_MAX),
           with(kFirst + kCount, UINT32_MAX),
           with(kSecond, 12),  // over the first run's last block
           with(kSecond + kCount, kSegmentBlocks),
       }) {
    BlockMap victim;
    CHECK(victim.decode_segment(0, damaged).error() == EIO);
  }
  BlockMap good;
  CHECK(good.decode_segment(0, with(kFirst, 10)).ok());
  CHECK(good.block_count() == 12);
  BlockMap last;
  CHECK(last.decode_segment(0, with(kSecond, kSegmentBlocks - 2)).ok());
}

}  // namespace fpfs::testing
