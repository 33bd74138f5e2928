// What a file's bytes take on the devices: fresh places, what is given back, and what is promised.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>

#include "support/engine_fixture.h"
#include "support/loop_mount.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kChunkBytes = 256 * 1024;
constexpr uint64_t kUnusedMax = 64
                                << 20;  // what a small file takes beside its content, uncommitted

uint64_t blocks_of(const std::vector<Extent>& extents) {
  uint64_t blocks = 0;
  for (const Extent& extent : extents) blocks += extent.count;
  return blocks;
}

// Keeps a device from preallocating anything, until it is destroyed.
class BusyDevice {
 public:
  BusyDevice(Device& device, uint64_t object) {
    auto* request = new Request();
    request->op = IoOp::Truncate;
    request->object = device.object(object);
    request->length = 64 << 20;
    request->shared = shared_;
    device.submit(request);
  }
  ~BusyDevice() { shared_->release.put(0); }
  BusyDevice(const BusyDevice&) = delete;
  BusyDevice& operator=(const BusyDevice&) = delete;
  void wait() { shared_->begun.wait(); }

 private:
  struct Shared {
    Delivery<int> begun;
    Delivery<int> release;
  };
  struct Request : IoRequest {
    std::shared_ptr<Shared> shared;
    void complete(int result) override {
      shared->begun.put(result);
      shared->release.wait();
      delete this;
    }
  };
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

// Lets nothing that a device has done be known, until it is released.
class SilentDevice {
 public:
  SilentDevice(Device& device, uint64_t object) : buffer_(kBlockBytes) {
    request_.op = IoOp::Read;
    request_.object = device.object(object);
    request_.length = kBlockBytes;
    request_.buffer = buffer_.data();
    device.submit(&request_);
    request_.begun.wait();
  }
  void release() { request_.released.put(0); }

 private:
  struct Request : IoRequest {
    Delivery<int> begun;
    Delivery<int> released;
    void complete(int result) override {
      begun.put(result);
      released.wait();
    }
  };
  AlignedBuffer buffer_;
  Request request_;
};

// Writes behind this byte of an object fail with EFBIG, which is no verdict on the device.
class ObjectLimit {
 public:
  explicit ObjectLimit(uint64_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before_) == 0);
    const rlimit limit = {bytes, before_.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
  }
  ~ObjectLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  ObjectLimit(const ObjectLimit&) = delete;
  ObjectLimit& operator=(const ObjectLimit&) = delete;

 private:
  void (*handler_)(int);
  rlimit before_{};
};

}  // namespace

TEST_CASE("the place that a device did not take bytes at is given back, once") {
  EngineFixture fixture({2, kChunkBytes, 16});
  const auto file = fixture.load(2);  // its even chunks belong to device 0
  const std::string bytes = random_bytes(kChunkBytes, 1);
  REQUIRE(fixture.write(*file, 0, bytes) == 0);
  SUBCASE("a place that the write took") {}
  SUBCASE("a place that fallocate had promised to these bytes") {
    REQUIRE(fixture.allocate(*file, 2 * kChunkBytes, kChunkBytes, false) == 0);
  }
  REQUIRE(fixture.commit(*file, false) == 0);
  SnapshotData snapshot;
  {
    const ObjectLimit limit(kChunkBytes);
    REQUIRE(fixture.write(*file, 2 * kChunkBytes, bytes) == 0);
    REQUIRE(fixture.drain(*file, true, &snapshot) == 0);
  }
  CHECK(blocks_of(snapshot.garbage) == kChunkBytes / kBlockBytes);
  fixture.make_current(*file, snapshot);
  fixture.wait_for(fixture.engine().discard(snapshot.garbage));  // behind those before it
  CHECK(fixture.read(*file, 0, kChunkBytes) == bytes);
  CHECK(fixture.read(*file, 2 * kChunkBytes, kChunkBytes) == bytes);
  fixture.engine().close();  // what was preallocated meanwhile is given back, too
  CHECK(bytes_taken(fixture) == 2 * kChunkBytes);
}

TEST_CASE("an object in which nothing is left is told of while the file is still open") {
  EngineFixture fixture({2, kChunkBytes, 16});
  const auto file = fixture.load(1);
  const std::string bytes = random_bytes(2 * kChunkBytes, 1);
  REQUIRE(fixture.write(*file, 0, bytes) == 0);
  SnapshotData snapshot;
  REQUIRE(fixture.drain(*file, false, &snapshot) == 0);
  REQUIRE(snapshot.objects.size() == 2);
  fixture.make_current(*file, snapshot);
  // Its last snapshot: what is closed without another change has no later one.
  REQUIRE(fixture.truncate(*file, kChunkBytes) == 0);
  SnapshotData cut;
  REQUIRE(fixture.drain(*file, false, &cut) == 0);
  REQUIRE(cut.objects.size() == 1);
  REQUIRE(cut.dead.size() == 1);
  CHECK(cut.dead[0] != cut.objects[0]);
  fixture.make_current(*file, cut);
  CHECK(fixture.read(*file, 0, kChunkBytes) == bytes.substr(0, kChunkBytes));
  // And the file grows again, in a new object.
  REQUIRE(fixture.write(*file, kChunkBytes, bytes.substr(kChunkBytes)) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  fixture.reopen();
  CHECK(fixture.read(*fixture.load(1), 0, bytes.size()) == bytes);
}

TEST_CASE("what is preallocated when another write comes is not given back by the close before") {
  EngineFixture fixture({1, kChunkBytes, 16});
  const auto file = fixture.load(1);
  const std::string bytes = random_bytes(kBlockBytes, 1);
  REQUIRE(fixture.write(*file, 0, bytes) == 0);
  SnapshotData first;
  REQUIRE(fixture.drain(*file, true, &first) == 0);
  REQUIRE(fixture.write(*file, kBlockBytes, bytes) == 0);
  Arena& arena = fixture.engine().arena();
  std::vector<Slot*> taken;
  while (Slot* slot = arena.take()) taken.push_back(slot);
  SilentDevice device(*fixture.engine().device(0), first.objects.at(0).second);
  Delivery<int> drained;
  file->drain(true, [&](int error, const SnapshotData&) { drained.put(error); });
  // Waits for the only slot, in which the drain has the bytes before it.
  Delivery<int> written;
  std::string copy = bytes;
  Payload payload;
  payload.add(copy.data(), copy.size());
  const auto attempt = [&] {
    const Outcome outcome = file->write(kChunkBytes, copy.size(), payload, nullptr, nullptr);
    if (outcome.progress == Progress::Wait) return Retry::Waiting;
    written.put(outcome.error);
    return Retry::Done;
  };
  REQUIRE(attempt() == Retry::Waiting);
  fixture.engine().park(attempt);
  device.release();
  REQUIRE(drained.wait() == 0);
  REQUIRE(written.wait() == 0);
  fixture.wait_idle();
  uint64_t bytes_there = 0;
  for (const auto& path : objects_of(fixture)) {
    bytes_there = std::max(bytes_there, uint64_t{std::filesystem::file_size(path)});
  }
  CHECK(bytes_there >= 3 * kBlockBytes);
  for (Slot* slot : taken) arena.give(slot);
  REQUIRE(fixture.commit(*file, true) == 0);
  CHECK(fixture.read(*file, kChunkBytes, kBlockBytes) == bytes);
}

TEST_CASE("what fallocate prepared is written in place, and none of it is given back") {
  EngineFixture fixture({1, kChunkBytes, 16});
  const auto file = fixture.load(1);
  const std::string bytes = random_bytes(kChunkBytes, 1);
  REQUIRE(fixture.allocate(*file, 0, kChunkBytes, false) == 0);
  REQUIRE(fixture.write(*file, 0, bytes) == 0);
  SnapshotData snapshot;
  REQUIRE(fixture.drain(*file, true, &snapshot) == 0);
  CHECK(snapshot.garbage.empty());
  CHECK(snapshot.dead.empty());
  fixture.make_current(*file, snapshot);
  CHECK(file->attributes().allocated_bytes == kChunkBytes);
  fixture.reopen();
  CHECK(fixture.read(*fixture.load(1), 0, kChunkBytes) == bytes);
  CHECK(bytes_taken(fixture) <= kChunkBytes + kBlockBytes);
}

TEST_CASE("a rewrite goes to a fresh place, and what it replaced is given back with its commit") {
  EngineFixture fixture({1, kChunkBytes, 16});
  const auto file = fixture.load(1);
  const uint64_t far = kSegmentBlocks * kBlockBytes;  // in the next segment of the map
  std::string near_bytes = random_bytes(kChunkBytes, 2);
  std::string far_bytes = random_bytes(kChunkBytes, 3);
  REQUIRE(fixture.write(*file, 0, near_bytes) == 0);
  REQUIRE(fixture.write(*file, far, far_bytes) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);

  near_bytes.replace(kBlockBytes, kBlockBytes, kBlockBytes, 'n');
  REQUIRE(fixture.write(*file, kBlockBytes, std::string(kBlockBytes, 'n')) == 0);
  SnapshotData refused;
  REQUIRE(fixture.drain(*file, false, &refused) == 0);
  CHECK(blocks_of(refused.garbage) == 1);
  REQUIRE(refused.segments.size() == 1);

  // The catalog did not take that snapshot: the next one tells the same again, and more.
  far_bytes.replace(0, 2 * kBlockBytes, 2 * kBlockBytes, 'f');
  REQUIRE(fixture.write(*file, far, std::string(2 * kBlockBytes, 'f')) == 0);
  SnapshotData taken;
  REQUIRE(fixture.drain(*file, true, &taken) == 0);
  CHECK(blocks_of(taken.garbage) == 3);
  CHECK(taken.segments.size() == 2);
  fixture.make_current(*file, taken);
  fixture.reopen();
  const auto again = fixture.load(1);
  CHECK(fixture.read(*again, 0, kChunkBytes) == near_bytes);
  CHECK(fixture.read(*again, far, kChunkBytes) == far_bytes);
}

TEST_CASE("small files that leave memory before they are committed are promised a block each") {
  constexpr uint64_t kFiles = 200;
  EngineFixture fixture({1, kChunkBytes, 32});
  for (uint64_t ino = 1; ino <= kFiles; ++ino) {
    REQUIRE(fixture.write(*fixture.load(ino), 0, std::string(100, 'x')) == 0);
  }
  const uint64_t left = fixture.engine().arena().slot_count();
  CHECK(bytes_taken(fixture) >= (kFiles - left) * kBlockBytes);
  CHECK(bytes_taken(fixture) <= kFiles * kBlockBytes);
}

TEST_CASE("what waits for space on a device that is removed goes to another") {
  LoopMount mount(Ext4::name, Ext4::make, Ext4::image_bytes);
  if (!mount.ready()) return;
  const TempDirectory other;
  EngineOptions options{2, kChunkBytes, 16};
  options.paths = {other.path(), mount.path()};
  EngineFixture fixture(options);
  const auto file = fixture.load(2);
  REQUIRE(fixture.write(*file, 0, random_bytes(kChunkBytes + kBlockBytes, 1)) == 0);
  REQUIRE(fixture.commit(*file, false) == 0);
  REQUIRE(file->objects().size() == 2);
  const auto [number, object] = file->objects()[1];
  REQUIRE(number == 1);
  const uint64_t offset = kChunkBytes + kBlockBytes;
  std::string bytes = random_bytes(kBlockBytes, 2);
  {
    auto busy = std::make_unique<BusyDevice>(*fixture.engine().device(1), object);
    busy->wait();
    Payload payload;
    payload.add(bytes.data(), bytes.size());
    const Outcome outcome = file->write(offset, bytes.size(), payload, nullptr, nullptr);
    REQUIRE(outcome.progress == Progress::Wait);
    // It asks for more than it needs; when that is refused, for what it needs.
    REQUIRE(mount.shut_down());
    const uint64_t removal = fixture.engine().remove_device(1);
    REQUIRE(fixture.engine().device(1) == nullptr);
    busy.reset();
    CHECK(fixture.wait_for(removal) == 0);
  }
  REQUIRE(fixture.write(*file, offset, bytes) == 0);
  CHECK(fixture.read(*file, offset, kBlockBytes) == bytes);
}

TEST_CASE("after the last close the devices hold what the bytes need and no more") {
  EngineFixture fixture({2, kChunkBytes, 16});
  const auto file = fixture.load(1);
  const std::string bytes = random_bytes(5 * kChunkBytes + 70'000, 4);
  REQUIRE(fixture.write(*file, 0, bytes) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  const uint64_t allocated = file->attributes().allocated_bytes;
  CHECK(allocated >= bytes.size());
  CHECK(allocated < bytes.size() + kBlockBytes);
  fixture.engine().close();  // what was to be given back is given back
  CHECK(bytes_taken(fixture) <= allocated + kBlockBytes);
}

TEST_CASE("what fallocate promised behind the end stays promised after the last close") {
  EngineFixture fixture({1, kChunkBytes, 16});
  const auto file = fixture.load(1);
  constexpr uint64_t kPromised = 3 * kChunkBytes;
  REQUIRE(fixture.allocate(*file, 0, kPromised, true) == 0);
  REQUIRE(fixture.write(*file, 0, random_bytes(kChunkBytes, 5)) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  CHECK(file->attributes().allocated_bytes == kPromised);
  fixture.engine().close();
  CHECK(bytes_taken(fixture) >= kPromised);
}

TEST_CASE("a dropped file tells every object it had, committed or not") {
  EngineFixture fixture({2, kChunkBytes, 16});
  const auto file = fixture.load(1);
  REQUIRE(fixture.write(*file, 0, random_bytes(2 * kChunkBytes, 6)) == 0);
  SnapshotData snapshot;
  REQUIRE(fixture.drain(*file, false, &snapshot) == 0);
  REQUIRE(snapshot.objects.size() == 2);
  Delivery<std::vector<ObjectKey>> dropped;
  file->drop([&](std::vector<ObjectKey> objects) { dropped.put(std::move(objects)); });
  CHECK(dropped.wait() == snapshot.objects);
  CHECK(fixture.write(*file, 0, "x") == EIO);
  CHECK(fixture.drain(*file, false, &snapshot) == ENOENT);
}

TEST_CASE("a part of a block whose rest cannot be read is lost, and nobody is told otherwise") {
  EngineFixture fixture({1, kChunkBytes, 16});
  REQUIRE(fixture.write(*fixture.load(1), 0, random_bytes(kChunkBytes, 7)) == 0);
  REQUIRE(fixture.commit(*fixture.engine().file(1), true) == 0);
  const auto written = objects_of(fixture);
  fixture.reopen();
  // Not those that it has made ahead of need: without them the device would count as lost.
  for (const auto& object : written) std::filesystem::remove(object);
  const auto file = fixture.load(1);
  REQUIRE(fixture.engine().open_handle(1, 1, O_RDWR).ok());
  REQUIRE(fixture.write(*file, 100, "new") == 0);
  CHECK(fixture.commit(*file, false) != 0);
  CHECK(fixture.commit(*file, false) != 0);
  std::string found;
  CHECK(fixture.try_read(*file, 100, 3, &found) == EIO);

  REQUIRE(fixture.engine().open_handle(2, 1, O_RDWR).ok());
  const auto error_of = [&](uint64_t id) {
    const auto handle = fixture.engine().handle(id);
    const MutexLock lock(handle->mutex);
    return file->take_error(&handle->errors_seen);
  };
  CHECK(error_of(1) != 0);
  CHECK(error_of(1) == 0);  // each handle hears of it once,
  CHECK(error_of(2) == 0);  // and one that was opened later never

  // A new content has nothing to do with the old one.
  REQUIRE(fixture.truncate(*file, 0) == 0);
  REQUIRE(fixture.write(*file, 0, std::string(kChunkBytes, 'y')) == 0);
  CHECK(fixture.commit(*file, false) == 0);
  CHECK(fixture.read(*file, 0, kChunkBytes) == std::string(kChunkBytes, 'y'));
}

TEST_CASE("what reads may still want is given back after them") {
  EngineFixture fixture({1, kChunkBytes, 16});
  Engine& engine = fixture.engine();
  const auto file = fixture.load(1);
  REQUIRE(fixture.write(*file, 0, random_bytes(kChunkBytes, 8)) == 0);
  SnapshotData snapshot;
  REQUIRE(fixture.drain(*file, false, &snapshot) == 0);
  const auto done = [&] {
    std::vector<std::pair<uint64_t, int>> tickets;
    for (const Event& event : engine.take_events()) {
      if (const auto* each = std::get_if<DoneEvent>(&event)) {
        tickets.emplace_back(each->ticket, each->error);
      }
    }
    return tickets;
  };
  const auto wait_done = [&] {
    auto tickets = done();
    while (tickets.empty()) {
      pollfd wait{engine.event_fd(), POLLIN, 0};
      poll(&wait, 1, -1);
      tickets = done();
    }
    return tickets;
  };
  const unsigned phase = engine.read_begin();
  const uint64_t first = engine.remove_objects(snapshot.objects);
  REQUIRE(snapshot.objects.size() == 1);
  const auto& [device, id] = snapshot.objects.front();
  const std::string object = object_path(fixture.device_path(device), id);
  std::this_thread::yield();
  CHECK(done().empty());
  CHECK(std::filesystem::exists(object));
  engine.read_end(phase);
  CHECK(wait_done() == std::vector<std::pair<uint64_t, int>>{{first, 0}});
  CHECK_FALSE(std::filesystem::exists(object));

  // What is gone already is as it should be; a device that is not there is an error.
  const uint64_t again = engine.remove_objects(snapshot.objects);
  CHECK(wait_done() == std::vector<std::pair<uint64_t, int>>{{again, 0}});
  const uint64_t removed = engine.remove_objects({{uint16_t{9}, 1}});
  CHECK(wait_done() == std::vector<std::pair<uint64_t, int>>{{removed, ENODEV}});
  const uint64_t discarded = engine.discard({Extent{0, 1, Place{1, 0, 9, false}}});
  CHECK(wait_done() == std::vector<std::pair<uint64_t, int>>{{discarded, ENODEV}});
}

TEST_CASE("what a file gives up before any version had it does not wait for a commit") {
  EngineFixture fixture({2, kChunkBytes, 16});
  const auto file = fixture.load(1);
  const std::string bytes = random_bytes(2 * kChunkBytes, 9);
  std::function<void()> give_up;
  std::string left;
  SUBCASE("cut off") {
    give_up = [&] { REQUIRE(fixture.truncate(*file, 0) == 0); };
  }
  SUBCASE("cut off, but for a byte") {
    give_up = [&] { REQUIRE(fixture.truncate(*file, 1) == 0); };
    left = bytes.substr(0, 1);
  }
  SUBCASE("overwritten") {
    give_up = [] {};
    left = bytes;
  }
  SUBCASE("punched out") {
    give_up = [&] { REQUIRE(fixture.punch(*file, 0, bytes.size()) == 0); };
    left.assign(bytes.size(), '\0');
  }
  SUBCASE("cut off, after a version that became current") {
    REQUIRE(fixture.write(*file, 0, bytes) == 0);
    REQUIRE(fixture.commit(*file, false) == 0);
    give_up = [&] { REQUIRE(fixture.truncate(*file, 0) == 0); };
  }
  for (uint64_t written = 0; written < 4 * kUnusedMax; written += bytes.size()) {
    REQUIRE(fixture.write(*file, 0, bytes) == 0);
    give_up();
  }
  CHECK(fixture.read(*file, 0, bytes.size()) == left);
  SnapshotData snapshot;  // its commit would give back all, its garbage too
  REQUIRE(fixture.drain(*file, true, &snapshot) == 0);
  fixture.engine().remove_objects(snapshot.dead);
  fixture.engine().close();
  CHECK(bytes_taken(fixture) <= left.size() + kUnusedMax);
}

TEST_CASE("what a version had stays until a later one is current") {
  EngineFixture fixture({2, kChunkBytes, 16});
  const auto file = fixture.load(1);
  const std::string bytes = random_bytes(4 * kChunkBytes, 10);
  REQUIRE(fixture.write(*file, 0, bytes) == 0);
  SnapshotData snapshot;
  REQUIRE(fixture.drain(*file, false, &snapshot) == 0);
  bool is_current = false;
  SUBCASE("while it is being made current") {}
  SUBCASE("when it has been made current") { is_current = true; }
  if (is_current) fixture.make_current(*file, snapshot);
  const std::string later = random_bytes(kChunkBytes, 11);
  REQUIRE(fixture.write(*file, 0, later) == 0);
  REQUIRE(fixture.punch(*file, kChunkBytes, kChunkBytes) == 0);
  REQUIRE(fixture.truncate(*file, 3 * kChunkBytes) == 0);
  CHECK(fixture.read(*file, 0, kChunkBytes) == later);
  REQUIRE(fixture.truncate(*file, 0) == 0);
  REQUIRE(fixture.write(*file, 0, later) == 0);
  REQUIRE(fixture.truncate(*file, 0) == 0);
  if (!is_current) fixture.catalog()[1].take(snapshot);
  fixture.reopen();  // what came later is gone
  CHECK(fixture.read(*fixture.load(1), 0, bytes.size()) == bytes);
}

TEST_CASE(
    "a file goes while an object is preallocated for a write that nobody waits for any more") {
  EngineFixture fixture({1, kChunkBytes, 16});
  Device& device = *fixture.engine().device(0);
  const testing::Created other = testing::create(device);
  const auto file = fixture.load(1);
  std::string bytes = random_bytes(kChunkBytes, 18);
  {
    BusyDevice busy(device, other.id);
    busy.wait();
    Payload payload;
    payload.add(bytes.data(), bytes.size());
    CHECK(file->write(0, bytes.size(), payload, nullptr, nullptr).progress == Progress::Wait);
    REQUIRE(file->retire([] { return Status(); }).ok());
  }
  fixture.engine().close();
  for (const auto& path : objects_of(fixture)) {
    CHECK(std::filesystem::equivalent(path, object_path(fixture.device_path(0), other.id)));
  }
}

TEST_CASE("a file's objects are as large as those before, or as what it is known to need") {
  EngineOptions options{1, kChunkBytes, 16};
  options.first_object_bytes = 2 * kChunkBytes;
  EngineFixture fixture(options);
  const auto file = fixture.load(1);
  constexpr uint64_t kPieces = 27;
  const std::string bytes = random_bytes(kPieces * kChunkBytes, 17);
  std::vector<uint64_t> expected;  // in chunks
  SUBCASE("as it grows") { expected = {2, 2, 4, 8, 11}; }
  SUBCASE("its size is set before") {
    REQUIRE(fixture.truncate(*file, bytes.size()) == 0);
    expected = {2, 25};
  }
  SUBCASE("it is preallocated before, keeping its size") {
    REQUIRE(fixture.allocate(*file, 0, bytes.size(), true) == 0);
    expected = {27};
  }
  for (uint64_t at = 0; at < bytes.size(); at += kChunkBytes) {
    REQUIRE(fixture.write(*file, at, bytes.substr(at, kChunkBytes)) == 0);
  }
  SnapshotData snapshot;
  REQUIRE(fixture.drain(*file, true, &snapshot) == 0);
  CHECK(fixture.read(*file, 0, bytes.size()) == bytes);
  std::sort(snapshot.objects.begin(), snapshot.objects.end());
  fixture.engine().remove_objects(snapshot.dead);
  fixture.engine().close();
  std::vector<uint64_t> chunks;
  for (const auto& [device, id] : snapshot.objects) {
    const auto path = object_path(fixture.device_path(device), id);
    chunks.push_back(std::filesystem::file_size(path) / kChunkBytes);
  }
  CHECK(chunks == expected);
}

TEST_CASE("what is read while it is overwritten is given back after that") {
  EngineFixture fixture({1, kChunkBytes, 16});
  const auto file = fixture.load(1);
  const auto overwrite = [&] {
    REQUIRE(fixture.write(*file, 0, random_bytes(kChunkBytes, 12)) == 0);
    REQUIRE(fixture.punch(*file, 2 * kChunkBytes, kChunkBytes) == 0);  // when that is written
  };
  overwrite();
  const unsigned phase = fixture.engine().read_begin();
  constexpr uint64_t kOverwritten = 2 * kUnusedMax;
  for (uint64_t written = 0; written < kOverwritten; written += kChunkBytes) overwrite();
  SnapshotData snapshot;
  REQUIRE(fixture.drain(*file, true, &snapshot) == 0);
  CHECK(bytes_taken(fixture) >= kOverwritten);
  fixture.engine().read_end(phase);
  fixture.engine().remove_objects(snapshot.dead);
  fixture.engine().close();
  CHECK(bytes_taken(fixture) <= kUnusedMax);
}

TEST_CASE("what fallocate promised is kept by a write that fails next to it") {
  EngineFixture fixture({1, kChunkBytes, 16});
  const auto file = fixture.load(1);
  REQUIRE(fixture.allocate(*file, 0, kChunkBytes / 2, false) == 0);
  REQUIRE(fixture.write(*file, 0, random_bytes(kChunkBytes - kBlockBytes, 13)) == 0);
  {
    const ObjectLimit limit(kChunkBytes / 2);  // the promised half is written, and not the other
    REQUIRE(fixture.punch(*file, 2 * kChunkBytes, kChunkBytes) == 0);  // when that has failed
  }
  for (uint64_t written = 0; written < 2 * kUnusedMax; written += kChunkBytes) {
    REQUIRE(fixture.write(*file, kChunkBytes, random_bytes(kChunkBytes, 14)) == 0);
  }
  SnapshotData snapshot;
  CHECK(fixture.drain(*file, false, &snapshot) == EFBIG);
  fixture.engine().close();
  const auto objects = objects_of(fixture);
  REQUIRE_FALSE(objects.empty());
  const auto first = std::min_element(
      objects.begin(), objects.end(),
      [](const auto& one, const auto& other) { return one.filename() < other.filename(); });
  const int fd = ::open(first->c_str(), O_RDONLY | O_CLOEXEC);
  REQUIRE(fd >= 0);
  CHECK(::lseek(fd, 0, SEEK_HOLE) == kChunkBytes / 2);
  ::close(fd);
}

TEST_CASE("an object that a drain flushes stays until the next version is current") {
  EngineFixture fixture({1, kChunkBytes, 16});
  const auto file = fixture.load(1);
  REQUIRE(fixture.write(*file, 0, random_bytes(kChunkBytes, 15)) == 0);
  REQUIRE(fixture.punch(*file, 8 * kChunkBytes, kChunkBytes) == 0);  // when that is written
  REQUIRE(file->objects().size() == 1);
  const uint64_t object = file->objects()[0].second;
  Device& device = *fixture.engine().device(0);
  {
    const BusyDevice busy(device, object);
    REQUIRE(fixture.write(*file, kChunkBytes, random_bytes(2 * kChunkBytes, 16)) == 0);
    REQUIRE(fixture.truncate(*file, 0) == 0);  // its object is being preallocated
  }
  BusyDevice(device, object).wait();  // and is so no more
  SnapshotData snapshot;
  REQUIRE(fixture.drain(*file, false, &snapshot) == 0);
  CHECK(snapshot.inline_content == "");
  REQUIRE(fixture.write(*file, 0, random_bytes(kChunkBytes, 17)) == 0);
  REQUIRE(fixture.truncate(*file, 0) == 0);
  const auto is_there = [&] {
    const auto found = objects_of(fixture);
    return std::any_of(found.begin(), found.end(), [&](const auto& path) {
      return std::stoull(path.filename(), nullptr, 16) == object;
    });
  };
  fixture.engine().remove_objects({});
  CHECK(is_there());
  fixture.make_current(*file, snapshot);
  REQUIRE(fixture.commit(*file, true) == 0);
  fixture.engine().close();
  CHECK_FALSE(is_there());
}

TEST_CASE("what a fallocate that was given up had wanted is not preallocated later") {
  constexpr uint64_t kWanted = uint64_t{256} << 20;
  EngineFixture fixture({1, kChunkBytes, 16});
  const auto file = fixture.load(1);
  SUBCASE("by a fallocate") {
    SnapshotData snapshot;
    REQUIRE(fixture.write(*file, 0, random_bytes(kChunkBytes, 18)) == 0);
    REQUIRE(fixture.drain(*file, false, &snapshot) == 0);
    BusyDevice busy(*fixture.engine().device(0), snapshot.objects.at(0).second);
    busy.wait();
    REQUIRE(file->allocate(0, kWanted, true).progress == Progress::Wait);
    file->give_up_allocating();
  }
  for (uint64_t chunk = 0; chunk < 64; ++chunk) {
    REQUIRE(fixture.write(*file, chunk * kChunkBytes, random_bytes(kChunkBytes, chunk)) == 0);
  }
  fixture.wait_idle();
  CHECK(bytes_taken(fixture) < kWanted / 2);
}

TEST_CASE("a file with unsaved bytes or handles is not unloaded") {
  EngineFixture fixture;
  Engine& engine = fixture.engine();
  const auto file = fixture.load(1);
  REQUIRE(engine.open_handle(1, 1, O_RDWR).ok());
  CHECK(engine.unload(1).error() == EBUSY);
  CHECK_FALSE(engine.set_cached(engine.handle(1)));  // somebody may write
  REQUIRE(fixture.write(*file, 0, "x") == 0);
  engine.release_handle(1);
  CHECK(engine.unload(1).error() == EBUSY);
  REQUIRE(fixture.commit(*file, true) == 0);
  CHECK(engine.unload(1).ok());
}

TEST_CASE("file: what only became longer is told from what was changed") {
  for (const uint64_t size : {100ULL, 300'000ULL}) {  // inline, and on devices
    CAPTURE(size);
    EngineFixture fixture(EngineOptions{});
    const auto file = fixture.load(1);
    const auto longer = [&] { return file->attributes().only_longer; };
    const auto write = [&](uint64_t offset) { REQUIRE(fixture.write(*file, offset, "more") == 0); };
    const auto commit = [&] { REQUIRE(fixture.commit(*file, false) == 0); };
    CHECK_FALSE(longer());
    REQUIRE(fixture.write(*file, 0, random_bytes(size, 1)) == 0);
    write(10);  // nothing of it is committed
    CHECK(longer());
    commit();
    CHECK_FALSE(longer());  // nor is it changed
    write(size);
    CHECK(longer());
    write(size - 1);
    CHECK_FALSE(longer());
    write(size + 100);
    CHECK_FALSE(longer());
    commit();
    REQUIRE(fixture.truncate(*file, size + 200) == 0);
    CHECK(longer());
    REQUIRE(fixture.truncate(*file, size + 199) == 0);
    CHECK(longer());
    REQUIRE(fixture.truncate(*file, size + 50) == 0);
    CHECK_FALSE(longer());
    commit();
    REQUIRE(fixture.punch(*file, size, 10) == 0);
    CHECK_FALSE(longer());
    commit();
    // Between a drain and its commit.
    write(size + 50);
    SnapshotData snapshot;
    REQUIRE(fixture.drain(*file, false, &snapshot) == 0);
    write(size + 51);
    fixture.make_current(*file, snapshot);
    CHECK_FALSE(longer());
    commit();
    write(size + 55);
    REQUIRE(fixture.drain(*file, false, &snapshot) == 0);
    write(size + 59);
    fixture.make_current(*file, snapshot);
    CHECK(longer());
    REQUIRE(fixture.truncate(*file, 0) == 0);
    CHECK_FALSE(longer());
  }
}

}  // namespace fpfs::testing
