// A ring whose kernel is short of memory: its system calls are refused, and counted.
//
// A seccomp filter asks this process about each call of the ring's thread, so the calls are those
// that the kernel gets, and their refusal is what the kernel's would be.
#include <doctest/doctest.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/file_descriptor.h"
#include "support/device_fixture.h"
#include "support/loop_mount.h"
#include "support/skips.h"

namespace fpfs {
namespace {

using testing::AlignedBuffer;
using testing::create;
using testing::Created;
using testing::Ext4;
using testing::LogLines;
using testing::LoopMount;
using testing::open_device;
using testing::run;
using testing::TempDirectory;
using testing::WaitedRequest;

constexpr uint64_t kBlock = kIoAlignment;
constexpr uint32_t kMany = 20;  // refusals: more than pass without a word in the log

enum class Call : uint8_t { Refused, Submitted, Waited, Paused };

// From here on the calls of this thread, and of those that it starts, are asked about.
int ask_about_calls() {
  std::array<sock_filter, 5> program = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_enter, 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clock_nanosleep, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog filter = {static_cast<unsigned short>(program.size()), program.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return -1;
  return static_cast<int>(
      ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &filter));
}

// A device whose ring's calls are answered here, and kept, while transfers are under way.
class RefusedDevice {
 public:
  explicit RefusedDevice(const DeviceConfig& config) : server_([this] { serve(); }) {
    // The device's threads have the filter of the one that starts them.
    std::thread([this, &config] {
      const int listener = ask_about_calls();
      if (listener < 0) error_ = errno;
      listener_.put(listener);
      if (listener >= 0) device_ = open_device(config);
    }).join();
    if (device_ == nullptr) testing::skip("seccomp's user notification: " + error_text(error_));
  }
  ~RefusedDevice() {
    refuse(0, 0);
    device_.reset();
    server_.join();
  }
  RefusedDevice(const RefusedDevice&) = delete;
  RefusedDevice& operator=(const RefusedDevice&) = delete;

  bool ready() const { return device_ != nullptr; }
  Device& device() { return *device_; }

  // Refuses the next calls that hand over requests, when this many transfers are under way.
  void refuse(uint32_t count, uint64_t in_flight) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    calls_.clear();
    left_ = count;
    in_flight_ = in_flight;
  }
  std::vector<Call> calls() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return calls_;
  }
  // Returns when there was such a call, or nothing is refused any more.
  void wait_for(Call call) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (left_ > 0 && std::find(calls_.begin(), calls_.end(), call) == calls_.end()) {
      changed_.wait(mutex_);
    }
  }

 private:
  void serve() {
    const FileDescriptor listener(listener_.wait());
    if (!listener) return;
    pollfd ready = {listener.get(), POLLIN, 0};
    // It hangs up when the last thread with the filter has ended.
    while (::poll(&ready, 1, -1) == 1 && (ready.revents & POLLIN) != 0) {
      seccomp_notif question = {};
      if (::ioctl(listener.get(), SECCOMP_IOCTL_NOTIF_RECV, &question) != 0) continue;
      seccomp_notif_resp answer = {};
      answer.id = question.id;
      if (is_refused(question.data)) {
        answer.error = -EAGAIN;
      } else {
        answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
      }
      CHECK(::ioctl(listener.get(), SECCOMP_IOCTL_NOTIF_SEND, &answer) == 0);
    }
  }

  bool is_refused(const seccomp_data& call) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (in_flight_ == 0) return false;  // the device is not there yet, or goes
    const uint64_t in_flight = device_->statistics().requests_in_flight;
    if (in_flight == 0) return false;
    const bool enters = call.nr == SYS_io_uring_enter;
    const bool submits = enters && call.args[1] > 0;
    const bool refused = submits && left_ > 0 && in_flight >= in_flight_;
    if (refused) --left_;
    calls_.push_back(refused   ? Call::Refused
                     : submits ? Call::Submitted
                     : enters  ? Call::Waited
                               : Call::Paused);
    changed_.notify_all();
    return refused;
  }

  testing::Delivery<int> listener_;
  int error_ = 0;
  std::unique_ptr<Device> device_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<Call> calls_ GUARDED_BY(mutex_);
  uint32_t left_ GUARDED_BY(mutex_) = 0;
  uint64_t in_flight_ GUARDED_BY(mutex_) = 0;
  std::thread server_;
};

DeviceConfig ring_config(const std::string& path, LogLines& log) {
  DeviceConfig config;
  config.path = path;
  config.backend = IoBackend::IoUring;
  config.pool_objects = 0;
  config.log = log.sink();
  return config;
}

TEST_CASE("device refused: with nothing under way the ring pauses before each new try") {
  const TempDirectory directory;
  LogLines log;
  RefusedDevice refused(ring_config(directory.path(), log));
  if (!refused.ready()) return;
  const Created object = create(refused.device());
  AlignedBuffer block(kBlock);
  struct Episode {
    uint32_t refusals;
    uint64_t lines;  // in the log, from the beginning
  };
  for (const Episode episode : {Episode{2, 0}, Episode{kMany, 1}, Episode{kMany, 2}}) {
    refused.refuse(episode.refusals, 1);
    CHECK(run(refused.device(), IoOp::Write, object.object, 0, kBlock, block.data()) == 0);
    std::vector<Call> expected;
    for (uint32_t i = 0; i < episode.refusals; ++i) {
      expected.insert(expected.end(), {Call::Refused, Call::Paused});
    }
    std::vector<Call> calls = refused.calls();
    REQUIRE(calls.size() > expected.size());
    CHECK(calls[expected.size()] == Call::Submitted);
    calls.resize(expected.size());
    CHECK(calls == expected);
    CHECK(log.count("io_uring_enter") == episode.lines);
  }
}

TEST_CASE("device refused: with a transfer under way the ring waits for its end") {
  const LoopMount mount(Ext4::name, Ext4::make, Ext4::image_bytes);
  if (!mount.ready()) return;
  LogLines log;
  RefusedDevice refused(ring_config(mount.path(), log));
  if (!refused.ready()) return;
  const Created object = create(refused.device());
  AlignedBuffer block(kBlock);
  std::array<WaitedRequest, 2> writes;
  for (WaitedRequest& write : writes) {
    write.op = IoOp::Write;
    write.object = object.object;
    write.length = kBlock;
    write.buffer = block.data();
  }
  const FileDescriptor root(::open(mount.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  REQUIRE(::ioctl(root.get(), FIFREEZE, 0) == 0);  // what is written now waits in the kernel
  refused.refuse(kMany, 2);
  refused.device().submit(&writes[0]);
  refused.wait_for(Call::Submitted);
  refused.device().submit(&writes[1]);
  refused.wait_for(Call::Waited);
  CHECK(::ioctl(root.get(), FITHAW, 0) == 0);
  for (WaitedRequest& write : writes) CHECK(write.delivery.wait() == 0);
  const std::vector<Call> calls = refused.calls();
  CHECK(std::count(calls.begin(), calls.end(), Call::Refused) == 1);
  CHECK(std::count(calls.begin(), calls.end(), Call::Paused) == 0);
  CHECK(log.count("io_uring_enter") == 0);
}

}  // namespace
}  // namespace fpfs
