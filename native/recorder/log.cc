#include "log.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <ctime>

namespace fpfs::recorder {
namespace {

char* log_base = nullptr;

LogHead* head() { return reinterpret_cast<LogHead*>(log_base); }

uint64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

char* put(char* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return to + bytes;
}

}  // namespace

bool open_log() {
  const char* path = ::secure_getenv("FPFS_RECORD_LOG");
  if (path == nullptr) return false;
  // The system call itself: open(2) of this process is the recorder's.
  const auto fd = static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0));
  if (fd < 0) return false;
  const off_t bytes = ::lseek(fd, 0, SEEK_END);
  void* base =
      ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (base == MAP_FAILED) return false;
  log_base = static_cast<char*>(base);
  if (head()->magic == kMagic) return true;
  log_base = nullptr;
  return false;
}

uint64_t append(const Entry& entry, const Piece* pieces, size_t piece_count) {
  if (log_base == nullptr) return 0;
  const int saved_errno = errno;
  size_t data_bytes = 0;
  for (size_t i = 0; i < piece_count; ++i) data_bytes += pieces[i].bytes;
  const size_t unpadded = sizeof(RecordHead) + entry.path.size() + entry.other.size() + data_bytes;
  const uint64_t bytes = (unpadded + 7) / 8 * 8;
  const uint64_t place = std::atomic_ref(head()->tail).fetch_add(bytes);
  if (place + bytes > head()->bytes) return 0;  // the reader sees it by the tail
  auto* record = reinterpret_cast<RecordHead*>(log_base + place);
  // At once: the reader has to get past what a process that is killed here does not finish.
  std::atomic_ref(record->bytes).store(static_cast<uint32_t>(bytes), std::memory_order_release);
  record->kind = entry.kind;
  record->begin = entry.begin;
  record->file = entry.file;
  record->a = entry.a;
  record->b = entry.b;
  record->time_ns = now_ns();
  record->mode = entry.mode;
  record->path_bytes = static_cast<uint32_t>(entry.path.size());
  record->other_bytes = static_cast<uint32_t>(entry.other.size());
  record->data_bytes = static_cast<uint32_t>(data_bytes);
  char* to = reinterpret_cast<char*>(record + 1);
  to = put(to, entry.path.data(), entry.path.size());
  to = put(to, entry.other.data(), entry.other.size());
  for (size_t i = 0; i < piece_count; ++i) to = put(to, pieces[i].base, pieces[i].bytes);
  std::atomic_ref(record->written).store(1, std::memory_order_release);
  errno = saved_errno;
  return place;
}

}  // namespace fpfs::recorder
