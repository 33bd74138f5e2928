// FLUSH and RELEASE, which need Python less often than they come; LSEEK, FALLOCATE and
// COPY_FILE_RANGE, which libfuse's Python binding has no handlers for.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "channel.h"

namespace fpfs {
namespace {

constexpr uint32_t kFallocKeepSize = 1;
constexpr uint32_t kFallocPunchHole = 2;
constexpr uint32_t kFallocZeroRange = 16;
// From here on an allocation that all devices together could not hold is refused at once, instead
// of when they are full of part of it.
constexpr uint64_t kCheckedBytesMin = uint64_t{1} << 30;
// One reply copies at most this much, so that the caller can be interrupted in between.
constexpr uint64_t kCopyBytesMax = 16 * 1024 * 1024;

// Lets a thread wait for one completion.
class Waiter {
 public:
  void set(int value) {
    const MutexLock lock(mutex_);
    value_ = value;
    done_ = true;
    set_.notify_one();
  }
  int wait() {
    const MutexLock lock(mutex_);
    while (!done_) set_.wait(mutex_);
    return value_;
  }

 private:
  Mutex mutex_;
  CondVar set_;
  bool done_ GUARDED_BY(mutex_) = false;
  int value_ GUARDED_BY(mutex_) = 0;
};

struct WaitedRead : ReadJob {
  Waiter waiter;
  size_t bytes = 0;
  const char* data = nullptr;
  void done(int failure, const char* from, size_t n) override {
    data = from;
    bytes = n;
    waiter.set(failure);
  }
};

}  // namespace

// A close without an error to report needs no Python; whoever waits for durability goes there.
void Channel::handle_flush(const FuseRequest& request) {
  fuse_flush_in in{};
  if (!request.argument(&in)) return reply(request.unique(), EIO);
  const std::shared_ptr<Handle> handle = engine_.handle(in.fh);
  if (handle != nullptr) {
    const MutexLock lock(handle->mutex);
    // A shell that redirects flushes before its first byte, and a forked child that exits flushes
    // what it never wrote: neither may commit.
    const bool waits =
        handle->writers.contains(in.lock_owner) || handle->writers.contains(kOwnerUnknown);
    if (!waits) return reply(request.unique(), handle->file->take_error(&handle->errors_seen));
  }
  relay(request);
}

// Nobody waits for it, and Python learns of it before anything that the kernel asks for later.
void Channel::handle_release(const FuseRequest& request) {
  fuse_release_in in{};
  if (!request.argument(&in)) return reply(request.unique(), EIO);
  reply(request.unique(), engine_.release_and_tell(in.fh) ? 0 : EBADF);
}

void Channel::handle_lseek(const FuseRequest& request) {
  fuse_lseek_in in{};
  if (!request.argument(&in)) return reply(request.unique(), EIO);
  const std::shared_ptr<Handle> handle = engine_.handle(in.fh);
  if (handle == nullptr) return reply(request.unique(), EBADF);
  if (in.whence != SEEK_DATA && in.whence != SEEK_HOLE) return reply(request.unique(), EINVAL);
  const int64_t at = handle->file->seek(in.offset, in.whence == SEEK_DATA);
  if (at < 0) return reply(request.unique(), static_cast<int>(-at));
  fuse_lseek_out out{};
  out.offset = static_cast<uint64_t>(at);
  reply(request.unique(), 0, &out, sizeof out);
}

void Channel::handle_fallocate(const FuseRequest& request) {
  fuse_fallocate_in in{};
  const uint64_t unique = request.unique();
  if (!request.argument(&in)) return reply(unique, EIO);
  const std::shared_ptr<Handle> handle = engine_.handle(in.fh);
  if (handle == nullptr) return reply(unique, EBADF);
  const std::shared_ptr<File> file = handle->file;
  if (in.length == 0) return reply(unique, EINVAL);
  if (in.offset > kFileBytesMax || in.length > kFileBytesMax - in.offset) {
    return reply(unique, EFBIG);
  }
  const bool keep_size = (in.mode & kFallocKeepSize) != 0;
  switch (in.mode & ~kFallocKeepSize) {
    case 0:
      return allocate_until_done(unique, file, in.offset, in.length, keep_size);
    case kFallocPunchHole:
      if (!keep_size) return reply(unique, EOPNOTSUPP);
      return file->punch(in.offset, in.length, [this, unique](int error) { reply(unique, error); });
    case kFallocZeroRange:
      return file->punch(in.offset, in.length, [this, unique, file, in, keep_size](int error) {
        if (error != 0) return reply(unique, error);
        allocate_until_done(unique, file, in.offset, in.length, keep_size);
      });
    default:
      return reply(unique, EOPNOTSUPP);
  }
}

void Channel::allocate_until_done(uint64_t unique, const std::shared_ptr<File>& file,
                                  uint64_t offset, uint64_t length, bool keep_size) {
  if (length > kCheckedBytesMin) {
    uint64_t bytes_free = file->attributes().allocated_bytes;
    for (const auto& device : engine_.devices()) bytes_free += device->bytes_free();
    if (length > bytes_free) return reply(unique, ENOSPC);
  }
  const auto attempt = [this, unique, file, offset, length, keep_size] {
    const Outcome outcome = file->allocate(offset, length, keep_size);
    if (outcome.progress == Progress::Wait) return false;
    reply(unique, outcome.error);
    return true;
  };
  if (!attempt()) engine_.park(attempt);
}

void Channel::handle_copy(const FuseRequest& request) {
  fuse_copy_file_range_in in{};
  if (!request.argument(&in)) return reply(request.unique(), EIO);
  const std::shared_ptr<Handle> from = engine_.handle(in.fh_in);
  const std::shared_ptr<Handle> to = engine_.handle(in.fh_out);
  if (from == nullptr || to == nullptr) return reply(request.unique(), EBADF);
  engine_.worker().post(
      [this, unique = request.unique(), source = from->file, target = to->file, in] {
        copy_range(unique, source, in.off_in, target, in.off_out, std::min(in.len, kCopyBytesMax));
      });
}

// Copies through a read buffer and staging, on the worker: both sides may wait for devices.
void Channel::copy_range(uint64_t unique, const std::shared_ptr<File>& from, uint64_t from_offset,
                         const std::shared_ptr<File>& to, uint64_t to_offset, uint64_t length) {
  uint64_t copied = 0;
  int error = 0;
  char* buffer = engine_.copy_buffer();
  while (copied < length && error == 0) {
    WaitedRead read;
    read.offset = from_offset + copied;
    read.length = std::min<uint64_t>(length - copied, wire::kMaxWriteBytes);
    read.buffer = buffer;
    from->read(&read);
    error = read.waiter.wait();
    if (error != 0 || read.bytes == 0) break;
    Payload payload;
    payload.add(const_cast<char*>(read.data), read.bytes);
    Waiter written;
    const auto attempt = [this, &to, &payload, &written, &read, at = to_offset + copied] {
      const Outcome outcome = to->write(at, read.bytes, payload, nullptr, nullptr);
      if (outcome.progress == Progress::Wait) return false;
      written.set(outcome.error);
      return true;
    };
    if (!attempt()) engine_.park(attempt);
    error = written.wait();
    if (error == 0) copied += read.bytes;
  }
  if (copied == 0 && error != 0) return reply(unique, error);
  const auto finish = [this, unique, copied] {
    reply_written(unique, static_cast<uint32_t>(copied));
  };
  engine_.has_cached_readers(to->ino()) ? invalidate(to->ino(), finish) : finish();
}

}  // namespace fpfs
