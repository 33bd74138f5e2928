// Which call fails: a page that the test and all processes of a mount share.
//
// Each kind of call is counted while `counting` is set. The call of `kind` whose number is `at`
// fails, once, and `fired` says that it did. tests/support/failures/injection.py has the same
// layout.
//
// Threads: any, without locks.
#pragma once

#include <cstdint>

namespace fpfs::faults {

enum class Kind : uint32_t {
  None = 0,
  RingWrite = 1,
  RingFlush = 2,
  RingRead = 3,
  Allocate = 4,     // of an object
  Create = 5,       // an object
  FolderFlush = 6,  // of the objects'
  CatalogWrite = 7,
  CatalogFlush = 8,
  Truncate = 9,  // an object
  Remove = 10,   // an object
  Read = 11,     // an object, not by a ring
};
inline constexpr uint32_t kKinds = 12;

struct Control {
  uint32_t counting;
  uint32_t kind;
  uint64_t at;    // 1: the first one
  int32_t error;  // a positive errno; 0: a part of it is done (writes only)
  uint32_t fired;
  uint64_t counts[kKinds];
};

// Reads the page's path from the environment.
void open_control();

inline constexpr int kNone = -1;

// Counts a call. kNone, or what is to come of it: an errno, or 0 for a part.
int fault(Kind kind);

}  // namespace fpfs::faults
