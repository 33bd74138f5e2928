// Who writes through a handle, by the kernel's lock owners: those that no request names.
#pragma once

#include <cstdint>

namespace fpfs {

// Of a write whose owner the kernel does not know: stores through a map, written back.
inline constexpr uint64_t kOwnerUnknown = 0;
// Whose process has ended; the kernel has no such.
inline constexpr uint64_t kOwnerGone = UINT64_MAX;

}  // namespace fpfs
