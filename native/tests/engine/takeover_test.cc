// A process that is killed at a random moment, and another that takes its arena over.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "base/crc32c.h"
#include "support/damage.h"

namespace fpfs::testing {
namespace {

using Part = Engine::Left::Part;

constexpr uint64_t kIno = 7;
constexpr uint64_t kFileBytes = 3 * 1024 * 1024;
constexpr uint64_t kChunkBytes = 256 * 1024;

enum class Kind { Write, Truncate, Punch, Allocate, Close, Commit };

struct Operation {
  Kind kind = Kind::Write;
  uint64_t offset = 0;
  uint64_t length = 0;  // the size, of a truncation
  uint64_t seed = 0;
};

// The same for the same seed. A third of the time the file stays small enough to be inline.
std::vector<Operation> make_operations(uint64_t seed, size_t count) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t bound) { return random() % bound; };
  std::vector<Operation> operations;
  const uint64_t limit = below(3) == 0 ? kInlineBytesMax : kFileBytes;
  for (size_t i = 0; i < count; ++i) {
    Operation operation;
    const uint64_t kind = below(100);
    operation.kind = kind < 60   ? Kind::Write
                     : kind < 72 ? Kind::Truncate
                     : kind < 80 ? Kind::Punch
                     : kind < 86 ? Kind::Allocate
                     : kind < 92 ? Kind::Close
                                 : Kind::Commit;
    operation.offset = below(limit);
    const uint64_t most = std::min<uint64_t>(limit - operation.offset, 700'000);
    operation.length = 1 + below(most);
    if (below(4) == 0) operation.offset = operation.offset / kBlockBytes * kBlockBytes;
    if (operation.kind == Kind::Truncate) operation.length = below(4) == 0 ? 0 : below(limit);
    operation.seed = random();
    operations.push_back(operation);
  }
  return operations;
}

void apply(const Operation& operation, std::string* model) {
  const uint64_t end = operation.offset + operation.length;
  switch (operation.kind) {
    case Kind::Write:
      if (model->size() < end) model->resize(end);
      model->replace(operation.offset, operation.length,
                     random_bytes(operation.length, operation.seed));
      break;
    case Kind::Truncate:
      model->resize(operation.length);
      break;
    case Kind::Punch:
      for (uint64_t at = operation.offset; at < std::min<uint64_t>(end, model->size()); ++at) {
        (*model)[at] = '\0';
      }
      break;
    case Kind::Allocate:
      if (model->size() < end) model->resize(end);
      break;
    case Kind::Close:
    case Kind::Commit:
      break;
  }
}

// The catalog's part in a file, replaced whole.
void save_catalog(const Committed& committed, const std::string& path) {
  {
    std::ofstream out(path + ".new", std::ios::binary);
    const auto put = [&](const std::string& bytes) {
      const uint64_t size = bytes.size();
      out.write(reinterpret_cast<const char*>(&size), sizeof size);
      out.write(bytes.data(), static_cast<std::streamsize>(size));
    };
    put(std::to_string(committed.size));
    put(committed.content.has_value() ? "inline" : "");
    put(committed.content.value_or(""));
    for (const auto& [index, blob] : committed.segments) {
      put(std::to_string(index));
      put(blob);
    }
  }
  std::filesystem::rename(path + ".new", path);
}

Committed load_catalog(const std::string& path) {
  Committed committed;
  std::ifstream in(path, std::ios::binary);
  const auto get = [&](std::string* bytes) {
    uint64_t size = 0;
    if (!in.read(reinterpret_cast<char*>(&size), sizeof size)) return false;
    bytes->resize(size);
    return bool(in.read(bytes->data(), static_cast<std::streamsize>(size)));
  };
  std::string text;
  if (!get(&text)) return committed;
  committed.size = std::stoull(text);
  REQUIRE(get(&text));
  const bool is_inline = text == "inline";
  REQUIRE(get(&text));
  if (is_inline) committed.content = text;
  std::string blob;
  while (get(&text) && get(&blob))
    committed.segments[static_cast<uint32_t>(std::stoul(text))] = blob;
  return committed;
}

struct Site {
  TempDirectory directory;
  EngineOptions options(bool take_over, uint64_t mount_count) const {
    EngineOptions options;
    options.paths = {directory.path() + "/0", directory.path() + "/1"};
    options.arena = directory.path() + "/arena";
    options.take_over = take_over;
    options.mount_count = mount_count;
    return options;
  }
  std::string catalog() const { return directory.path() + "/catalog"; }
};

// One that works on the file: with versions that were closed and are on their way.
class Worker {
 public:
  Worker(EngineFixture& fixture, std::shared_ptr<File> file, const Site& place)
      : fixture_(fixture), file_(std::move(file)), place_(place) {}

  void perform(const Operation& operation) {
    int error = 0;
    switch (operation.kind) {
      case Kind::Write:
        error = fixture_.write(*file_, operation.offset,
                               random_bytes(operation.length, operation.seed));
        break;
      case Kind::Truncate:
        error = fixture_.truncate(*file_, operation.length);
        break;
      case Kind::Punch:
        error = fixture_.punch(*file_, operation.offset, operation.length);
        break;
      case Kind::Allocate:
        error = fixture_.allocate(*file_, operation.offset, operation.length, false);
        break;
      case Kind::Close:
        finish();
        file_->closed(0);
        begin();
        break;
      case Kind::Commit:
        commit();
        break;
    }
    REQUIRE(error == 0);
  }
  void commit() {
    finish();
    begin();
    finish();
  }
  void begin() {
    drained_ = std::make_shared<Delivery<int>>();
    file_->drain(true, [this, drained = drained_](int error, SnapshotData data) {
      snapshot_ = std::move(data);
      drained->put(error);
    });
  }
  void wait() {
    REQUIRE(drained_->wait() == 0);
    drained_.reset();
    is_drained_ = true;
  }
  // The version that is on its way becomes current.
  void finish() {
    if (drained_ != nullptr) wait();
    if (!is_drained_) return;
    is_drained_ = false;
    Committed after = fixture_.catalog()[kIno];
    after.take(snapshot_);
    save_catalog(after, place_.catalog());
    fixture_.make_current(*file_, snapshot_);
  }

 private:
  EngineFixture& fixture_;
  const std::shared_ptr<File> file_;
  const Site& place_;
  std::shared_ptr<Delivery<int>> drained_;
  bool is_drained_ = false;
  SnapshotData snapshot_;
};

// Runs in the child: says over the pipe which operation has ended, one byte each.
[[noreturn]] void work(const Site& place, const std::vector<Operation>& operations, int pipe) {
  // What it makes for itself, it will not remove.
  ::setenv("TMPDIR", place.directory.path().c_str(), 1);
  EngineFixture fixture(place.options(false, 0));
  Worker worker(fixture, fixture.load(kIno), place);
  if (::write(pipe, "x", 1) != 1) ::_exit(2);  // there is an arena
  for (const Operation& operation : operations) {
    worker.perform(operation);
    if (::write(pipe, "x", 1) != 1) break;
  }
  ::pause();
  ::_exit(1);
}

// Lets a child work and kills it; how many operations had ended then.
size_t work_and_die(const Site& place, const std::vector<Operation>& operations, uint64_t seed) {
  int pipe[2];
  REQUIRE(::pipe(pipe) == 0);
  const pid_t pid = ::fork();
  REQUIRE(pid >= 0);
  if (pid == 0) work(place, operations, pipe[1]);
  ::close(pipe[1]);
  const size_t most = seed % operations.size();
  size_t ended = 0;
  char byte = 0;
  REQUIRE(::read(pipe[0], &byte, 1) == 1);
  while (ended < most && ::read(pipe[0], &byte, 1) == 1) ++ended;
  std::this_thread::sleep_for(std::chrono::microseconds(seed / 1024 % 3000));
  REQUIRE(::kill(pid, SIGKILL) == 0);
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  REQUIRE(WIFSIGNALED(status));
  REQUIRE(WTERMSIG(status) == SIGKILL);
  while (::read(pipe[0], &byte, 1) == 1) ++ended;
  ::close(pipe[0]);
  return ended;
}

void check_content(EngineFixture& fixture, File& file, const std::string& model) {
  CHECK(file.attributes().size == model.size());
  const std::string found = fixture.read(file, 0, kFileBytes + 1);
  CHECK(found.size() == model.size());
  const auto differ = std::mismatch(found.begin(), found.end(), model.begin(), model.end());
  const auto at = static_cast<size_t>(differ.first - found.begin());
  CHECK_MESSAGE(at == model.size(), "differs at " << at);
}

void kill_and_take_over(uint64_t seed, int* parted) {
  INFO("FPFS_SEED=" << seed);
  const Site place;
  const std::vector<Operation> operations = make_operations(seed, 30);
  const size_t ended = work_and_die(place, operations, std::mt19937_64(seed)());
  std::string model;
  std::string closed;
  for (size_t i = 0; i < ended; ++i) {
    apply(operations[i], &model);
    if (operations[i].kind == Kind::Close) closed = model;
  }

  EngineFixture fixture(place.options(true, 1));
  fixture.catalog()[kIno] = load_catalog(place.catalog());
  const auto file = fixture.load(kIno);
  {
    Worker worker(fixture, file, place);
    const Engine::Left left = fixture.engine().left();
    if (!left.changed.empty()) {
      REQUIRE(left.changed[0].ino == kIno);
      REQUIRE(fixture.recover(kIno) == 0);
    }
    if (left.changed.size() > 1) {
      REQUIRE(left.changed.size() == 2);
      CHECK(left.changed[0].part == Part::Closed);
      CHECK(left.changed[1].part == Part::Later);
      ++*parted;
      check_content(fixture, *file, closed);
      worker.begin();
      worker.wait();
      REQUIRE(fixture.recover_later(kIno) == 0);
      worker.finish();
      check_committed(fixture, kIno);
    }
    // The kernel sends again what was not answered.
    if (ended < operations.size()) {
      apply(operations[ended], &model);
      worker.perform(operations[ended]);
    }
    check_content(fixture, *file, model);
    // Nor is it lost by growing, or by what is given back at the next commit.
    REQUIRE(fixture.truncate(*file, kFileBytes) == 0);
    model.resize(kFileBytes);
    check_content(fixture, *file, model);
    worker.commit();
    check_content(fixture, *file, model);
    check_committed(fixture, kIno);
  }
  fixture.reopen_without_arena();
  const auto again = fixture.load(kIno);
  check_content(fixture, *again, model);
}

// Makes an arena what it was before the last record of a slot of the inode was written.
void take_back_last_record(const std::string& path, uint64_t ino) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  const auto load = [&](uint64_t at, auto* to) {
    file.seekg(static_cast<std::streamoff>(at));
    REQUIRE(bool(file.read(reinterpret_cast<char*>(to), sizeof *to)));
  };
  const auto save = [&](uint64_t at, const auto& from) {
    file.seekp(static_cast<std::streamoff>(at));
    REQUIRE(bool(file.write(reinterpret_cast<const char*>(&from), sizeof from)));
  };
  arena::Header header{};
  load(0, &header);
  REQUIRE(header.tables[0].kind == arena::Table::Slots);
  REQUIRE(header.tables[5].kind == arena::Table::Published);
  for (uint64_t slot = 0; slot < header.slot_count; ++slot) {
    const uint64_t at = header.tables[0].offset + slot * 2 * sizeof(arena::SlotRecord);
    arena::SlotRecord records[2];
    load(at, &records);
    const size_t last = records[1].sequence > records[0].sequence ? 1 : 0;
    const arena::SlotRecord& before = records[last ^ 1];
    if (before.ino != ino) continue;
    REQUIRE(records[last].state == arena::SlotState::Free);
    save(at + last * sizeof(arena::SlotRecord), arena::SlotRecord{});
    save(header.tables[5].offset + slot * sizeof(arena::PublishedWord),
         arena::published_word(before.sequence));
    return;
  }
  FAIL("no slot held bytes of the inode");
}

// An engine that ended without a word, and the one that takes its arena over.
struct Succession {
  Site place;
  std::unique_ptr<EngineFixture> first = std::make_unique<EngineFixture>(place.options(false, 0));
  std::unique_ptr<EngineFixture> second;
  uint64_t mounts = 0;

  // The first one's arena as it is now, or as `change` leaves it. Nothing is under way but what
  // that ends.
  std::shared_ptr<File> attach(const std::function<void(const std::string& arena)>& change =
                                   [](const auto&) {}) {
    EngineOptions options = place.options(true, ++mounts);
    const Committed committed = first->catalog()[kIno];
    const std::string left = options.arena + "-left" + std::to_string(mounts);
    std::filesystem::copy_file(first->options().arena, left);
    change(left);
    first.reset();
    options.arena = left;
    second = std::make_unique<EngineFixture>(options);
    second->catalog()[kIno] = committed;
    return second->load(kIno);
  }
  // The same again, of what the second one has done.
  std::shared_ptr<File> attach_again() {
    first = std::move(second);
    return attach();
  }
  std::shared_ptr<File> take_over(const std::function<void(const std::string& arena)>& change =
                                      [](const auto&) {}) {
    const auto file = attach(change);
    REQUIRE(second->engine().left().changed.size() == 1);
    REQUIRE(second->engine().left().changed[0].ino == kIno);
    REQUIRE(second->recover(kIno) == 0);
    return file;
  }
  // Until the second one's devices have given back what waited for earlier reads.
  void give_back() const {
    REQUIRE(second->wait_for(second->engine().remove_objects({})) == 0);
    second->wait_idle();
  }
  // A truncation that was entered and not carried out any further.
  void note_truncation(uint64_t size) const {
    const FileState state{kIno, size, 1, 1, false};
    REQUIRE(first->engine().arena().journal().note(state, arena::Change::Truncate).ok());
  }
};

}  // namespace

TEST_CASE("takeover: what was taken over and never served is left to the next one") {
  Succession succession;
  const auto file = succession.first->load(kIno);
  const std::string model = random_bytes(2 * kChunkBytes + 100, 1);
  REQUIRE(succession.first->write(*file, 0, model) == 0);
  SUBCASE("as it was") { succession.attach(); }
  SUBCASE("and brought back already") { succession.take_over(); }
  succession.second->engine().close();  // it found no space for something, say
  const auto taken = succession.attach_again();
  REQUIRE(succession.second->recover(kIno) == 0);
  CHECK(succession.second->read(*taken, 0, kFileBytes) == model);
}

TEST_CASE("takeover: an object that was given back is no error of its device") {
  Succession succession;
  const auto file = succession.first->load(kIno);
  REQUIRE(succession.first->write(*file, 0, random_bytes(4 * kChunkBytes, 1)) == 0);
  REQUIRE(succession.first->truncate(*file, 0) == 0);
  const std::string model = random_bytes(2 * kChunkBytes, 2);
  REQUIRE(succession.first->write(*file, 0, model) == 0);
  REQUIRE(succession.first->punch(*file, 8 * kChunkBytes, kChunkBytes) == 0);
  const auto taken = succession.take_over();
  REQUIRE(succession.second->commit(*taken, true) == 0);
  succession.give_back();
  for (const auto& device : succession.second->engine().devices()) {
    CHECK(device->statistics().errors == 0);
  }
  CHECK(succession.second->read(*taken, 0, kFileBytes) == model);
}

TEST_CASE("takeover: space that a transfer took and nobody has noted comes back") {
  Succession succession;
  const auto file = succession.first->load(kIno);
  std::string model = random_bytes(8 * kChunkBytes, 1);
  REQUIRE(succession.first->write(*file, 0, model) == 0);
  REQUIRE(succession.first->commit(*file, false) == 0);
  // What is committed refers to it no longer, and nothing tells to give it back.
  REQUIRE(succession.first->punch(*file, 2 * kChunkBytes, 2 * kChunkBytes) == 0);
  model.replace(2 * kChunkBytes, 2 * kChunkBytes, 2 * kChunkBytes, '\0');
  SnapshotData snapshot;
  REQUIRE(succession.first->drain(*file, true, &snapshot) == 0);
  CHECK_FALSE(snapshot.garbage.empty());
  snapshot.garbage.clear();
  succession.first->make_current(*file, snapshot);
  REQUIRE(succession.first->write(*file, 0, "new") == 0);
  model.replace(0, 3, "new");

  const auto taken = succession.attach();
  bool shared = false;
  SUBCASE("of its own objects") {}
  SUBCASE("but not what others may refer to") { shared = true; }
  REQUIRE(succession.second->recover(kIno, !shared) == 0);
  REQUIRE(succession.second->commit(*taken, true) == 0);
  succession.give_back();
  CHECK(succession.second->read(*taken, 0, kFileBytes) == model);
  const uint64_t bytes = bytes_taken(*succession.second);
  if (shared) {
    CHECK(bytes >= 8 * kChunkBytes);
  } else {
    CHECK(bytes == 6 * kChunkBytes);
  }
}

TEST_CASE("takeover: what a journal without room does not tell of is still there") {
  Succession succession;
  const auto file = succession.first->load(kIno);
  std::string model = random_bytes(4 * kChunkBytes, 1);
  REQUIRE(succession.first->write(*file, 0, model) == 0);
  REQUIRE(succession.first->punch(*file, 8 * kChunkBytes, kChunkBytes) == 0);
  const FileState other{kIno + 1, 1, 1, 1, false};
  Journal& journal = succession.first->engine().arena().journal();
  while (journal.note(other, arena::Change::None).ok()) {
  }
  SUBCASE("cut off") { REQUIRE(succession.first->truncate(*file, 0) == 0); }
  SUBCASE("punched out") {
    REQUIRE(succession.first->punch(*file, 0, 2 * kChunkBytes) == 0);
    REQUIRE(succession.first->truncate(*file, 0) == 0);
  }
  const auto taken = succession.attach();
  REQUIRE(succession.second->recover(kIno) == 0);
  CHECK(succession.second->read(*taken, 0, kFileBytes) == model);
  CHECK(succession.second->commit(*taken, false) == 0);
}

TEST_CASE("takeover: zeros of a file that had outgrown its row stay, whatever else is written") {
  Succession succession;
  const auto file = succession.first->load(kIno);
  REQUIRE(succession.first->write(*file, 0, "in the catalog") == 0);
  REQUIRE(succession.first->commit(*file, false) == 0);
  REQUIRE(succession.first->write(*file, 0, random_bytes(4 * kChunkBytes, 1)) == 0);
  succession.first->wait_idle();
  REQUIRE(succession.first->punch(*file, 0, 4 * kChunkBytes) == 0);
  // Until the journal forgets the places that were punched out, and what it had to.
  Journal& journal = succession.first->engine().arena().journal();
  const WrittenExtent extent{{0, 1, Place{9, 0, 0, false}}, {7}};
  for (uint64_t used = 0; journal.bytes_used() >= used;) {
    used = journal.bytes_used();
    REQUIRE(journal.note_extents({kIno + 1, 1, 1, 1, false}, {extent}).ok());
  }
  const auto taken = succession.attach();
  REQUIRE(succession.second->recover(kIno) == 0);
  CHECK(succession.second->read(*taken, 0, kFileBytes) == std::string(4 * kChunkBytes, '\0'));
}

TEST_CASE("takeover: what a truncation cut off a block does not come back") {
  Succession succession;
  const auto file = succession.first->load(kIno);
  std::string model = random_bytes(100'000, 1);
  REQUIRE(succession.first->write(*file, 0, model) == 0);
  SUBCASE("of bytes on a device") { REQUIRE(succession.first->commit(*file, false) == 0); }
  SUBCASE("of staged bytes") {}
  succession.note_truncation(50'000);

  const auto taken = succession.take_over();
  CHECK(taken->attributes().size == 50'000);
  REQUIRE(succession.second->truncate(*taken, 100'000) == 0);
  model.resize(50'000);
  model.resize(100'000);
  CHECK(succession.second->read(*taken, 0, 200'000) == model);
}

TEST_CASE("takeover: what was written behind a truncation in its block is kept") {
  Succession succession;
  const auto file = succession.first->load(kIno);
  std::string model = random_bytes(100'000, 1);
  REQUIRE(succession.first->write(*file, 0, model) == 0);
  REQUIRE(succession.first->commit(*file, false) == 0);
  REQUIRE(succession.first->truncate(*file, 70'000) == 0);
  REQUIRE(succession.first->write(*file, 80'000, "later") == 0);
  model.resize(70'000);
  model.resize(80'000);
  model += "later";
  SUBCASE("and all of it is put back at once") {}
  SUBCASE("and it is on a device before the rest has space") {
    // More blocks than the first preallocation of both devices, and no chunk that is full.
    for (uint64_t at = kChunkBytes; at < 30 * kChunkBytes; at += kChunkBytes) {
      const std::string more = random_bytes(130'000, at);
      REQUIRE(succession.first->write(*file, at, more) == 0);
      model.resize(at);
      model += more;
    }
  }
  CHECK(succession.second == nullptr);
  const auto taken = succession.take_over();
  CHECK(succession.second->read(*taken, 0, 30 * kChunkBytes) == model);
}

// Whether the size changed before the snapshot was made, which is what there is to see.
static bool grow_while_draining(Succession& succession, const std::string& content) {
  const auto file = succession.first->load(kIno);
  REQUIRE(succession.first->write(*file, 0, content) == 0);
  Delivery<int> drained;
  SnapshotData snapshot;
  file->drain(false, [&](int error, SnapshotData data) {
    snapshot = std::move(data);
    drained.put(error);
  });
  REQUIRE(succession.first->truncate(*file, 2 * kFileBytes) == 0);
  REQUIRE(drained.wait() == 0);
  succession.first->make_current(*file, snapshot);
  return file->attributes().dirty;
}

TEST_CASE("takeover: a size that changed while a snapshot was made survives its commit") {
  const std::string content = random_bytes(kFileBytes, 1);
  for (int attempt = 0; attempt < 50; ++attempt) {
    Succession succession;
    if (!grow_while_draining(succession, content)) continue;  // the devices were faster
    const auto taken = succession.take_over();
    CHECK(taken->attributes().size == 2 * kFileBytes);
    CHECK(succession.second->read(*taken, 0, kFileBytes) == content);
    return;
  }
  FAIL("the size never changed in time");
}

TEST_CASE("takeover: blocks that only the journal knows of are checked when they are read") {
  Succession succession;
  const auto file = succession.first->load(kIno);
  const std::string content = random_bytes(kFileBytes, 1);
  REQUIRE(succession.first->write(*file, 0, content) == 0);
  SnapshotData written;
  REQUIRE(succession.first->drain(*file, false, &written) == 0);  // and never committed
  const auto taken = succession.take_over();
  EngineFixture& second = *succession.second;
  second.catalog()[kIno].take(written);
  const Location damaged = locate(second, kIno, 7);
  flip(damaged, 100);
  std::string found;
  CHECK(second.try_read(*taken, 7 * kBlockBytes, 1, &found) == EIO);
  CHECK(second.read(*taken, 0, 7 * kBlockBytes) == content.substr(0, 7 * kBlockBytes));
  // Committed by the successor, it is as damaged.
  REQUIRE(second.commit(*taken, true) == 0);
  second.reopen_without_arena();
  const auto again = second.load(kIno);
  CHECK(second.try_read(*again, 7 * kBlockBytes, 1, &found) == EIO);
  flip(damaged, 100);
  CHECK(second.read(*again, 0, kFileBytes) == content);
  CHECK(check_committed(second, kIno) == kFileBytes / kBlockBytes);
}

TEST_CASE("takeover: what inline content was committed with survives its slot") {
  Succession succession;
  const auto file = succession.first->load(kIno);
  const std::string content = random_bytes(5'000, 1);
  REQUIRE(succession.first->write(*file, 0, content) == 0);
  REQUIRE(succession.first->allocate(*file, 0, 8'000, false) == 0);
  file->set_times(1'000, 2'000'000'000'000'000'000);
  REQUIRE(succession.first->commit(*file, false) == 0);
  const auto taken =
      succession.take_over([](const std::string& arena) { take_back_last_record(arena, kIno); });
  CHECK(taken->attributes().size == 8'000);
  CHECK(taken->attributes().mtime_ns == 1'000);
  CHECK(succession.second->read(*taken, 0, 5'000) == content);
}

TEST_CASE("takeover: bytes that only a slow read still needs do not come back") {
  struct SlowRead : ReadJob {
    void done(int, const char*, size_t) override {}
  };
  Succession succession;
  const auto file = succession.first->load(kIno);
  REQUIRE(succession.first->write(*file, 0, random_bytes(100'000, 1)) == 0);
  SlowRead job;
  const std::unique_ptr<char, void (*)(void*)> buffer(
      static_cast<char*>(std::aligned_alloc(kIoAlignment, ReadJob::buffer_bytes(100'000))),
      std::free);
  job.buffer = buffer.get();
  job.length = 100'000;
  job.pending = 2;  // as if a device had yet to answer
  file->read(&job);
  REQUIRE(job.overlays.size() == 1);
  REQUIRE(succession.first->commit(*file, false) == 0);
  std::string model = random_bytes(100'000, 2);
  REQUIRE(succession.first->write(*file, 0, model) == 0);
  REQUIRE(succession.first->commit(*file, false) == 0);
  REQUIRE(succession.first->write(*file, 100'000, "later") == 0);
  model += "later";
  const auto taken = succession.take_over([&](const auto&) { job.part_done(0); });
  CHECK(succession.second->read(*taken, 0, 200'000) == model);
}

TEST_CASE("takeover: inline content that was left behind does not show through holes") {
  Succession succession;
  const auto file = succession.first->load(kIno);
  REQUIRE(succession.first->write(*file, 0, random_bytes(5'000, 1)) == 0);
  REQUIRE(succession.first->commit(*file, false) == 0);
  REQUIRE(succession.first->truncate(*file, 0) == 0);
  REQUIRE(succession.first->write(*file, 1'000'000, "far") == 0);
  const auto taken = succession.take_over();
  CHECK(succession.second->read(*taken, 0, 2'000'000) == std::string(1'000'000, '\0') + "far");
}

TEST_CASE("takeover: what was closed is a version of its own, although somebody wrote on") {
  Succession succession;
  auto file = succession.first->load(kIno);
  const std::string closed = random_bytes(3 * kChunkBytes + 5'000, 1);
  REQUIRE(succession.first->write(*file, 0, closed) == 0);
  file->closed(0);
  std::string model = closed;
  SUBCASE("behind its last byte, before it is on devices") {
    const FileState state{kIno, closed.size(), 1, 1, false};
    REQUIRE(succession.first->engine().arena().journal().note(state, arena::Change::Begun).ok());
    model.resize(5 * kChunkBytes);
    model += "later";
  }
  SUBCASE("in the middle, when it was on devices") {
    SnapshotData never_committed;
    REQUIRE(succession.first->drain(*file, true, &never_committed) == 0);
    REQUIRE(succession.first->truncate(*file, kChunkBytes + 100) == 0);
    model.resize(kChunkBytes + 100);
    model.resize(5 * kChunkBytes);
    model += "later";
    REQUIRE(succession.first->write(*file, 7, "other") == 0);
    model.replace(7, 5, "other");
  }
  REQUIRE(succession.first->write(*file, 5 * kChunkBytes, "later") == 0);
  file->closed(SIGKILL);

  SnapshotData snapshot;
  for (const bool dies_too : {true, false}) {
    CAPTURE(dies_too);
    file = dies_too ? succession.attach() : succession.attach_again();
    const std::vector<Engine::Left::Changed> left = succession.second->engine().left().changed;
    REQUIRE(left.size() == 2);
    CHECK(left[0].part == Part::Closed);
    CHECK(left[0].killed_by == 0);
    CHECK(left[1].part == Part::Later);
    CHECK(left[1].killed_by == SIGKILL);
    REQUIRE(succession.second->recover(kIno) == 0);
    check_content(*succession.second, *file, closed);
    REQUIRE(succession.second->drain(*file, true, &snapshot) == 0);
  }
  REQUIRE(succession.second->recover_later(kIno) == 0);
  check_content(*succession.second, *file, model);
  succession.second->make_current(*file, snapshot);
  check_committed(*succession.second, kIno);
  CHECK(file->attributes().dirty);
  SnapshotData later;
  REQUIRE(succession.second->drain(*file, true, &later) == 0);

  // Of the commit of the first part the catalog and the journal know.
  file = succession.attach_again();
  check_content(*succession.second, *file, closed);
  const std::vector<Engine::Left::Changed> left = succession.second->engine().left().changed;
  REQUIRE(left.size() == 1);
  CHECK(left[0].part == Part::All);
  CHECK(left[0].killed_by == SIGKILL);
  REQUIRE(succession.second->recover(kIno) == 0);
  check_content(*succession.second, *file, model);
  REQUIRE(succession.second->commit(*file, true) == 0);
  check_committed(*succession.second, kIno);
}

TEST_CASE("takeover: what could be written to no device makes all that was left doubtful") {
  Succession succession;
  const auto file = succession.first->load(kIno);
  const std::string content = random_bytes(100'000, 1);
  REQUIRE(succession.first->write(*file, 0, content) == 0);
  const FileState state{kIno, content.size(), 1, 1, false};
  REQUIRE(succession.first->engine().arena().journal().note(state, arena::Change::Lost).ok());
  SUBCASE("whatever else was written") {
    REQUIRE(succession.first->write(*file, 0, content) == 0);
    succession.attach();
    const Engine::Left left = succession.second->engine().left();
    CHECK(left.suspects == std::vector<uint64_t>{kIno});
    CHECK_FALSE(left.all_suspect);
  }
  SUBCASE("unless the file was emptied") {
    REQUIRE(succession.first->truncate(*file, 0) == 0);
    REQUIRE(succession.first->write(*file, 0, content) == 0);
    const auto taken = succession.attach();
    CHECK(succession.second->engine().left().suspects.empty());
    REQUIRE(succession.second->recover(kIno) == 0);
    CHECK(succession.second->read(*taken, 0, 200'000) == content);
  }
}

TEST_CASE("takeover: an arena that was never finished is made anew") {
  for (const size_t bytes : {0U, 100U, 1'000'000U}) {
    const Site place;
    const EngineOptions options = place.options(true, 1);
    std::ofstream(options.arena, std::ios::binary) << std::string(bytes, '\0');
    EngineFixture fixture(options);
    const auto file = fixture.load(kIno);
    REQUIRE(fixture.write(*file, 0, "content") == 0);
    CHECK(fixture.read(*file, 0, 100) == "content");
    CHECK(fixture.engine().left().changed.empty());
  }
}

TEST_CASE("takeover: an arena of another filesystem or boot, or a damaged one, is not taken") {
  const Site place;
  EngineOptions options = place.options(false, 0);
  std::string whole(4096, '\0');
  {
    const EngineFixture fixture(options);
    std::ifstream in(options.arena, std::ios::binary);
    in.read(whole.data(), static_cast<std::streamsize>(whole.size()));
    std::filesystem::copy_file(options.arena, options.arena + "-left");
  }
  const auto refusal = [&](size_t at, char byte) {
    std::string changed = whole;
    changed[at] = byte;
    auto* header = reinterpret_cast<arena::Header*>(changed.data());
    if (at < sizeof *header) header->crc = crc32c(0, header, offsetof(arena::Header, crc));
    std::fstream(options.arena + "-left", std::ios::binary | std::ios::in | std::ios::out)
        .write(changed.data(), static_cast<std::streamsize>(changed.size()));
    Remains remains;
    std::string warning;
    const Arena::Config config{options.arena + "-left", "fixture", 0, 0};
    return Arena::attach(config, -1, &remains, &warning).status();
  };
  CHECK(refusal(4000, 'x').ok());  // nothing is there
  for (const auto& [at, why] : {std::pair{1, "it is none"},
                                {8, "another version"},
                                {16, "another filesystem"},
                                {80, "before the machine was started"},
                                {144, "sizes"},
                                {152, "size is wrong"}}) {
    const Status status = refusal(static_cast<size_t>(at), 'x');
    CHECK(status.error() == ESTALE);
    CHECK_MESSAGE(status.message().find(why) != std::string::npos, status.message());
  }
}

TEST_CASE("takeover: what was answered is there after a kill, and what was not can be repeated") {
  const char* given = std::getenv("FPFS_SEED");
  int parted = 0;
  if (given != nullptr) return kill_and_take_over(std::stoull(given), &parted);
  std::random_device random;
  const char* rounds = std::getenv("FPFS_ROUNDS");
  const int count = rounds != nullptr ? std::stoi(rounds) : 40;
  for (int i = 0; i < count; ++i) kill_and_take_over(random(), &parted);
  MESSAGE(parted << " of " << count << " left a version that was closed, and what came later");
}

}  // namespace fpfs::testing
