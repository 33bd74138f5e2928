// The channel: what waits for staging, what is given up, and what closes wait for.
#include "support/channel_fixture.h"

namespace fpfs::testing {

TEST_CASE("channel: writes that wait for slots are all done when there are some") {
  constexpr uint64_t count = 40;  // more than landing buffers
  Kernel kernel;
  std::string model;
  std::vector<uint64_t> sent;
  NoSlots none(kernel.engine());
  for (uint64_t i = 0; i < count; ++i) {
    const std::string piece = random_bytes(1000 + i, i);
    sent.push_back(kernel.send(FUSE_WRITE, Kernel::write_body(model.size(), piece)));
    model += piece;
  }
  wait_parked(kernel, 17);
  none.give();
  for (const uint64_t unique : sent) CHECK(kernel.wait(unique).error == 0);
  wait_parked(kernel, 0);
  kernel.check(model);
  REQUIRE(kernel.fixture().commit(*kernel.file(), true) == 0);
  kernel.check(model);
  CHECK(kernel.engine().arena().free_count() >= kSlots - 1);
}

TEST_CASE("channel: a waiting write is given up when its process is killed, and only then") {
  Kernel kernel;
  kernel.write_whole(0, "before");
  REQUIRE(kernel.fixture().commit(*kernel.file(), true) == 0);
  NoSlots none(kernel.engine());
  const uint64_t lives =
      kernel.send(FUSE_WRITE, Kernel::write_body(0, "lives"), static_cast<uint32_t>(getpid()));
  // Of a process that has ended by itself, and of a thread that began it and is gone.
  const Zombie ended(0);
  const uint64_t patient = kernel.send(FUSE_WRITE, Kernel::write_body(10, "patient"), ended.pid());
  const uint64_t left = kernel.send(FUSE_WRITE, Kernel::write_body(17, "left"), kNobody);
  for (int i = 0; i < 2; ++i) {  // also when the relay thread has looked before
    const Zombie writer(SIGKILL);
    const uint64_t killed = kernel.send(FUSE_WRITE, Kernel::write_body(0, "killed"), writer.pid());
    CHECK(kernel.wait(killed).error == EINTR);
    wait_parked(kernel, 3);
  }
  for (const uint64_t unique : {lives, patient, left}) CHECK_FALSE(kernel.answered(unique));
  none.give();
  for (const uint64_t unique : {lives, patient, left}) CHECK(kernel.wait(unique).error == 0);
  kernel.check(std::string("livese") + std::string(4, '\0') + "patientleft");
}

TEST_CASE("channel: interrupts are refused, and the request that is named stays unanswered") {
  Kernel kernel;
  NoSlots none(kernel.engine());
  const uint64_t waits = kernel.send(FUSE_WRITE, Kernel::write_body(0, "waits"));
  wait_parked(kernel, 1);
  fuse_interrupt_in in{};
  in.unique = waits;
  const uint64_t interrupt = waits | 1;  // FUSE_INT_REQ_BIT of the kernel
  kernel.send_as(interrupt, FUSE_INTERRUPT, bytes_of(in));
  CHECK(kernel.wait(interrupt).error == ENOSYS);
  CHECK(kernel.engine().arena().requests().is_under_way(waits));
  none.give();
  CHECK(kernel.wait(waits).error == 0);
}

TEST_CASE("channel: a write of a process that cannot be seen waits") {
  constexpr uint32_t unseen = 0;  // as the kernel names who is in another PID namespace
  Kernel kernel;
  NoSlots none(kernel.engine());
  const Zombie writer(SIGKILL);
  const uint64_t waits = kernel.send(FUSE_WRITE, Kernel::write_body(0, "waits"), unseen);
  const uint64_t killed = kernel.send(FUSE_WRITE, Kernel::write_body(0, "killed"), writer.pid());
  CHECK(kernel.wait(killed).error == EINTR);  // that was asked about later
  wait_parked(kernel, 1);
  CHECK_FALSE(kernel.answered(waits));
  none.give();
  CHECK(kernel.wait(waits).error == 0);
}

TEST_CASE("channel: a close waits for durability if its owner wrote, or nobody knows who did") {
  constexpr uint64_t owner = 77;
  constexpr uint64_t other = 78;
  Kernel kernel(Ack::Close);
  CHECK(kernel.ask(FUSE_FLUSH, flush_body(owner)).error == 0);
  REQUIRE(kernel.ask(FUSE_WRITE, Kernel::write_body(0, "x", 0, kHandle, owner)).error == 0);
  CHECK(kernel.ask(FUSE_FLUSH, flush_body(other)).error == 0);
  kernel.send(FUSE_FLUSH, flush_body(owner));
  CHECK(kernel.relayed() == FUSE_FLUSH);
  REQUIRE(kernel.write(1, "x") == 0);  // of a map
  kernel.send(FUSE_FLUSH, flush_body(other));
  CHECK(kernel.relayed() == FUSE_FLUSH);
}

TEST_CASE("channel: how a writer ends is told with the release, and a killed one commits nothing") {
  constexpr uint64_t owner = 77;
  for (const Ack ack : {Ack::Early, Ack::Close}) {
    for (const int signal : {0, SIGKILL, SIGTERM}) {
      CAPTURE(signal);
      Kernel kernel(ack);
      REQUIRE(kernel.ask(FUSE_WRITE, Kernel::write_body(0, "x", 0, kHandle, owner)).error == 0);
      const Zombie writer(signal);
      const uint64_t flush = kernel.send(FUSE_FLUSH, flush_body(owner), writer.pid());
      if (ack == Ack::Close && signal == 0) {
        CHECK(kernel.relayed() == FUSE_FLUSH);
        kernel.answer(flush, 0);
      }
      CHECK(kernel.wait(flush).error == 0);
      CHECK(kernel.ask(FUSE_RELEASE, release_body(kHandle)).error == 0);
      const std::vector<Engine::Released> released = kernel.engine().take_released();
      REQUIRE(released.size() == 1);
      CHECK(released[0].killed_by == signal);
    }
  }
}

TEST_CASE("channel: a close waits for copies, allocations and truncations, too") {
  constexpr uint64_t owner = 77;
  fuse_setattr_in truncation{};
  truncation.valid = FATTR_SIZE | FATTR_FH | FATTR_LOCKOWNER;
  truncation.fh = kHandle;
  truncation.lock_owner = owner;
  fuse_setattr_in times = truncation;
  times.valid = FATTR_MTIME | FATTR_FH;
  const auto closes_at_once = [](Kernel& kernel) {
    return !kernel.is_relayed(kernel.send(FUSE_FLUSH, flush_body(owner)));
  };
  for (const Ack ack : {Ack::Early, Ack::Close, Ack::Durable}) {
    for (const std::string what : {"nothing", "times", "copy", "allocation", "truncation"}) {
      CAPTURE(what);
      Kernel kernel(ack);
      if (what == "copy") {
        kernel.send(FUSE_COPY_FILE_RANGE, copy_body(kHandle, 0, kHandle, 0, 1));
      } else if (what == "allocation") {
        kernel.send(FUSE_FALLOCATE, fallocate_body(0, 0, 1));
      } else if (what != "nothing") {
        kernel.send(FUSE_SETATTR, bytes_of(what == "times" ? times : truncation));
      }
      const bool changes = what != "nothing" && what != "times";
      CHECK(closes_at_once(kernel) == (ack == Ack::Early || !changes));
    }
  }
}

TEST_CASE("channel: a waiting copy is given up when its process is killed, and only then") {
  Kernel kernel;
  kernel.open(kIno + 1, kHandle + 1);
  const std::string bytes = random_bytes(kPieceBytes, 7);
  kernel.write_whole(0, bytes);
  REQUIRE(kernel.fixture().commit(*kernel.file(), true) == 0);
  NoSlots none(kernel.engine());
  const std::string body = copy_body(kHandle, 0, kHandle + 1, 0, kPieceBytes);
  const Zombie writer(SIGKILL);
  const uint64_t killed = kernel.send(FUSE_COPY_FILE_RANGE, body, writer.pid());
  const uint64_t queued = kernel.send(FUSE_COPY_FILE_RANGE, body, writer.pid());
  const uint64_t lives = kernel.send(FUSE_COPY_FILE_RANGE, body, static_cast<uint32_t>(getpid()));
  CHECK(kernel.wait(killed).error == EINTR);
  CHECK(kernel.wait(queued).error == EINTR);
  CHECK_FALSE(kernel.answered(lives));
  none.give();
  CHECK(Kernel::written(kernel.wait(lives)) == kPieceBytes);
}

TEST_CASE("channel: a copy that waits for slots is done when there are some, and leaves none") {
  Kernel kernel;
  kernel.open(kIno + 1, kHandle + 1);
  const std::string bytes = random_bytes(kPieceBytes, 5);
  kernel.write_whole(0, bytes);
  REQUIRE(kernel.fixture().commit(*kernel.file(), true) == 0);
  const uint64_t sent = [&] {
    const NoSlots none(kernel.engine());
    const uint64_t unique =
        kernel.send(FUSE_COPY_FILE_RANGE, copy_body(kHandle, 0, kHandle + 1, 7, kPieceBytes));
    CHECK(kernel.ask(FUSE_READ, Kernel::read_body(0, 10)).body == bytes.substr(0, 10));
    return unique;
  }();
  CHECK(Kernel::written(kernel.wait(sent)) == bytes.size());
  const auto copy = kernel.engine().file(kIno + 1);
  CHECK((kernel.fixture().read(*copy, 0, 2 * kPieceBytes) == std::string(7, '\0') + bytes));
  REQUIRE(kernel.fixture().commit(*copy, true) == 0);
  CHECK(kernel.engine().arena().free_count() >= kSlots - 1);
}

}  // namespace fpfs::testing
