// Conformance of a device: what its header promises, of both backends.
#include "device.h"

#include <doctest/doctest.h>
#include <sys/stat.h>

#include <atomic>
#include <set>
#include <thread>

#include "device_fixture.h"

namespace fpfs {
namespace {

using testing::AlignedBuffer;
using testing::Created;
using testing::create;
using testing::Delivery;
using testing::LogLines;
using testing::open_device;
using testing::run;
using testing::TempDirectory;
using testing::ThreadsBackend;
using testing::UringBackend;
using testing::WaitedRequest;

constexpr uint64_t kBlock = kIoAlignment;

// A device over a directory of its own, with a registered region.
template <typename Backend>
struct Fixture {
  TempDirectory directory;
  LogLines log;
  AlignedBuffer region{uint64_t{4} << 20};
  DeviceConfig config = make_config();
  std::unique_ptr<Device> device = open_device(config, {{region.data(), region.size()}});

  DeviceConfig make_config() {
    DeviceConfig result;
    result.path = directory.path();
    result.backend = Backend::kind;
    result.log = log.sink();
    return result;
  }
  std::string object_path(uint64_t id) const {
    std::array<char, 32> name;
    std::snprintf(name.data(), name.size(), "/%02x/%016llx", static_cast<unsigned>(id & 0xff),
                  static_cast<unsigned long long>(id));
    return directory.path() + name.data();
  }
  void reopen(const DeviceConfig& changed) {
    device->close();
    config = changed;
    device = open_device(config, {{region.data(), region.size()}});
  }
  uint64_t object_files() const {
    uint64_t count = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory.path())) {
      count += entry.is_regular_file() ? 1 : 0;
    }
    return count;
  }
};

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
  CHECK(statistics.io_uring == (Backend::kind == IoBackend::IoUring));
}

}  // namespace
}  // namespace fpfs
