// Conformance of a device: what its header promises, of both backends.
#include "device/device.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <numeric>
#include <thread>

#include "base/file_descriptor.h"
#include "support/device_fixture.h"

namespace fpfs {
namespace {

using testing::AlignedBuffer;
using testing::create;
using testing::Created;
using testing::Delivery;
using testing::Fixture;
using testing::open_device;
using testing::run;
using testing::ThreadsBackend;
using testing::UringBackend;
using testing::WaitedRequest;

constexpr uint64_t kBlock = kIoAlignment;

// Of calls that allocate without extending: how many there were, and what they fail with.
std::atomic<int> waits = 0;
std::atomic<int> wait_error = 0;

}  // namespace
}  // namespace fpfs

extern "C" int fallocate(int fd, int mode, off_t offset, off_t length) {
  if (mode == FALLOC_FL_KEEP_SIZE) {
    ++fpfs::waits;
    if (fpfs::wait_error != 0) {
      errno = fpfs::wait_error;
      return -1;
    }
  }
  return static_cast<int>(::syscall(SYS_fallocate, fd, mode, offset, length));
}

namespace fpfs {
namespace {

TEST_CASE_TEMPLATE("device: bytes written are read back", Backend, UringBackend, ThreadsBackend) {
  Fixture<Backend> fixture;
  Device& device = *fixture.device;
  const Created object = create(device);
  REQUIRE(object.error == 0);
  AlignedBuffer written(uint64_t{1} << 20);
  written.fill(1);
  CHECK(run(device, IoOp::Write, object.object, kBlock, written.size(), written.data()) == 0);
  AlignedBuffer read(written.size());
  CHECK(run(device, IoOp::Read, object.object, kBlock, read.size(), read.data()) == 0);
  CHECK(read == written);
  CHECK(run(device, IoOp::Flush, object.object, 0, 0) == 0);
  CHECK(std::filesystem::file_size(fixture.object_path(object.id)) == kBlock + written.size());
  const DeviceStatistics statistics = device.statistics();
  CHECK(statistics.bytes_written == written.size());
  CHECK(statistics.bytes_read == written.size());
  CHECK(statistics.errors == 0);
  for (const DurationCounts& latency :
       {statistics.write_latency, statistics.read_latency, statistics.flush_latency}) {
    CHECK(std::accumulate(latency.counts.begin(), latency.counts.end(), uint64_t{0}) == 1);
    CHECK(latency.sum_ns > 0);
  }
  CHECK(statistics.io_uring == (Backend::kind == IoBackend::IoUring));
}

TEST_CASE_TEMPLATE("device: what others have under way to an object is waited for before a write",
                   Backend, UringBackend, ThreadsBackend) {
  Fixture<Backend> fixture;
  AlignedBuffer data(16 * kBlock);
  data.fill(1);
  waits = 0;
  const Created object = create(*fixture.device);
  REQUIRE(run(*fixture.device, IoOp::Allocate, object.object, 0, data.size()) == 0);
  const auto write = [&](Device& device, const ObjectRef& to) {
    return run(device, IoOp::Write, to, kBlock, kBlock, data.data());
  };
  CHECK(write(*fixture.device, object.object) == 0);
  CHECK(waits == 0);

  const auto successor = open_device(fixture.config);
  const ObjectRef known = successor->object(object.id);
  AlignedBuffer read(kBlock);
  CHECK(run(*successor, IoOp::Read, known, kBlock, kBlock, read.data()) == 0);
  CHECK(waits == 0);
  data.fill(2);
  wait_error = EIO;
  CHECK(write(*successor, known) == -EIO);
  CHECK(waits == 1);
  AlignedBuffer after(kBlock);
  CHECK(run(*successor, IoOp::Read, known, kBlock, kBlock, after.data()) == 0);
  CHECK(after == read);
  for (const int error : {EOPNOTSUPP, 0}) {  // there are other ways
    wait_error = error;
    CHECK(write(*successor, known) == 0);
    CHECK(waits == 2);
  }
  CHECK(run(*successor, IoOp::Read, known, kBlock, kBlock, after.data()) == 0);
  CHECK(std::equal(after.data(), after.data() + kBlock, data.data()));
  CHECK(std::filesystem::file_size(fixture.object_path(object.id)) == data.size());
}

TEST_CASE_TEMPLATE("device: zeros beyond an object's end", Backend, UringBackend, ThreadsBackend) {
  Fixture<Backend> fixture;
  Device& device = *fixture.device;
  const Created object = create(device);
  AlignedBuffer written(4 * kBlock);
  written.fill(2);
  REQUIRE(run(device, IoOp::Write, object.object, 0, written.size(), written.data()) == 0);
  REQUIRE(run(device, IoOp::Truncate, object.object, 0, 2 * kBlock + 904) == 0);

  SUBCASE("an end within a block") {
    AlignedBuffer read(8 * kBlock);
    read.fill(3);
    CHECK(run(device, IoOp::Read, object.object, 0, read.size(), read.data()) == 0);
    char* end = read.data() + 2 * kBlock + 904;
    CHECK(std::equal(read.data(), end, written.data()));
    CHECK(std::all_of(end, read.data() + read.size(), [](char c) { return c == 0; }));
  }
  SUBCASE("far beyond") {
    AlignedBuffer read(kBlock);
    read.fill(3);
    CHECK(run(device, IoOp::Read, object.object, uint64_t{1} << 40, kBlock, read.data()) == 0);
    CHECK(read == AlignedBuffer(kBlock));
  }
}

TEST_CASE_TEMPLATE("device: buffers inside, outside and across registered regions", Backend,
                   UringBackend, ThreadsBackend) {
  Fixture<Backend> fixture;
  Device& device = *fixture.device;
  CHECK(device.statistics().buffers_registered == (Backend::kind == IoBackend::IoUring));
  AlignedBuffer outside(64 * kBlock);
  outside.fill(4);
  // Half in the region, half behind it: memory that lies together by being one allocation.
  AlignedBuffer whole(uint64_t{2} << 20);
  fixture.device->close();
  fixture.device = open_device(fixture.config, {{whole.data(), whole.size() / 2}});
  Device& reopened = *fixture.device;
  const Created fresh = create(reopened);
  REQUIRE(fresh.error == 0);
  char* across = whole.data() + whole.size() / 2 - 8 * kBlock;
  for (char* buffer : {whole.data(), outside.data(), across}) {
    std::copy(outside.data(), outside.data() + 16 * kBlock, buffer);
    CHECK(run(reopened, IoOp::Write, fresh.object, 0, 16 * kBlock, buffer) == 0);
    std::fill(buffer, buffer + 16 * kBlock, '\1');
    CHECK(run(reopened, IoOp::Read, fresh.object, 0, 16 * kBlock, buffer) == 0);
    outside.fill(4);
    CHECK(std::equal(buffer, buffer + 16 * kBlock, outside.data()));
  }
}

TEST_CASE_TEMPLATE("device: many threads, many objects, every block where it belongs", Backend,
                   UringBackend, ThreadsBackend) {
  Fixture<Backend> fixture;
  Device& device = *fixture.device;
  constexpr uint64_t threads = 8;
  constexpr uint64_t blocks = 32;
  std::vector<ObjectRef> objects;
  for (uint64_t i = 0; i < threads; ++i) objects.push_back(create(device).object);
  std::atomic<uint64_t> failures{0};
  std::vector<std::thread> running;
  for (uint64_t t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      // Each thread writes one block of every object, round and round, and reads it back.
      for (uint64_t block = 0; block < blocks; ++block) {
        AlignedBuffer written(kBlock);
        written.fill(t * blocks + block);
        AlignedBuffer read(kBlock);
        const ObjectRef& object = objects[(t + block) % threads];
        const uint64_t offset = (t * blocks + block) * kBlock;
        failures += run(device, IoOp::Write, object, offset, kBlock, written.data()) != 0 ? 1 : 0;
        failures += run(device, IoOp::Read, object, offset, kBlock, read.data()) != 0 ? 1 : 0;
        failures += read == written ? 0 : 1;
      }
    });
  }
  for (auto& thread : running) thread.join();
  CHECK(failures == 0);
  CHECK(device.statistics().bytes_written == threads * blocks * kBlock);
}

// Writes block after block with the same request, from complete() itself; the last one deletes it.
struct ChainedRequest final : IoRequest {
  ChainedRequest(Device& target, char* source, uint64_t count, Delivery<int>& delivery)
      : device(target), left(count), finished(delivery) {
    buffer = source;
    op = IoOp::Write;
    length = kBlock;
  }
  void complete(int result) override {
    if (result != 0 || --left == 0) {
      Delivery<int>& delivery = finished;
      delete this;
      delivery.put(result);
      return;
    }
    offset += kBlock;
    device.submit(this);
  }
  Device& device;
  uint64_t left;
  Delivery<int>& finished;
};

TEST_CASE_TEMPLATE("device: a request may be submitted again, or deleted, in complete()", Backend,
                   UringBackend, ThreadsBackend) {
  Fixture<Backend> fixture;
  Device& device = *fixture.device;
  const Created object = create(device);
  AlignedBuffer block(kBlock);
  block.fill(5);
  Delivery<int> finished;
  auto* request = new ChainedRequest(device, block.data(), 100, finished);
  request->object = object.object;
  device.submit(request);
  CHECK(finished.wait() == 0);
  CHECK(std::filesystem::file_size(fixture.object_path(object.id)) == 100 * kBlock);
}

TEST_CASE_TEMPLATE("device: no more in flight than the depth, the rest is queued", Backend,
                   UringBackend, ThreadsBackend) {
  Fixture<Backend> fixture;
  DeviceConfig config = fixture.config;
  config.depth = 4;
  fixture.reopen(config);
  Device& device = *fixture.device;
  const Created object = create(device);
  constexpr uint64_t count = 128;
  AlignedBuffer data(count * kBlock);
  std::vector<std::unique_ptr<WaitedRequest>> requests;
  for (uint64_t i = 0; i < count; ++i) {
    requests.push_back(std::make_unique<WaitedRequest>());
    WaitedRequest& request = *requests.back();
    request.op = IoOp::Write;
    request.object = object.object;
    request.offset = i * kBlock;
    request.length = kBlock;
    request.buffer = data.data() + i * kBlock;
    device.submit(&request);
  }
  for (auto& request : requests) CHECK(request->delivery.wait() == 0);
  const DeviceStatistics statistics = device.statistics();
  CHECK(statistics.requests_in_flight_max <= 4);
  CHECK(statistics.requests_in_flight_max >= 1);
  device.close();
  CHECK(device.statistics().requests_in_flight == 0);
  CHECK(device.statistics().requests_queued == 0);
}

namespace {

// What it does when it completes is the test's.
struct HookedRead final : IoRequest {
  void complete(int result) override {
    hook();
    done.put(result);
  }
  std::function<void()> hook;
  Delivery<int> done;
};

// Whether the first block of a file soon holds what `block` does.
bool soon_holds(const std::string& path, const AlignedBuffer& block) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  AlignedBuffer found(block.size());
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (std::chrono::steady_clock::now() < give_up) {
    const ssize_t bytes = ::pread(file.get(), found.data(), found.size(), 0);
    if (bytes == static_cast<ssize_t>(found.size()) && found == block) return true;
    std::this_thread::yield();
  }
  return false;
}

}  // namespace

// Else the device would have nothing to do while the answers to a row of READs are copied.
TEST_CASE("device: what comes in while completions are handled reaches the kernel meanwhile") {
  Fixture<UringBackend> fixture;
  Device& device = *fixture.device;
  const Created object = create(device);
  AlignedBuffer data(kBlock);
  REQUIRE(run(device, IoOp::Write, object.object, 0, kBlock, data.data()) == 0);
  AlignedBuffer read(kBlock);
  bool held = true;
  for (uint64_t round = 1; held && round <= 20; ++round) {
    data.fill(round);
    WaitedRequest write;  // submitted by the first read, and on the disk before the last one ends
    write.op = IoOp::Write;
    write.object = object.object;
    write.length = kBlock;
    write.buffer = data.data();
    std::array<HookedRead, 6> reads;  // issued together: they are submitted while the first ends
    size_t ended = 0;
    const auto hook = [&] {
      if (++ended == 2) device.submit(&write);
      if (ended == reads.size()) held = soon_holds(fixture.object_path(object.id), data);
    };
    for (HookedRead& each : reads) {
      each.op = IoOp::Read;
      each.object = object.object;
      each.length = kBlock;
      each.buffer = read.data();
      each.hook = hook;
    }
    reads[0].hook = [&] {
      hook();
      for (size_t i = 1; i < reads.size(); ++i) device.submit(&reads[i]);
    };
    device.submit(&reads[0]);
    for (HookedRead& each : reads) CHECK(each.done.wait() == 0);
    CHECK(write.delivery.wait() == 0);
  }
  CHECK(held);
}

TEST_CASE_TEMPLATE("device: a thread asleep is woken by every request", Backend, UringBackend,
                   ThreadsBackend) {
  // One request at a time lets the device fall asleep in between: a lost wakeup would hang here.
  Fixture<Backend> fixture;
  Device& device = *fixture.device;
  const Created object = create(device);
  AlignedBuffer block(kBlock);
  uint64_t failures = 0;
  for (int round = 0; round < 3000; ++round) {
    failures += run(device, IoOp::Read, object.object, 0, kBlock, block.data()) != 0 ? 1 : 0;
  }
  CHECK(failures == 0);
}

TEST_CASE_TEMPLATE("device: allocate reserves blocks and extends the size", Backend, UringBackend,
                   ThreadsBackend) {
  Fixture<Backend> fixture;
  Device& device = *fixture.device;
  const Created object = create(device);
  const uint64_t bytes = uint64_t{1} << 20;
  CHECK(run(device, IoOp::Allocate, object.object, bytes, bytes) == 0);
  struct stat status {};
  REQUIRE(::stat(fixture.object_path(object.id).c_str(), &status) == 0);
  CHECK(static_cast<uint64_t>(status.st_size) == 2 * bytes);
  CHECK(static_cast<uint64_t>(status.st_blocks) * 512 >= bytes);

  SUBCASE("punched ranges are given back and read as zeros") {
    AlignedBuffer data(bytes);
    data.fill(6);
    REQUIRE(run(device, IoOp::Write, object.object, bytes, bytes, data.data()) == 0);
    CHECK(run(device, IoOp::Punch, object.object, bytes, bytes) == 0);
    REQUIRE(::stat(fixture.object_path(object.id).c_str(), &status) == 0);
    CHECK(static_cast<uint64_t>(status.st_size) == 2 * bytes);
    CHECK(static_cast<uint64_t>(status.st_blocks) * 512 < bytes / 2);
    CHECK(run(device, IoOp::Read, object.object, bytes, bytes, data.data()) == 0);
    CHECK(data == AlignedBuffer(bytes));
  }
  SUBCASE("truncate takes it back") {
    CHECK(run(device, IoOp::Truncate, object.object, 0, kBlock) == 0);
    CHECK(std::filesystem::file_size(fixture.object_path(object.id)) == kBlock);
  }
}

TEST_CASE_TEMPLATE("device: close waits for everything submitted", Backend, UringBackend,
                   ThreadsBackend) {
  Fixture<Backend> fixture;
  const Created object = create(*fixture.device);
  struct Counted final : IoRequest {
    void complete(int result) override { *count += result == 0 ? 1 : 0; }
    std::atomic<int>* count = nullptr;
  };
  std::atomic<int> completed{0};
  AlignedBuffer data(uint64_t{1} << 20);
  std::array<Counted, 40> requests;
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].count = &completed;
    requests[i].op = i % 10 == 9 ? IoOp::Flush : IoOp::Write;
    requests[i].object = object.object;
    requests[i].offset = i * data.size();
    requests[i].length = data.size();
    requests[i].buffer = data.data();
    fixture.device->submit(&requests[i]);
  }
  fixture.device->close();
  CHECK(completed == 40);
  fixture.device->close();  // and again is harmless
}

}  // namespace
}  // namespace fpfs
