// Aligned buffers that device reads land in: made once, reused, registered with the devices.
//
// Threads: take() and give() lock inside. A buffer belongs to the caller between the two.
#pragma once

#include <cstddef>
#include <vector>

#include "base/thread_annotations.h"
#include "device/device.h"

namespace fpfs {

class ReadBuffers {
 public:
  ReadBuffers(size_t count, size_t buffer_bytes);
  ~ReadBuffers();
  ReadBuffers(const ReadBuffers&) = delete;
  ReadBuffers& operator=(const ReadBuffers&) = delete;

  size_t buffer_bytes() const { return buffer_bytes_; }
  MemoryRegion region() const { return {base_, count_ * buffer_bytes_}; }
  char* take() EXCLUDES(mutex_);        // null: none free
  char* take_spare() EXCLUDES(mutex_);  // null: no more than half of them are free
  void give(char* buffer) EXCLUDES(mutex_);

 private:
  const size_t count_;
  const size_t buffer_bytes_;
  char* base_ = nullptr;
  Mutex mutex_;
  std::vector<char*> free_ GUARDED_BY(mutex_);
};

}  // namespace fpfs
