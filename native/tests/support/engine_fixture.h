// What tests of files share: an engine over temporary directories, and calls that wait.
#pragma once

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "engine/engine.h"
#include "fuse/channel.h"
#include "support/device_fixture.h"

namespace fpfs::testing {

struct EngineOptions {
  int devices = 2;
  uint64_t chunk_bytes = 256 * 1024;
  uint64_t slots = 32;
  uint64_t journal_area_bytes = 4 * 1024 * 1024;
  std::vector<std::string> paths =
      {};  // of the first devices; temporary directories for the others
  Ack ack = Ack::Early;
  uint32_t channel_threads = 1;
  std::string arena = {};    // its file; a memfd without
  bool take_over = false;    // it is there
  uint64_t mount_count = 0;  // how often these devices were opened before
  bool checksums = true;
  uint64_t first_object_bytes = uint64_t{8} << 20;
};

// The catalog's part: what the last committed snapshot of an inode said.
struct Committed {
  uint64_t size = 0;
  std::optional<std::string> content;
  std::map<uint32_t, std::string> segments;

  void take(const SnapshotData& snapshot) {
    size = snapshot.size;
    content = snapshot.inline_content;
    for (const auto& [index, blob] : snapshot.segments) {
      if (blob.empty()) {
        segments.erase(index);
      } else {
        segments[index] = blob;
      }
    }
  }
};

// Waits for the event of an operation.
template <typename E>
E event_of(Engine& engine, uint64_t ticket) {
  for (;;) {
    pollfd ready{engine.event_fd(), POLLIN, 0};
    REQUIRE(::poll(&ready, 1, 60'000) == 1);
    for (const Event& event : engine.take_events()) {
      const auto* each = std::get_if<E>(&event);
      if (each != nullptr && each->ticket == ticket) return *each;
    }
  }
}

class EngineFixture {
 public:
  explicit EngineFixture(EngineOptions options = {})
      : options_(options), opened_(options.mount_count) {
    open();
  }
  ~EngineFixture() { engine_->close(); }

  Engine& engine() { return *engine_; }
  std::string device_path(int number) const {
    const auto index = static_cast<size_t>(number);
    return index < options_.paths.size() ? options_.paths[index]
                                         : directory_.path() + "/" + std::to_string(number);
  }
  const EngineOptions& options() const { return options_; }

  void reopen() {
    engine_->close();
    engine_.reset();
    open();
  }

  void reopen_without_arena() {
    options_.arena.clear();
    options_.take_over = false;
    reopen();
  }

  std::shared_ptr<File> load(uint64_t ino) {
    Placement placement{options_.chunk_bytes, {}, ino};
    for (int i = 0; i < options_.devices; ++i) {
      placement.devices.push_back(static_cast<uint16_t>(i));
    }
    const Committed& committed = committed_[ino];
    std::vector<std::pair<uint32_t, std::string>> segments(committed.segments.begin(),
                                                           committed.segments.end());
    const Status status =
        engine_->load(ino, placement, committed.size, 0, 0, committed.content, segments);
    REQUIRE_MESSAGE(status.ok(), status.message());
    return engine_->file(ino);
  }

  // Waits until the write is taken.
  int write(File& file, uint64_t offset, const std::string& bytes) {
    Delivery<int> done;
    std::string copy = bytes;
    Payload payload;
    payload.add(copy.data(), copy.size());
    const auto attempt = [&] {
      const Outcome outcome = file.write(offset, copy.size(), payload, nullptr, nullptr);
      if (outcome.progress == Progress::Wait) return Retry::Waiting;
      done.put(outcome.error);
      return Retry::Done;
    };
    if (attempt() != Retry::Done) engine_->park(attempt);
    return done.wait();
  }

  // The bytes in `result`; returns the error.
  int try_read(File& file, uint64_t offset, size_t length, std::string* result,
               bool for_page = false) {
    struct Job : ReadJob {
      Delivery<int> finished;
      std::string* to = nullptr;
      void done(int failure, const char* from, size_t n) override {
        if (failure == 0) to->assign(from, n);
        finished.put(failure);
      }
    } job;
    const size_t bytes = ReadJob::buffer_bytes(length);
    AlignedBuffer buffer(bytes);
    std::memset(buffer.data(), 0xa5, bytes);  // as if others had read into it before
    job.to = result;
    job.offset = offset;
    job.length = length;
    job.buffer = buffer.data();
    job.for_page = for_page;
    file.read(&job);
    return job.finished.wait();
  }

  std::string read(File& file, uint64_t offset, size_t length, bool for_page = false) {
    std::string result;
    REQUIRE(try_read(file, offset, length, &result, for_page) == 0);
    return result;
  }

  int truncate(File& file, uint64_t size) {
    Delivery<int> done;
    file.truncate(size, [&](int error) { done.put(error); });
    return done.wait();
  }

  int punch(File& file, uint64_t offset, uint64_t length) {
    Delivery<int> done;
    file.punch(offset, length, [&](int error) { done.put(error); });
    return done.wait();
  }

  int allocate(File& file, uint64_t offset, uint64_t length, bool keep_size) {
    Delivery<int> done;
    const auto attempt = [&] {
      const Outcome outcome = file.allocate(offset, length, keep_size);
      if (outcome.progress == Progress::Wait) return Retry::Waiting;
      done.put(outcome.error);
      return Retry::Done;
    };
    if (attempt() != Retry::Done) engine_->park(attempt);
    return done.wait();
  }

  // Waits until everything written is on the devices; what the catalog is then to make current.
  int drain(File& file, bool last, SnapshotData* snapshot) {
    Delivery<int> done;
    file.drain(last, [&](int error, SnapshotData data) {
      *snapshot = std::move(data);
      done.put(error);
    });
    return done.wait();
  }

  // Makes a drained snapshot current, and gives back what it replaced.
  void make_current(File& file, const SnapshotData& snapshot) {
    committed_[file.ino()].take(snapshot);
    file.committed(snapshot.sequence);
    engine_->discard(snapshot.garbage);
    engine_->remove_objects(snapshot.dead);
  }

  std::map<uint64_t, Committed>& catalog() { return committed_; }

  // What another process left of an inode that is loaded.
  int recover(uint64_t ino, bool trim = true) { return wait_for(engine_->recover(ino, trim)); }
  int recover_later(uint64_t ino, bool trim = true) {
    return wait_for(engine_->recover_later(ino, trim));
  }
  int wait_for(uint64_t ticket) { return event_of<DoneEvent>(*engine_, ticket).error; }

  // Waits until the devices have done what they were told.
  void wait_idle() {
    for (const auto& device : engine_->devices()) {
      const auto busy = [&] {
        const DeviceStatistics now = device->statistics();
        return now.requests_in_flight + now.requests_queued != 0;
      };
      while (busy()) std::this_thread::yield();
    }
  }

  // Drains and commits, as the commit module does.
  int commit(File& file, bool last) {
    SnapshotData snapshot;
    if (const int error = drain(file, last, &snapshot); error != 0) return error;
    make_current(file, snapshot);
    return 0;
  }

 private:
  void open() {
    EngineConfig config;
    for (int i = 0; i < options_.devices; ++i) {
      const std::string path = device_path(i);
      std::filesystem::create_directories(path);
      config.devices.emplace_back(static_cast<uint16_t>(i), path);
    }
    config.slot_bytes = options_.chunk_bytes;
    config.staging_bytes = options_.slots * options_.chunk_bytes;
    config.journal_area_bytes = options_.journal_area_bytes;
    config.object_base = ++opened_;
    config.ack = options_.ack;
    config.channel_threads = options_.channel_threads;
    config.arena_path = options_.arena;
    config.take_over = options_.take_over;
    config.filesystem_id = "fixture";
    config.checksums = options_.checksums;
    config.first_object_bytes = options_.first_object_bytes;
    auto opened = Engine::open(config);
    REQUIRE_MESSAGE(opened.ok(), opened.status().message());
    engine_ = opened.take();
  }

  EngineOptions options_;
  TempDirectory directory_;
  std::unique_ptr<Engine> engine_;
  uint64_t opened_;
  std::map<uint64_t, Committed> committed_;
};

// `count` bytes that are the same for the same seed.
inline std::string random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string bytes(count, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// A seed that is new each run unless FPFS_SEED says otherwise; printed when a test fails.
inline uint64_t test_seed() {
  const char* given = std::getenv("FPFS_SEED");
  return given != nullptr ? std::stoull(given) : std::random_device{}();
}

inline std::vector<std::filesystem::path> objects_of(const EngineFixture& fixture) {
  std::vector<std::filesystem::path> found;
  for (int i = 0; i < fixture.options().devices; ++i) {
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(fixture.device_path(i))) {
      if (entry.is_regular_file()) found.push_back(entry.path());
    }
  }
  return found;
}

// What all objects take on the devices' filesystems.
inline uint64_t bytes_taken(const EngineFixture& fixture) {
  uint64_t bytes = 0;
  for (const auto& path : objects_of(fixture)) {
    struct stat status {};
    if (::stat(path.c_str(), &status) == 0) bytes += static_cast<uint64_t>(status.st_blocks) * 512;
  }
  return bytes;
}

}  // namespace fpfs::testing
