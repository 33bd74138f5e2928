#include "device/device_transfer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "device/device_open_files.h"

namespace fpfs {
namespace {

constexpr uint64_t kCallBytesMax = uint64_t{1} << 30;

// One system call; bytes or a negative errno.
int call_once(const IoRequest& request) {
  const int fd = request.open_file->fd.get();
  const uint64_t start = transfer_start(request);
  const uint64_t bytes = std::min(request.length - start, kCallBytesMax);
  const auto offset = static_cast<off_t>(request.offset + start);
  const auto length = static_cast<off_t>(request.length);
  int64_t result = -1;
  switch (request.op) {
    case IoOp::Read:
      result = ::pread(fd, request.buffer + start, bytes, offset);
      break;
    case IoOp::Write:
      result = ::pwrite(fd, request.buffer + start, bytes, offset);
      break;
    case IoOp::Flush:
      result = ::fdatasync(fd);
      break;
    case IoOp::Allocate:
      result = ::fallocate(fd, 0, static_cast<off_t>(request.offset), length);
      break;
    case IoOp::Punch:
      result = ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                           static_cast<off_t>(request.offset), length);
      break;
    case IoOp::Truncate:
      result = ::ftruncate(fd, length);
      break;
  }
  return result < 0 ? -errno : static_cast<int>(result);
}

}  // namespace

uint64_t transfer_start(const IoRequest& request) {
  const bool moves_bytes = request.op == IoOp::Read || request.op == IoOp::Write;
  return moves_bytes ? request.bytes_done & ~(kIoAlignment - 1) : 0;
}

TransferAdvance transfer_advance(IoRequest* request, int result) {
  if (result == -EINTR) return {TransferStep::Again, 0};
  if (result == -EAGAIN) return {TransferStep::Blocked, 0};
  if (result < 0) return {TransferStep::Finished, result};
  if (request->op != IoOp::Read && request->op != IoOp::Write) return {TransferStep::Finished, 0};
  const uint64_t done = transfer_start(*request) + static_cast<uint64_t>(result);
  if (done <= request->bytes_done) {
    if (request->op == IoOp::Write) return {TransferStep::Finished, -EIO};
    std::memset(request->buffer + request->bytes_done, 0, request->length - request->bytes_done);
    return {TransferStep::Finished, 0};
  }
  request->bytes_done = done;
  return {done == request->length ? TransferStep::Finished : TransferStep::Again, 0};
}

int transfer_blocking(IoRequest* request) {
  while (true) {
    const TransferAdvance advance = transfer_advance(request, call_once(*request));
    // Blocked cannot last here: blocking calls on a regular file wait by themselves.
    if (advance.step == TransferStep::Finished) return advance.result;
  }
}

}  // namespace fpfs
