// The bound on the processors' latency: asked for in bursts, taken back when it is quiet.
#include "base/cpu_latency.h"

#include <doctest/doctest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "support/device_fixture.h"

namespace fpfs::testing {
namespace {

// A file in the place of /dev/cpu_dma_latency.
struct Device {
  TempDirectory directory;
  std::string path = directory.path() + "/latency";
  std::vector<std::string> failures;
  CpuLatency latency{path, [this](const std::string& why) { failures.push_back(why); }};

  Device() { std::ofstream file(path); }
  bool held() const {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      if (std::filesystem::read_symlink(entry.path(), gone) == path) return true;
    }
    return false;
  }
  // Requests as quick as they come; a busy machine may tear a burst apart.
  bool burst() {
    for (int i = 0; i < 10'000 && !latency.bounded(); ++i) latency.request_came();
    return latency.bounded();
  }
  int32_t asked() const {
    int32_t value = -1;
    std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(&value), sizeof value);
    return value;
  }
};

void pass(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

}  // namespace

TEST_CASE("cpu latency: a burst asks for a bound, and its end takes it back") {
  Device device;
  CHECK_FALSE(device.held());
  REQUIRE(device.burst());
  CHECK(device.held());
  const int32_t asked = device.asked();
  CHECK((asked == 0 || asked == 10));

  bool stayed = false;  // unless the machine is so busy that it looks like silence
  for (int i = 0; i < 100 && !stayed; ++i) {
    REQUIRE(device.burst());
    device.latency.request_came();
    device.latency.rest();
    stayed = device.latency.bounded();
  }
  CHECK(stayed);
  CHECK(device.held());

  pass(CpuLatency::kQuietMs + 1);
  device.latency.rest();
  CHECK_FALSE(device.latency.bounded());
  CHECK_FALSE(device.held());
  device.latency.request_came();  // a new burst has to begin anew
  CHECK_FALSE(device.latency.bounded());
  CHECK(device.burst());
  CHECK(device.held());
  device.latency.give_back();
  CHECK_FALSE(device.latency.bounded());
  CHECK_FALSE(device.held());
}

TEST_CASE("cpu latency: requests now and then do not keep what a burst asked for") {
  Device device;
  REQUIRE(device.burst());
  for (int i = 0; i < 20; ++i) {
    pass(6);
    device.latency.request_came();
    device.latency.rest();
  }
  CHECK_FALSE(device.latency.bounded());
  CHECK_FALSE(device.held());
}

TEST_CASE("cpu latency: requests now and then ask for nothing") {
  Device device;
  for (int i = 0; i < 20; ++i) {
    device.latency.request_came();
    pass(6);
  }
  CHECK_FALSE(device.latency.bounded());
  CHECK_FALSE(device.held());
}

TEST_CASE("cpu latency: a bound that nobody grants is reported once") {
  Device device;
  std::filesystem::remove(device.path);
  CHECK_FALSE(device.burst());
  REQUIRE(device.failures.size() == 1);
  CHECK(device.failures[0] == device.path + ": No such file or directory");
  std::ofstream late(device.path);
  CHECK_FALSE(device.burst());
}

TEST_CASE("cpu latency: without a path nothing is asked for") {
  CpuLatency latency("", [](const std::string&) { FAIL("nothing was to fail"); });
  for (int i = 0; i < 1000; ++i) latency.request_came();
  CHECK_FALSE(latency.bounded());
}

}  // namespace fpfs::testing
