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
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "base/file_descriptor.h"
#include "staging/arena.h"
#include "support/device_fixture.h"
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
}  // namespace fpfs::testing
