// Checksums of 64 KiB blocks that lie behind each other in memory.
//
// Threads: pure functions. On an AMD EPYC (November 2026) a block that is in the cache takes 3 µs.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/block_map.h"

namespace fpfs {

// Of each block of the `bytes` at `data`; what the last one lacks counts as zeros.
std::vector<uint32_t> checksum_blocks(const char* data, uint64_t bytes);

// Numbers of the blocks at `data`, all of them whole, that are not as `expected`.
std::vector<uint64_t> damaged_blocks(const char* data, const std::vector<Checksum>& expected);

}  // namespace fpfs
