// What a kill leaves of the arena's records, at every point where it can find the process.
//
// A child writes them one instruction, or one system call, at a time, and the arena's file is
// looked at in between: the order of the stores is the compiler's, and no source can tell it.
#include <fcntl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "base/file_descriptor.h"
#include "staging/arena.h"
#include "support/device_fixture.h"
#include "support/journal_memory.h"
#include "support/skips.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kSlotBytes = 64 * 1024;
constexpr uint64_t kSlotCount = 4;

// Runs `work` in a child, and calls `look` wherever it stops. False where it may not be traced.
bool traced(__ptrace_request step, const std::function<void()>& work,
            const std::function<void()>& look) {
  const pid_t pid = ::fork();
  REQUIRE(pid >= 0);
  if (pid == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(1);
    ::raise(SIGSTOP);
    work();
    ::_exit(0);
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) == pid && WIFSTOPPED(status)) {
    look();
    ::ptrace(step, pid, nullptr, nullptr);
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return true;
  skip("ptrace");
  return false;
}

struct Kept {
  TempDirectory directory;
  std::string path = directory.path() + "/arena";
  Arena::Config config{path, "some-id", kSlotCount* kSlotBytes, kSlotBytes};
  std::string warning;

  std::unique_ptr<Arena> create() {
    auto made = Arena::create(config, &warning);
    REQUIRE_MESSAGE(made.ok(), made.status().message());
    file.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    return made.take();
  }
  template <typename Record>
  Record record(uint64_t offset) const {
    Record found{};
    REQUIRE(::pread(file.get(), &found, sizeof found, static_cast<off_t>(offset)) == sizeof found);
    return found;
  }
  uint64_t table(arena::Table kind) const {
    const auto header = record<arena::Header>(0);
    for (const arena::TableEntry& each : header.tables) {
      if (each.kind == kind) return each.offset;
    }
    return 0;
  }
  FileDescriptor file;
};

template <typename Record>
bool is_sound(const Record& record) {
  return record.crc == crc32c(0, &record, offsetof(Record, crc));
}

arena::HandleRecord open_file(uint64_t handle) {
  arena::HandleRecord record{};
  record.handle = handle;
  record.ino = handle * 3;
  record.flags = O_RDWR;
  record.request = 77;
  return record;
}

TEST_CASE("arena: a handle's record is whole, or says that it is not, whenever a kill comes") {
  Kept kept;
  const auto arena = kept.create();
  const uint64_t at = kept.table(arena::Table::Handles);
  REQUIRE(arena->record_handle(open_file(5)).ok());
  REQUIRE(kept.record<arena::HandleRecord>(at).handle == 5);
  std::vector<uint64_t> seen;  // handles in turn; none where the record is torn
  const auto work = [&] {
    arena->forget_handle(5);
    (void)arena->record_handle(open_file(9));  // in the same place
  };
  const auto look = [&] {
    const auto record = kept.record<arena::HandleRecord>(at);
    const bool sound = is_sound(record);
    CHECK((sound || record.sequence == 0));
    const uint64_t handle = sound ? record.handle : UINT64_MAX;
    if (seen.empty() || seen.back() != handle) seen.push_back(handle);
  };
  if (!traced(PTRACE_SINGLESTEP, work, look)) return;
  CHECK(seen == std::vector<uint64_t>{5, UINT64_MAX, 0, UINT64_MAX, 9});
}

TEST_CASE("arena: the record that a slot's word names is whole whenever a kill comes") {
  Kept kept;
  const auto arena = kept.create();
  Slot* slot = arena->take();
  REQUIRE(slot != nullptr);
  slot->ranges.add(0, 4096);
  arena->publish(slot, arena::SlotState::Filling, 7, kSlotBytes, 4096, 1);
  const uint64_t at = kept.table(arena::Table::Slots) + slot->index * 2 * sizeof(arena::SlotRecord);
  const uint64_t word_at =
      kept.table(arena::Table::Published) + slot->index * sizeof(arena::PublishedWord);
  std::vector<uint64_t> seen;  // sizes of the file that are named in turn
  const auto work = [&] {
    for (const uint64_t size : {8192, 12288, 16384}) {
      arena->publish(slot, arena::SlotState::Filling, 7, kSlotBytes, size, 1);
    }
  };
  const auto look = [&] {
    const auto word = kept.record<arena::PublishedWord>(word_at);
    uint64_t size = 0;
    for (const uint64_t copy : {0, 1}) {
      const auto record = kept.record<arena::SlotRecord>(at + copy * sizeof(arena::SlotRecord));
      if (is_sound(record) && arena::published_word(record.sequence) == word) {
        size = record.file_size;
      }
    }
    if (seen.empty() || seen.back() != size) seen.push_back(size);
  };
  if (!traced(PTRACE_SINGLESTEP, work, look)) return;
  CHECK(seen == std::vector<uint64_t>{4096, 8192, 12288, 16384});
}

TEST_CASE("arena: one that was being made when a kill came is made anew") {
  Kept kept;
  uint64_t unfinished = 0;
  uint64_t finished = 0;
  const auto look = [&] {
    Remains remains;
    const auto found = Arena::attach(kept.config, -1, &remains, &kept.warning);
    if (found.ok()) {
      ++finished;
    } else if (found.status().error() == ENODATA) {
      ++unfinished;
    } else {
      CHECK_MESSAGE(found.status().error() == ENOENT, found.status().message());
    }
  };
  const auto work = [&] { (void)Arena::create(kept.config, &kept.warning); };
  if (!traced(PTRACE_SYSCALL, work, look)) return;
  CHECK(unfinished > 0);
  CHECK(finished > 0);
}

}  // namespace
namespace {

constexpr uint64_t kJournalBytes = 8 * 1024;

void note_and_settle(Journal& journal) {
  REQUIRE(journal.note(state_of(5, 500), arena::Change::None).ok());
  journal.settle(5, UINT64_MAX);
}

// Fills the journal with what is settled, and then until its records move to the other area.
void fill(Journal& journal) {
  const uint64_t unused = journal.bytes_used();
  note_and_settle(journal);
  const uint64_t step = journal.bytes_used() - unused;
  while (journal.bytes_used() + step < kJournalBytes - sizeof(arena::JournalArea)) {
    note_and_settle(journal);
  }
}
void move_records(Journal& journal) {
  const uint64_t used = journal.bytes_used();
  note_and_settle(journal);
  REQUIRE(journal.bytes_used() < used);
}

// Calls `look` where `work` has changed the journal's memory, at every store.
void watched(const JournalMemory& memory, const std::function<void()>& work,
             const std::function<void()>& look) {
  std::string before;
  traced(PTRACE_SINGLESTEP, work, [&] {
    const std::string_view now(memory.base, 2 * kJournalBytes);
    if (now == before) return;
    before = now;
    look();
  });
}

// What the next servers find where a kill left `memory`: `next` finds `expected`, `then` does its
// work, and the one after it finds `left`, also where it does not know where the records end.
void find_after_kill(const JournalMemory& memory,
                     const std::function<bool(const std::vector<uint64_t>&)>& expected,
                     const std::function<void(Journal&)>& then, const std::vector<uint64_t>& left) {
  JournalMemory found(kJournalBytes);
  std::memcpy(found.base, memory.base, 2 * kJournalBytes);
  found.sequence = 1'000'000;
  const auto next = found.open();
  CHECK(expected(sizes(next->recover(&found.damage))));
  CHECK(found.damage.empty());
  then(*next);
  for (const bool is_known : {true, false}) {
    JournalMemory copy(kJournalBytes);
    std::memcpy(copy.base, found.base, 2 * kJournalBytes);
    for (const unsigned index : {0U, 1U}) {
      auto* area = reinterpret_cast<arena::JournalArea*>(copy.base + index * kJournalBytes);
      if (!is_known) area->end ^= 1;
    }
    CHECK(sizes(copy.recovered()) == left);
    CHECK(copy.damage.empty());
  }
}

}  // namespace

TEST_CASE("journal: a kill while records move loses none, and leaves none that comes back") {
  JournalMemory memory(kJournalBytes);
  std::vector<uint64_t> all(20);
  std::iota(all.begin(), all.end(), 1);
  for (const uint64_t size : all) {
    REQUIRE(memory.journal->note(state_of(size == 1 ? 6 : 3, size), arena::Change::None).ok());
  }
  fill(*memory.journal);
  const auto work = [&] { move_records(*memory.journal); };
  const auto look = [&] {
    find_after_kill(
        memory,
        [&](std::vector<uint64_t> found) {
          if (found.size() > all.size()) found.pop_back();  // what is settled next
          return found == all;
        },
        [](Journal& next) {
          next.settle(3, UINT64_MAX);
          if (next.bytes_used() > kJournalBytes / 2) move_records(next);
          // Up to where records may lie that the kill has left.
          while (next.bytes_used() % sizeof(arena::ChangeHead) != 0) note_and_settle(next);
        },
        {1});
  };
  watched(memory, work, look);
}

TEST_CASE("journal: a kill while it begins anew leaves nothing that comes back") {
  JournalMemory memory(kJournalBytes);
  for (const uint64_t size : {1, 2}) {
    REQUIRE(memory.journal->note(state_of(3, size), arena::Change::None).ok());
  }
  fill(*memory.journal);
  move_records(*memory.journal);  // the first area has records of its first generation
  const auto work = [&] { memory.journal->settle(3, UINT64_MAX); };
  const auto look = [&] {
    find_after_kill(
        memory,
        [](const auto& found) {
          return found.empty() || found == std::vector<uint64_t>{1, 2};
        },
        [](Journal& next) {
          next.settle(3, UINT64_MAX);
          REQUIRE(next.note(state_of(6, 7), arena::Change::None).ok());
        },
        {7});
  };
  watched(memory, work, look);
}

}  // namespace fpfs::testing
