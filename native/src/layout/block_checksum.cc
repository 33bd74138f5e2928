#include "layout/block_checksum.h"

#include <algorithm>

#include "base/crc32c.h"

namespace fpfs {
namespace {

const char zeros[kBlockBytes] = {};

}  // namespace

std::vector<uint32_t> checksum_blocks(const char* data, uint64_t bytes) {
  std::vector<uint32_t> result;
  result.reserve((bytes + kBlockBytes - 1) / kBlockBytes);
  for (uint64_t at = 0; at < bytes; at += kBlockBytes) {
    const uint64_t stored = std::min(bytes - at, kBlockBytes);
    result.push_back(crc32c(crc32c(0, data + at, stored), zeros, kBlockBytes - stored));
  }
  return result;
}

std::vector<uint64_t> damaged_blocks(const char* data, const std::vector<Checksum>& expected) {
  std::vector<uint64_t> damaged;
  for (uint64_t i = 0; i < expected.size(); ++i) {
    if (!expected[i].has_value()) continue;
    if (crc32c(0, data + i * kBlockBytes, kBlockBytes) != *expected[i]) damaged.push_back(i);
  }
  return damaged;
}

}  // namespace fpfs
