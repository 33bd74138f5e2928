// Real faults under a device, on loop devices of its own: full, shut down (EIO), read-only.
//
// Needs root, loop devices and mkfs; without them each case counts as skipped.
#include <doctest/doctest.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <string>

#include "support/device_fixture.h"
#include "support/loop_mount.h"

namespace fpfs {
namespace {

using testing::AlignedBuffer;
using testing::create;
using testing::Created;
using testing::Delivery;
using testing::Ext4;
using testing::LoopMount;
using testing::open_device;
using testing::remove;
using testing::run;
using testing::WaitedRequest;
using testing::Xfs;

constexpr uint64_t kBlock = kIoAlignment;

template <typename Filesystem, IoBackend backend>
struct Combination {
  LoopMount mount{Filesystem::name, Filesystem::make, Filesystem::image_bytes};
  DeviceConfig config() const {
    DeviceConfig result;
    result.path = mount.path();
    result.backend = backend;
    return result;
  }
};
using Ext4Uring = Combination<Ext4, IoBackend::IoUring>;
using Ext4Threads = Combination<Ext4, IoBackend::Threads>;
using XfsUring = Combination<Xfs, IoBackend::IoUring>;
using XfsThreads = Combination<Xfs, IoBackend::Threads>;

}  // namespace
}  // namespace fpfs

TYPE_TO_STRING(fpfs::Ext4Uring);
TYPE_TO_STRING(fpfs::Ext4Threads);
TYPE_TO_STRING(fpfs::XfsUring);
TYPE_TO_STRING(fpfs::XfsThreads);

namespace fpfs {
namespace {

#define ALL_COMBINATIONS Ext4Uring, Ext4Threads, XfsUring, XfsThreads

TEST_CASE_TEMPLATE("device fault: full, and usable again after a removal", T, ALL_COMBINATIONS) {
  T fixture;
  if (!fixture.mount.ready()) return;
  const auto device = open_device(fixture.config());
  constexpr uint64_t piece = uint64_t{4} << 20;
  const Created filler = create(*device);
  const Created victim = create(*device);
  REQUIRE(run(*device, IoOp::Allocate, victim.object, 0, 2 * piece) == 0);
  uint64_t filled = 0;
  int result = 0;
  while ((result = run(*device, IoOp::Allocate, filler.object, filled, piece)) == 0) {
    filled += piece;
  }
  CHECK(result == -ENOSPC);
  CHECK(filled > 0);

  // What was allocated can be written, even now.
  AlignedBuffer data(piece);
  data.fill(1);
  CHECK(run(*device, IoOp::Write, filler.object, filled - piece, piece, data.data()) == 0);
  CHECK(run(*device, IoOp::Flush, filler.object, 0, 0) == 0);
  // What was not allocated fails in the write, with the same errno.
  const Created other = create(*device);
  REQUIRE(other.error == 0);
  int written = 0;
  for (uint64_t at = 0; written == 0; at += piece) {
    written = run(*device, IoOp::Write, other.object, at, piece, data.data());
  }
  CHECK(written == -ENOSPC);

  CHECK(remove(*device, victim.id) == 0);
  CHECK(remove(*device, other.id) == 0);
  // The blocks come back when the last descriptor is closed, by a thread of the device, and when
  // the filesystem has worked off the removal.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  do {
    fixture.mount.sync();
    result = run(*device, IoOp::Allocate, filler.object, filled, piece);
  } while (result == -ENOSPC && std::chrono::steady_clock::now() < deadline);
  CHECK(result == 0);
}

TEST_CASE_TEMPLATE("device fault: space that is being given back is waited for", T,
                   ALL_COMBINATIONS) {
  T fixture;
  if (!fixture.mount.ready()) return;
  const auto device = open_device(fixture.config());
  const uint64_t most = device->bytes_free() / 4 * 3 / kBlock * kBlock;
  Created held = create(*device);
  REQUIRE(run(*device, IoOp::Allocate, held.object, 0, most) == 0);
  for (int round = 0; round < 10; ++round) {
    CAPTURE(round);
    Created next = create(*device);
    REQUIRE(next.error == 0);
    // The removal is under way, and not waited for, when the space is asked for.
    Delivery<int> removed;
    device->remove_object(held.id, [&removed](int error) { removed.put(error); });
    CHECK(run(*device, IoOp::Allocate, next.object, 0, most) == 0);
    CHECK(removed.wait() == 0);
    // Likewise a hole punched into what is held.
    const Created other = create(*device);
    REQUIRE(other.error == 0);
    WaitedRequest punch;
    punch.op = IoOp::Punch;
    punch.object = next.object;
    punch.length = most;
    device->submit(&punch);
    CHECK(run(*device, IoOp::Allocate, other.object, 0, most) == 0);
    CHECK(punch.delivery.wait() == 0);
    REQUIRE(remove(*device, next.id) == 0);
    held = other;
  }
  // With nothing on its way the answer comes at once.
  CHECK(run(*device, IoOp::Allocate, create(*device).object, 0, most) == -ENOSPC);
  device->close();
}

// A request whose completion waits, so that whatever comes behind it on its thread waits too.
struct HeldRequest final : IoRequest {
  void complete(int result) override {
    CHECK(result == 0);
    reached.put(true);
    (void)release.wait();
  }
  Delivery<bool> reached;
  Delivery<bool> release;
};

TEST_CASE("device fault: a new object waits for room that is being given back") {
  // Hardly any inodes: what is missing is not space for the content.
  const LoopMount mount("ext4", "mkfs.ext4 -q -m 0 -N 600 -F ", Ext4::image_bytes);
  if (!mount.ready()) return;
  DeviceConfig config;
  config.path = mount.path();
  const auto device = open_device(config);
  const Created first = create(*device);
  REQUIRE(first.error == 0);
  Created last = first;
  for (Created next = create(*device); next.error == 0; next = create(*device)) last = next;
  CHECK(create(*device).error == ENOSPC);
  for (int round = 0; round < 20; ++round) {
    CAPTURE(round);
    HeldRequest punch;
    punch.op = IoOp::Punch;
    punch.object = first.object;
    punch.length = kBlock;
    device->submit(&punch);
    (void)punch.reached.wait();
    Delivery<int> removed;
    device->remove_object(last.id, [&removed](int error) { removed.put(error); });
    Delivery<Created> made;
    device->create_object([&made](int error, ObjectRef object, uint64_t id) {
      made.put({error, std::move(object), id});
    });
    punch.release.put(true);
    CHECK(removed.wait() == 0);
    last = made.wait();
    REQUIRE(last.error == 0);
  }
  CHECK(create(*device).error == ENOSPC);
  device->close();
}

TEST_CASE_TEMPLATE("device fault: the reserve stays free", T, ALL_COMBINATIONS) {
  T fixture;
  if (!fixture.mount.ready()) return;
  DeviceConfig config = fixture.config();
  config.reserve_bytes = uint64_t{16} << 20;
  const auto device = open_device(config);
  const Created object = create(*device);
  constexpr uint64_t piece = uint64_t{1} << 20;
  uint64_t filled = 0;
  while (run(*device, IoOp::Allocate, object.object, filled, piece) == 0) filled += piece;
  CHECK(std::filesystem::space(config.path).available >= config.reserve_bytes);
  CHECK(std::filesystem::space(config.path).available < config.reserve_bytes + 4 * piece);
}

TEST_CASE_TEMPLATE(
    "device fault: what would touch the reserve is refused, and nothing is kept of it", T,
    ALL_COMBINATIONS) {
  T fixture;
  if (!fixture.mount.ready()) return;
  DeviceConfig config = fixture.config();
  config.reserve_bytes = std::filesystem::space(config.path).available;
  const auto device = open_device(config);
  const Created object = create(*device);
  CHECK(run(*device, IoOp::Allocate, object.object, 0, uint64_t{1} << 20) == -ENOSPC);
  CHECK(std::filesystem::file_size(testing::object_path(config.path, object.id)) == 0);
  CHECK(device->statistics().errors == 1);
}

TEST_CASE_TEMPLATE("device fault: a lost device answers EIO, to everybody, and closes", T,
                   ALL_COMBINATIONS) {
  T fixture;
  if (!fixture.mount.ready()) return;
  DeviceConfig config = fixture.config();
  config.pool_objects = 1;
  const auto device = open_device(config);
  const Created object = create(*device);
  AlignedBuffer data(uint64_t{1} << 20);
  REQUIRE(run(*device, IoOp::Write, object.object, 0, data.size(), data.data()) == 0);
  REQUIRE(fixture.mount.shut_down());

  std::array<WaitedRequest, 24> requests;
  constexpr std::array<IoOp, 3> ops = {IoOp::Write, IoOp::Flush, IoOp::Allocate};
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].op = ops[i % ops.size()];
    requests[i].object = object.object;
    requests[i].length = data.size();
    requests[i].offset = i * data.size();
    requests[i].buffer = data.data();
    device->submit(&requests[i]);
  }
  for (auto& request : requests) CHECK(request.delivery.wait() == -EIO);
  CHECK(run(*device, IoOp::Read, object.object, 0, data.size(), data.data()) == -EIO);
  CHECK(run(*device, IoOp::Read, device->object(object.id + 1000), 0, kBlock, data.data()) < 0);
  CHECK(remove(*device, object.id) == EIO);
  int created = 0;
  for (int i = 0; i < 3 && created == 0; ++i) created = create(*device).error;
  CHECK(created == EIO);
  CHECK(device->statistics().errors >= requests.size() + 4);
  device->close();
}

TEST_CASE_TEMPLATE("device fault: read-only, objects can still be read", T, ALL_COMBINATIONS) {
  T fixture;
  if (!fixture.mount.ready()) return;
  DeviceConfig config = fixture.config();
  config.pool_objects = 0;
  AlignedBuffer data(uint64_t{1} << 20);
  data.fill(3);
  uint64_t id = 0;
  {
    const auto device = open_device(config);
    const Created object = create(*device);
    id = object.id;
    REQUIRE(run(*device, IoOp::Write, object.object, 0, data.size(), data.data()) == 0);
    device->close();
  }
  // A filesystem with files open for writing cannot be remounted: turn it before any is.
  const auto device = open_device(config);
  REQUIRE(fixture.mount.remount_read_only());
  CHECK(create(*device).error == EROFS);
  const ObjectRef object = device->object(id);
  AlignedBuffer read(data.size());
  CHECK(run(*device, IoOp::Read, object, 0, read.size(), read.data()) == 0);
  CHECK(read == data);
  for (int i = 0; i < 2; ++i) {
    CHECK(run(*device, IoOp::Write, object, 0, data.size(), data.data()) == -EROFS);
    CHECK(run(*device, IoOp::Allocate, object, 0, data.size()) == -EROFS);
    CHECK(run(*device, IoOp::Truncate, object, 0, 0) == -EROFS);
    CHECK(run(*device, IoOp::Punch, object, 0, kBlock) == -EROFS);
  }
  CHECK(run(*device, IoOp::Flush, object, 0, 0) == 0);
  CHECK(remove(*device, id) == EROFS);
  device->close();

  // And a device that is read-only from the start is refused.
  const auto refused = Device::open(config, {});
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.status().error() == EROFS);
}

}  // namespace
}  // namespace fpfs
