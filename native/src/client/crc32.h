// CRC32 as zip has it (reflected polynomial 0xEDB88320), by isa-l: with carry-less multiplication
// an order of magnitude faster than a table. (Checksums of stored blocks are CRC32C:
// base/crc32c.h.)
//
// Threads: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fpfs {

// Continues from `crc`: start with 0.
uint32_t crc32(uint32_t crc, const void* data, size_t bytes);

// The CRC32 of a followed by b from both CRC32s and b's length.
uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b);

}  // namespace fpfs
