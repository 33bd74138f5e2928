#include "base/huge_pages.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstddef>

#ifndef MADV_COLLAPSE  // Linux 6.1
#define MADV_COLLAPSE 25
#endif

namespace fpfs {
namespace {

constexpr off_t kSmallPageBytes = 4096;
// So many ranges may stay small before the rest is left as it comes: each attempt where memory is
// in pieces has the kernel look for a huge page in vain.
constexpr int kCollapsesFailedMax = 8;

uint64_t whole_huge_pages(uint64_t bytes) {
  return (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
}

// Address space of `bytes` that begins on a huge page, with nothing behind it yet. Null: failed.
char* reserve_aligned(uint64_t bytes) {
  const uint64_t reserved = bytes + kHugePageBytes;
  void* base =
      mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  char* const first = static_cast<char*>(base);
  char* const aligned =
      first + (kHugePageBytes - reinterpret_cast<uintptr_t>(first)) % kHugePageBytes;
  if (aligned > first) munmap(first, static_cast<size_t>(aligned - first));
  char* const end = aligned + bytes;
  if (end < first + reserved) munmap(end, static_cast<size_t>(first + reserved - end));
  return aligned;
}

}  // namespace

char* map_private(uint64_t bytes) {
  char* const base = reserve_aligned(whole_huge_pages(bytes));
  if (base == nullptr) return nullptr;
  if (mprotect(base, whole_huge_pages(bytes), PROT_READ | PROT_WRITE) != 0) {
    unmap_private(base, bytes);
    return nullptr;
  }
  madvise(base, whole_huge_pages(bytes), MADV_HUGEPAGE);
  return base;
}

void unmap_private(char* base, uint64_t bytes) { munmap(base, whole_huge_pages(bytes)); }

char* map_shared(int fd, uint64_t bytes) {
  char* const base = reserve_aligned(bytes);
  if (base == nullptr) return nullptr;
  void* mapped = mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapped != MAP_FAILED) return base;
  munmap(base, bytes);
  return nullptr;
}

// tmpfs gives out huge pages by itself only where it was mounted so, but collapses on request
// whatever its settings are: a range that has one page at least.
void allocate_huge_pages(int fd, char* base, uint64_t bytes) {
  int failed = 0;
  for (uint64_t start = 0; start + kHugePageBytes <= bytes; start += kHugePageBytes) {
    if (posix_fallocate(fd, static_cast<off_t>(start), kSmallPageBytes) != 0) return;
    if (madvise(base + start, kHugePageBytes, MADV_COLLAPSE) == 0) continue;
    if (errno == EINVAL || ++failed == kCollapsesFailedMax) return;  // no such call, or no memory
  }
}

void prefer_huge_pages(char* data, uint64_t bytes) {
  if (bytes < kHugePageBytes) return;
  // Whole small pages, not whole huge ones: so neighbours stay one mapping, and mappings are few.
  char* const first = data - reinterpret_cast<uintptr_t>(data) % kSmallPageBytes;
  madvise(first, static_cast<size_t>(data + bytes - first), MADV_HUGEPAGE);
}

}  // namespace fpfs
