// What a device calls durable: names of objects, and flushed bytes. Seen on filesystems that lose
// their power, and in the calls that a device makes.
#include <doctest/doctest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>

#include "support/device_fixture.h"
#include "support/loop_mount.h"

namespace fpfs {
namespace {

using testing::AlignedBuffer;
using testing::create;
using testing::Created;
using testing::Ext4;
using testing::Fixture;
using testing::LoopMount;
using testing::object_path;
using testing::open_device;
using testing::run;
using testing::ThreadsBackend;
using testing::Xfs;

constexpr uint64_t kBlock = kIoAlignment;

// While one is there: the names that directories had when they were last synced, by the directory's
// path, and what syncing fails with.
class DirectorySyncs {
 public:
  DirectorySyncs() { watching() = this; }
  ~DirectorySyncs() { watching() = nullptr; }
  DirectorySyncs(const DirectorySyncs&) = delete;
  DirectorySyncs& operator=(const DirectorySyncs&) = delete;

  static std::atomic<DirectorySyncs*>& watching() {
    static std::atomic<DirectorySyncs*> syncs{nullptr};
    return syncs;
  }

  // The error of this call, or 0 after noting it.
  int sync(int fd) {
    MutexLock lock(mutex_);
    const int error = errors_.empty() ? 0 : errors_.front();
    if (!errors_.empty()) errors_.pop_front();
    if (error != 0) return error;
    const std::string opened = "/proc/self/fd/" + std::to_string(fd);
    std::set<std::string>& names = names_[std::filesystem::read_symlink(opened)];
    for (const auto& entry : std::filesystem::directory_iterator(opened)) {
      names.insert(entry.path().filename());
    }
    return 0;
  }
  bool synced(const std::filesystem::path& name) {
    MutexLock lock(mutex_);
    return names_[name.parent_path()].contains(name.filename());
  }
  // What the next calls fail with, one each.
  void fail(std::deque<int> errors) {
    MutexLock lock(mutex_);
    errors_ = std::move(errors);
  }
  bool all_failed() {
    MutexLock lock(mutex_);
    return errors_.empty();
  }

 private:
  Mutex mutex_;
  std::map<std::string, std::set<std::string>> names_ GUARDED_BY(mutex_);
  std::deque<int> errors_ GUARDED_BY(mutex_);
};

// A device whose every object is made when it is asked for, and watched while it is.
struct Watched {
  DirectorySyncs syncs;  // outlives the device's threads
  Fixture<ThreadsBackend> fixture;
  explicit Watched(uint64_t object_id_first) {
    DeviceConfig config = fixture.config;
    config.pool_objects = 0;
    config.object_id_first = object_id_first;
    fixture.reopen(config);
  }
  void check_synced(uint64_t id) {
    const auto path = std::filesystem::canonical(fixture.object_path(id));
    CHECK(syncs.synced(path));
    CHECK(syncs.synced(path.parent_path()));
  }
};

}  // namespace
}  // namespace fpfs

// In the place of the C library's, for this whole program.
extern "C" int fsync(int fd) {
  fpfs::DirectorySyncs* const watching = fpfs::DirectorySyncs::watching();
  const int error = watching != nullptr ? watching->sync(fd) : 0;
  if (error == 0) return static_cast<int>(::syscall(SYS_fsync, fd));
  errno = error;
  return -1;
}

TYPE_TO_STRING(fpfs::testing::Ext4);
TYPE_TO_STRING(fpfs::testing::Xfs);

namespace fpfs {
namespace {

TEST_CASE_TEMPLATE("device: objects that were handed out are there after a power failure", T, Ext4,
                   Xfs) {
  LoopMount mount(T::name, T::make, T::image_bytes);
  if (!mount.ready()) return;
  DeviceConfig config;
  config.path = mount.path();
  config.pool_objects = 0;  // else the syncs of later objects would come to the aid of these
  auto device = open_device(config);
  std::array<uint64_t, 10> ids{};
  for (uint64_t& id : ids) {
    const Created object = create(*device);
    REQUIRE(object.error == 0);
    id = object.id;
  }
  const std::string lost = mount.path() + "/nobody-synced-it";
  { std::ofstream file(lost); }
  REQUIRE(mount.shut_down());
  device.reset();
  REQUIRE(mount.mount_again());
  for (const uint64_t id : ids) CHECK(std::filesystem::exists(object_path(mount.path(), id)));
  CHECK_FALSE(std::filesystem::exists(lost));  // else this was no power failure
}

TEST_CASE_TEMPLATE("device: what was removed before a clean end stays away after a power failure",
                   T, Ext4, Xfs) {
  LoopMount mount(T::name, T::make, T::image_bytes);
  if (!mount.ready()) return;
  DeviceConfig config;
  config.path = mount.path();
  auto device = open_device(config);
  std::array<uint64_t, 3> ids{};
  for (uint64_t& id : ids) id = create(*device).id;
  for (const uint64_t id : ids) CHECK(testing::remove(*device, id) == 0);
  device->close();
  REQUIRE(mount.shut_down());
  device.reset();
  REQUIRE(mount.mount_again());
  // Nor those that were kept ready.
  for (uint64_t id = 1; id < ids.back() + 20; ++id) {
    CHECK_FALSE(std::filesystem::exists(object_path(mount.path(), id)));
  }
}

TEST_CASE_TEMPLATE("device: flushed bytes are there after a power failure", T, Ext4, Xfs) {
  for (const IoBackend backend : {IoBackend::IoUring, IoBackend::Threads}) {
    LoopMount mount(T::name, T::make, T::image_bytes);
    if (!mount.ready()) return;
    DeviceConfig config;
    config.path = mount.path();
    config.pool_objects = 0;
    config.backend = backend;
    auto device = open_device(config);
    AlignedBuffer data(64 * kBlock);
    data.fill(1);
    const Created flushed = create(*device);
    const Created other = create(*device);
    CHECK(run(*device, IoOp::Write, flushed.object, 0, data.size(), data.data()) == 0);
    CHECK(run(*device, IoOp::Flush, flushed.object, 0, 0) == 0);
    CHECK(run(*device, IoOp::Write, other.object, 0, data.size(), data.data()) == 0);
    REQUIRE(mount.shut_down());
    device.reset();
    REQUIRE(mount.mount_again());
    // Its blocks are there, but nothing says that they are the file's.
    CHECK(std::filesystem::file_size(object_path(mount.path(), other.id)) == 0);
    config.object_id_first = other.id + 1;
    device = open_device(config);
    AlignedBuffer read(data.size());
    CHECK(run(*device, IoOp::Read, device->object(flushed.id), 0, read.size(), read.data()) == 0);
    CHECK(read == data);
    device.reset();  // before its filesystem
  }
}

TEST_CASE("device: an object is handed out when its name and its folder's were synced") {
  Watched watched(1);
  for (int i = 0; i < 300; ++i) {  // more than there are folders
    const Created object = create(*watched.fixture.device);
    REQUIRE(object.error == 0);
    watched.check_synced(object.id);
  }
}

TEST_CASE("device: an object whose name cannot be synced is not handed out, and is gone") {
  Watched watched(0x80);  // of which no folder was made yet
  Device& device = *watched.fixture.device;
  const uint64_t files = watched.fixture.object_files();
  watched.syncs.fail({EIO});  // the folder's name
  CHECK(create(device).error == EIO);
  watched.syncs.fail({0, EIO});  // the object's
  CHECK(create(device).error == EIO);
  CHECK(watched.fixture.object_files() == files);
  watched.syncs.fail({EINTR, EINTR, 0, EINTR});
  const Created object = create(device);
  REQUIRE(object.error == 0);
  CHECK(watched.syncs.all_failed());
  watched.check_synced(object.id);
}

}  // namespace
}  // namespace fpfs
