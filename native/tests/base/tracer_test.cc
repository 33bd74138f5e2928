// The ring of traced events, and what an engine puts into it.
#include "base/tracer.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "support/engine_fixture.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kIno = 7;

TraceEvent numbered(uint64_t number) {
  TraceEvent event;
  event.ino = kIno;
  event.offset = number;
  return event;
}

std::vector<TraceEvent> of_kind(const std::vector<TraceEvent>& events, TraceKind kind) {
  std::vector<TraceEvent> found;
  std::copy_if(events.begin(), events.end(), std::back_inserter(found),
               [kind](const TraceEvent& event) { return event.kind == kind; });
  return found;
}

}  // namespace

TEST_CASE("tracer: nothing is wanted, kept or lost before somebody traces") {
  Tracer tracer;
  CHECK_FALSE(tracer.watches(kIno));
  CHECK_FALSE(tracer.watches(0));
  tracer.add(numbered(1));
  tracer.request_received(2, numbered(1));
  tracer.request_answered(2, 0);
  CHECK(tracer.take(10).empty());
  CHECK(tracer.lost() == 0);
}

TEST_CASE("tracer: what finds the ring full is counted, the rest comes in its order") {
  Tracer tracer;
  tracer.start(kIno);
  constexpr uint64_t more = 10;
  for (uint64_t i = 0; i < Tracer::kEventsMax + more; ++i) tracer.add(numbered(i));
  CHECK(tracer.lost() == more);
  uint64_t expected = 0;
  for (;;) {
    const std::vector<TraceEvent> events = tracer.take(1000);
    if (events.empty()) break;
    for (const TraceEvent& event : events) REQUIRE(event.offset == expected++);
  }
  CHECK(expected == Tracer::kEventsMax);
  tracer.add(numbered(5));
  REQUIRE(tracer.take(10).size() == 1);
  tracer.add(numbered(6));
  tracer.start(kIno);  // what an earlier trace left is none of this one's
  CHECK(tracer.take(10).empty());
  CHECK(tracer.lost() == 0);
}

TEST_CASE("tracer: events of many threads come once each, while they are read") {
  constexpr uint64_t threads = 4;
  constexpr uint64_t each = 100'000;
  Tracer tracer;
  tracer.start(kIno);
  std::atomic<uint64_t> running = threads;
  std::vector<std::thread> writers;
  for (uint64_t t = 0; t < threads; ++t) {
    writers.emplace_back([&, t] {
      for (uint64_t i = 0; i < each; ++i) {
        TraceEvent event = numbered(t * each + i);
        event.length = ~event.offset;  // a torn event does not fit
        tracer.add(event);
      }
      --running;
    });
  }
  std::vector<uint64_t> next(threads, 0);
  uint64_t seen = 0;
  for (bool more = true; more;) {
    more = running != 0;
    for (const TraceEvent& event : tracer.take(1000)) {
      more = true;
      ++seen;
      REQUIRE(event.length == ~event.offset);
      const uint64_t thread = event.offset / each;
      REQUIRE(event.offset % each >= next[thread]);
      next[thread] = event.offset % each + 1;
    }
  }
  for (std::thread& writer : writers) writer.join();
  CHECK(seen + tracer.lost() == threads * each);
}

TEST_CASE("tracer: a request is told of with its answer, and only while it is traced") {
  Tracer tracer;
  tracer.start(kIno);
  tracer.request_received(4, numbered(1));
  tracer.request_received(6, numbered(2));
  CHECK(tracer.take(10).empty());
  tracer.request_answered(6, EIO);
  tracer.request_answered(6, 0);  // there is no second answer
  tracer.request_answered(8, 0);  // of another file: it was not kept
  const std::vector<TraceEvent> events = tracer.take(10);
  REQUIRE(events.size() == 1);
  CHECK(events[0].offset == 2);
  CHECK(events[0].error == EIO);
  CHECK(events[0].at_ns[1] > 0);
  tracer.start(kIno + 1);
  tracer.request_answered(4, 0);
  CHECK(tracer.take(10).empty());
}

TEST_CASE("tracer: chunks, writes and flushes of the traced file, with times in order") {
  constexpr uint64_t chunks = 5;
  EngineFixture fixture;
  const uint64_t chunk_bytes = fixture.options().chunk_bytes;
  const std::shared_ptr<File> file = fixture.load(kIno);
  const std::shared_ptr<File> other = fixture.load(kIno + 1);
  Tracer& tracer = fixture.engine().tracer();
  REQUIRE(fixture.write(*other, 0, random_bytes(chunk_bytes, 1)) == 0);
  tracer.start(kIno);
  REQUIRE(fixture.write(*file, 0, random_bytes(chunks * chunk_bytes, 2)) == 0);
  REQUIRE(fixture.write(*other, chunk_bytes, random_bytes(chunk_bytes, 3)) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  REQUIRE(fixture.commit(*other, true) == 0);
  tracer.stop();
  REQUIRE(fixture.write(*file, 0, random_bytes(chunk_bytes, 4)) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  const std::vector<TraceEvent> events = tracer.take(1000);
  for (const TraceEvent& event : events) CHECK(event.ino == kIno);

  std::set<uint64_t> offsets;
  for (const TraceEvent& chunk : of_kind(events, TraceKind::Chunk)) {
    CHECK(std::is_sorted(chunk.at_ns.begin(), chunk.at_ns.end()));
    CHECK(chunk.at_ns[0] > 0);
    CHECK(chunk.length == chunk_bytes);
    offsets.insert(chunk.offset);
  }
  CHECK(offsets.size() == chunks);
  std::set<uint16_t> written_to;
  std::set<uint16_t> flushed;
  uint64_t bytes = 0;
  for (const TraceEvent& transfer : of_kind(events, TraceKind::Transfer)) {
    CHECK(std::is_sorted(transfer.at_ns.begin(), transfer.at_ns.begin() + 3));
    CHECK(transfer.at_ns[0] > 0);
    if (transfer.op == static_cast<uint8_t>(IoOp::Write)) {
      written_to.insert(transfer.device);
      bytes += transfer.length;
    } else {
      flushed.insert(transfer.device);
    }
  }
  CHECK(bytes == chunks * chunk_bytes);
  CHECK(written_to == std::set<uint16_t>{0, 1});
  CHECK(flushed == written_to);
  CHECK(tracer.lost() == 0);
}

TEST_CASE("file: how much is not committed, and since when") {
  EngineFixture fixture;
  const std::shared_ptr<File> file = fixture.load(kIno);
  CHECK(file->unsaved().oldest_ns == 0);
  for (const uint64_t size : {uint64_t{100}, uint64_t{300'000}}) {  // in the catalog, on devices
    CAPTURE(size);
    const uint64_t before = file->unsaved().bytes_acknowledged;
    const int64_t began_ns = monotonic_ns();
    REQUIRE(fixture.write(*file, 0, random_bytes(size, 1)) == 0);
    const File::Unsaved written = file->unsaved();
    CHECK(written.bytes_acknowledged == before + size);
    CHECK(written.bytes_uncommitted == size);
    CHECK(written.bytes_staged <= size);
    CHECK(written.bytes_staged > 0);  // the last chunk is not full
    CHECK(written.oldest_ns >= began_ns);
    CHECK(written.oldest_ns <= monotonic_ns());
    REQUIRE(fixture.write(*file, size, "more") == 0);
    CHECK(file->unsaved().oldest_ns == written.oldest_ns);

    SnapshotData snapshot;
    REQUIRE(fixture.drain(*file, false, &snapshot) == 0);
    CHECK(snapshot.acknowledged_ns == written.oldest_ns);
    CHECK(file->unsaved().oldest_ns == written.oldest_ns);  // it is in no version yet
    const int64_t later_ns = monotonic_ns();
    REQUIRE(fixture.write(*file, 0, "later") == 0);
    fixture.make_current(*file, snapshot);
    CHECK(file->unsaved().bytes_uncommitted == 5);
    CHECK(file->unsaved().oldest_ns >= later_ns);

    REQUIRE(fixture.commit(*file, true) == 0);
    CHECK(file->unsaved().bytes_uncommitted == 0);
    CHECK(file->unsaved().bytes_staged == 0);
    CHECK(file->unsaved().oldest_ns == 0);
    REQUIRE(fixture.drain(*file, true, &snapshot) == 0);
    CHECK(snapshot.acknowledged_ns == 0);  // there is nothing new in it
    fixture.make_current(*file, snapshot);
  }
}

TEST_CASE("file: what was drained and not committed is as old as it was") {
  EngineFixture fixture;
  const std::shared_ptr<File> file = fixture.load(kIno);
  REQUIRE(fixture.write(*file, 0, random_bytes(300'000, 1)) == 0);
  const int64_t oldest_ns = file->unsaved().oldest_ns;
  SnapshotData snapshot;
  REQUIRE(fixture.drain(*file, false, &snapshot) == 0);
  REQUIRE(fixture.write(*file, 0, "later") == 0);
  REQUIRE(fixture.drain(*file, false, &snapshot) == 0);
  CHECK(snapshot.acknowledged_ns == oldest_ns);
  fixture.make_current(*file, snapshot);
  CHECK(file->unsaved().oldest_ns == 0);
}

}  // namespace fpfs::testing
