// The kernel's FUSE wire format: the system header, plus what newer kernels added to it.
//
// Only constants that Debian 12's header lacks are defined here; their values are kernel ABI.
#pragma once

#include <linux/fuse.h>

#include <cstddef>
#include <cstdint>

namespace fpfs::wire {

inline constexpr uint32_t kMaxWriteBytes = 1024 * 1024;
inline constexpr uint32_t kPageBytes = 4096;
// One more page than max_write: an unaligned user buffer touches that many.
inline constexpr uint16_t kMaxPages = kMaxWriteBytes / kPageBytes + 1;

// A WRITE request's bytes before its payload.
inline constexpr size_t kWriteHeaderBytes = sizeof(fuse_in_header) + sizeof(fuse_write_in);
static_assert(kWriteHeaderBytes == 80);

inline constexpr uint32_t kOpenParallelDirectWrites = 1u << 6;  // FOPEN_PARALLEL_DIRECT_WRITES
inline constexpr uint32_t kOpenNoFlush = 1u << 5;               // FOPEN_NOFLUSH
inline constexpr uint32_t kInitExt = 1u << 30;                  // FUSE_INIT_EXT
inline constexpr uint32_t kInit2DirectIoAllowMmap = 1u << 4;    // FUSE_DIRECT_IO_ALLOW_MMAP >> 32
inline constexpr uint32_t kWriteKillSuidgid = 1u << 2;          // FUSE_WRITE_KILL_SUIDGID

inline constexpr uint32_t kMaxReadaheadBytes = 16 * 1024 * 1024;
// The kernel holds back what exceeds it, and RELEASE stands in that line, behind reads: a file that
// is closed and opened again would have no moment without a writer. So it is out of reach.
inline constexpr uint16_t kMaxBackground = 4096;
// Beyond it the kernel drops what it has begun to read ahead. The reader then asks for half of the
// rest each time, down to a page, and each of these READs reads a whole block. Many readers of a
// server that is behind stay below, and what one reader has out fits above.
inline constexpr uint16_t kCongestionThreshold = kMaxBackground / 2;

// What handlers know a request by: 30 bits that differ for all requests under way, and whether the
// kernel has sent it before (FUSE_UNIQUE_RESEND, Linux 6.9). Uniques grow by 2.
inline constexpr uint64_t kUniqueResent = uint64_t{1} << 63;
inline constexpr uint32_t kNumberResent = 1u << 30;
inline constexpr uint32_t request_number(uint64_t unique) {
  const auto number = static_cast<uint32_t>(unique >> 1) & (kNumberResent - 1);
  return (unique & kUniqueResent) != 0 ? number | kNumberResent : number;
}

// Replies to directory reads are kept below the smallest socket buffer an ordinary user can have.
inline constexpr uint32_t kRelayReplyBytesMax = 64 * 1024;

}  // namespace fpfs::wire
