// CRC32C (Castagnoli, reflected polynomial 0x82F63B78), as in iSCSI (RFC 3720, appendix B.4).
//
// Threads: all functions are pure and may run anywhere. The implementation is chosen once, from
// what the processor offers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace fpfs {

// Checksum of `bytes` bytes at `data`, continuing from `crc`: start with 0, and
// crc32c(crc32c(0, a, n), b, m) is the checksum of a followed by b.
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);

struct Crc32cImplementation {
  std::string_view name;
  uint32_t (*function)(uint32_t crc, const void* data, size_t bytes);
};

// Those that this processor can run, best first; crc32c() is the first.
const std::vector<Crc32cImplementation>& crc32c_implementations();

}  // namespace fpfs
