// What tests of devices share: directories, aligned memory, requests to wait for, and both
// backends.
#pragma once

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "device/device.h"

namespace fpfs::testing {

// A directory of its own under $TMPDIR, removed with all it holds.
class TempDirectory {
 public:
  TempDirectory() {
    const std::filesystem::path base = std::filesystem::temp_directory_path();
    std::string pattern = (base / "fpfs-native-XXXXXX").string();
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~TempDirectory() {
    std::error_code ignored;  // a failed test may leave a read-only mount behind
    std::filesystem::remove_all(path_, ignored);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class AlignedBuffer {
 public:
  explicit AlignedBuffer(uint64_t bytes)
      : data_(static_cast<char*>(std::aligned_alloc(kIoAlignment, bytes)), &std::free),
        bytes_(bytes) {
    REQUIRE(data_ != nullptr);
    std::fill(data(), data() + bytes, '\0');
  }

  char* data() { return data_.get(); }
  const char* data() const { return data_.get(); }
  uint64_t size() const { return bytes_; }
  bool operator==(const AlignedBuffer& other) const {
    return bytes_ == other.bytes_ && std::equal(data(), data() + bytes_, other.data());
  }

  // Bytes that differ at every offset and for every seed.
  void fill(uint64_t seed) {
    uint64_t state = seed * 0x9E3779B97F4A7C15U + 1;
    for (uint64_t i = 0; i < bytes_; ++i) {
      state ^= state << 13U;
      state ^= state >> 7U;
      state ^= state << 17U;
      data_.get()[i] = static_cast<char>(state);
    }
  }

 private:
  std::unique_ptr<char, decltype(&std::free)> data_;
  uint64_t bytes_;
};

// A value that another thread delivers.
template <typename T>
class Delivery {
 public:
  void put(T value) {
    MutexLock lock(mutex_);
    value_ = std::move(value);
    delivered_.notify_all();
  }
  T wait() {
    MutexLock lock(mutex_);
    while (!value_.has_value()) delivered_.wait(mutex_);
    return *std::exchange(value_, std::nullopt);
  }

 private:
  Mutex mutex_;
  CondVar delivered_;
  std::optional<T> value_ GUARDED_BY(mutex_);
};

struct WaitedRequest final : IoRequest {
  void complete(int result) override { delivery.put(result); }
  Delivery<int> delivery;
};

class LogLines {
 public:
  LogSink sink() {
    return [this](int, const std::string& message) {
      MutexLock lock(mutex_);
      lines_.push_back(message);
    };
  }
  uint64_t count(const std::string& part) const {
    MutexLock lock(mutex_);
    uint64_t count = 0;
    for (const auto& line : lines_) count += line.find(part) != std::string::npos ? 1 : 0;
    return count;
  }

 private:
  mutable Mutex mutex_;
  std::vector<std::string> lines_ GUARDED_BY(mutex_);
};

inline int run(Device& device, IoOp op, const ObjectRef& object, uint64_t offset, uint64_t length,
               char* buffer = nullptr) {
  WaitedRequest request;
  request.op = op;
  request.object = object;
  request.offset = offset;
  request.length = length;
  request.buffer = buffer;
  device.submit(&request);
  return request.delivery.wait();
}

struct Created {
  int error = 0;
  ObjectRef object;
  uint64_t id = 0;
};

inline Created create(Device& device) {
  Delivery<Created> delivery;
  device.create_object([&delivery](int error, ObjectRef object, uint64_t id) {
    delivery.put({error, std::move(object), id});
  });
  return delivery.wait();
}

inline int remove(Device& device, uint64_t id) {
  Delivery<int> delivery;
  device.remove_object(id, [&delivery](int error) { delivery.put(error); });
  return delivery.wait();
}

struct UringBackend {
  static constexpr IoBackend kind = IoBackend::IoUring;
};
struct ThreadsBackend {
  static constexpr IoBackend kind = IoBackend::Threads;
};

inline std::unique_ptr<Device> open_device(const DeviceConfig& config,
                                           const std::vector<MemoryRegion>& regions = {}) {
  auto result = Device::open(config, regions);
  REQUIRE_MESSAGE(result.ok(), result.status().message());
  return result.take();
}

// Where an object lies in the directory of its device.
inline std::string object_path(const std::string& directory, uint64_t id) {
  std::array<char, 32> name;
  std::snprintf(name.data(), name.size(), "/%02x/%016llx", static_cast<unsigned>(id & 0xff),
                static_cast<unsigned long long>(id));
  return directory + name.data();
}

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
  std::string object_path(uint64_t id) const { return testing::object_path(directory.path(), id); }
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

}  // namespace fpfs::testing

TYPE_TO_STRING(fpfs::testing::UringBackend);
TYPE_TO_STRING(fpfs::testing::ThreadsBackend);
