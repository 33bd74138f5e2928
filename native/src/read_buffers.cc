#include "read_buffers.h"

#include <sys/mman.h>

#include <new>

namespace fpfs {

ReadBuffers::ReadBuffers(size_t count, size_t buffer_bytes)
    : count_(count), buffer_bytes_(buffer_bytes) {
  void* base = mmap(nullptr, count * buffer_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(base);
  const MutexLock lock(mutex_);
  for (size_t i = count; i-- > 0;) free_.push_back(base_ + i * buffer_bytes);
}

ReadBuffers::~ReadBuffers() { munmap(base_, count_ * buffer_bytes_); }

char* ReadBuffers::take() {
  const MutexLock lock(mutex_);
  if (free_.empty()) return nullptr;
  char* buffer = free_.back();  // the one used last: its pages are warm
  free_.pop_back();
  return buffer;
}

void ReadBuffers::give(char* buffer) {
  const MutexLock lock(mutex_);
  free_.push_back(buffer);
}

}  // namespace fpfs
