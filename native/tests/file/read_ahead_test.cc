// Reading ahead: what a sequential reader gets is what the file holds, also while that changes.
#include "file/read_ahead.h"

#include <thread>

#include "support/engine_fixture.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kMiB = 1024 * 1024;

// A reader as the channel serves it: from what was read ahead, or by a read of its own.
class Reader {
 public:
  Reader(EngineFixture& fixture, std::shared_ptr<File> file, uint64_t bytes)
      : fixture_(fixture),
        file_(std::move(file)),
        // (A piece may be given back by its device's thread when this is gone.)
        ahead_(std::make_shared<ReadAhead>(fixture.engine().read_buffers(), file_, bytes,
                                           [&engine = fixture.engine()] { engine.wake(); })) {}

  std::string read(uint64_t offset, size_t length) {
    struct Answer {
      bool is_hit = false;
      std::string bytes;
    };
    Delivery<Answer> answer;
    const bool is_taken = ahead_->read(
        offset, length,
        [&](const std::vector<ReadAhead::Part>& parts) {
          std::string bytes;
          for (const ReadAhead::Part& part : parts) bytes.append(part.data, part.length);
          answer.put({true, std::move(bytes)});
        },
        [&] {
          answer.put({false, {}});
        });
    if (is_taken) {
      Answer found = answer.wait();
      if (found.is_hit) {
        ++hits;
        return std::move(found.bytes);
      }
      ++misses;
    }
    return fixture_.read(*file_, offset, length);
  }

  std::atomic<int> hits = 0;
  std::atomic<int> misses = 0;

 private:
  EngineFixture& fixture_;
  std::shared_ptr<File> file_;
  std::shared_ptr<ReadAhead> ahead_;
};

std::shared_ptr<File> committed_file(EngineFixture& fixture, const std::string& content) {
  const std::shared_ptr<File> file = fixture.load(1);
  REQUIRE(fixture.write(*file, 0, content) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  return file;
}

}  // namespace

TEST_CASE("who reads in sequence gets what was read ahead") {
  EngineFixture fixture({2, 256 * 1024, 64});
  const std::string content = random_bytes(9 * kMiB + 4321, 1);
  const std::shared_ptr<File> file = committed_file(fixture, content);
  for (const size_t step : {size_t{512 * 1024}, size_t{300'000}, size_t{4096}}) {
    CAPTURE(step);
    Reader reader(fixture, file, 4 * kMiB);
    int reads = 0;
    for (uint64_t at = 0; at < content.size(); at += step, ++reads) {
      REQUIRE(reader.read(at, step) == content.substr(at, step));
    }
    CHECK(reader.hits >= reads - 3);
    CHECK(reader.misses == 0);
    CHECK(reader.read(content.size() + 5, 100).empty());
  }
}

TEST_CASE("who reads here and there costs the devices nothing more") {
  EngineFixture fixture({1, 256 * 1024, 128});
  const std::string content = random_bytes(20 * kMiB, 1);
  const std::shared_ptr<File> file = committed_file(fixture, content);
  Reader reader(fixture, file, 4 * kMiB);
  const uint64_t before = fixture.engine().devices()[0]->statistics().bytes_read;
  for (const uint64_t at : {15 * kMiB, 5 * kMiB, 19 * kMiB, 10 * kMiB, uint64_t{0}}) {
    CHECK(reader.read(at, kBlockBytes) == content.substr(at, kBlockBytes));
  }
  CHECK(fixture.engine().devices()[0]->statistics().bytes_read - before == 5 * kBlockBytes);
}

TEST_CASE("what a sequential reader asks for at once is read once") {
  EngineFixture fixture({1, 256 * 1024, 64});
  constexpr uint64_t step = 256 * 1024;
  constexpr uint64_t size = 8 * step;
  const std::string content = random_bytes(size, 1);
  const std::shared_ptr<File> file = committed_file(fixture, content);
  const uint64_t before = fixture.engine().devices()[0]->statistics().bytes_read;
  constexpr int rounds = 500;
  std::atomic<int> ready{0};
  for (int round = 0; round < rounds; ++round) {
    Reader reader(fixture, file, size);
    const auto check = [&](uint64_t at) {
      CHECK(reader.read(at, step) == content.substr(at, step));
    };
    const auto check_beside = [&](uint64_t at) {
      ++ready;
      while (ready < 2 * (round + 1)) continue;
      check(at);
    };
    check(0);
    // The first of these two starts to read ahead; the other may have found nothing by then.
    std::thread other(check_beside, 2 * step);
    check_beside(step);
    other.join();
    for (uint64_t at = 3 * step; at < size; at += step) check(at);
  }
  CHECK(fixture.engine().devices()[0]->statistics().bytes_read - before == rounds * size);
}

TEST_CASE("what was read ahead of a change is not given out after it") {
  EngineFixture fixture({2, 256 * 1024, 64});
  const std::string old = random_bytes(8 * kMiB, 1);
  const std::string later = random_bytes(8 * kMiB, 2);
  for (const bool is_committed : {false, true}) {
    const std::shared_ptr<File> file = committed_file(fixture, old);
    Reader reader(fixture, file, 6 * kMiB);
    for (uint64_t at = 0; at < 2 * kMiB; at += kMiB / 2) {
      REQUIRE(reader.read(at, kMiB / 2) == old.substr(at, kMiB / 2));
    }
    REQUIRE(fixture.write(*file, 0, later) == 0);
    if (is_committed) REQUIRE(fixture.commit(*file, true) == 0);
    for (uint64_t at = 2 * kMiB; at < 8 * kMiB; at += kMiB / 2) {
      REQUIRE(reader.read(at, kMiB / 2) == later.substr(at, kMiB / 2));
    }
    CHECK(reader.misses > 0);
    REQUIRE(fixture.truncate(*file, 3 * kMiB) == 0);
    CHECK(reader.read(4 * kMiB, 100).empty());
    REQUIRE(fixture.commit(*file, true) == 0);
    REQUIRE(fixture.engine().unload(1).ok());
    fixture.catalog().clear();
  }
}

TEST_CASE("a writer beside a reader: each read is of one moment of its blocks") {
  EngineFixture fixture({2, 256 * 1024, 64});
  constexpr uint64_t size = 8 * kMiB;
  const std::shared_ptr<File> file = committed_file(fixture, std::string(size, 'a'));
  std::atomic<char> written{'a'};
  std::atomic<bool> reading{true};
  std::thread writer([&] {
    for (char letter = 'b'; letter <= 'z'; ++letter) {
      CHECK(fixture.write(*file, 0, std::string(size, letter)) == 0);
      written = letter;
      if (letter % 3 == 0) CHECK(fixture.commit(*file, false) == 0);
    }
    reading = false;
  });
  Reader reader(fixture, file, 4 * kMiB);
  while (reading) {
    for (uint64_t at = 0; at < size; at += kMiB / 2) {
      const char least = written;
      const std::string bytes = reader.read(at, kMiB / 2);
      REQUIRE(bytes.size() == kMiB / 2);
      // Whatever was written before the read was asked for is in it.
      for (const char byte : {bytes.front(), bytes[kMiB / 4], bytes.back()}) REQUIRE(byte >= least);
    }
  }
  writer.join();
  REQUIRE(fixture.commit(*file, true) == 0);
}

TEST_CASE("many who read ahead leave buffers to those who read") {
  EngineFixture fixture({2, 256 * 1024, 64});
  const std::string content = random_bytes(8 * kMiB, 1);
  const std::shared_ptr<File> file = committed_file(fixture, content);
  std::vector<std::unique_ptr<Reader>> readers;
  for (int i = 0; i < 20; ++i) {
    readers.push_back(std::make_unique<Reader>(fixture, file, 16 * kMiB));
    for (uint64_t at = 0; at < 2 * kMiB; at += kMiB / 2) {
      REQUIRE(readers.back()->read(at, kMiB / 2) == content.substr(at, kMiB / 2));
    }
  }
  CHECK(fixture.engine().read_buffers().take_spare() == nullptr);
  char* buffer = fixture.engine().read_buffers().take();
  CHECK(buffer != nullptr);
  fixture.engine().read_buffers().give(buffer);
  readers.clear();
  CHECK(fixture.read(*file, 0, 100) == content.substr(0, 100));
}

}  // namespace fpfs::testing
