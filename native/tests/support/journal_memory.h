// A journal in memory that another process can look at.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "base/file_descriptor.h"
#include "staging/journal.h"

namespace fpfs::testing {

struct JournalMemory {
  explicit JournalMemory(uint64_t bytes = 4 * 1024 * 1024) : area_bytes(bytes) {
    fd.reset(memfd_create("journal", MFD_CLOEXEC));
    REQUIRE(ftruncate(fd.get(), static_cast<off_t>(2 * area_bytes)) == 0);
    void* mapped = mmap(nullptr, 2 * area_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    REQUIRE(mapped != MAP_FAILED);
    base = static_cast<char*>(mapped);
    journal = open();
    REQUIRE(journal->format().ok());
  }
  ~JournalMemory() { munmap(base, 2 * area_bytes); }
  // What another process finds of the journal.
  std::vector<JournalEntry> recovered() {
    damage.clear();
    return open()->recover(&damage);
  }
  // Another process's journal over the same memory.
  std::unique_ptr<Journal> open() {
    return std::make_unique<Journal>(fd.get(), base, 0, area_bytes, sequence);
  }
  uint64_t memory_bytes() const {
    struct stat file {};
    REQUIRE(fstat(fd.get(), &file) == 0);
    return static_cast<uint64_t>(file.st_blocks) * 512;
  }

  const uint64_t area_bytes;
  FileDescriptor fd;
  char* base = nullptr;
  std::atomic<uint64_t> sequence{1};
  std::unique_ptr<Journal> journal;
  std::vector<RecordDamage> damage;
};

inline FileState state_of(uint64_t ino, uint64_t size) { return {ino, size, 11, 12, ino % 2 == 1}; }

inline std::vector<uint64_t> sizes(const std::vector<JournalEntry>& entries) {
  std::vector<uint64_t> result;
  for (const JournalEntry& entry : entries) result.push_back(entry.state.size);
  return result;
}

}  // namespace fpfs::testing
