// A file against the perfect model (a string), with random operations, reloads and little staging.
#include <thread>

#include "support/engine_fixture.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kSizeMax = 1500 * 1000;

class ModelRun {
 public:
  ModelRun(EngineOptions options, uint64_t seed) : fixture_(options), random_(seed) {
    file_ = fixture_.load(7);
  }

  void run(int steps) {
    for (int i = 0; i < steps; ++i) {
      step();
      const File::Attributes attributes = file_->attributes();
      REQUIRE(attributes.size == model_.size());
    }
    check_all();
    reload(true);
    check_all();
  }

 private:
  uint64_t below(uint64_t n) { return n == 0 ? 0 : random_() % n; }
  // Sizes around the block and chunk boundaries, and small ones, are more interesting.
  uint64_t length() {
    switch (below(4)) {
      case 0:
        return 1 + below(300);
      case 1:
        return 1 + below(20000);
      case 2:
        return kBlockBytes - 2 + below(5);
      default:
        return 1 + below(400000);
    }
  }
  std::string random_bytes(uint64_t n) {
    std::string bytes(n, '\0');
    for (char& c : bytes) c = static_cast<char>(random_());
    return bytes;
  }

  void step() {
    switch (below(16)) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
        return write(below(kSizeMax / 2));
      case 5:
      case 6:
        return write(model_.size());
      case 7:
      case 8:
      case 9:
        return check(below(model_.size() + 1000), length());
      case 10:
        return truncate(below(model_.size() + 1));
      case 11:
        return below(3) == 0 ? truncate(0) : truncate(model_.size() + below(200000));
      case 12:
        return punch();
      case 13:
        return allocate();
      case 14:
        REQUIRE(fixture_.commit(*file_, below(2) == 0) == 0);
        return;
      default:
        if (below(4) == 0) reload(below(2) == 0);
        if (below(4) == 0) apply_policy();
    }
  }

  // Other devices, other chunks, other limits, in the middle of it all.
  void apply_policy() {
    file_->set_flow({Ack::Early, static_cast<uint32_t>(below(3)),
                     static_cast<uint32_t>(below(2) == 0 ? 0 : 2 + below(3)), true});
    REQUIRE(fixture_.commit(*file_, below(2) == 0) == 0);
    const uint64_t slot = fixture_.options().chunk_bytes;
    Placement placement{(1 + below(slot / kBlockBytes)) * kBlockBytes, {}, below(5)};
    if (below(2) == 0) placement.chunk_bytes = (1 + below(3)) * slot;
    const auto width =
        static_cast<int>(1 + below(static_cast<uint64_t>(fixture_.options().devices)));
    for (int i = 0; i < width; ++i) placement.devices.push_back(static_cast<uint16_t>(i));
    REQUIRE(fixture_.engine().place(7, placement).ok());
  }

  void write(uint64_t offset) {
    const std::string bytes =
        random_bytes(std::min(length(), kSizeMax - std::min(offset, kSizeMax - 1)));
    REQUIRE(fixture_.write(*file_, offset, bytes) == 0);
    if (model_.size() < offset + bytes.size()) model_.resize(offset + bytes.size());
    model_.replace(offset, bytes.size(), bytes);
  }

  void truncate(uint64_t size) {
    REQUIRE(fixture_.truncate(*file_, size) == 0);
    model_.resize(size);
  }

  void punch() {
    const uint64_t offset = below(model_.size() + 1);
    const uint64_t n = length();
    REQUIRE(fixture_.punch(*file_, offset, n) == 0);
    if (offset < model_.size()) {
      const uint64_t end = std::min<uint64_t>(model_.size(), offset + n);
      std::fill(model_.begin() + static_cast<std::ptrdiff_t>(offset),
                model_.begin() + static_cast<std::ptrdiff_t>(end), '\0');
    }
  }

  void allocate() {
    const uint64_t offset = below(kSizeMax / 2);
    const uint64_t n = length();
    const bool keep = below(2) == 0;
    REQUIRE(fixture_.allocate(*file_, offset, n, keep) == 0);
    if (!keep && model_.size() < offset + n) model_.resize(offset + n);
  }

  void check(uint64_t offset, uint64_t n) {
    const std::string got = fixture_.read(*file_, offset, n);
    const std::string want = offset < model_.size() ? model_.substr(offset, n) : std::string();
    REQUIRE(got.size() == want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      if (got[i] != want[i]) FAIL("byte " << offset + i << " of " << model_.size() << " differs");
    }
  }
  void check_all() { check(0, model_.size() + 10); }

  // Forgets the file and loads what was committed; with a new engine, as a remount does.
  void reload(bool new_engine) {
    REQUIRE(fixture_.commit(*file_, true) == 0);
    REQUIRE(file_->idle());
    file_.reset();
    if (new_engine) {
      fixture_.reopen();
    } else {
      const Status status = fixture_.engine().unload(7);
      REQUIRE_MESSAGE(status.ok(), status.message());
    }
    file_ = fixture_.load(7);
  }

  EngineFixture fixture_;
  std::mt19937_64 random_;
  std::shared_ptr<File> file_;
  std::string model_;
};

}  // namespace

TEST_CASE("a file equals a string under random operations") {
  const uint64_t seed = test_seed();
  for (const int devices : {1, 3}) {
    for (const uint64_t chunk : {uint64_t{64 * 1024}, uint64_t{256 * 1024}}) {
      CAPTURE(seed);
      CAPTURE(devices);
      CAPTURE(chunk);
      ModelRun({devices, chunk, 24}, seed).run(400);
    }
  }
}

TEST_CASE("a chunk larger than a slot lies on one device") {
  EngineFixture fixture({2, 256 * 1024, 32});
  const std::shared_ptr<File> file = fixture.load(1);
  REQUIRE(fixture.engine().place(1, {1024 * 1024, {0, 1}, 1}).ok());
  const auto written = [&](size_t device) {
    return fixture.engine().devices()[device]->statistics().bytes_written;
  };
  const std::string content = random_bytes(1024 * 1024, 1);
  REQUIRE(fixture.write(*file, 0, content) == 0);
  REQUIRE(fixture.commit(*file, false) == 0);
  CHECK(written(0) == 0);
  CHECK(written(1) == 1024 * 1024);
  REQUIRE(fixture.write(*file, 1024 * 1024, content) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  CHECK(written(0) == 1024 * 1024);
  CHECK(written(1) == 1024 * 1024);
  CHECK(fixture.read(*file, 0, 2 * content.size()) == content + content);
}

TEST_CASE("new chunks go elsewhere once nothing is staged") {
  EngineFixture fixture({2, 256 * 1024, 32});
  const std::shared_ptr<File> file = fixture.load(1);
  const std::string content = random_bytes(700'000, 1);
  REQUIRE(fixture.write(*file, 0, content) == 0);
  CHECK(fixture.engine().place(1, {128 * 1024, {0}, 0}).error() == EBUSY);
  REQUIRE(fixture.commit(*file, false) == 0);
  CHECK(fixture.engine().place(1, {100, {0}, 0}).error() == EINVAL);
  CHECK(fixture.engine().place(2, {128 * 1024, {0}, 0}).error() == ENOENT);
  REQUIRE(fixture.engine().place(1, {128 * 1024, {0}, 0}).ok());
  const uint64_t before = fixture.engine().devices()[1]->statistics().bytes_written;
  REQUIRE(fixture.write(*file, 700'000, content) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  CHECK(fixture.engine().devices()[1]->statistics().bytes_written == before);
  CHECK(fixture.read(*file, 0, 2 * content.size()) == content + content);
}

TEST_CASE("a depth keeps chunks back until others are on the device") {
  EngineFixture fixture({1, 256 * 1024, 64});
  const std::shared_ptr<File> file = fixture.load(1);
  const auto most_in_flight = [&](uint32_t depth) {
    file->set_flow({Ack::Early, depth, 0, true});
    REQUIRE(fixture.write(*file, 0, random_bytes(40 * 256 * 1024, depth)) == 0);
    REQUIRE(fixture.commit(*file, false) == 0);
    CHECK(fixture.read(*file, 0, 100) == random_bytes(100, depth));
    return fixture.engine().devices()[0]->statistics().requests_in_flight_max;
  };
  CHECK(most_in_flight(1) == 1);
  // A device may be faster than the copy to staging: then there are never two, until there are.
  uint64_t most = 1;
  for (int round = 0; round < 100 && most == 1; ++round) most = most_in_flight(0);
  CHECK(most > 1);
}

TEST_CASE("a depth that is given up lets chunks go that it kept back") {
  EngineFixture fixture({1, 256 * 1024, 64});
  const std::shared_ptr<File> file = fixture.load(1);
  file->set_flow({Ack::Early, 1, 0, true});
  for (int round = 0; round < 50; ++round) {
    REQUIRE(fixture.write(*file, 0, std::string(10 * 256 * 1024, 'a')) == 0);
    file->set_flow({Ack::Early, static_cast<uint32_t>(round % 2), 0, true});
    REQUIRE(fixture.commit(*file, false) == 0);
  }
}

TEST_CASE("a file holds no more staging buffers than it may, whatever it writes") {
  const uint64_t seed = test_seed();
  CAPTURE(seed);
  EngineFixture fixture({2, 256 * 1024, 64});
  const std::shared_ptr<File> file = fixture.load(1);
  file->set_flow({Ack::Early, 0, 2, true});
  const auto held = [&] { return 64 - fixture.engine().arena().free_count(); };
  std::mt19937_64 random(seed);
  REQUIRE(fixture.write(*file, 0, std::string(20'000, 'i')) == 0);  // not inline any more
  uint64_t most = 0;
  for (int i = 0; i < 300; ++i) {
    // Partly filled chunks, which nothing seals but the limit, and whole ones.
    const uint64_t length = random() % 3 == 0 ? 256 * 1024 : 1 + random() % 1000;
    REQUIRE(fixture.write(*file, random() % 40 * 256 * 1024, std::string(length, 'x')) == 0);
    most = std::max<uint64_t>(most, held());
  }
  CHECK(most <= 4);
  CHECK(most >= 3);
  // One write may need more than that: it gets them when nothing else is held.
  REQUIRE(fixture.write(*file, 100, std::string(6 * 256 * 1024, 'y')) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  CHECK(fixture.read(*file, 100, 6 * 256 * 1024) == std::string(6 * 256 * 1024, 'y'));
}

TEST_CASE("writers, readers and commits at once lose nothing") {
  EngineFixture fixture({2, 256 * 1024, 20});
  const std::shared_ptr<File> file = fixture.load(3);
  constexpr uint64_t kLane = 3 * 1000 * 1000;
  constexpr int kWriters = 3;
  const auto byte_at = [](uint64_t lane, uint64_t i) {
    return static_cast<char>((i * 31 + lane * 7 + i / 251) & 0xff);
  };
  std::atomic<bool> writing{true};
  std::vector<std::thread> threads;
  for (uint64_t lane = 0; lane < kWriters; ++lane) {
    threads.emplace_back([&, lane] {
      std::mt19937_64 random(lane);
      for (uint64_t at = 0; at < kLane;) {
        const uint64_t n = std::min<uint64_t>(kLane - at, 1 + random() % 150000);
        std::string bytes(n, '\0');
        for (uint64_t i = 0; i < n; ++i) bytes[i] = byte_at(lane, at + i);
        CHECK(fixture.write(*file, lane * kLane + at, bytes) == 0);
        CHECK(fixture.read(*file, lane * kLane + at, n) == bytes);
        at += n;
      }
    });
  }
  std::thread committer([&] {
    while (writing) CHECK(fixture.commit(*file, false) == 0);
  });
  for (std::thread& thread : threads) thread.join();
  writing = false;
  committer.join();
  CHECK(fixture.commit(*file, true) == 0);
  CHECK(file->idle());
  for (uint64_t lane = 0; lane < kWriters; ++lane) {
    const std::string got = fixture.read(*file, lane * kLane, kLane);
    REQUIRE(got.size() == kLane);
    for (uint64_t i = 0; i < kLane; ++i) {
      if (got[i] != byte_at(lane, i)) FAIL("lane " << lane << " byte " << i);
    }
  }
}

TEST_CASE("hundreds of files with partly filled chunks share little staging") {
  EngineFixture fixture({2, 64 * 1024, 16});
  std::vector<std::shared_ptr<File>> files;
  for (uint64_t ino = 1; ino <= 300; ++ino) {
    files.push_back(fixture.load(ino));
    REQUIRE(fixture.write(*files.back(), 0, std::string(20000, 'a')) == 0);
  }
  for (const auto& file : files) {
    REQUIRE(fixture.write(*file, 20000, std::string(20000, 'b')) == 0);
  }
  for (const auto& file : files) {
    REQUIRE(fixture.commit(*file, true) == 0);
    CHECK(fixture.read(*file, 0, 50000) == std::string(20000, 'a') + std::string(20000, 'b'));
  }
}

TEST_CASE("a write over several chunks gets its slots although some are free") {
  for (uint64_t open = 8; open <= 16; ++open) {
    CAPTURE(open);
    EngineFixture fixture({2, 256 * 1024, 16});
    for (uint64_t ino = 1; ino <= open; ++ino) {
      REQUIRE(fixture.write(*fixture.load(ino), 0, std::string(20000, 'a')) == 0);
    }
    const std::shared_ptr<File> file = fixture.load(100);
    REQUIRE(fixture.write(*file, 0, "inline") == 0);
    const std::string wide(1024 * 1024, 'w');
    REQUIRE(fixture.write(*file, 200'000, wide) == 0);
    CHECK(fixture.read(*file, 200'000, wide.size()) == wide);
    CHECK(fixture.read(*file, 0, 6) == "inline");
  }
}

TEST_CASE("a commit that waits for another operation holds nothing written meanwhile") {
  constexpr uint64_t chunk = 256 * 1024;
  for (int round = 0; round < 20; ++round) {
    CAPTURE(round);
    EngineFixture fixture;
    std::shared_ptr<File> file = fixture.load(1);
    REQUIRE(fixture.write(*file, 0, std::string(4 * chunk - 100, 'o')) == 0);
    Delivery<int> punched;
    file->punch(0, kBlockBytes, [&](int error) { punched.put(error); });
    Delivery<SnapshotData> drained;
    file->drain(false, [&](int error, SnapshotData snapshot) {
      CHECK(error == 0);
      drained.put(std::move(snapshot));
    });
    REQUIRE(fixture.write(*file, 4 * chunk - 100, std::string(100 + chunk, 'n')) == 0);
    const SnapshotData snapshot = drained.wait();
    REQUIRE(punched.wait() == 0);
    fixture.make_current(*file, snapshot);
    // The rest is lost, as when the server dies; what lies behind the end reads as zeros.
    file.reset();
    fixture.reopen();
    file = fixture.load(1);
    REQUIRE(fixture.truncate(*file, snapshot.size + 2 * chunk) == 0);
    CHECK(fixture.read(*file, snapshot.size, chunk) == std::string(chunk, '\0'));
  }
}

TEST_CASE("a small file stays inline until it outgrows the catalog") {
  EngineFixture fixture;
  const std::shared_ptr<File> file = fixture.load(5);
  REQUIRE(fixture.write(*file, 100, "small") == 0);
  SnapshotData seen;
  Delivery<int> done;
  file->drain(true, [&](int error, SnapshotData data) {
    seen = std::move(data);
    done.put(error);
  });
  REQUIRE(done.wait() == 0);
  CHECK(seen.inline_content == std::string(100, '\0') + "small");
  CHECK(seen.objects.empty());
  file->committed(seen.sequence);
  CHECK(file->idle());
  REQUIRE(fixture.write(*file, kInlineBytesMax, "x") == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  CHECK(fixture.read(*file, 100, 5) == "small");
  CHECK(fixture.read(*file, kInlineBytesMax, 5) == "x");
}

TEST_CASE("many small pieces of an inline file stay inline") {
  EngineFixture fixture;
  const std::shared_ptr<File> file = fixture.load(6);
  std::string model(kInlineBytesMax, '\0');
  for (uint64_t at = 0; at + 37 < kInlineBytesMax; at += 2 * 37) {
    const std::string piece(37, static_cast<char>('a' + at % 26));
    REQUIRE(fixture.write(*file, at, piece) == 0);
    model.replace(at, piece.size(), piece);
    if (at % 5 == 0) REQUIRE(fixture.commit(*file, false) == 0);
  }
  const uint64_t size = file->attributes().size;
  CHECK(fixture.read(*file, 0, size) == model.substr(0, size));
  REQUIRE(fixture.commit(*file, true) == 0);
  CHECK(file->attributes().allocated_bytes <= kInlineBytesMax);
  CHECK(fixture.read(*file, 0, size) == model.substr(0, size));
}

TEST_CASE("bytes cut off by a truncation do not come back") {
  EngineFixture fixture;
  const std::shared_ptr<File> file = fixture.load(8);
  REQUIRE(fixture.write(*file, 0, std::string(100000, 'x')) == 0);
  REQUIRE(fixture.commit(*file, true) == 0);
  REQUIRE(fixture.truncate(*file, 70000) == 0);
  REQUIRE(fixture.truncate(*file, 100000) == 0);
  CHECK(fixture.read(*file, 0, 100000) == std::string(70000, 'x') + std::string(30000, '\0'));
}

TEST_CASE("a small file equals a string under small operations") {
  const uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  EngineFixture fixture;
  const std::shared_ptr<File> file = fixture.load(10);
  std::string model;
  for (int step = 0; step < 600; ++step) {
    const uint64_t at = random() % kInlineBytesMax;
    const uint64_t n = std::min<uint64_t>(1 + random() % 500, kInlineBytesMax - at);
    switch (random() % 8) {
      case 0:
      case 1: {
        const uint64_t size = random() % 3 == 0 ? at : std::min(at, uint64_t{model.size()});
        REQUIRE(fixture.truncate(*file, size) == 0);
        model.resize(size);
        break;
      }
      case 2:
        REQUIRE(fixture.punch(*file, at, n) == 0);
        for (uint64_t i = at; i < std::min<uint64_t>(at + n, model.size()); ++i) model[i] = '\0';
        break;
      case 3:
        REQUIRE(fixture.commit(*file, false) == 0);
        break;
      default: {
        const std::string bytes = random_bytes(n, random());
        REQUIRE(fixture.write(*file, at, bytes) == 0);
        if (model.size() < at + n) model.resize(at + n);
        model.replace(at, n, bytes);
      }
    }
    REQUIRE(fixture.read(*file, 0, kInlineBytesMax) == model);
  }
  REQUIRE(fixture.commit(*file, true) == 0);
  fixture.reopen();
  CHECK(fixture.read(*fixture.load(10), 0, kInlineBytesMax) == model);
}

// A file of which the kernel may have pages, and what is to be in it.
class FileWithPages {
 public:
  explicit FileWithPages(uint64_t size) : model_(size, 'o') {
    REQUIRE(fixture_.write(file(), 0, model_) == 0);
  }
  File& file() { return *file_; }
  // Writes in two pieces; returns the overwrite's number.
  uint64_t write(uint64_t from, uint64_t to, char filler, Source source) {
    std::string bytes(to - from, filler);
    Payload payload;
    payload.add(bytes.data(), bytes.size() / 3);
    payload.add(bytes.data() + bytes.size() / 3, bytes.size() - bytes.size() / 3);
    Delivery<Outcome> done;
    const auto attempt = [&] {
      const Outcome outcome = file().write(from, bytes.size(), payload, nullptr, nullptr, source);
      if (outcome.progress == Progress::Wait) return Retry::Waiting;
      done.put(outcome);
      return Retry::Done;
    };
    if (attempt() != Retry::Done) fixture_.engine().park(attempt);
    const Outcome outcome = done.wait();
    REQUIRE(outcome.error == 0);
    return outcome.overwrite;
  }
  std::string read(uint64_t from, uint64_t to, bool for_page) {
    return fixture_.read(file(), from, to - from, for_page);
  }
  void expect(uint64_t from, uint64_t to, char filler) {
    model_.replace(from, to - from, to - from, filler);
  }
  bool is_as_expected() { return read(0, model_.size(), false) == model_; }

 private:
  EngineFixture fixture_;
  std::shared_ptr<File> file_ = fixture_.load(1);
  std::string model_;
};

TEST_CASE("bytes of a page are left out where a caller wrote since it was read") {
  for (const uint64_t size : {12'000ULL, 700'000ULL}) {  // inline, and over three chunks
    CAPTURE(size);
    const uint64_t half = size / 2;
    FileWithPages pages(size);
    CHECK(pages.write(0, 10, 'a', Source::Caller) == 0);  // the kernel has none
    pages.file().keep_pages();
    CHECK(pages.write(0, size, 'b', Source::Page) == 0);
    const uint64_t first = pages.write(100, 200, 'c', Source::Caller);
    const uint64_t second = pages.write(150, half, 'd', Source::Caller);
    const uint64_t third = pages.write(half + 50, half + 51, 'e', Source::Caller);
    CHECK((first != 0 && second != 0 && third != 0));
    CHECK(pages.write(0, size, 'f', Source::Page) == 0);
    pages.expect(0, size, 'f');
    pages.expect(100, 200, 'c');
    pages.expect(150, half, 'd');
    pages.expect(half + 50, half + 51, 'e');
    CHECK(pages.is_as_expected());

    pages.file().pages_dropped(second);
    pages.write(50, size - 1, 'g', Source::Page);
    pages.expect(50, 100, 'g');
    pages.expect(200, half + 50, 'g');
    pages.expect(half + 51, size - 1, 'g');
    CHECK(pages.is_as_expected());

    pages.file().pages_dropped(first);
    pages.file().pages_dropped(third);
    pages.file().keep_no_pages();
    pages.write(0, size, 'h', Source::Page);
    pages.expect(0, size, 'h');
    CHECK(pages.write(10, 20, 'i', Source::Caller) == 0);
    pages.expect(10, 20, 'i');
    CHECK(pages.is_as_expected());
  }
}

TEST_CASE("bytes that are read anew for a page are not older than what a caller wrote") {
  for (const uint64_t size : {12'000ULL, 700'000ULL}) {
    CAPTURE(size);
    FileWithPages pages(size);
    pages.file().keep_pages();
    const uint64_t first = pages.write(100, 8000, 'a', Source::Caller);
    const uint64_t second = pages.write(5000, 9000, 'b', Source::Caller);
    CHECK(pages.read(6000, 7000, false) == std::string(1000, 'b'));  // for a caller
    CHECK(pages.read(4096, 8192, true).substr(904) == std::string(3192, 'b'));
    pages.write(0, 12'000, 'c', Source::Page);
    pages.expect(0, 100, 'c');
    pages.expect(100, 4096, 'a');
    pages.expect(4096, 8192, 'c');
    pages.expect(8192, 9000, 'b');
    pages.expect(9000, 12'000, 'c');
    CHECK(pages.is_as_expected());
    CHECK(pages.file().is_being_overwritten());
    pages.file().pages_dropped(first);
    pages.file().pages_dropped(second);
    CHECK_FALSE(pages.file().is_being_overwritten());
    pages.write(0, 12'000, 'd', Source::Page);
    pages.expect(0, 12'000, 'd');
    CHECK(pages.is_as_expected());
  }
}

TEST_CASE("what cannot be in a file is refused, and changes nothing") {
  EngineFixture fixture;
  const std::shared_ptr<File> file = fixture.load(11);
  REQUIRE(fixture.write(*file, 0, "content") == 0);
  for (const uint64_t offset : {kFileBytesMax, kFileBytesMax + 1, UINT64_MAX}) {
    CHECK(fixture.write(*file, offset, "x") == EFBIG);
    CHECK(fixture.allocate(*file, offset, 1, false) == EFBIG);
  }
  CHECK(fixture.truncate(*file, kFileBytesMax + 1) == EFBIG);
  CHECK(fixture.read(*file, 0, 100) == "content");
}

TEST_CASE("seek finds data and holes") {
  EngineFixture fixture;
  const std::shared_ptr<File> file = fixture.load(9);
  REQUIRE(fixture.write(*file, 5 * kBlockBytes, std::string(10, 'x')) == 0);
  REQUIRE(fixture.truncate(*file, 20 * kBlockBytes) == 0);
  for (const bool committed : {false, true}) {
    if (committed) REQUIRE(fixture.commit(*file, true) == 0);
    CHECK(file->seek(0, true) == 5 * kBlockBytes);
    CHECK(file->seek(0, false) == 0);
    CHECK(file->seek(5 * kBlockBytes + 3, true) == 5 * kBlockBytes + 3);
    CHECK(file->seek(5 * kBlockBytes, false) == 6 * kBlockBytes);
    CHECK(file->seek(6 * kBlockBytes, true) == -ENXIO);
    CHECK(file->seek(20 * kBlockBytes, false) == -ENXIO);
  }
}

}  // namespace fpfs::testing
