// What tests of checksums share: where committed blocks lie, and damage done to them there.
#pragma once

#include <fstream>
#include <string>

#include "layout/block_checksum.h"
#include "support/engine_fixture.h"

namespace fpfs::testing {

inline BlockMap map_of(const Committed& committed) {
  BlockMap map;
  for (const auto& [index, blob] : committed.segments) {
    REQUIRE(map.decode_segment(index, blob).ok());
  }
  return map;
}

// The object that holds a block of a committed file, and where in it.
struct Location {
  std::string path;
  uint64_t offset = 0;
};

inline Location locate(const EngineFixture& fixture, const Place& place) {
  char name[32];
  std::snprintf(name, sizeof name, "/%02lx/%016lx", place.object & 0xff, place.object);
  return {fixture.device_path(place.device) + name, uint64_t{place.object_block} * kBlockBytes};
}

inline Location locate(EngineFixture& fixture, uint64_t ino, uint64_t block) {
  Extent extent;
  REQUIRE(map_of(fixture.catalog()[ino]).find(block, &extent));
  return locate(fixture, extent.place);
}

// Flips one bit of the byte at `at` within the block. Twice is not at all.
inline void flip(const Location& location, uint64_t at) {
  std::fstream object(location.path, std::ios::binary | std::ios::in | std::ios::out);
  object.seekg(static_cast<std::streamoff>(location.offset + at));
  const int byte = object.get();
  REQUIRE(byte != std::char_traits<char>::eof());
  object.seekp(static_cast<std::streamoff>(location.offset + at));
  object.put(static_cast<char>(byte ^ 0x10));
  REQUIRE(object.flush().good());
}

// A block as it is stored; what is not is zeros.
inline std::string stored_block(const Location& location) {
  std::string bytes(kBlockBytes, '\0');
  std::ifstream object(location.path, std::ios::binary);
  object.seekg(static_cast<std::streamoff>(location.offset));
  object.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

// Compares each committed block with its checksum; returns how many there are.
inline uint64_t check_committed(EngineFixture& fixture, uint64_t ino) {
  const BlockMap map = map_of(fixture.catalog()[ino]);
  uint64_t count = 0;
  for (const Extent& extent : map.lookup(0, kFileBytesMax / kBlockBytes)) {
    if (extent.place.unwritten) continue;
    for (uint64_t i = 0; i < extent.count; ++i, ++count) {
      const Extent block = extent.part(extent.block + i, 1);
      const std::string stored = stored_block(locate(fixture, block.place));
      const Checksum expected = checksum_blocks(stored.data(), stored.size()).front();
      CHECK_MESSAGE(map.checksums(block.block, 1).front() == expected, "block " << block.block);
    }
  }
  return count;
}

// How many lines of the log, since it was looked at last, have this in them.
inline uint64_t log_lines(Engine& engine, const std::string& part) {
  uint64_t count = 0;
  for (const Event& event : engine.take_events()) {
    const auto* line = std::get_if<LogEvent>(&event);
    count += line != nullptr && line->message.find(part) != std::string::npos ? 1 : 0;
  }
  return count;
}

}  // namespace fpfs::testing
