// Devices where something is missing: io_uring, memory that may be locked, O_DIRECT.
#include <doctest/doctest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <filesystem>

#include "support/child.h"
#include "support/device_fixture.h"
#include "support/skips.h"

namespace fpfs {
namespace {

using testing::AlignedBuffer;
using testing::ChildResult;
using testing::create;
using testing::Created;
using testing::LogLines;
using testing::open_device;
using testing::run;
using testing::run_child;
using testing::TempDirectory;

constexpr uint64_t kBlock = kIoAlignment;

// Writes, reads and compares; the device works.
void check_round_trip(Device& device, char* buffer, uint64_t bytes) {
  const Created object = create(device);
  REQUIRE(object.error == 0);
  AlignedBuffer expected(bytes);
  expected.fill(11);
  std::copy(expected.data(), expected.data() + bytes, buffer);
  CHECK(run(device, IoOp::Write, object.object, 0, bytes, buffer) == 0);
  CHECK(run(device, IoOp::Flush, object.object, 0, 0) == 0);
  std::fill(buffer, buffer + bytes, '\0');
  CHECK(run(device, IoOp::Read, object.object, 0, bytes, buffer) == 0);
  CHECK(std::equal(buffer, buffer + bytes, expected.data()));
}

// From here on io_uring_setup fails with this errno, as under a container's seccomp profile.
bool forbid_io_uring(unsigned error) {
  std::array<sock_filter, 4> program = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog filter = {static_cast<unsigned short>(program.size()), program.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

TEST_CASE("child: a device without io_uring" * doctest::skip()) {
  const TempDirectory directory;
  LogLines log;
  DeviceConfig config;
  config.path = directory.path();
  config.log = log.sink();
  AlignedBuffer region(64 * kBlock);
  const auto device = open_device(config, {{region.data(), region.size()}});
  CHECK_FALSE(device->statistics().io_uring);
  CHECK(log.count("no io_uring") == 1);
  check_round_trip(*device, region.data(), region.size());

  config.backend = IoBackend::IoUring;
  const auto refused = Device::open(config, {});
  REQUIRE_FALSE(refused.ok());
  CHECK((refused.status().error() == EPERM || refused.status().error() == ENOSYS));
}

TEST_CASE("device: without io_uring threads are used, and the log says so") {
  for (const unsigned error : {unsigned{EPERM}, unsigned{ENOSYS}}) {
    const ChildResult child =
        run_child("child: a device without io_uring", [error] { return forbid_io_uring(error); });
    CHECK_MESSAGE(child.passed(), child.output);
  }
}

TEST_CASE("child: a device without locked memory" * doctest::skip()) {
  const TempDirectory directory;
  LogLines log;
  DeviceConfig config;
  config.path = directory.path();
  config.backend = IoBackend::IoUring;
  config.log = log.sink();
  AlignedBuffer region(uint64_t{1} << 20);
  const auto device = open_device(config, {{region.data(), region.size()}});
  CHECK(device->statistics().io_uring);
  CHECK_FALSE(device->statistics().buffers_registered);
  CHECK(log.count("registering buffers") == 1);
  check_round_trip(*device, region.data(), region.size());
}

bool become_user_with_little_locked_memory() {
  const rlimit limit = {64 * 1024, 64 * 1024};
  return ::setrlimit(RLIMIT_MEMLOCK, &limit) == 0 &&
         (::geteuid() != 0 || (::setgid(65534) == 0 && ::setuid(65534) == 0));
}

TEST_CASE("device: where memory may not be locked, buffers stay unregistered") {
  const ChildResult child = run_child("child: a device without locked memory",
                                      [] { return become_user_with_little_locked_memory(); });
  CHECK_MESSAGE(child.passed(), child.output);
}

TEST_CASE("child: a device with few descriptors" * doctest::skip()) {
  // Far more objects than the process may have descriptors.
  const TempDirectory directory;
  DeviceConfig config;
  config.path = directory.path();
  const auto device = open_device(config);
  AlignedBuffer block(kBlock);
  for (int i = 0; i < 300; ++i) {
    const Created object = create(*device);
    REQUIRE(object.error == 0);
    CHECK(run(*device, IoOp::Write, object.object, 0, kBlock, block.data()) == 0);
  }
}

TEST_CASE("device: descriptors suffice under a low limit") {
  const ChildResult child = run_child("child: a device with few descriptors", [] {
    const rlimit limit = {128, 128};
    return ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
  });
  CHECK_MESSAGE(child.passed(), child.output);
}

TEST_CASE("device: without O_DIRECT writes are buffered, and the log says so once") {
  const TempDirectory directory;
  // ramfs has no direct I/O (tmpfs has had it since Linux 6.6).
  if (::mount("ramfs", directory.path().c_str(), "ramfs", 0, nullptr) != 0) {
    return testing::skip("mounting ramfs: " + error_text(errno));
  }
  for (const IoBackend backend : {IoBackend::IoUring, IoBackend::Threads}) {
    LogLines log;
    DeviceConfig config;
    config.path = directory.path();
    config.backend = backend;
    config.open_files_max = 2;
    config.log = log.sink();
    AlignedBuffer region(64 * kBlock);
    const auto device = open_device(config, {{region.data(), region.size()}});
    CHECK_FALSE(device->statistics().direct);
    CHECK(log.count("no direct I/O") == 1);
    for (int i = 0; i < 10; ++i) check_round_trip(*device, region.data(), region.size());
    // ramfs knows neither fallocate nor hole punching: said once, and not an error.
    const Created object = create(*device);
    for (int i = 0; i < 2; ++i) {
      CHECK(run(*device, IoOp::Allocate, object.object, 0, kBlock) == 0);
      CHECK(run(*device, IoOp::Punch, object.object, 0, kBlock) == 0);
    }
    CHECK(log.count("no fallocate") == 1);
    // A pipe in an object's place; with O_DIRECT the kernel itself refuses it, here the device
    // must.
    const std::string folder = directory.path() + "/ff";
    std::filesystem::create_directory(folder);
    ::mkfifo((folder + "/00000000000000ff").c_str(), 0600);
    CHECK(run(*device, IoOp::Read, device->object(0xff), 0, kBlock, region.data()) == -EINVAL);
    CHECK(log.count("no hole punching") == 1);
  }
  CHECK(::umount(directory.path().c_str()) == 0);
}

}  // namespace
}  // namespace fpfs
