// Checksums of contents: right for whatever is committed, and what does not fit them is not read.
#include <poll.h>

#include <cerrno>
#include <set>

#include "support/damage.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kIno = 5;
constexpr uint64_t kBlocks = 12;
constexpr uint64_t kBytes = kBlocks * kBlockBytes;

// A committed file on the devices, and what is in it.
struct Stored {
  EngineFixture fixture;
  std::shared_ptr<File> file;
  std::string content;

  explicit Stored(std::string bytes, EngineOptions options = {})
      : fixture(std::move(options)), file(fixture.load(kIno)), content(std::move(bytes)) {
    REQUIRE(fixture.write(*file, 0, content) == 0);
    REQUIRE(fixture.commit(*file, true) == 0);
  }

  Location at(uint64_t block) { return locate(fixture, kIno, block); }
  void remount() {
    file.reset();
    fixture.reopen();
    file = fixture.load(kIno);
  }
  int error_of(uint64_t offset, size_t length) {
    std::string found;
    return fixture.try_read(*file, offset, length, &found);
  }
  std::string read(uint64_t offset, size_t length) { return fixture.read(*file, offset, length); }
  bool holds(uint64_t offset, size_t length) {
    return read(offset, length) == content.substr(offset, length);
  }
  uint64_t errors() {
    uint64_t errors = 0;
    for (int i = 0; i < fixture.options().devices; ++i) {
      errors += fixture.engine().checksum_errors(static_cast<uint16_t>(i));
    }
    return errors;
  }
};

}  // namespace

TEST_CASE("checksums: of blocks, of which the last may be short") {
  const std::string bytes = random_bytes(2 * kBlockBytes + 4096, 1);
  const std::vector<uint32_t> sums = checksum_blocks(bytes.data(), bytes.size());
  REQUIRE(sums.size() == 3);
  std::string whole = bytes;
  whole.resize(3 * kBlockBytes);
  CHECK(sums == checksum_blocks(whole.data(), whole.size()));
  std::vector<Checksum> expected(sums.begin(), sums.end());
  CHECK(damaged_blocks(whole.data(), expected).empty());
  whole[2 * kBlockBytes + 60'000] = 'x';  // behind what was stored
  whole[0] = static_cast<char>(whole[0] ^ 1);
  CHECK(damaged_blocks(whole.data(), expected) == std::vector<uint64_t>{0, 2});
  expected[0].reset();
  CHECK(damaged_blocks(whole.data(), expected) == std::vector<uint64_t>{2});
}

TEST_CASE("checksums: a block of wrong bytes is not read, and the others are") {
  Stored stored(random_bytes(kBytes, 1));
  constexpr uint64_t kDamaged = 6;
  constexpr uint64_t begin = kDamaged * kBlockBytes;
  flip(stored.at(kDamaged), 1000);
  SUBCASE("in the same mount") {}
  SUBCASE("in the next one") { stored.remount(); }
  CHECK(stored.error_of(begin, kBlockBytes) == EIO);
  CHECK(stored.error_of(begin + 1000, 1) == EIO);
  CHECK(stored.error_of(begin + 50'000, 10) == EIO);  // of a sound part of it
  CHECK(stored.error_of(0, kBytes) == EIO);
  CHECK(stored.error_of(begin - 1, 2) == EIO);
  CHECK(stored.holds(0, begin));
  CHECK(stored.holds(begin + kBlockBytes, kBytes - begin - kBlockBytes));
  CHECK(stored.errors() == 5);
  CHECK(log_lines(stored.fixture.engine(), "inode 5: its block 6 (64 KiB) is damaged") == 1);
  CHECK(stored.error_of(begin, 1) == EIO);
  CHECK(log_lines(stored.fixture.engine(), "damaged") == 0);
  // The bytes come back with the bit.
  flip(stored.at(kDamaged), 1000);
  CHECK(stored.holds(0, kBytes));
}

TEST_CASE("checksums: behind the end of a file nothing that is stored may change either") {
  Stored stored(random_bytes(kBlockBytes + 100, 2));
  CHECK(stored.holds(kBlockBytes, 100));
  flip(stored.at(1), 200);
  CHECK(stored.error_of(kBlockBytes, 100) == EIO);
  CHECK(stored.holds(0, kBlockBytes));
}

TEST_CASE("checksums: an object that was cut short is not read as zeros, unless it held some") {
  std::string bytes = random_bytes(2 * kBlockBytes, 3);
  bytes.replace(kBlockBytes, kBlockBytes, kBlockBytes, '\0');
  Stored stored(bytes, {.devices = 1});
  const Location last = stored.at(1);
  std::filesystem::resize_file(last.path, last.offset);
  CHECK(stored.holds(0, 2 * kBlockBytes));
  std::filesystem::resize_file(last.path, stored.at(0).offset + 4096);
  CHECK(stored.error_of(0, kBlockBytes) == EIO);
  CHECK(stored.error_of(0, 100) == EIO);  // of bytes that are there
  CHECK(stored.holds(kBlockBytes, kBlockBytes));
}

TEST_CASE("checksums: staged bytes are read though what they are to replace is damaged") {
  Stored stored(random_bytes(kBytes, 4));
  flip(stored.at(2), 5);
  REQUIRE(stored.fixture.write(*stored.file, 2 * kBlockBytes, std::string(30'000, 'a')) == 0);
  REQUIRE(stored.fixture.write(*stored.file, 2 * kBlockBytes + 30'000, std::string(20'000, 'b')) ==
          0);
  CHECK(stored.read(2 * kBlockBytes + 29'999, 2) == "ab");
  CHECK(stored.read(2 * kBlockBytes, 50'000).front() == 'a');
  CHECK(stored.error_of(2 * kBlockBytes, 50'001) == EIO);
  CHECK(stored.error_of(2 * kBlockBytes - 1, kBlockBytes + 2) == EIO);
  // A rewrite of the whole block heals it.
  const std::string fresh = random_bytes(kBlockBytes, 5);
  REQUIRE(stored.fixture.write(*stored.file, 2 * kBlockBytes, fresh) == 0);
  CHECK(stored.read(2 * kBlockBytes, kBlockBytes) == fresh);
  REQUIRE(stored.fixture.commit(*stored.file, true) == 0);
  stored.content.replace(2 * kBlockBytes, kBlockBytes, fresh);
  stored.remount();
  CHECK(stored.holds(0, kBytes));
}

TEST_CASE("checksums: wrong bytes of a block that is rewritten in part get no fresh checksum") {
  Stored stored(random_bytes(kBytes, 6));
  const Location damaged = stored.at(3);
  flip(damaged, 40'000);
  REQUIRE(stored.fixture.write(*stored.file, 3 * kBlockBytes, "new") == 0);
  SnapshotData snapshot;
  CHECK(stored.fixture.drain(*stored.file, true, &snapshot) == EIO);
  CHECK(log_lines(stored.fixture.engine(), "inode 5: its block 3 (64 KiB) is damaged") == 1);
  CHECK(stored.error_of(3 * kBlockBytes, kBlockBytes) == EIO);
  uint64_t seen = 0;
  CHECK(stored.file->take_error(&seen) == EIO);
  // The committed version is what it was.
  stored.remount();
  CHECK(stored.error_of(3 * kBlockBytes, kBlockBytes) == EIO);
  flip(damaged, 40'000);
  CHECK(stored.holds(0, kBytes));
}

TEST_CASE("checksums: cutting a file in a block and extending it again leaves them right") {
  Stored stored(random_bytes(kBytes, 7));
  EngineFixture& fixture = stored.fixture;
  const uint64_t cut = 4 * kBlockBytes + 10'001;
  REQUIRE(fixture.truncate(*stored.file, cut) == 0);
  stored.content.resize(cut);
  bool between = false;
  SUBCASE("at once") {}
  SUBCASE("with a commit between") { between = true; }
  if (between) {
    REQUIRE(fixture.commit(*stored.file, true) == 0);
    CHECK(check_committed(fixture, kIno) == 5);
    CHECK(stored.holds(0, cut));
  }
  REQUIRE(fixture.truncate(*stored.file, kBytes) == 0);
  stored.content.resize(kBytes);
  CHECK(stored.holds(0, kBytes));
  REQUIRE(fixture.write(*stored.file, 9 * kBlockBytes + 77, "further on") == 0);
  stored.content.replace(9 * kBlockBytes + 77, 10, "further on");
  REQUIRE(fixture.commit(*stored.file, true) == 0);
  CHECK(check_committed(fixture, kIno) == 6);
  stored.remount();
  CHECK(stored.holds(0, kBytes));
}

TEST_CASE("checksums: punching and preallocating leave them right") {
  Stored stored(random_bytes(kBytes, 8));
  EngineFixture& fixture = stored.fixture;
  REQUIRE(fixture.punch(*stored.file, kBlockBytes + 100, 3 * kBlockBytes) == 0);
  std::fill_n(stored.content.begin() + kBlockBytes + 100, 3 * kBlockBytes, '\0');
  REQUIRE(fixture.allocate(*stored.file, 2 * kBlockBytes, 2 * kBlockBytes, true) == 0);
  REQUIRE(fixture.write(*stored.file, 2 * kBlockBytes + 5, "into what was allocated") == 0);
  stored.content.replace(2 * kBlockBytes + 5, 23, "into what was allocated");
  REQUIRE(fixture.commit(*stored.file, true) == 0);
  CHECK(check_committed(fixture, kIno) == kBlocks - 1);
  stored.remount();
  CHECK(stored.holds(0, kBytes));
}

TEST_CASE("checksums: those of every committed block are right under random operations") {
  const uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t bound) { return random() % bound; };
  EngineFixture fixture;
  auto file = fixture.load(kIno);
  uint64_t checked = 0;
  for (int step = 0; step < 400; ++step) {
    const uint64_t offset = below(kBytes);
    const uint64_t length = 1 + below(3 * kBlockBytes);
    const uint64_t kind = below(10);
    if (kind < 5) {
      REQUIRE(fixture.write(*file, offset, random_bytes(length, random())) == 0);
    } else if (kind == 5) {
      REQUIRE(fixture.truncate(*file, offset) == 0);
    } else if (kind == 6) {
      REQUIRE(fixture.punch(*file, offset, length) == 0);
    } else if (kind == 7) {
      REQUIRE(fixture.allocate(*file, offset, length, below(2) == 0) == 0);
    } else {
      REQUIRE(fixture.commit(*file, below(2) == 0) == 0);
      checked += check_committed(fixture, kIno);
    }
  }
  CHECK(checked > 100);
}

TEST_CASE("checksums: blocks that were written without are read, and keep none") {
  Stored stored(random_bytes(kBytes, 9), {.checksums = false});
  const std::vector<Checksum> none(kBlocks);
  CHECK(map_of(stored.fixture.catalog()[kIno]).checksums(0, kBlocks) == none);
  CHECK(stored.holds(0, kBytes));
  EngineOptions options = stored.fixture.options();
  options.paths = {stored.fixture.device_path(0), stored.fixture.device_path(1)};
  options.mount_count = 1;
  options.checksums = true;
  EngineFixture next(options);
  next.catalog()[kIno] = stored.fixture.catalog()[kIno];
  const auto file = next.load(kIno);
  CHECK(next.read(*file, 0, kBytes) == stored.content);
  REQUIRE(next.write(*file, 3 * kBlockBytes + 9, "new") == 0);
  stored.content.replace(3 * kBlockBytes + 9, 3, "new");
  REQUIRE(next.commit(*file, true) == 0);
  const std::vector<Checksum> known = map_of(next.catalog()[kIno]).checksums(0, kBlocks);
  for (uint64_t block = 0; block < kBlocks; ++block) {
    CHECK(known[block].has_value() == (block == 3));
  }
  CHECK(next.read(*file, 0, kBytes) == stored.content);
  flip(locate(next, kIno, 3), 60'000);
  std::string found;
  CHECK(next.try_read(*file, 3 * kBlockBytes, 1, &found) == EIO);
}

// What a verification comes to.
static VerifiedEvent wait_verified(Engine& engine, uint64_t ticket) {
  for (;;) {
    pollfd wait{engine.event_fd(), POLLIN, 0};
    REQUIRE(::poll(&wait, 1, 60'000) == 1);
    for (const Event& event : engine.take_events()) {
      const auto* verified = std::get_if<VerifiedEvent>(&event);
      if (verified != nullptr && verified->ticket == ticket) return *verified;
    }
  }
}

// All committed blocks of the file, as a scrub asks for them.
static std::vector<StoredRange> ranges_of(Stored& stored) {
  const BlockMap map = map_of(stored.fixture.catalog()[kIno]);
  std::vector<StoredRange> ranges;
  for (const Extent& extent : map.lookup(0, kBlocks)) {
    StoredRange& range = ranges.emplace_back(StoredRange{extent.place, {}});
    for (const Checksum& each : map.checksums(extent.block, extent.count)) {
      range.checksums.push_back(each.value());
    }
  }
  return ranges;
}

TEST_CASE("checksums: a verification finds each damaged block, and what cannot be read") {
  constexpr uint64_t kRun = 37;  // several pieces, the last one short
  Stored stored(random_bytes(kRun * kBlockBytes - 1000, 10), {.devices = 1});
  Engine& engine = stored.fixture.engine();
  const BlockMap map = map_of(stored.fixture.catalog()[kIno]);
  StoredRange whole;
  Extent first;
  REQUIRE(map.find(0, &first));
  whole.place = first.place;
  for (const Checksum& each : map.checksums(0, kRun)) whole.checksums.push_back(each.value());
  CHECK(wait_verified(engine, engine.verify({})).damage.empty());
  CHECK(wait_verified(engine, engine.verify({whole, whole})).damage.empty());

  for (const uint64_t block : {0U, 8U, 36U}) flip(stored.at(block), 77);
  StoredRange absent = whole;
  absent.place.object = 99;
  absent.checksums.resize(3);
  StoredRange elsewhere = absent;
  elsewhere.place.device = 7;
  const VerifiedEvent found = wait_verified(engine, engine.verify({absent, whole, elsewhere}));
  CHECK(found.error == 0);
  std::set<std::tuple<uint64_t, uint64_t, uint64_t, int>> damage;
  for (const auto& each : found.damage) {
    damage.emplace(each.range, each.first, each.count, each.error);
  }
  CHECK(damage ==
        decltype(damage){
            {0, 0, 3, ENOENT}, {1, 0, 1, 0}, {1, 8, 1, 0}, {1, 36, 1, 0}, {2, 0, 3, ENODEV}});
}

TEST_CASE("checksums: an engine ends in the middle of verifications") {
  Stored stored(random_bytes(kBytes, 11));
  Engine& engine = stored.fixture.engine();
  std::vector<StoredRange> ranges;
  for (int i = 0; i < 50; ++i) {
    for (const StoredRange& range : ranges_of(stored)) ranges.push_back(range);
  }
  std::set<uint64_t> tickets;
  for (int i = 0; i < 20; ++i) tickets.insert(engine.verify(ranges));
  engine.close();
  tickets.insert(engine.verify(ranges));
  for (const Event& event : engine.take_events()) {
    if (const auto* verified = std::get_if<VerifiedEvent>(&event); verified != nullptr) {
      CHECK((verified->error == 0 || verified->error == ESHUTDOWN));
      CHECK(verified->damage.empty());
      CHECK(tickets.erase(verified->ticket) == 1);
    }
  }
  CHECK(tickets.empty());
}

}  // namespace fpfs::testing
