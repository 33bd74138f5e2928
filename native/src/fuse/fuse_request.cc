#include "fuse/fuse_request.h"

#include <fcntl.h>

#include <algorithm>
#include <utility>

namespace fpfs {

bool FuseRequest::parse(const char* head, size_t received, const Payload& rest) {
  if (received < sizeof header_) return false;
  std::memcpy(&header_, head, sizeof header_);
  if (header_.len != received) return false;
  head_ = head;
  head_bytes_ = std::min(received, wire::kWriteHeaderBytes);
  rest_ = &rest;
  body_bytes_ = received - sizeof header_;
  return true;
}

void FuseRequest::copy(size_t from, char* to, size_t length) const {
  const size_t in_head = head_bytes_ - sizeof header_;
  if (from < in_head) {
    const size_t n = std::min(length, in_head - from);
    std::memcpy(to, head_ + sizeof header_ + from, n);
    to += n;
    from += n;
    length -= n;
  }
  if (length > 0) rest_->copy_to(to, from - in_head, length);
}

int parse_write(const FuseRequest& request, WriteArguments* write) {
  fuse_write_in in{};
  if (!request.argument(&in)) return EIO;
  if (request.body_bytes() - sizeof in != in.size || in.size > wire::kMaxWriteBytes) return EIO;
  if (in.offset > kFileBytesMax || in.size > kFileBytesMax - in.offset) return EFBIG;
  write->handle = in.fh;
  write->offset = in.offset;
  write->size = in.size;
  write->owner = (in.write_flags & FUSE_WRITE_LOCKOWNER) != 0 ? in.lock_owner : kOwnerUnknown;
  write->from_page_cache = (in.write_flags & FUSE_WRITE_CACHE) != 0;
  write->kill_privileges = (in.write_flags & wire::kWriteKillSuidgid) != 0;
  write->direct = (in.flags & O_DIRECT) != 0;
  write->sync = (in.flags & (O_SYNC | O_DSYNC)) != 0;
  return 0;
}

std::string operation_name(uint32_t opcode) {
#define FPFS_NAME(name) \
  { FUSE_##name, #name }
  static constexpr std::pair<uint32_t, const char*> kNames[] = {
      FPFS_NAME(LOOKUP),
      FPFS_NAME(GETATTR),
      FPFS_NAME(SETATTR),
      FPFS_NAME(READLINK),
      FPFS_NAME(SYMLINK),
      FPFS_NAME(MKNOD),
      FPFS_NAME(MKDIR),
      FPFS_NAME(UNLINK),
      FPFS_NAME(RMDIR),
      FPFS_NAME(RENAME),
      FPFS_NAME(LINK),
      FPFS_NAME(OPEN),
      FPFS_NAME(READ),
      FPFS_NAME(WRITE),
      FPFS_NAME(STATFS),
      FPFS_NAME(RELEASE),
      FPFS_NAME(FSYNC),
      FPFS_NAME(SETXATTR),
      FPFS_NAME(GETXATTR),
      FPFS_NAME(LISTXATTR),
      FPFS_NAME(REMOVEXATTR),
      FPFS_NAME(FLUSH),
      FPFS_NAME(INIT),
      FPFS_NAME(OPENDIR),
      FPFS_NAME(READDIR),
      FPFS_NAME(RELEASEDIR),
      FPFS_NAME(FSYNCDIR),
      FPFS_NAME(GETLK),
      FPFS_NAME(SETLK),
      FPFS_NAME(SETLKW),
      FPFS_NAME(ACCESS),
      FPFS_NAME(CREATE),
      FPFS_NAME(BMAP),
      FPFS_NAME(DESTROY),
      FPFS_NAME(IOCTL),
      FPFS_NAME(POLL),
      FPFS_NAME(FALLOCATE),
      FPFS_NAME(READDIRPLUS),
      FPFS_NAME(RENAME2),
      FPFS_NAME(LSEEK),
      FPFS_NAME(COPY_FILE_RANGE),
  };
#undef FPFS_NAME
  for (const auto& [number, name] : kNames) {
    if (number == opcode) return name;
  }
  return "operation " + std::to_string(opcode);
}

void patch_init_reply(const fuse_init_in& kernel, char* reply, size_t reply_bytes) {
  fuse_init_out out{};
  const size_t known = std::min(reply_bytes, sizeof out);
  std::memcpy(&out, reply, known);
  out.max_write = wire::kMaxWriteBytes;
  out.max_pages = wire::kMaxPages;
  out.max_readahead = wire::kMaxReadaheadBytes;
  out.max_background = wire::kMaxBackground;
  out.congestion_threshold = wire::kCongestionThreshold;
  out.time_gran = 1;
  const uint32_t wanted = FUSE_MAX_PAGES | FUSE_BIG_WRITES | FUSE_ASYNC_READ | FUSE_ASYNC_DIO |
                          FUSE_PARALLEL_DIROPS | FUSE_CACHE_SYMLINKS | wire::kInitExt;
  out.flags |= wanted & kernel.flags;
  // The kernel keeps locks itself, and file contents go past libfuse.
  out.flags &= ~(FUSE_POSIX_LOCKS | FUSE_FLOCK_LOCKS | FUSE_WRITEBACK_CACHE | FUSE_SPLICE_READ |
                 FUSE_SPLICE_WRITE | FUSE_SPLICE_MOVE);
  if ((kernel.flags & wire::kInitExt) != 0) {
    out.flags2 |= wire::kInit2DirectIoAllowMmap & kernel.flags2;
  }
  std::memcpy(reply, &out, known);
}

}  // namespace fpfs
