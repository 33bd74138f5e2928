#include "file/read_buffers.h"

#include <new>

#include "base/huge_pages.h"

namespace fpfs {

ReadBuffers::ReadBuffers(size_t count, size_t buffer_bytes)
    : count_(count), buffer_bytes_(buffer_bytes) {
  base_ = map_private(count * buffer_bytes);
  if (base_ == nullptr) throw std::bad_alloc();
  const MutexLock lock(mutex_);
  for (size_t i = count; i-- > 0;) free_.push_back(base_ + i * buffer_bytes);
}

ReadBuffers::~ReadBuffers() { unmap_private(base_, count_ * buffer_bytes_); }

char* ReadBuffers::take() {
  const MutexLock lock(mutex_);
  if (free_.empty()) return nullptr;
  char* buffer = free_.back();  // the one used last: its pages are warm
  free_.pop_back();
  return buffer;
}

char* ReadBuffers::take_spare() {
  const MutexLock lock(mutex_);
  if (free_.size() <= count_ / 2) return nullptr;
  char* buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void ReadBuffers::give(char* buffer) {
  const MutexLock lock(mutex_);
  free_.push_back(buffer);
}

}  // namespace fpfs
