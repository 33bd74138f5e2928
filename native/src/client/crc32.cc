#include "client/crc32.h"

#include <isa-l/crc.h>
#include <zlib.h>

namespace fpfs {

uint32_t crc32(uint32_t crc, const void* data, size_t bytes) {
  return ::crc32_gzip_refl(crc, static_cast<const unsigned char*>(data), bytes);
}

uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b) {
  return static_cast<uint32_t>(::crc32_combine64(crc_a, crc_b, static_cast<z_off64_t>(bytes_b)));
}

}  // namespace fpfs
