// Devices that come, drain and go while an engine is in use.
#include <doctest/doctest.h>

#include <filesystem>
#include <thread>

#include "support/engine_fixture.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kChunk = 256 * 1024;

// Objects with content on a device: those that are kept ready are empty.
size_t objects_with_content(const std::string& path) {
  size_t count = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    if (entry.is_regular_file() && entry.file_size() != 0) ++count;
  }
  return count;
}

Placement placed(std::vector<uint16_t> devices) { return {kChunk, std::move(devices), 0}; }

std::shared_ptr<File> make(Engine& engine, uint64_t ino, std::vector<uint16_t> devices) {
  REQUIRE(engine.load(ino, placed(std::move(devices)), 0, 0, 0, std::nullopt, {}).ok());
  return engine.file(ino);
}

}  // namespace

TEST_CASE("engine: a device that is added takes chunks at once, and is read") {
  EngineFixture fixture({.devices = 1});
  const TempDirectory added;
  REQUIRE(fixture.engine().add_device(7, added.path()).ok());
  CHECK(fixture.engine().add_device(7, added.path()).error() == EEXIST);
  CHECK(fixture.engine().add_device(65'535, added.path()).error() == EINVAL);
  CHECK(fixture.engine().devices().size() == 2);
  const auto file = make(fixture.engine(), 20, {0, 7});
  const std::string bytes = random_bytes(8 * kChunk, 1);
  REQUIRE(fixture.write(*file, 0, bytes) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  CHECK(objects_with_content(added.path()) == 1);
  CHECK(objects_with_content(fixture.device_path(0)) == 1);
  CHECK(fixture.read(*file, 0, bytes.size()) == bytes);
}

TEST_CASE("engine: new chunks avoid a device that drains, those of files made for it alone, too") {
  EngineFixture fixture({.devices = 2});
  fixture.engine().set_draining(0, true);
  CHECK_FALSE(fixture.engine().takes_chunks(0));
  CHECK_FALSE(fixture.engine().device_failed(0));
  const std::string bytes = random_bytes(4 * kChunk, 2);
  for (const auto& [ino, devices] :
       {std::pair<uint64_t, std::vector<uint16_t>>{20, {0, 1}}, {21, {0}}, {22, {9}}}) {
    const auto file = make(fixture.engine(), ino, devices);
    REQUIRE(fixture.write(*file, 0, bytes) == 0);
    REQUIRE(fixture.commit(*file, true) == 0);
    CHECK(fixture.read(*file, 0, bytes.size()) == bytes);
  }
  CHECK(objects_with_content(fixture.device_path(0)) == 0);
  CHECK(objects_with_content(fixture.device_path(1)) == 3);
  fixture.engine().set_draining(0, false);
  const auto file = make(fixture.engine(), 23, {0});
  REQUIRE(fixture.write(*file, 0, bytes) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  CHECK(objects_with_content(fixture.device_path(0)) == 1);
}

TEST_CASE("engine: a device that was removed answers nobody, and its number is free") {
  EngineFixture fixture({.devices = 2});
  Device* device = fixture.engine().device(1);
  const uint64_t ticket = fixture.engine().remove_device(1);
  CHECK(fixture.wait_for(ticket) == 0);
  CHECK(fixture.engine().device(1) == nullptr);
  CHECK(fixture.engine().devices().size() == 1);
  CHECK(fixture.wait_for(fixture.engine().remove_device(1)) == ENODEV);
  // Whoever looked it up before is told.
  Delivery<int> removed;
  device->remove_object(1, [&](int error) { removed.put(error); });
  CHECK(removed.wait() == ENODEV);
  Delivery<int> made;
  device->create_object([&](int error, ObjectRef, uint64_t) { made.put(error); });
  CHECK(made.wait() == ENODEV);
  CHECK(fixture.engine().add_device(1, fixture.device_path(1)).ok());
  const auto file = make(fixture.engine(), 20, {1});
  REQUIRE(fixture.write(*file, 0, std::string(kChunk, 'x')) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  CHECK(objects_with_content(fixture.device_path(1)) == 1);
}

TEST_CASE("engine: devices come and go while files are written") {
  EngineFixture fixture({.devices = 1});
  const TempDirectory added;
  std::atomic<bool> stop{false};
  std::thread changes([&] {
    for (uint16_t number = 1; !stop; ++number) {
      const std::string path = added.path() + "/" + std::to_string(number);
      std::filesystem::create_directory(path);
      REQUIRE(fixture.engine().add_device(number, path).ok());
      fixture.engine().set_draining(number, true);
      (void)fixture.engine().remove_device(number);
      CHECK(fixture.engine().device(number) == nullptr);
    }
  });
  for (uint64_t ino = 20; ino < 40; ++ino) {
    const auto file = make(fixture.engine(), ino, {0});
    const std::string bytes = random_bytes(2 * kChunk, static_cast<unsigned>(ino));
    REQUIRE(fixture.write(*file, 0, bytes) == 0);
    REQUIRE(fixture.commit(*file, true) == 0);
    CHECK(fixture.read(*file, 0, bytes.size()) == bytes);
  }
  stop = true;
  changes.join();
}

}  // namespace fpfs::testing
