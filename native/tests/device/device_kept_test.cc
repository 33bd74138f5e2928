// Removed objects that a device keeps for new bytes: which, under what name, and until when.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <filesystem>

#include "support/device_fixture.h"
#include "support/loop_mount.h"

namespace fpfs {
namespace {

using testing::AlignedBuffer;
using testing::create;
using testing::Created;
using testing::Ext4;
using testing::LoopMount;
using testing::object_path;
using testing::open_device;
using testing::remove;
using testing::run;
using testing::WaitedRequest;
using testing::Xfs;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kImageBytes = 400 * kMiB;
constexpr uint64_t kFolders = 64 * 1024;  // what the folder of a new name may take

struct Kept {
  LoopMount mount;
  std::unique_ptr<Device> device;

  bool open(uint32_t percent) {
    if (!mount.ready()) return false;
    DeviceConfig config;
    config.path = mount.path();
    config.kept_percent = percent;
    device = open_device(config);
    return true;
  }
  uint64_t kept_bytes() const { return device->statistics().kept_bytes; }
  Created written(uint64_t bytes, uint64_t seed) {
    const Created object = create(*device);
    AlignedBuffer data(bytes);
    data.fill(seed);
    REQUIRE(run(*device, IoOp::Allocate, object.object, 0, bytes) == 0);
    REQUIRE(run(*device, IoOp::Write, object.object, 0, bytes, data.data()) == 0);
    REQUIRE(run(*device, IoOp::Flush, object.object, 0, 0) == 0);
    return object;
  }
};

template <typename T>
struct KeptOn : Kept {
  KeptOn() : Kept{{T::name, T::make, kImageBytes}, nullptr} {}
};

TEST_CASE_TEMPLATE("device kept: new bytes go to the blocks of a removed object", T, Ext4, Xfs) {
  KeptOn<T> fixture;
  if (!fixture.open(90)) return;
  Device& device = *fixture.device;
  const Created object = fixture.written(16 * kMiB, 1);
  const auto blocks_free = [&] { return std::filesystem::space(fixture.mount.path()).free; };
  const uint64_t free_before = blocks_free();
  const uint64_t device_free_before = device.bytes_free();
  CHECK(remove(device, object.id) == 0);
  CHECK(fixture.kept_bytes() == 16 * kMiB);
  CHECK(blocks_free() >= free_before - kFolders);
  CHECK(device.bytes_free() >= device_free_before + 16 * kMiB - kFolders);

  // Who asks for the old one finds nothing, and nobody gets a larger one than he wants.
  AlignedBuffer block(kIoAlignment);
  CHECK(run(device, IoOp::Read, object.object, 0, kIoAlignment, block.data()) == -ENOENT);
  CHECK(remove(device, object.id) == ENOENT);
  CHECK_FALSE(std::filesystem::exists(object_path(fixture.mount.path(), object.id)));
  CHECK_FALSE(device.take_kept_object(16 * kMiB - 1).has_value());

  const auto taken = device.take_kept_object(16 * kMiB);
  REQUIRE(taken.has_value());
  CHECK(taken->bytes == 16 * kMiB);
  CHECK(taken->id != object.id);
  CHECK(std::filesystem::exists(object_path(fixture.mount.path(), taken->id)));
  CHECK(fixture.kept_bytes() == 0);
  CHECK_FALSE(device.take_kept_object(UINT64_MAX).has_value());
  AlignedBuffer data(16 * kMiB);
  data.fill(2);
  CHECK(run(device, IoOp::Write, taken->object, 0, data.size(), data.data()) == 0);
  CHECK(run(device, IoOp::Flush, taken->object, 0, 0) == 0);
  CHECK(blocks_free() >= free_before - kFolders);
  AlignedBuffer read(16 * kMiB);
  CHECK(run(device, IoOp::Read, taken->object, 0, read.size(), read.data()) == 0);
  CHECK(read == data);
}

TEST_CASE_TEMPLATE("device kept: not what is small, has holes or is in use", T, Ext4, Xfs) {
  KeptOn<T> fixture;
  if (!fixture.open(90)) return;
  Device& device = *fixture.device;
  CHECK(remove(device, fixture.written(16 * kMiB - kIoAlignment, 1).id) == 0);
  CHECK(fixture.kept_bytes() == 0);

  const Created holes = fixture.written(32 * kMiB, 1);
  REQUIRE(run(device, IoOp::Punch, holes.object, kMiB, kMiB) == 0);
  CHECK(remove(device, holes.id) == 0);
  CHECK(fixture.kept_bytes() == 0);

  const Created linked = fixture.written(16 * kMiB, 1);
  std::filesystem::create_hard_link(object_path(fixture.mount.path(), linked.id),
                                    fixture.mount.path() + "/somebody-else");
  CHECK(remove(device, linked.id) == 0);
  CHECK(fixture.kept_bytes() == 0);

  const Created busy = fixture.written(16 * kMiB, 1);
  AlignedBuffer data(64 * kMiB);
  WaitedRequest write;
  write.op = IoOp::Write;
  write.object = busy.object;
  write.length = data.size();
  write.buffer = data.data();
  device.submit(&write);
  CHECK(remove(device, busy.id) == 0);
  // It had ended before the removal looked, or it was not kept.
  if (write.delivery.wait() == 0 && fixture.kept_bytes() != 0) {
    CHECK(fixture.kept_bytes() == data.size());
  }
}

TEST_CASE_TEMPLATE("device kept: given up when the room is needed", T, Ext4, Xfs) {
  KeptOn<T> fixture;
  if (!fixture.open(90)) return;
  Device& device = *fixture.device;
  CHECK(remove(device, fixture.written(32 * kMiB, 1).id) == 0);
  CHECK(remove(device, fixture.written(16 * kMiB, 1).id) == 0);
  CHECK(fixture.kept_bytes() == 48 * kMiB);
  // 64 MiB of the filesystem stay free, for whoever else needs room, the oldest goes first.
  const Created filler = create(device);
  const uint64_t all = device.bytes_free();
  const uint64_t room = all - fixture.kept_bytes() - 54 * kMiB;
  CHECK(run(device, IoOp::Allocate, filler.object, 0, room) == 0);
  CHECK(fixture.kept_bytes() == 16 * kMiB);
  // All that is said to be free can be had.
  const uint64_t rest = all - room - 4 * kMiB;
  CHECK(run(device, IoOp::Allocate, filler.object, room, rest) == 0);
  CHECK(fixture.kept_bytes() == 0);
  CHECK(run(device, IoOp::Allocate, filler.object, room + rest, 8 * kMiB) == -ENOSPC);
}

TEST_CASE_TEMPLATE("device kept: within its bound, the newest", T, Ext4, Xfs) {
  KeptOn<T> fixture;
  if (!fixture.open(12)) return;
  Device& device = *fixture.device;
  const uint64_t bound =
      std::filesystem::space(fixture.mount.path()).capacity / 100 * 12;  // some 42 MiB
  REQUIRE(bound > 34 * kMiB);
  CHECK(remove(device, fixture.written(18 * kMiB, 1).id) == 0);
  CHECK(remove(device, fixture.written(16 * kMiB, 1).id) == 0);
  CHECK(fixture.kept_bytes() == 34 * kMiB);
  CHECK(remove(device, fixture.written(17 * kMiB, 1).id) == 0);
  CHECK(fixture.kept_bytes() == 33 * kMiB);
  // One that is larger than all drives nothing out.
  CHECK(remove(device, fixture.written(64 * kMiB, 1).id) == 0);
  CHECK(fixture.kept_bytes() == 33 * kMiB);
}

TEST_CASE_TEMPLATE("device kept: nothing where the catalog's room is short, or where it is off", T,
                   Ext4, Xfs) {
  KeptOn<T> fixture;
  if (!fixture.open(90)) return;
  Device& device = *fixture.device;
  const Created object = fixture.written(16 * kMiB, 1);
  const uint64_t room = device.bytes_free() - 32 * kMiB;
  REQUIRE(run(device, IoOp::Allocate, create(device).object, 0, room) == 0);
  CHECK(remove(device, object.id) == 0);
  CHECK(fixture.kept_bytes() == 0);

  fixture.device.reset();
  if (!fixture.open(0)) return;
  const Created other = fixture.written(16 * kMiB, 1);
  CHECK(remove(*fixture.device, other.id) == 0);
  CHECK(fixture.kept_bytes() == 0);
}

TEST_CASE_TEMPLATE("device kept: a new name is durable, and gone after the end", T, Ext4, Xfs) {
  KeptOn<T> fixture;
  if (!fixture.open(90)) return;
  const Created object = fixture.written(16 * kMiB, 1);
  const Created unused = fixture.written(20 * kMiB, 1);
  CHECK(remove(*fixture.device, object.id) == 0);
  CHECK(remove(*fixture.device, unused.id) == 0);
  const auto taken = fixture.device->take_kept_object(16 * kMiB);
  REQUIRE(taken.has_value());
  fixture.device->close();
  const std::string lost = fixture.mount.path() + "/nobody-synced-it";
  { const FileDescriptor made(::open(lost.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600)); }
  REQUIRE(fixture.mount.shut_down());
  fixture.device.reset();
  REQUIRE(fixture.mount.mount_again());
  CHECK_FALSE(std::filesystem::exists(lost));  // else this was no power failure
  for (uint64_t id = 1; id < taken->id + 20; ++id) {
    CAPTURE(id);
    const bool exists = std::filesystem::exists(object_path(fixture.mount.path(), id));
    CHECK(exists == (id == taken->id));
  }
}

}  // namespace
}  // namespace fpfs
