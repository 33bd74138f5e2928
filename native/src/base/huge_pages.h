// Huge pages for the memory that devices transfer to and from: a MiB is one piece for the device
// then, and one entry for the processor, instead of 256.
//
// All of it is advice. Where the kernel does not do it, or finds no memory that lies together, the
// pages are small and everything works, slower.
#pragma once

#include <cstdint>

namespace fpfs {

inline constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;

// Zeroed private memory, in whole huge pages where that is possible. Null: none. Unmapped with the
// same number of bytes.
char* map_private(uint64_t bytes);
void unmap_private(char* base, uint64_t bytes);

// Maps the first `bytes` of a file on tmpfs at an address that suits huge pages. Null, with errno:
// failed. Nothing is allocated.
char* map_shared(int fd, uint64_t bytes);

// Allocates that mapping's memory as huge pages as far as possible: what is missing afterwards is
// the caller's to allocate. The file is at least `bytes` long.
void allocate_huge_pages(int fd, char* base, uint64_t bytes);

// Memory of any origin that is about to be written, and may never have been touched: a page of it
// that is touched for the first time is a huge one where that is possible, which takes a third of
// the time.
void prefer_huge_pages(char* data, uint64_t bytes);

}  // namespace fpfs
