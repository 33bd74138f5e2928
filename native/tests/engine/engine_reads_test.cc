// Reads that are in flight: what is given back waits for them, and they keep the slots they copy
// from.
#include "support/engine_fixture.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kChunkBytes = 256 * 1024;
constexpr uint64_t kSlots = 16;

// Tickets of the operations that have ended since the last call.
std::vector<uint64_t> ended(Engine& engine) {
  std::vector<uint64_t> tickets;
  for (const Event& event : engine.take_events()) {
    if (const auto* each = std::get_if<DoneEvent>(&event)) tickets.push_back(each->ticket);
  }
  return tickets;
}

using Tickets = std::vector<uint64_t>;

// Too few to fill the chunk: its slot stays open, so it holds them until a commit, however long the
// test takes.
constexpr uint64_t kStagedBytes = kChunkBytes - 1;

// A read of staged bytes that ends when the test says so: it counts as one more part.
struct HeldRead : ReadJob {
  AlignedBuffer memory{ReadJob::buffer_bytes(kChunkBytes)};
  std::string found;
  int failure = -1;
  explicit HeldRead(File& from) {
    offset = 0;
    length = kChunkBytes;
    buffer = memory.data();
    pending = 2;
    from.read(this);
    REQUIRE(overlays.size() == 1);
    REQUIRE(pending == 1);
  }
  void done(int error_found, const char* data, size_t bytes) override {
    failure = error_found;
    found.assign(data, bytes);
  }
};

}  // namespace

TEST_CASE("reads in flight: giving back waits for those before it and for no later ones") {
  EngineFixture fixture;
  Engine& engine = fixture.engine();
  const unsigned before = engine.read_begin();
  const uint64_t first = engine.discard({});
  const unsigned after = engine.read_begin();
  SUBCASE("the later read ends first") {
    engine.read_end(after);
    CHECK(ended(engine).empty());
    engine.read_end(before);
    CHECK(ended(engine) == Tickets{first});
  }
  SUBCASE("the later read goes on") {
    engine.read_end(before);
    CHECK(ended(engine) == Tickets{first});
    engine.read_end(after);
  }
  SUBCASE("and what is to be given back later waits for it") {
    const uint64_t second = engine.discard({});
    engine.read_end(before);
    CHECK(ended(engine) == Tickets{first});
    const uint64_t third = engine.discard({});
    CHECK(ended(engine).empty());
    engine.read_end(after);
    CHECK(ended(engine) == Tickets{second, third});
  }
  const uint64_t last = engine.discard({});
  CHECK(ended(engine) == Tickets{last});
}

TEST_CASE("reads in flight: what waited behind another is given back though nobody reads") {
  EngineFixture fixture;
  Engine& engine = fixture.engine();
  const unsigned phase = engine.read_begin();
  const uint64_t first = engine.discard({});
  const uint64_t second = engine.discard({});
  CHECK(ended(engine).empty());
  engine.read_end(phase);
  CHECK(ended(engine) == Tickets{first, second});
}

TEST_CASE("reads in flight: a read of a file holds back what is given back, until it ends") {
  EngineFixture fixture({1, kChunkBytes, kSlots});
  Engine& engine = fixture.engine();
  const auto file = fixture.load(1);
  REQUIRE(fixture.write(*file, 0, random_bytes(kStagedBytes, 1)) == 0);
  HeldRead read(*file);
  const uint64_t ticket = engine.discard({});
  CHECK(ended(engine).empty());
  read.part_done(0);
  CHECK(ended(engine) == Tickets{ticket});
}

TEST_CASE("reads in flight: a slot stays until the read that copies from it has ended") {
  EngineFixture fixture({1, kChunkBytes, kSlots});
  Engine& engine = fixture.engine();
  const auto file = fixture.load(1);
  const std::string bytes = random_bytes(kStagedBytes, 2);
  REQUIRE(fixture.write(*file, 0, bytes) == 0);
  HeldRead read(*file);
  REQUIRE(fixture.commit(*file, true) == 0);
  CHECK(engine.arena().free_count() == kSlots - 1);

  std::vector<Slot*> taken;
  while (Slot* slot = engine.arena().take()) taken.push_back(slot);
  const auto other = fixture.load(2);
  Delivery<int> attempted;
  Delivery<int> written;
  bool first = true;
  engine.park([&] {
    std::string more = "more";
    Payload payload;
    payload.add(more.data(), more.size());
    const Outcome outcome = other->write(0, more.size(), payload, nullptr, nullptr);
    if (std::exchange(first, false)) attempted.put(0);
    if (outcome.progress == Progress::Wait) return Retry::Waiting;
    written.put(outcome.error);
    return Retry::Done;
  });
  attempted.wait();
  read.part_done(0);  // its slot is what the write waits for
  CHECK(written.wait() == 0);
  CHECK(read.failure == 0);
  CHECK(read.found == bytes);
  for (Slot* slot : taken) engine.arena().give(slot);
  REQUIRE(fixture.commit(*other, true) == 0);
  CHECK(engine.arena().free_count() == kSlots);
}

TEST_CASE("reads in flight: a part that failed fails the read") {
  EngineFixture fixture({1, kChunkBytes, kSlots});
  const auto file = fixture.load(1);
  REQUIRE(fixture.write(*file, 0, random_bytes(kStagedBytes, 3)) == 0);
  HeldRead read(*file);
  read.part_done(-EIO);
  CHECK(read.failure == EIO);
  CHECK(fixture.read(*file, 0, kStagedBytes) == random_bytes(kStagedBytes, 3));
}

}  // namespace fpfs::testing
