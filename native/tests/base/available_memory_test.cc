// What is left of the memory, on machines of files.
#include "base/available_memory.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "support/device_fixture.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kMiB = 1024 * 1024;

// A machine with 1000 MiB available.
class Machine {
 public:
  Machine() { write("/proc/meminfo", "MemTotal: 2000000 kB\nMemAvailable: 1024000 kB\n"); }

  void write(const std::string& path, const std::string& content) {
    const std::filesystem::path whole = directory_.path() + path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << content;
  }

  // A group of version 2 with `limit`, in which `usage` MiB are used, 30 of them droppable.
  void second(const std::string& group, const std::string& limit, uint64_t usage) {
    const std::string folder = "/sys/fs/cgroup" + group;
    write(folder + "/memory.max", limit + "\n");
    write(folder + "/memory.current", std::to_string(usage * kMiB) + "\n");
    write(folder + "/memory.stat",
          "anon 1\ninactive_file 15728640\nactive_file 10485760\nslab_reclaimable 5242880\n");
  }

  // The same of version 1, whose lines without "total_" leave out the groups below.
  void first(const std::string& group, uint64_t limit, uint64_t usage) {
    const std::string folder = "/sys/fs/cgroup/memory" + group;
    write(folder + "/memory.limit_in_bytes", std::to_string(limit) + "\n");
    write(folder + "/memory.usage_in_bytes", std::to_string(usage * kMiB) + "\n");
    write(folder + "/memory.stat",
          "inactive_file 1\ntotal_inactive_file 20971520\ntotal_active_file 10485760\n");
  }

  uint64_t left() const { return available_memory(directory_.path()); }

 private:
  TempDirectory directory_;
};

constexpr char kMountSecond[] = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";
constexpr char kMountFirst[] =
    "31 24 0:27 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu\n"
    "32 24 0:28 / /sys/fs/cgroup/memory rw shared:10 - cgroup cgroup rw,memory\n";

}  // namespace

TEST_CASE("available memory: the machine's, where nothing limits it") {
  Machine machine;
  CHECK(machine.left() == 1000 * kMiB);
  machine.write("/proc/self/cgroup", "0::/user.slice\n");
  machine.write("/proc/self/mountinfo", kMountSecond);
  CHECK(machine.left() == 1000 * kMiB);
  machine.second("/user.slice", "max", 500);
  CHECK(machine.left() == 1000 * kMiB);
}

TEST_CASE("available memory: what is left of the cgroup's limit, droppable pages included") {
  Machine machine;
  machine.write("/proc/self/cgroup", "0::/jobs/job7\n");
  machine.write("/proc/self/mountinfo", kMountSecond);
  machine.second("/jobs/job7", std::to_string(400 * kMiB), 100);
  CHECK(machine.left() == 330 * kMiB);
  machine.second("/jobs/job7", std::to_string(400 * kMiB), 10);  // less than could be dropped
  CHECK(machine.left() == 400 * kMiB);
  machine.second("/jobs/job7", std::to_string(400 * kMiB), 600);  // the limit was lowered
  CHECK(machine.left() == 0);
}

TEST_CASE("available memory: the least of all groups above") {
  Machine machine;
  machine.write("/proc/self/cgroup", "0::/jobs/job7/task\n");
  machine.write("/proc/self/mountinfo", kMountSecond);
  machine.second("/jobs", std::to_string(300 * kMiB), 130);
  machine.second("/jobs/job7", "max", 130);
  machine.second("/jobs/job7/task", std::to_string(500 * kMiB), 130);
  CHECK(machine.left() == 200 * kMiB);
}

TEST_CASE("available memory: a container's own group at the mountpoint") {
  Machine machine;
  machine.write("/proc/self/cgroup", "0::/\n");
  machine.write("/proc/self/mountinfo", kMountSecond);
  machine.second("", std::to_string(50 * kMiB), 40);
  CHECK(machine.left() == 40 * kMiB);
}

TEST_CASE("available memory: version 1, beside others") {
  Machine machine;
  machine.write("/proc/self/cgroup", "5:cpu:/other\n4:memory:/jobs/job7\n0::/\n");
  machine.write("/proc/self/mountinfo", kMountFirst);
  machine.first("", 0x7FFFFFFFFFFFF000, 900);  // as the kernel writes "none"
  machine.first("/jobs", 350 * kMiB, 80);
  machine.first("/jobs/job7", 400 * kMiB, 80);
  CHECK(machine.left() == 300 * kMiB);
}

TEST_CASE("available memory: version 1 in a container that sees its group under another name") {
  Machine machine;
  machine.write("/proc/self/cgroup", "4:memory:/docker/0123\n");
  machine.write("/proc/self/mountinfo",
                "32 24 0:28 /docker/0123 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  machine.first("", 200 * kMiB, 80);
  CHECK(machine.left() == 150 * kMiB);
}

TEST_CASE("available memory: a mount of somebody else's group says nothing") {
  Machine machine;
  machine.write("/proc/self/cgroup", "4:memory:/docker/0123\n");
  machine.write("/proc/self/mountinfo",
                "32 24 0:28 /docker/01 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  machine.first("", 200 * kMiB, 80);
  CHECK(machine.left() == 1000 * kMiB);
}

TEST_CASE("available memory: the mount on top counts") {
  Machine machine;
  machine.write("/proc/self/cgroup", "0::/\n");
  machine.write("/proc/self/mountinfo",
                "29 24 0:26 / /elsewhere rw - cgroup2 cgroup2 rw\n" + std::string(kMountSecond));
  machine.second("", std::to_string(50 * kMiB), 40);
  CHECK(machine.left() == 40 * kMiB);
}

TEST_CASE("available memory: of this machine") {
  CHECK(available_memory() > kMiB);
  CHECK(available_memory() < UINT64_MAX / 1024 * 1024);
}

}  // namespace fpfs::testing
