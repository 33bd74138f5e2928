// The engine's tables: what is loaded, opened and given back, and what is left of it afterwards.
#include <fcntl.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>

#include "support/engine_fixture.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kBytes = 300 * 1000;

std::string path_of(const EngineFixture& fixture, const ObjectKey& key) {
  return object_path(fixture.device_path(key.first), key.second);
}

uint64_t bytes_allocated(const std::string& path) {
  struct stat found {};
  REQUIRE(stat(path.c_str(), &found) == 0);
  return static_cast<uint64_t>(found.st_blocks) * 512;
}

// A file with content on the one device, committed while its writer may go on; its object.
ObjectKey write_one(EngineFixture& fixture, File& file) {
  REQUIRE(fixture.write(file, 0, random_bytes(kBytes, 1)) == 0);
  SnapshotData snapshot;
  REQUIRE(fixture.drain(file, false, &snapshot) == 0);
  fixture.make_current(file, snapshot);
  REQUIRE(snapshot.objects.size() == 1);
  return snapshot.objects.front();
}

}  // namespace

TEST_CASE("engine: an unloaded file keeps no space that it was only promised") {
  EngineFixture fixture({.devices = 1});
  const std::shared_ptr<File> file = fixture.load(1);
  const ObjectKey object = write_one(fixture, *file);
  const std::string path = path_of(fixture, object);
  const uint64_t needed = (kBytes + kIoAlignment - 1) / kIoAlignment * kIoAlignment;
  CHECK(bytes_allocated(path) > needed);  // its writer would go on
  REQUIRE(fixture.engine().unload(1).ok());
  fixture.engine().close();
  CHECK(bytes_allocated(path) == needed);
}

TEST_CASE("engine: handles come and go for ever") {
  EngineFixture fixture;
  fixture.load(1);
  for (uint64_t id = 1; id <= 2 * uint64_t{arena::kHandlesMax}; ++id) {
    REQUIRE(fixture.engine().open_handle(id, 1, O_RDWR).ok());
    fixture.engine().release_handle(id);
  }
  CHECK(fixture.engine().unload(1).ok());
}

TEST_CASE("engine: the kernel may have pages as long as a handle is open that they were read by") {
  EngineFixture fixture;
  Engine& engine = fixture.engine();
  const auto file = fixture.load(1);
  REQUIRE(engine.open_handle(1, 1, O_RDWR).ok());
  CHECK_FALSE(file->has_kept_pages());
  engine.handle(1)->keep_pages();
  engine.handle(1)->keep_pages();
  CHECK(file->has_kept_pages());
  engine.release_handle(1);
  CHECK_FALSE(file->has_kept_pages());

  // Of a handle that comes from another server it is not known: what only writes has none.
  REQUIRE(engine.restore_handle(2, 1, O_WRONLY).ok());
  CHECK_FALSE(file->has_kept_pages());
  REQUIRE(engine.restore_handle(3, 1, O_RDWR).ok());
  CHECK(file->has_kept_pages());
  REQUIRE(engine.restore_handle(4, 1, O_RDONLY).ok());
  engine.release_handle(3);
  CHECK(file->has_kept_pages());
  engine.release_handle(4);
  CHECK_FALSE(file->has_kept_pages());
  engine.release_handle(2);
}

TEST_CASE("engine: bytes that wait for the journal go on when another file is dropped") {
  EngineFixture fixture({.journal_area_bytes = 64 * 1024});
  const auto other = fixture.load(4);
  Journal& journal = fixture.engine().arena().journal();
  while (journal.note({4, 1, 1, 1, false}, arena::Change::None).ok()) {
  }
  const auto file = fixture.load(3);
  const std::string bytes = random_bytes(4 * fixture.options().chunk_bytes, 1);
  REQUIRE(fixture.write(*file, 0, bytes) == 0);
  fixture.wait_idle();  // on the devices, and the journal has no room to say where
  event_of<DroppedEvent>(fixture.engine(), fixture.engine().drop(4));
  CHECK(fixture.commit(*file, false) == 0);
  CHECK(fixture.read(*file, 0, bytes.size()) == bytes);
}

TEST_CASE("engine: an object that was removed is gone when that is said") {
  EngineFixture fixture({.devices = 1});
  const std::shared_ptr<File> file = fixture.load(1);
  const ObjectKey object = write_one(fixture, *file);
  const std::string path = path_of(fixture, object);
  REQUIRE(std::filesystem::exists(path));
  Engine& engine = fixture.engine();
  CHECK(event_of<DoneEvent>(engine, engine.remove_objects({object})).error == 0);
  CHECK_FALSE(std::filesystem::exists(path));
  // Once more, after a crash that kept the removal from being recorded.
  CHECK(event_of<DoneEvent>(engine, engine.remove_objects({object})).error == 0);
}

TEST_CASE("engine: a dropped file is not loaded any more, and names all its objects") {
  EngineFixture fixture({.devices = 1});
  const std::shared_ptr<File> file = fixture.load(1);
  const ObjectKey object = write_one(fixture, *file);
  Engine& engine = fixture.engine();
  const auto dropped = event_of<DroppedEvent>(engine, engine.drop(1));
  CHECK(dropped.objects == std::vector<ObjectKey>{object});
  CHECK(engine.file(1) == nullptr);
  CHECK(engine.unload(1).error() == ENOENT);
}

}  // namespace fpfs::testing
