// The block map against an array of places, and its segments against what a disk can do to them.
#include <doctest/doctest.h>

#include <cstring>
#include <random>

#include "base/crc32c.h"
#include "layout/block_map.h"
#include "support/engine_fixture.h"

namespace fpfs::testing {

TEST_CASE("a block map equals an array under random changes, also through its segments") {
  const uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  constexpr uint64_t kBlocks = 3 * kSegmentBlocks;
  using Known = std::tuple<uint16_t, uint64_t, uint32_t, bool, Checksum>;
  std::vector<std::optional<Known>> model(kBlocks);
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
    WrittenExtent written{{block, count, place}, {}};
    if (!place.unwritten && random() % 2 == 0) {
      for (uint64_t i = 0; i < count; ++i) {
        written.checksums.push_back(static_cast<uint32_t>(random()));
      }
    }
    map.assign(written, nullptr);
    for (uint64_t i = 0; i < count; ++i) {
      model[block + i] = {place.device, place.object, place.object_block + static_cast<uint32_t>(i),
                          place.unwritten,
                          written.checksums.empty() ? Checksum() : written.checksums[i]};
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
      const Checksum checksum = each->checksums(block, 1).front();
      if (!model[block].has_value()) {
        REQUIRE_FALSE(checksum.has_value());
        continue;
      }
      ++mapped;
      const Place& p = extent.place;
      REQUIRE(Known(p.device, p.object, p.object_block, p.unwritten, checksum) == *model[block]);
    }
    CHECK(each->block_count() == mapped);
  }
}

TEST_CASE("a damaged segment is refused, whatever bit is wrong") {
  BlockMap map;
  map.assign({{3, 3, Place{77, 5, 1, false}}, {4, 5, 6}}, nullptr);
  map.assign({{6, 7, Place{77, 8, 1, false}}, {}}, nullptr);
  map.assign({{20, 1, Place{78, 0, 0, true}}, {}}, nullptr);
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
  map.assign({{kSegmentBlocks - 1, 2, Place{1, 0, 0, false}}, {7, 8}}, nullptr);
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
  // begin with the block and the count; the number of checksums, and they; the checksum of it all.
  BlockMap map;
  map.assign({{3, 10, Place{77, 5, 1, false}}, std::vector<uint32_t>(10, 1)}, nullptr);
  map.assign({{20, 2, Place{78, 0, 0, true}}, {}}, nullptr);
  const std::string blob = map.encode_segment(0);
  REQUIRE(blob.size() == 16 + 2 * 24 + 4 + 10 * 4 + 4);
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
  constexpr size_t kDeviceAndFlags = 12;
  constexpr size_t kChecksumCount = kSecond + 24;
  for (const std::string& damaged : {
           with(0, 0),
           with(kFormat, 0),
           with(kFormat, 3),
           with(kFirst + kDeviceAndFlags, 2 << 16),  // unverified: then it has no checksums
           with(kFirst + kDeviceAndFlags, 3 << 16),
           with(kFirst + kDeviceAndFlags, 4 << 16),
           with(kSecond + kDeviceAndFlags, 0),  // checksums of its two blocks are missing
           with(kChecksumCount, 0),
           with(kChecksumCount, 9),
           with(kChecksumCount, 11),
           with(kChecksumCount, UINT32_MAX),
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

// The segment that the first format has for one run.
static std::string segment_of_format_1() {
  const uint32_t words[] = {0x47455346, 1, 0, 1, 3, 10, 5, 1, 77, 0, 0};
  std::string blob(reinterpret_cast<const char*>(words), sizeof words);
  const uint32_t crc = crc32c(0, blob.data(), blob.size());
  return blob.append(reinterpret_cast<const char*>(&crc), sizeof crc);
}

TEST_CASE("a segment of the first format has no checksums, and keeps what it gets") {
  BlockMap map;
  REQUIRE(map.decode_segment(0, segment_of_format_1()).ok());
  CHECK(map.checksums(3, 10) == std::vector<Checksum>(10));
  map.assign({{5, 1, Place{80, 0, 0, false}}, {99}}, nullptr);
  BlockMap copy;
  REQUIRE(copy.decode_segment(0, map.encode_segment(0)).ok());
  std::vector<Checksum> expected(10);
  expected[2] = 99;
  CHECK(copy.checksums(3, 10) == expected);
  Extent extent;
  REQUIRE(copy.find(12, &extent));
  CHECK(extent.place.object_block == 14);
}

}  // namespace fpfs::testing
