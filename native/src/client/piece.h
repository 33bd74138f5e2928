// Memory and its place in a file: what clients write and read.
#pragma once

#include <cstdint>

namespace fpfs {

struct Piece {
  char* data;  // null, for a writer: in its strips
  uint64_t bytes;
  uint64_t offset;
};

}  // namespace fpfs
