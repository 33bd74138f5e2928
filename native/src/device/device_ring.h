// Setting up an io_uring: its flags, its registered buffers and its table of registered files, each
// with a way to go on where the kernel lacks it or the memory-lock limit forbids it.
//
// Threads: everything here belongs to the thread that calls open().
#pragma once

#include <liburing.h>

#include <string>
#include <vector>

#include "base/status.h"
#include "device/device.h"
#include "device/device_open_files.h"

namespace fpfs {

class Ring {
 public:
  Ring() = default;
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // `entries` is the most that will be in flight, the wakeup read included.
  Status open(uint32_t entries);
  // A status that is not ok says why the ring works without them.
  Status register_buffers(const std::vector<MemoryRegion>& regions);
  Status register_files(uint32_t files_max);

  io_uring* native() { return &ring_; }

  // Index of the registered buffer that holds the whole range, or -1.
  int buffer_index(const char* buffer, uint64_t length) const;

  // Gives the file a slot if one is free. Without one its descriptor serves.
  void add_file(OpenFile* file);
  void remove_file(OpenFile* file);

 private:
  bool opened_ = false;
  io_uring ring_{};
  std::vector<MemoryRegion> pieces_;
  std::vector<int> slots_free_;
};

}  // namespace fpfs
