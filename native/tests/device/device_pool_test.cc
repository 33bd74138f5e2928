// Objects of a device: fresh ones, many at once, names on disk, hostile names, open descriptors.
#include <doctest/doctest.h>
#include <sys/stat.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "support/device_fixture.h"

namespace fpfs {
namespace {

using testing::AlignedBuffer;
using testing::create;
using testing::Created;
using testing::Delivery;
using testing::Fixture;
using testing::open_device;
using testing::remove;
using testing::run;
using testing::ThreadsBackend;
using testing::UringBackend;

constexpr uint64_t kBlock = kIoAlignment;

// Descriptors of this process that lead to files under a directory.
uint64_t descriptors_under(const std::string& directory) {
  uint64_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the iterator's own descriptor, or one closed meanwhile
    const auto target = std::filesystem::read_symlink(entry.path(), gone);
    // Folders that a worker looks into for a moment do not count.
    count += !gone && target.string().rfind(directory + "/", 0) == 0 &&
                     target.filename().string().size() >= 16
                 ? 1
                 : 0;
  }
  return count;
}

TEST_CASE_TEMPLATE("device: fresh objects have names of their own", Backend, UringBackend,
                   ThreadsBackend) {
  Fixture<Backend> fixture;
  DeviceConfig config = fixture.config;
  config.object_id_first = 0x700000000;
  fixture.reopen(config);
  Delivery<int> all;
  Mutex mutex;
  std::set<uint64_t> ids;
  constexpr size_t count = 300;  // more than the pool and a batch hold, and than there are folders
  for (size_t i = 0; i < count; ++i) {
    fixture.device->create_object([&](int error, const ObjectRef& object, uint64_t id) {
      MutexLock lock(mutex);
      if (error == 0 && object->id() == id) ids.insert(id);
      if (ids.size() == count) all.put(0);
    });
  }
  CHECK(all.wait() == 0);
  CHECK(*ids.begin() == config.object_id_first);
  for (const uint64_t id : ids) CHECK(std::filesystem::exists(fixture.object_path(id)));
  fixture.device->close();
  CHECK(fixture.object_files() == count);  // what the pool held is gone
}

TEST_CASE_TEMPLATE("device: ids that are in use are passed over", Backend, UringBackend,
                   ThreadsBackend) {
  Fixture<Backend> fixture;
  const Created first = create(*fixture.device);
  fixture.reopen(fixture.config);
  const Created second = create(*fixture.device);
  CHECK(second.error == 0);
  CHECK(second.id > first.id);
}

TEST_CASE_TEMPLATE("device: an objects directory that is gone is reported", Backend, UringBackend,
                   ThreadsBackend) {
  Fixture<Backend> fixture;
  DeviceConfig config = fixture.config;
  config.pool_objects = 0;
  config.path = fixture.directory.path() + "/objects";
  std::filesystem::create_directory(config.path);
  fixture.reopen(config);
  std::filesystem::remove_all(config.path);
  CHECK(create(*fixture.device).error == ENOENT);
  CHECK(create(*fixture.device).error == ENOENT);
  CHECK(remove(*fixture.device, 77) == ENOENT);
  AlignedBuffer block(kBlock);
  CHECK(run(*fixture.device, IoOp::Read, fixture.device->object(5), 0, kBlock, block.data()) ==
        -ENOENT);
  CHECK(fixture.device->statistics().errors == 3);  // gone is what 77 should be
}

TEST_CASE_TEMPLATE("device: an objects directory that never was is refused", Backend, UringBackend,
                   ThreadsBackend) {
  DeviceConfig config;
  config.path = "/nonexistent/objects";
  config.backend = Backend::kind;
  const auto result = Device::open(config, {});
  REQUIRE(!result.ok());
  CHECK(result.status().error() == ENOENT);
  CHECK(result.status().message().find(config.path) != std::string::npos);
}

TEST_CASE_TEMPLATE("device: objects of an earlier mount are opened lazily", Backend, UringBackend,
                   ThreadsBackend) {
  Fixture<Backend> fixture;
  const Created object = create(*fixture.device);
  AlignedBuffer written(kBlock);
  written.fill(7);
  REQUIRE(run(*fixture.device, IoOp::Write, object.object, 0, kBlock, written.data()) == 0);
  fixture.reopen(fixture.config);
  AlignedBuffer read(kBlock);
  const ObjectRef again = fixture.device->object(object.id);
  CHECK(run(*fixture.device, IoOp::Read, again, 0, kBlock, read.data()) == 0);
  CHECK(read == written);
}

TEST_CASE_TEMPLATE("device: names that lead elsewhere are not followed", Backend, UringBackend,
                   ThreadsBackend) {
  Fixture<Backend> fixture;
  DeviceConfig config = fixture.config;
  config.pool_objects = 0;
  fixture.reopen(config);
  const std::string secret = fixture.directory.path() + "/secret";
  { std::ofstream(secret) << "not yours"; }
  std::filesystem::create_directory(fixture.directory.path() + "/f1");
  std::filesystem::create_symlink(secret, fixture.object_path(0xf1));
  std::filesystem::create_symlink(fixture.directory.path() + "/f1",
                                  fixture.directory.path() + "/f2");
  std::filesystem::copy_file(secret, fixture.directory.path() + "/f1/00000000000001f2");
  std::filesystem::create_directory(fixture.object_path(0x1f1));
  REQUIRE(::mkfifo(fixture.object_path(0x2f1).c_str(), 0600) == 0);
  AlignedBuffer block(kBlock);
  Device& device = *fixture.device;
  const auto read = [&](uint64_t id) {
    return run(device, IoOp::Read, device.object(id), 0, kBlock, block.data());
  };
  CHECK(read(0xf1) == -ELOOP);     // a link in the object's place
  CHECK(read(0x1f2) == -ENOTDIR);  // a link in the folder's place
  CHECK(read(0x1f1) == -EISDIR);
  const int pipe = read(0x2f1);
  CHECK((pipe == -EIO || pipe == -EINVAL));  // EINVAL where pipes do not know O_DIRECT
  CHECK(block == AlignedBuffer(kBlock));
  CHECK(remove(device, 0x1f2) == ENOTDIR);
  CHECK(remove(device, 0xf1) == 0);  // removes the link, not what it leads to
  CHECK(std::filesystem::exists(secret));
}

TEST_CASE_TEMPLATE("device: a removed object gives its space back", Backend, UringBackend,
                   ThreadsBackend) {
  Fixture<Backend> fixture;
  Device& device = *fixture.device;
  const Created object = create(device);
  REQUIRE(run(device, IoOp::Allocate, object.object, 0, uint64_t{1} << 20) == 0);
  CHECK(remove(device, object.id) == 0);
  CHECK_FALSE(std::filesystem::exists(fixture.object_path(object.id)));
  AlignedBuffer block(kBlock);
  CHECK(run(device, IoOp::Read, object.object, 0, kBlock, block.data()) == -ENOENT);
  CHECK(remove(device, object.id) == ENOENT);
  device.close();
  CHECK(descriptors_under(fixture.directory.path()) == 0);
}

TEST_CASE_TEMPLATE("device: removing an object does not disturb requests in flight", Backend,
                   UringBackend, ThreadsBackend) {
  Fixture<Backend> fixture;
  Device& device = *fixture.device;
  AlignedBuffer data(uint64_t{8} << 20);
  for (int round = 0; round < 5; ++round) {
    const Created object = create(device);
    testing::WaitedRequest write;
    write.op = IoOp::Write;
    write.object = object.object;
    write.length = data.size();
    write.buffer = data.data();
    device.submit(&write);
    CHECK(remove(device, object.id) == 0);
    CHECK(write.delivery.wait() == 0);
  }
  device.close();
  CHECK(descriptors_under(fixture.directory.path()) == 0);
}

TEST_CASE_TEMPLATE("device: descriptors stay within their bound", Backend, UringBackend,
                   ThreadsBackend) {
  Fixture<Backend> fixture;
  DeviceConfig config = fixture.config;
  config.open_files_max = 4;
  config.pool_objects = 2;
  fixture.reopen(config);
  Device& device = *fixture.device;
  constexpr size_t count = 32;
  std::vector<Created> objects;
  for (size_t i = 0; i < count; ++i) objects.push_back(create(device));
  std::vector<AlignedBuffer> blocks;
  for (size_t i = 0; i < count; ++i) {
    blocks.emplace_back(kBlock);
    blocks.back().fill(i);
  }
  // All at once: files in use may exceed the bound, and the table of registered files.
  std::array<testing::WaitedRequest, count> requests;
  for (size_t i = 0; i < count; ++i) {
    requests[i].op = IoOp::Write;
    requests[i].object = objects[i].object;
    requests[i].length = kBlock;
    requests[i].buffer = blocks[i].data();
    device.submit(&requests[i]);
  }
  for (auto& request : requests) CHECK(request.delivery.wait() == 0);
  // One after the other, in an order that finds hardly one of them open.
  for (size_t round = 0; round < 2; ++round) {
    for (size_t i = 0; i < count; ++i) {
      AlignedBuffer read(kBlock);
      const size_t at = (i * 7 + round) % count;
      CHECK(run(device, IoOp::Read, objects[at].object, 0, kBlock, read.data()) == 0);
      CHECK(read == blocks[at]);
    }
  }
  // Closing is left to a thread of the device.
  while (descriptors_under(fixture.directory.path()) > 4) std::this_thread::yield();
  device.close();
  CHECK(descriptors_under(fixture.directory.path()) == 0);
}

}  // namespace
}  // namespace fpfs
