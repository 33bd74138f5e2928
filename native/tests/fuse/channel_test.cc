// The channel: what no kernel sends, where payloads land, and what is told of requests.
#include <numeric>
#include <set>

#include "support/channel_fixture.h"

namespace fpfs::testing {

TEST_CASE("channel: arguments that cannot be are refused, and change nothing") {
  constexpr uint64_t no_handle = 99;
  constexpr uint32_t keep = 1;
  constexpr uint32_t punch = 2;
  constexpr uint32_t zero = 16;
  Kernel kernel;
  const std::string model = random_bytes(kPieceBytes, 1);
  kernel.write_whole(0, model);
  const auto refused = [&](uint32_t opcode, const std::string& body) {
    const Reply reply = kernel.ask(opcode, body);
    CHECK(reply.body.empty());
    return reply.error;
  };
  CHECK(refused(FUSE_READ, "short") == EIO);
  CHECK(refused(FUSE_READ, Kernel::read_body(0, wire::kMaxWriteBytes + 1)) == EINVAL);
  CHECK(refused(FUSE_READ, Kernel::read_body(0, 10, no_handle)) == EBADF);
  CHECK(kernel.ask(FUSE_READ, Kernel::read_body(UINT64_MAX - 5, 10)).error == 0);

  CHECK(refused(FUSE_WRITE, "short") == EIO);
  CHECK(refused(FUSE_WRITE, Kernel::write_body(0, "more") + "x") == EIO);
  CHECK(refused(FUSE_WRITE, Kernel::write_body(0, "x", 0, no_handle)) == EBADF);
  CHECK(refused(FUSE_WRITE, Kernel::write_body(kFileBytesMax, "x")) == EFBIG);
  CHECK(refused(FUSE_WRITE, Kernel::write_body(UINT64_MAX, "x")) == EFBIG);

  CHECK(refused(FUSE_LSEEK, "short") == EIO);
  CHECK(refused(FUSE_LSEEK, lseek_body(SEEK_DATA, 0, no_handle)) == EBADF);
  CHECK(refused(FUSE_LSEEK, lseek_body(SEEK_CUR, 0)) == EINVAL);
  CHECK(refused(FUSE_LSEEK, lseek_body(SEEK_HOLE, model.size())) == ENXIO);

  CHECK(refused(FUSE_FALLOCATE, "short") == EIO);
  CHECK(refused(FUSE_FALLOCATE, fallocate_body(0, 0, 1, no_handle)) == EBADF);
  CHECK(refused(FUSE_FALLOCATE, fallocate_body(punch, 0, 1)) == EOPNOTSUPP);
  CHECK(refused(FUSE_FALLOCATE, fallocate_body(keep | 64, 0, 1)) == EOPNOTSUPP);
  for (const uint32_t mode : {uint32_t{0}, keep, punch | keep, zero, zero | keep}) {
    CHECK(refused(FUSE_FALLOCATE, fallocate_body(mode, 0, 0)) == EINVAL);
    CHECK(refused(FUSE_FALLOCATE, fallocate_body(mode, UINT64_MAX, 1)) == EFBIG);
    CHECK(refused(FUSE_FALLOCATE, fallocate_body(mode, 1, UINT64_MAX)) == EFBIG);
    CHECK(refused(FUSE_FALLOCATE, fallocate_body(mode, 1, kFileBytesMax)) == EFBIG);
  }

  CHECK(refused(FUSE_COPY_FILE_RANGE, "short") == EIO);
  CHECK(refused(FUSE_COPY_FILE_RANGE, copy_body(no_handle, 0, kHandle, 0, 1)) == EBADF);
  CHECK(refused(FUSE_COPY_FILE_RANGE, copy_body(kHandle, 0, no_handle, 0, 1)) == EBADF);
  CHECK(refused(FUSE_COPY_FILE_RANGE, copy_body(kHandle, 0, kHandle, kFileBytesMax, 1)) == EFBIG);
  CHECK(refused(FUSE_FLUSH, "short") == EIO);
  kernel.check(model);
  CHECK(kernel.file()->attributes().size == model.size());
}

TEST_CASE("channel: streams that lie anywhere and are written by turns equal strings") {
  const uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  constexpr uint64_t files = 3;
  Kernel kernel;
  std::vector<std::string> models(files);
  std::vector<uint64_t> ends(files, 0);
  for (uint64_t i = 1; i < files; ++i) kernel.open(kIno + i, kHandle + i);
  for (int step = 0; step < 1500; ++step) {
    const uint64_t i = random() % files;
    std::string& model = models[i];
    const auto file = kernel.engine().file(kIno + i);
    const std::string bytes = random_bytes(1 + random() % kPieceBytes, random());
    switch (random() % 40) {
      case 0:
        REQUIRE(kernel.fixture().commit(*file, random() % 2 == 0) == 0);
        continue;
      case 1:
        ends[i] = random() % (3 * kChunkBytes);
        break;
      case 2: {  // somebody writes into the middle of where the stream goes
        const uint64_t at = ends[i] + random() % kPieceBytes;
        REQUIRE(kernel.fixture().write(*file, at, bytes) == 0);
        model.resize(std::max<uint64_t>(model.size(), at + bytes.size()));
        model.replace(at, bytes.size(), bytes);
        continue;
      }
      case 3:
        REQUIRE((kernel.fixture().read(*file, 0, model.size() + 1) == model));
        continue;
      default:
        break;
    }
    REQUIRE(kernel.write(ends[i], bytes, kHandle + i) == 0);
    model.resize(std::max<uint64_t>(model.size(), ends[i] + bytes.size()));
    model.replace(ends[i], bytes.size(), bytes);
    ends[i] += bytes.size();
    if (ends[i] > 4 * kChunkBytes) ends[i] = 0;
  }
  CHECK(Channel::of(kernel.engine())->statistics().writes_in_place > 0);
  for (uint64_t i = 0; i < files; ++i) {
    const auto file = kernel.engine().file(kIno + i);
    CHECK((kernel.fixture().read(*file, 0, models[i].size() + 1) == models[i]));
    REQUIRE(kernel.fixture().commit(*file, true) == 0);
    CHECK((kernel.fixture().read(*file, 0, models[i].size() + 1) == models[i]));
  }
  CHECK(kernel.engine().arena().free_count() >= kSlots - 1);  // a spare may be held
}

namespace {

// Writes pieces of so many bytes to streams that take turns; returns how many of the writes were
// not received where they belong.
uint64_t misplaced(uint64_t streams, uint64_t piece_bytes) {
  // Over the edges of chunks, but within what staging holds: slots are always to be had.
  const uint64_t writes = 7 * kChunkBytes / piece_bytes;
  Kernel kernel;
  for (uint64_t i = 1; i < streams; ++i) kernel.open(kIno + i, kHandle + i);
  std::vector<std::string> models(streams);
  for (uint64_t write = 0; write < writes; ++write) {
    std::string& model = models[write % streams];
    const std::string bytes = random_bytes(piece_bytes, write);
    REQUIRE(kernel.write(model.size(), bytes, kHandle + write % streams) == 0);
    model += bytes;
  }
  for (uint64_t i = 0; i < streams; ++i) {
    const auto file = kernel.engine().file(kIno + i);
    CHECK((kernel.fixture().read(*file, 0, models[i].size() + 1) == models[i]));
  }
  const ChannelStatistics& statistics = Channel::of(kernel.engine())->statistics();
  CHECK(statistics.writes == writes);
  return writes - statistics.writes_in_place;
}

}  // namespace

TEST_CASE("channel: all but the first writes of streams are received where they belong") {
  // Of a single stream nothing is known before its first write. Of two it takes a write of each to
  // know them, and one more to know that they take turns.
  for (const uint64_t piece_bytes : {kChunkBytes / 8, uint64_t{kPieceBytes}}) {
    CAPTURE(piece_bytes);
    CHECK(misplaced(1, piece_bytes) <= 1);
    CHECK(misplaced(2, piece_bytes) <= 3);
  }
}

TEST_CASE("channel: reads that wait for a buffer are all answered") {
  constexpr uint64_t count = 64;
  Kernel kernel;
  const std::string bytes = random_bytes(kPieceBytes, 4);
  kernel.write_whole(0, bytes);
  REQUIRE(kernel.fixture().commit(*kernel.file(), true) == 0);
  std::vector<char*> taken;
  while (char* buffer = kernel.engine().read_buffers().take()) taken.push_back(buffer);
  kernel.engine().read_buffers().give(taken.back());  // one at a time, then
  std::vector<uint64_t> sent;
  for (uint64_t i = 0; i < count; ++i) {
    sent.push_back(kernel.send(FUSE_READ, Kernel::read_body(i * 1000, 10)));
  }
  for (uint64_t i = 0; i < count; ++i) {
    const Reply reply = kernel.wait(sent[i]);
    CHECK(reply.error == 0);
    CHECK(reply.body == bytes.substr(i * 1000, 10));
  }
}

// Sends a request that is to be answered when it is durable, and lets that have an outcome.
Reply when_durable(Kernel& kernel, uint32_t opcode, const std::string& body, int outcome) {
  const uint64_t unique = kernel.send(opcode, body);
  for (;;) {
    pollfd ready{kernel.engine().event_fd(), POLLIN, 0};
    poll(&ready, 1, -1);
    for (const Event& event : kernel.engine().take_events()) {
      const auto* wanted = std::get_if<SyncWriteEvent>(&event);
      if (wanted == nullptr) continue;
      CHECK(wanted->ino == kIno);
      CHECK_FALSE(kernel.answered(unique));
      kernel.engine().complete_write(wanted->ticket, outcome);
      kernel.engine().complete_write(wanted->ticket, outcome);  // nothing is answered twice
      return kernel.wait(unique);
    }
  }
}

TEST_CASE("channel: a synchronous write is answered with what became of it") {
  Kernel kernel;
  const std::string body = Kernel::write_body(0, "synced", O_DSYNC);
  CHECK(Kernel::written(when_durable(kernel, FUSE_WRITE, body, 0)) == 6);
  CHECK(when_durable(kernel, FUSE_WRITE, body, EIO).error == EIO);
  CHECK(when_durable(kernel, FUSE_WRITE, body, ENOSPC).error == ENOSPC);
}

TEST_CASE("channel: copies and allocations are answered when they are durable, where writes are") {
  constexpr uint64_t synced = kHandle + 1;
  for (const Ack ack : {Ack::Early, Ack::Durable}) {
    Kernel kernel(ack);
    REQUIRE(kernel.engine().open_handle(synced, kIno, O_RDWR | O_SYNC).ok());
    const uint64_t handle = ack == Ack::Durable ? kHandle : synced;
    if (ack == Ack::Early) {
      kernel.write_whole(0, "source");
      CHECK(kernel.ask(FUSE_FALLOCATE, fallocate_body(0, 0, 6)).error == 0);
    } else {
      when_durable(kernel, FUSE_WRITE, Kernel::write_body(0, "source"), 0);
    }
    const std::string copy = copy_body(kHandle, 0, handle, 100, 6);
    CHECK(Kernel::written(when_durable(kernel, FUSE_COPY_FILE_RANGE, copy, 0)) == 6);
    CHECK(when_durable(kernel, FUSE_COPY_FILE_RANGE, copy, EIO).error == EIO);
    for (const uint32_t mode :
         {0, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, FALLOC_FL_ZERO_RANGE}) {
      const std::string body = fallocate_body(mode, 0, 6, handle);
      const Reply reply = when_durable(kernel, FUSE_FALLOCATE, body, 0);
      CHECK(reply.error == 0);
      CHECK(reply.body.empty());
      CHECK(when_durable(kernel, FUSE_FALLOCATE, body, EIO).error == EIO);
    }
  }
}

TEST_CASE("channel: read-ahead stops long before the kernel holds closes back") {
  fuse_init_out out{};
  std::string reply = bytes_of(out);
  patch_init_reply(fuse_init_in{}, reply.data(), reply.size());
  std::memcpy(&out, reply.data(), sizeof out);
  // A reader that nothing slows down may have so many requests out, whatever the threshold says.
  const uint32_t of_one_reader = wire::kMaxReadaheadBytes / (512 * 1024);
  CHECK(out.congestion_threshold > 0);
  CHECK(out.max_background >= out.congestion_threshold + 16 * of_one_reader);
}

TEST_CASE("channel: what the kernel releases is told once, in its order") {
  constexpr uint64_t no_handle = 99;
  Kernel kernel;
  Engine& engine = kernel.engine();
  for (uint64_t i = 1; i < 4; ++i) kernel.open(kIno + i, kHandle + i);
  CHECK(engine.take_released().empty());
  CHECK(kernel.ask(FUSE_RELEASE, "short").error == EIO);
  for (const uint64_t handle : {kHandle + 2, no_handle, kHandle, kHandle + 1}) {
    CHECK(kernel.ask(FUSE_RELEASE, release_body(handle)).error ==
          (handle == no_handle ? EBADF : 0));
    CHECK(engine.handle(handle) == nullptr);
  }
  CHECK(released(engine) == std::vector<uint64_t>{kHandle + 2, kHandle, kHandle + 1});
  CHECK(engine.take_released().empty());
  // Whoever gives a handle back first is the one who did.
  CHECK(engine.release_handle(kHandle + 3) != nullptr);
  CHECK(engine.release_handle(kHandle + 3) == nullptr);
  CHECK(kernel.ask(FUSE_RELEASE, release_body(kHandle + 3)).error == EBADF);
  CHECK(engine.take_released().empty());
}

TEST_CASE("channel: a request finds released what was closed before it, whoever received that") {
  Kernel kernel(Ack::Early, 4);
  for (uint64_t handle = kHandle + 1; handle < kHandle + 20'000; ++handle) {
    REQUIRE(kernel.engine().open_handle(handle, kIno, O_RDWR).ok());
    const uint64_t sent = kernel.send(FUSE_RELEASE, release_body(handle));
    kernel.send(FUSE_STATFS, "");
    REQUIRE(kernel.relayed() == FUSE_STATFS);
    REQUIRE(released(kernel.engine()) == std::vector<uint64_t>{handle});
    REQUIRE(kernel.wait(sent).error == 0);
  }
}

TEST_CASE("channel: releases are told in the kernel's order, whoever received them") {
  constexpr uint64_t count = 64;
  Kernel kernel(Ack::Early, 4);
  for (uint64_t first = kHandle + 1; first < kHandle + 200 * count; first += count) {
    std::vector<uint64_t> handles;
    std::vector<uint64_t> sent;
    for (uint64_t handle = first; handle < first + count; ++handle) {
      REQUIRE(kernel.engine().open_handle(handle, kIno, O_RDWR).ok());
      handles.push_back(handle);
    }
    for (const uint64_t handle : handles) {
      sent.push_back(kernel.send(FUSE_RELEASE, release_body(handle)));
    }
    for (const uint64_t unique : sent) REQUIRE(kernel.wait(unique).error == 0);
    REQUIRE((released(kernel.engine()) == handles));
  }
}

TEST_CASE("channel: a release that no request follows is announced") {
  Kernel kernel;
  Engine& engine = kernel.engine();
  for (uint64_t i = 1; i < 4; ++i) {
    kernel.open(kIno + i, kHandle + i);
    CHECK(kernel.ask(FUSE_RELEASE, release_body(kHandle + i)).error == 0);
    const auto announced = [&] {
      pollfd ready{engine.event_fd(), POLLIN, 0};
      REQUIRE(poll(&ready, 1, -1) == 1);
      const auto events = engine.take_events();
      return std::any_of(events.begin(), events.end(), [](const Event& event) {
        return std::holds_alternative<ReleasedEvent>(event);
      });
    };
    while (!announced()) {
    }
    CHECK(released(engine) == std::vector<uint64_t>{kHandle + i});
  }
}

TEST_CASE("channel: wrong bytes are neither read nor copied") {
  Kernel kernel;
  kernel.open(kIno + 1, kHandle + 1);
  const std::string bytes = random_bytes(kPieceBytes, 1);
  kernel.write_whole(0, bytes);
  REQUIRE(kernel.fixture().commit(*kernel.file(), false) == 0);
  const Location damaged = locate(kernel.fixture(), kIno, 1);
  flip(damaged, 10);
  const std::string copy = copy_body(kHandle, 0, kHandle + 1, 0, kPieceBytes);
  CHECK(kernel.ask(FUSE_COPY_FILE_RANGE, copy).error == EIO);
  CHECK(kernel.ask(FUSE_READ, Kernel::read_body(0, kPieceBytes)).error == EIO);
  CHECK(kernel.engine().file(kIno + 1)->attributes().size == 0);
  CHECK(kernel.ask(FUSE_READ, Kernel::read_body(100, 5'000)).body == bytes.substr(100, 5'000));
  flip(damaged, 10);
  CHECK(Kernel::written(kernel.ask(FUSE_COPY_FILE_RANGE, copy)) == kPieceBytes);
}

TEST_CASE("channel: a request is under way until it is answered, whoever answers it") {
  Kernel kernel;
  const Requests& requests = kernel.engine().arena().requests();
  const auto wait_ended = [&](uint64_t unique) {
    while (requests.is_under_way(unique)) std::this_thread::yield();
  };
  const uint64_t write = kernel.send(FUSE_WRITE, Kernel::write_body(0, "bytes"));
  CHECK(kernel.wait(write).error == 0);
  wait_ended(write);
  const uint64_t read = kernel.send(FUSE_READ, Kernel::read_body(0, 5));
  CHECK(kernel.wait(read).body == "bytes");
  wait_ended(read);
  const uint64_t relayed = kernel.send(FUSE_GETXATTR, std::string(8, '\0'));
  CHECK(kernel.relayed() == FUSE_GETXATTR);
  CHECK(requests.is_under_way(relayed));
  const uint64_t refused = kernel.send(FUSE_LSEEK, "");
  CHECK(kernel.wait(refused).error == EIO);
  wait_ended(refused);
  CHECK(requests.is_under_way(relayed));
  kernel.answer(relayed, ENODATA);
  CHECK(kernel.wait(relayed).error == ENODATA);
  wait_ended(relayed);
  // Nobody waits for an answer to this one.
  const uint64_t forget = kernel.send(FUSE_FORGET, std::string(sizeof(fuse_forget_in), '\0'));
  CHECK(kernel.relayed() == FUSE_FORGET);
  CHECK_FALSE(requests.is_under_way(forget));
}

TEST_CASE("channel: attributes are dropped after the replies that were given before") {
  Kernel kernel(Ack::Early, 2);
  for (int i = 0; i < 300; ++i) {
    const uint64_t asked = kernel.send(FUSE_GETXATTR, std::string(8, '\0'));
    REQUIRE(kernel.relayed() == FUSE_GETXATTR);
    kernel.answer(asked, ENODATA);
    kernel.engine().invalidate(kIno);  // of attributes, then of pages
    CHECK(kernel.next_told() == asked);
    CHECK(kernel.next_told() == 0);
    CHECK(kernel.next_told() == 0);
  }
}

TEST_CASE("channel: names that are invalidated are dropped before that is told") {
  Kernel kernel;
  for (int i = 0; i < 300; ++i) {
    kernel.engine().invalidate_name(kIno, "name");
    CHECK(event_of<DoneEvent>(kernel.engine(), kernel.engine().names_invalidated()).error == 0);
    CHECK(kernel.next_told(MSG_DONTWAIT) == 0);
  }
}

// Waits for so many answered writes to be measured, which is after they were answered.
DurationCounts wait_measured(Kernel& kernel, uint64_t count) {
  for (;;) {
    const DurationCounts found = Channel::of(kernel.engine())->statistics().write_to_ack.read();
    if (std::accumulate(found.counts.begin(), found.counts.end(), uint64_t{0}) == count) {
      return found;
    }
    std::this_thread::yield();
  }
}

TEST_CASE("channel: the time to a write's answer counts what it waited, and no refusals") {
  Kernel kernel;
  const int64_t began_ns = monotonic_ns();
  kernel.write_whole(0, "at once");
  wait_measured(kernel, 1);
  CHECK(kernel.write(kFileBytesMax, "x") == EFBIG);
  NoSlots none(kernel.engine(), 1);  // that of the write
  const uint64_t parked =
      kernel.send(FUSE_WRITE, Kernel::write_body(kChunkBytes, random_bytes(1000, 1)));
  wait_parked(kernel, 1);
  const int64_t parked_ns = monotonic_ns();
  while (monotonic_ns() < parked_ns + 5'000'000) std::this_thread::yield();
  none.give();
  CHECK(kernel.wait(parked).error == 0);
  const uint64_t waited = static_cast<uint64_t>(monotonic_ns() - parked_ns);
  DurationCounts found = wait_measured(kernel, 2);
  CHECK(found.sum_ns > 5'000'000);
  CHECK(found.sum_ns < static_cast<uint64_t>(monotonic_ns() - began_ns));
  CHECK(waited > 5'000'000);
  CHECK(Kernel::written(when_durable(kernel, FUSE_WRITE, Kernel::write_body(0, "s", O_DSYNC), 0)) ==
        1);
  wait_measured(kernel, 3);
}

TEST_CASE("channel: requests of the traced file are told of, whoever answers them") {
  Kernel kernel;
  kernel.open(kIno + 1, kHandle + 1);
  Tracer& tracer = kernel.engine().tracer();
  kernel.write_whole(0, "before");
  tracer.start(kIno);
  kernel.write_whole(0, "bytes");
  CHECK(kernel.ask(FUSE_READ, Kernel::read_body(1, 3)).body == "yte");
  CHECK(kernel.ask(FUSE_LSEEK, "").error == EIO);
  const uint64_t relayed = kernel.send(FUSE_GETXATTR, std::string(8, '\0'));
  CHECK(kernel.relayed() == FUSE_GETXATTR);
  kernel.answer(relayed, ENODATA);
  CHECK(kernel.wait(relayed).error == ENODATA);
  std::vector<TraceEvent> events;
  while (events.size() < 4) {  // an event comes after its answer
    for (const TraceEvent& event : tracer.take(10)) events.push_back(event);
  }
  const auto check = [&](size_t index, uint32_t opcode, int error, uint64_t offset,
                         uint64_t length) {
    const TraceEvent& event = events[index];
    CHECK(event.kind == TraceKind::Request);
    CHECK(event.detail == opcode);
    CHECK(event.error == error);
    CHECK(event.offset == offset);
    CHECK(event.length == length);
    CHECK(event.at_ns[0] > 0);
    CHECK(event.at_ns[1] >= event.at_ns[0]);
  };
  check(0, FUSE_WRITE, 0, 0, 5);
  check(1, FUSE_READ, 0, 1, 3);
  check(2, FUSE_LSEEK, EIO, 0, 0);
  check(3, FUSE_GETXATTR, ENODATA, 0, 0);
  tracer.stop();
  kernel.write_whole(0, "after");
  CHECK(tracer.take(10).empty());
}

}  // namespace fpfs::testing
