// Real faults under a whole engine: a device that is lost, one that is full.
#include <doctest/doctest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "support/damage.h"
#include "support/loop_mount.h"

namespace fpfs {
namespace {

using testing::Delivery;
using testing::EngineFixture;
using testing::EngineOptions;
using testing::Ext4;
using testing::log_lines;
using testing::LoopMount;
using testing::random_bytes;
using testing::TempDirectory;
using testing::Xfs;

constexpr uint64_t kPieceBytes = uint64_t{1} << 20;

// An engine whose device 0 is the filesystem of `mount`.
EngineOptions over(const LoopMount& mount, int devices = 2) {
  EngineOptions options;
  options.devices = devices;
  options.paths = {mount.path()};
  return options;
}

TEST_CASE("engine fault: what a lost device does not take goes to another one") {
  LoopMount mount(Xfs::name, Xfs::make, Xfs::image_bytes);
  if (!mount.ready()) return;
  EngineFixture fixture(over(mount));
  const auto file = fixture.load(1);
  REQUIRE(mount.shut_down());
  const std::string bytes = random_bytes(4 * kPieceBytes, 1);
  CHECK(fixture.write(*file, 0, bytes) == 0);
  CHECK(fixture.commit(*file, true) == 0);
  CHECK(fixture.read(*file, 0, bytes.size()) == bytes);
  CHECK(fixture.engine().device_failed(0));
  CHECK_FALSE(fixture.engine().device_failed(1));
  CHECK(log_lines(fixture.engine(), "device 0") >= 1);

  // The next file does not even try.
  const auto next = fixture.load(2);
  CHECK(fixture.write(*next, 0, bytes) == 0);
  CHECK(fixture.commit(*next, true) == 0);
  CHECK(fixture.read(*next, 0, bytes.size()) == bytes);
}

TEST_CASE("engine fault: staged bytes whose device is lost are written to another one") {
  LoopMount mount(Xfs::name, Xfs::make, Xfs::image_bytes);
  if (!mount.ready()) return;
  EngineFixture fixture(over(mount));
  const auto file = fixture.load(2);  // its first chunk belongs to device 0
  const std::string bytes = random_bytes(100 * 1000, 4);
  REQUIRE(fixture.write(*file, 0, bytes) == 0);  // space is allocated there, nothing written yet
  REQUIRE(mount.shut_down());
  CHECK(fixture.commit(*file, true) == 0);
  CHECK(fixture.read(*file, 0, bytes.size()) == bytes);
  CHECK(fixture.engine().device_failed(0));
  CHECK(log_lines(fixture.engine(), "its bytes go to device 1") == 1);
  CHECK(testing::check_committed(fixture, 2) == 2);
  testing::flip(testing::locate(fixture, 2, 1), 30'000);
  std::string found;
  CHECK(fixture.try_read(*file, bytes.size() - 1, 1, &found) == EIO);
}

TEST_CASE("engine fault: bytes lost with a device before their flush are not committed") {
  LoopMount mount(Xfs::name, Xfs::make, Xfs::image_bytes);
  if (!mount.ready()) return;
  EngineFixture fixture(over(mount));
  const auto file = fixture.load(2);
  const auto other = fixture.load(3);
  const std::string bytes = random_bytes(fixture.options().chunk_bytes, 5);
  REQUIRE(fixture.write(*file, 0, bytes) == 0);  // a whole chunk: it goes to device 0 at once
  Device* device = fixture.engine().device(0);
  while (device->statistics().bytes_written < bytes.size()) std::this_thread::yield();
  REQUIRE(mount.shut_down());
  CHECK(fixture.commit(*file, false) == EIO);
  CHECK(fixture.commit(*file, true) == EIO);  // what was lost once stays lost
  // A file that had nothing there goes on.
  CHECK(fixture.write(*other, 0, bytes) == 0);
  CHECK(fixture.commit(*other, true) == 0);
  CHECK(fixture.read(*other, 0, bytes.size()) == bytes);
}

TEST_CASE("engine fault: with the only device lost the writer learns of it") {
  LoopMount mount(Xfs::name, Xfs::make, Xfs::image_bytes);
  if (!mount.ready()) return;
  EngineFixture fixture(over(mount, 1));
  const auto file = fixture.load(1);
  REQUIRE(mount.shut_down());
  const std::string bytes = random_bytes(kPieceBytes, 2);
  int error = 0;
  for (uint64_t at = 0; error == 0 && at < 64 * kPieceBytes; at += kPieceBytes) {
    error = fixture.write(*file, at, bytes);
  }
  CHECK(error == EIO);
}

TEST_CASE(
    "engine fault: what could be kept nowhere cannot be read, and nothing beside it is lost") {
  LoopMount mount(Xfs::name, Xfs::make, Xfs::image_bytes);
  if (!mount.ready()) return;
  const TempDirectory folder;
  EngineOptions options = over(mount, 1);
  options.arena = folder.path() + "/arena";
  EngineFixture fixture(options);
  const auto file = fixture.load(1);
  constexpr uint64_t kBegin = 300'000;
  const std::string bytes = random_bytes(50'000, 6);
  const uint64_t end = kBegin + bytes.size();
  REQUIRE(fixture.truncate(*file, kPieceBytes) == 0);
  REQUIRE(fixture.write(*file, kBegin, bytes) == 0);
  REQUIRE(mount.shut_down());
  CHECK(fixture.commit(*file, false) == EIO);
  std::string found;
  CHECK(fixture.try_read(*file, kBegin, 1, &found) == EIO);
  CHECK(fixture.try_read(*file, end - 1, 1, &found) == EIO);
  CHECK(fixture.try_read(*file, 0, kPieceBytes, &found) == EIO);
  CHECK(fixture.read(*file, kBegin - 100, 100) == std::string(100, '\0'));
  CHECK(fixture.read(*file, end, 100) == std::string(100, '\0'));

  // Nor does another process take for whole what is left of it.
  std::filesystem::copy_file(options.arena, options.arena + "-left");
  Remains remains;
  std::string warning;
  REQUIRE(Arena::attach({options.arena + "-left", "fixture", 0, 0}, -1, &remains, &warning).ok());
  CHECK(std::any_of(remains.changes.begin(), remains.changes.end(), [](const JournalEntry& entry) {
    return entry.kind == arena::Change::Lost && entry.state.ino == 1;
  }));
}

TEST_CASE("engine fault: a full device refuses the write, keeps what it took, and recovers") {
  LoopMount mount(Ext4::name, Ext4::make, Ext4::image_bytes);
  if (!mount.ready()) return;
  EngineFixture fixture(over(mount, 1));
  const auto file = fixture.load(1);
  const std::string bytes = random_bytes(kPieceBytes, 3);
  uint64_t taken = 0;
  int error = 0;
  while ((error = fixture.write(*file, taken, bytes)) == 0) taken += kPieceBytes;
  CHECK(error == ENOSPC);
  CHECK(taken > 8 * kPieceBytes);

  CHECK(fixture.commit(*file, false) == 0);
  for (uint64_t at = 0; at < taken; at += kPieceBytes) {
    REQUIRE(fixture.read(*file, at, kPieceBytes) == bytes);
  }
  // Space given back is used again, when the filesystem has worked that off.
  CHECK(fixture.truncate(*file, kPieceBytes) == 0);
  CHECK(fixture.commit(*file, false) == 0);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  do {
    mount.sync();
    error = fixture.write(*file, kPieceBytes, bytes);
  } while (error == ENOSPC && std::chrono::steady_clock::now() < deadline);
  CHECK(error == 0);
  CHECK(fixture.commit(*file, true) == 0);
  CHECK(fixture.read(*file, kPieceBytes, kPieceBytes) == bytes);
}

// Waits until a line with this part is logged.
void wait_for_log(Engine& engine, const std::string& part) {
  while (log_lines(engine, part) == 0) {
    pollfd wait{engine.event_fd(), POLLIN, 0};
    REQUIRE(::poll(&wait, 1, 60'000) == 1);
  }
}

// An engine with one small device, which file 1 fills.
class FullDevice {
 public:
  explicit FullDevice(const LoopMount& mount) : fixture_(options(mount)) {
    const auto file = fixture_.load(1);
    const std::string bytes = random_bytes(kPieceBytes, 3);
    uint64_t taken = 0;
    while (fixture_.write(*file, taken, bytes) == 0) taken += kPieceBytes;
    while (fixture_.write(*file, taken, bytes.substr(0, kBlockBytes)) == 0) taken += kBlockBytes;
    REQUIRE(fixture_.commit(*file, true) == 0);
  }

  EngineFixture& fixture() { return fixture_; }
  Engine& engine() { return fixture_.engine(); }

  // What the device has refused, when it has nothing left to do.
  uint64_t refusals() {
    fixture_.wait_idle();
    return fixture_.engine().device(0)->statistics().errors;
  }

  void make_space() {
    const auto file = fixture_.engine().file(1);
    REQUIRE(fixture_.truncate(*file, 0) == 0);
    REQUIRE(fixture_.commit(*file, true) == 0);
  }

 private:
  static EngineOptions options(const LoopMount& mount) {
    EngineOptions options = over(mount, 1);
    options.slots = 16;
    return options;
  }
  EngineFixture fixture_;
};

// A write of an inode that is tried again until it is taken, as one through the mount is.
class WaitingWrite {
 public:
  WaitingWrite(EngineFixture& fixture, uint64_t ino, uint64_t bytes)
      : engine_(fixture.engine()), file_(fixture.load(ino)), bytes_(bytes, 'w') {
    engine_.park([this] { return attempt(); });
  }
  int wait() { return done_.wait(); }
  int attempts() const { return attempts_; }
  void wait_refused(int more_than) const {
    while (attempts_ <= more_than || last_ != Retry::Refused) std::this_thread::yield();
  }

 private:
  Retry attempt() {
    Payload payload;
    payload.add(bytes_.data(), bytes_.size());
    const Outcome outcome = file_->write(0, bytes_.size(), payload, nullptr, nullptr);
    const Retry retry = engine_.retry_of(file_->ino(), outcome);
    last_ = retry;
    ++attempts_;
    if (retry == Retry::Done) done_.put(outcome.error);
    return retry;
  }

  Engine& engine_;
  std::shared_ptr<File> file_;
  std::string bytes_;
  Delivery<int> done_;
  std::atomic<Retry> last_{Retry::Waiting};
  std::atomic<int> attempts_{0};
};

TEST_CASE("engine fault: small files that a full device has no space for do not ask it again") {
  LoopMount mount(Ext4::name, Ext4::make, Ext4::image_bytes);
  if (!mount.ready()) return;
  FullDevice full(mount);
  std::vector<std::unique_ptr<WaitingWrite>> writes;
  for (uint64_t ino = 2; ino < 40; ++ino) {
    writes.push_back(std::make_unique<WaitingWrite>(full.fixture(), ino, 100));
  }
  REQUIRE(writes.front()->wait() == 0);
  wait_for_log(full.engine(), "no device has space for the small files");
  const uint64_t refused = full.refusals();
  for (int i = 0; i < 100; ++i) full.engine().wake();
  CHECK(full.refusals() == refused);
  CHECK(log_lines(full.engine(), "no device has space") == 0);

  full.make_space();
  for (size_t i = 1; i < writes.size(); ++i) CHECK(writes[i]->wait() == 0);
}

TEST_CASE("engine fault: writes that wait for space do not drive each other") {
  LoopMount mount(Ext4::name, Ext4::make, Ext4::image_bytes);
  if (!mount.ready()) return;
  FullDevice full(mount);
  full.engine().set_gives_way();
  WaitingWrite first(full.fixture(), 2, kPieceBytes);
  WaitingWrite second(full.fixture(), 3, kPieceBytes);
  first.wait_refused(0);
  second.wait_refused(0);
  const uint64_t refused = full.refusals();
  const int first_attempts = first.attempts();
  const int second_attempts = second.attempts();
  for (int i = 0; i < 100; ++i) full.engine().wake();
  CHECK(full.refusals() == refused);
  CHECK(first.attempts() == first_attempts);
  CHECK(second.attempts() == second_attempts);

  full.engine().room_made(true);
  first.wait_refused(first_attempts);
  second.wait_refused(second_attempts);
  CHECK(full.refusals() > refused);
  full.make_space();
  CHECK(first.wait() == 0);
  CHECK(second.wait() == 0);
}

}  // namespace
}  // namespace fpfs
