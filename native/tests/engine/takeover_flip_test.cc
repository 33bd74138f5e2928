// A wrong bit in what a process left in its arena: every file has what was acknowledged, or what
// was committed before and that is told.
//
// FPFS_FLIPS is how many bits are tried, FPFS_SEED the first seed; both are printed.
#include <doctest/doctest.h>
#include <fcntl.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/file_descriptor.h"
#include "support/engine_fixture.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kFiles = 4;
constexpr uint64_t kInoFirst = 4;
constexpr uint64_t kHandleFirst = 20;
constexpr uint64_t kFlipsAState = 100;

struct Model {
  std::string committed;
  std::string acknowledged;
};

void overwrite(std::string* content, uint64_t at, const std::string& bytes) {
  if (content->size() < at + bytes.size()) content->resize(at + bytes.size());
  content->replace(at, bytes.size(), bytes);
}

// A copy with the holes of the original: an arena is mostly that.
void copy_sparse(const std::string& from, const std::string& to) {
  const FileDescriptor source(::open(from.c_str(), O_RDONLY | O_CLOEXEC));
  const FileDescriptor target(::open(to.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  REQUIRE((source && target));
  const off_t size = ::lseek(source.get(), 0, SEEK_END);
  REQUIRE(::ftruncate(target.get(), size) == 0);
  std::string bytes(1 << 20, '\0');
  for (off_t at = ::lseek(source.get(), 0, SEEK_DATA); at >= 0;) {
    const off_t end = ::lseek(source.get(), at, SEEK_HOLE);
    while (at < end) {
      const auto part = std::min<size_t>(bytes.size(), static_cast<size_t>(end - at));
      const ssize_t n = ::pread(source.get(), bytes.data(), part, at);
      REQUIRE(n > 0);
      REQUIRE(::pwrite(target.get(), bytes.data(), static_cast<size_t>(n), at) == n);
      at += n;
    }
    at = ::lseek(source.get(), at, SEEK_DATA);
  }
}

void copy_all(const std::string& from, const std::string& to) {
  for (const char* device : {"/0", "/1"}) {
    std::filesystem::copy(from + device, to + device, std::filesystem::copy_options::recursive);
  }
  copy_sparse(from + "/arena", to + "/arena");
}

// Files with changes that are acknowledged and not committed, in every way that the arena can hold
// them, and the arena as a kill leaves it.
class State {
 public:
  explicit State(uint64_t seed) : random_(seed), fixture_(options(false)) {
    for (uint64_t ino = kInoFirst; ino < kInoFirst + kFiles; ++ino) make(ino);
    catalog_ = fixture_.catalog();
    // The copy is of one moment only if nothing is under way: full chunks are written at once.
    fixture_.wait_idle();
    copy_all(directory_.path(), left_.path());
    find_tables();
  }

  // Another process's engine over a copy of what is left, of which one bit is wrong.
  struct Flip {
    uint64_t at;
    unsigned bit;
  };
  Flip pick() {
    const auto& [begin, size] = tables_[random_() % tables_.size()];
    std::string content(size, '\0');
    std::ifstream arena(left_.path() + "/arena", std::ios::binary);
    arena.seekg(static_cast<std::streamoff>(begin));
    arena.read(content.data(), static_cast<std::streamsize>(size));
    std::vector<uint64_t> used;
    for (uint64_t i = 0; i < size; ++i) {
      if (content[i] != '\0') used.push_back(i);
    }
    const bool any = used.empty() || random_() % 10 == 0;
    return {begin + (any ? random_() % size : used[random_() % used.size()]),
            static_cast<unsigned>(random_() % 8)};
  }

  const std::map<uint64_t, Model>& models() const { return models_; }
  std::map<uint64_t, Committed>& catalog() { return catalog_; }
  std::string left() const { return left_.path(); }

  static EngineOptions options_at(const std::string& folder, bool take_over) {
    EngineOptions options;
    options.paths = {folder + "/0", folder + "/1"};
    options.arena = folder + "/arena";
    options.take_over = take_over;
    options.mount_count = take_over ? 1 : 0;
    options.slots = 16;
    return options;
  }

 private:
  EngineOptions options(bool take_over) const { return options_at(directory_.path(), take_over); }

  std::string some_bytes(uint64_t most) { return random_bytes(1 + random_() % most, random_()); }

  void write(File& file, std::string* content, uint64_t at, const std::string& bytes) {
    REQUIRE(fixture_.write(file, at, bytes) == 0);
    overwrite(content, at, bytes);
  }

  void make(uint64_t ino) {
    Model& model = models_[ino];
    const auto file = fixture_.load(ino);
    const uint64_t most = ino == kInoFirst ? 8'000 : 600'000;  // the first one stays inline
    write(*file, &model.committed, 0, some_bytes(most));
    REQUIRE(fixture_.commit(*file, false) == 0);
    REQUIRE(fixture_.engine().open_handle(kHandleFirst + ino, ino, O_RDWR, 3).ok());
    std::string& now = model.acknowledged = model.committed;
    for (int change = 0; change < 3; ++change) {
      switch (random_() % 4) {
        case 0: {
          const uint64_t size = random_() % (now.size() + 1);
          REQUIRE(fixture_.truncate(*file, size) == 0);
          now.resize(size);
          break;
        }
        case 1: {  // on a device, and in the journal alone; a version that was closed, maybe
          write(*file, &now, random_() % most, some_bytes(most));
          if (random_() % 2 == 0) file->closed(0);
          SnapshotData snapshot;
          REQUIRE(fixture_.drain(*file, false, &snapshot) == 0);
          break;
        }
        default:
          write(*file, &now, random_() % most, some_bytes(most));
      }
    }
  }

  void find_tables() {
    arena::Header header{};
    std::ifstream arena(left_.path() + "/arena", std::ios::binary);
    arena.read(reinterpret_cast<char*>(&header), sizeof header);
    tables_.emplace_back(0, sizeof header);
    for (const arena::TableEntry& table : header.tables) {
      constexpr uint64_t kJournalBytes = 4096;
      if (table.kind == arena::Table::None) continue;
      const bool journal = table.kind == arena::Table::Journal;
      tables_.emplace_back(table.offset,
                           journal ? kJournalBytes : table.record_bytes * table.count);
    }
  }

  std::mt19937_64 random_;
  TempDirectory directory_;
  TempDirectory left_;
  EngineFixture fixture_;
  std::map<uint64_t, Model> models_;
  std::map<uint64_t, Committed> catalog_;
  std::vector<std::pair<uint64_t, uint64_t>> tables_;  // where, and how large
};

struct Totals {
  uint64_t flips = 0;
  uint64_t refused = 0;
  uint64_t told = 0;
  uint64_t lost = 0;  // files
};

// Flips a bit of a file, which twice is not at all.
void flip(const std::string& path, const State::Flip& flip) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(static_cast<std::streamoff>(flip.at));
  const auto byte = static_cast<char>(file.get() ^ (1 << flip.bit));
  file.seekp(static_cast<std::streamoff>(flip.at));
  file.put(byte);
  REQUIRE(file.flush().good());
}

bool is_refused(const EngineOptions& options) {
  Remains remains;
  std::string warning;
  const Arena::Config config{options.arena, "fixture", 0, 0};
  const Status status = Arena::attach(config, -1, &remains, &warning).status();
  if (!status.ok()) CHECK((status.error() == ESTALE || status.error() == ENODATA));
  return !status.ok();
}

void check_file(EngineFixture& fixture, const Engine::Left& left, uint64_t ino, const Model& model,
                Totals* totals) {
  const auto file = fixture.load(ino);
  const auto parts = std::count_if(left.changed.begin(), left.changed.end(),
                                   [&](const auto& each) { return each.ino == ino; });
  const bool changed = parts != 0;
  const bool suspect = left.all_suspect || std::find(left.suspects.begin(), left.suspects.end(),
                                                     ino) != left.suspects.end();
  if (changed && suspect) fixture.engine().abandon(ino);
  if (changed && !suspect) REQUIRE(fixture.recover(ino) == 0);
  if (parts == 2 && !suspect) {
    SnapshotData closed;
    REQUIRE(fixture.drain(*file, false, &closed) == 0);
    REQUIRE(fixture.recover_later(ino) == 0);
  }
  totals->lost += suspect ? 1 : 0;
  const std::string& expected = suspect ? model.committed : model.acknowledged;
  const std::string found = fixture.read(*file, 0, expected.size() + 100);
  CHECK_MESSAGE(found == expected, "inode " << ino << (suspect ? " is told to be lost" : ""));
}

// A head that is wrong is refused, a record that is wrong is told of; the rest holds.
void try_flip(State& state, uint64_t seed, Totals* totals) {
  const State::Flip wrong = state.pick();
  INFO("FPFS_SEED=" << seed << " byte " << wrong.at << " bit " << wrong.bit);
  const TempDirectory copy;
  copy_all(state.left(), copy.path());
  const EngineOptions options = State::options_at(copy.path(), true);
  flip(options.arena, wrong);
  ++totals->flips;
  if (wrong.at < sizeof(arena::Header) && is_refused(options)) {
    ++totals->refused;
    return;
  }
  EngineFixture fixture(options);
  fixture.catalog() = state.catalog();
  const Engine::Left left = fixture.engine().left();
  totals->told += left.all_suspect || left.handles_damaged || !left.suspects.empty() ? 1 : 0;
  CHECK((left.handles.size() == kFiles || left.handles_damaged));
  for (const auto& [ino, model] : state.models()) check_file(fixture, left, ino, model, totals);
}

}  // namespace

TEST_CASE("takeover: a wrong bit in an arena is told of, or changes nothing") {
  const char* given = std::getenv("FPFS_FLIPS");
  const uint64_t flips = given != nullptr ? std::stoull(given) : 60;
  const uint64_t seed = test_seed();
  Totals totals;
  for (uint64_t n = 0; totals.flips < flips; ++n) {
    State state(seed + n);
    for (uint64_t i = 0; i < kFlipsAState && totals.flips < flips; ++i) {
      try_flip(state, seed + n, &totals);
    }
  }
  MESSAGE(totals.flips << " bits from seed " << seed << ": " << totals.refused << " refused, "
                       << totals.told << " told of, " << totals.lost << " files lost and told of");
}

}  // namespace fpfs::testing
