// Slots that are lent to a channel thread while others write, read and drain.
#include "base/fuse_wire.h"
#include "support/engine_fixture.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kChunkBytes = wire::kMaxWriteBytes;
constexpr uint64_t kSlots = 16;
constexpr uint64_t kStart = 300'000;

// A file with bytes in an open slot, whose rest is lent to thread 0.
struct Lent {
  EngineFixture fixture{{1, kChunkBytes, kSlots}};
  std::shared_ptr<File> file = fixture.load(1);
  std::string model = std::string(kStart, 'a');
  Lease lease;
  char* memory = nullptr;
  size_t room = 0;

  Lent() {
    REQUIRE(fixture.write(*file, 0, model) == 0);
    lease.thread = 0;
    room = file->begin_lease(kStart, &lease, &memory);
    REQUIRE(room == kChunkBytes - kStart);
  }
  ~Lent() { file->end_lease(&lease); }

  // What the kernel copies into the lent memory, acknowledged or not.
  void receive(size_t count, char byte) const { std::memset(memory, byte, count); }
  void write_received(size_t count, char byte) {
    Payload payload;
    payload.add(memory, count);
    Slot* spare = nullptr;
    Delivery<int> written;
    const auto attempt = [&] {
      const Outcome outcome = file->write(kStart, count, payload, &spare, &lease);
      if (outcome.progress == Progress::Wait) return Retry::Waiting;
      written.put(outcome.error);
      return Retry::Done;
    };
    if (attempt() != Retry::Done) fixture.engine().park(attempt);
    REQUIRE(written.wait() == 0);
    REQUIRE(spare == nullptr);
    model.resize(std::max(model.size(), kStart + count));
    model.replace(kStart, count, count, byte);
  }
  void check() { CHECK(fixture.read(*file, 0, model.size() + 10) == model); }
  void check_after_commit() {
    check();
    REQUIRE(fixture.commit(*file, true) == 0);
    file->end_lease(&lease);
    check();
    CHECK(file->idle());
    CHECK(fixture.engine().arena().free_count() == kSlots);
    CHECK(file->attributes().allocated_bytes < model.size() + kBlockBytes);
  }
};

}  // namespace

TEST_CASE("lease: what was received in place is written without a copy") {
  Lent lent;
  lent.receive(50'000, 'r');
  lent.write_received(50'000, 'r');
  CHECK(lent.lease.slot != nullptr);
  lent.check_after_commit();
}

TEST_CASE("lease: a write that fills the slot ends it") {
  Lent lent;
  lent.receive(lent.room, 'r');
  lent.write_received(lent.room, 'r');
  CHECK(lent.lease.slot == nullptr);
  lent.check_after_commit();
}

TEST_CASE("lease: bytes that another thread writes there are not received over") {
  Lent lent;
  REQUIRE(lent.fixture.write(*lent.file, kStart + 1000, std::string(2000, 'w')) == 0);
  lent.model += std::string(1000, '\0') + std::string(2000, 'w');
  lent.receive(50'000, 'r');
  lent.check();
  SUBCASE("and what was received comes later") { lent.write_received(50'000, 'r'); }
  SUBCASE("and what was received is given up") {}
  lent.check_after_commit();
}

TEST_CASE("lease: a drain takes what is acknowledged and not what is being received") {
  Lent lent;
  lent.receive(50'000, 'r');
  REQUIRE(lent.fixture.commit(*lent.file, false) == 0);
  lent.check();
  CHECK(lent.fixture.engine().arena().free_count() == kSlots - 1);  // the lent one
  lent.receive(60'000, 's');
  SUBCASE("and what was received comes later") { lent.write_received(60'000, 's'); }
  SUBCASE("and what was received is given up") {}
  lent.check_after_commit();
}

TEST_CASE("lease: with no slot to copy to, a drain waits for the lease to end") {
  Lent lent;
  Arena& arena = lent.fixture.engine().arena();
  std::vector<Slot*> taken;
  while (Slot* slot = arena.take()) taken.push_back(slot);
  Delivery<int> drained;
  lent.file->drain(false, [&](int error, const SnapshotData&) { drained.put(error); });
  lent.receive(50'000, 'r');
  lent.file->end_lease(&lent.lease);
  CHECK(drained.wait() == 0);
  for (Slot* slot : taken) arena.give(slot);
  lent.check_after_commit();
}

}  // namespace fpfs::testing
