// LSEEK, FALLOCATE and COPY_FILE_RANGE, which libfuse's Python binding has no handlers for.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "fuse/channel_waiting.h"

namespace fpfs {
namespace {

constexpr uint32_t kFallocKeepSize = 1;
constexpr uint32_t kFallocPunchHole = 2;
constexpr uint32_t kFallocZeroRange = 16;
// From here on an allocation that all devices together could not hold finds no space at once,
// instead of when they are full of part of it.
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

// Truncating through a descriptor is writing; Python does it.
void Channel::note_truncation(const FuseRequest& request) {
  fuse_setattr_in in{};
  constexpr uint32_t wanted = FATTR_SIZE | FATTR_FH;
  if (!request.argument(&in) || (in.valid & wanted) != wanted) return;
  const std::shared_ptr<Handle> handle = engine_.handle(in.fh);
  if (handle == nullptr) return;
  note_writer(*handle, (in.valid & FATTR_LOCKOWNER) != 0 ? in.lock_owner : kOwnerUnknown);
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
  const uint32_t mode = in.mode & ~kFallocKeepSize;
  if ((mode != 0 && mode != kFallocPunchHole && mode != kFallocZeroRange) ||
      (mode == kFallocPunchHole && !keep_size)) {
    return reply(unique, EOPNOTSUPP);
  }
  note_writer(*handle, kOwnerUnknown);  // the kernel does not say who
  if (mode == kFallocZeroRange && !may_have_room(*file, in.length)) return reply(unique, ENOSPC);
  const bool sync = waits_for_changes(*handle);
  if (sync) let_releases_pass();
  const auto waiting = std::make_shared<Waiting>(request);
  if (mode == 0) return allocate_until_done(waiting, file, in, sync);
  file->punch(in.offset, in.length, [this, waiting, file, in, mode, sync](int error) {
    if (error != 0) return fail_zeroing(waiting->unique, file, in, error);
    if (mode == kFallocZeroRange) return allocate_until_done(waiting, file, in, sync);
    finish({waiting->unique, {}, 0}, file->ino(), sync);
  });
}

bool Channel::may_have_room(File& file, uint64_t length) const {
  if (length <= kCheckedBytesMin) return true;
  uint64_t bytes_free = file.attributes().allocated_bytes;
  for (const auto& device : engine_.devices()) bytes_free += device->bytes_free();
  return length <= bytes_free;
}

// The kernel drops the pages of a range when it was zeroed, not when that failed in its middle.
void Channel::fail_zeroing(uint64_t unique, const std::shared_ptr<File>& file,
                           const fuse_fallocate_in& in, int error) {
  invalidate(file->ino(), static_cast<int64_t>(in.offset), static_cast<int64_t>(in.length),
             [this, unique, error] { reply(unique, error); });
}

void Channel::allocate_until_done(const std::shared_ptr<Waiting>& waiting,
                                  const std::shared_ptr<File>& file, const fuse_fallocate_in& in,
                                  bool sync) {
  // Once something has given way, what a filesystem says is free may lag behind.
  bool is_tried = may_have_room(*file, in.length);
  auto attempt = [this, waiting, file, in, sync, is_tried]() mutable {
    Outcome outcome = is_tried
                          ? file->allocate(in.offset, in.length, (in.mode & kFallocKeepSize) != 0)
                          : Outcome::failed(ENOSPC);
    is_tried = true;
    if (const Retry retry = engine_.retry_of(file->ino(), outcome); retry != Retry::Done) {
      if (!waiting->given_up) return retry;
      file->give_up_allocating();
      outcome = Outcome::failed(EINTR);
    }
    end_waiting(waiting->unique);
    if (outcome.error == 0) {
      finish({waiting->unique, {}, 0}, file->ino(), sync);
    } else if ((in.mode & kFallocZeroRange) != 0) {
      fail_zeroing(waiting->unique, file, in, outcome.error);
    } else {
      reply(waiting->unique, outcome.error);
    }
    return Retry::Done;
  };
  keep_waiting(waiting);
  if (attempt() != Retry::Done) engine_.park(attempt);
}

void Channel::handle_copy(const FuseRequest& request) {
  fuse_copy_file_range_in in{};
  if (!request.argument(&in)) return reply(request.unique(), EIO);
  const std::shared_ptr<Handle> from = engine_.handle(in.fh_in);
  const std::shared_ptr<Handle> to = engine_.handle(in.fh_out);
  if (from == nullptr || to == nullptr) return reply(request.unique(), EBADF);
  // Afterwards the kernel would throw away what a map has changed beside the range, on its first
  // and its last page. Without this request it reads and writes.
  if (to->file->has_kept_pages()) return reply(request.unique(), EOPNOTSUPP);
  note_writer(*to, kOwnerUnknown);  // the kernel does not say who
  const bool sync = waits_for_changes(*to);
  if (sync) let_releases_pass();
  const auto waiting = std::make_shared<Waiting>(request);
  keep_waiting(waiting);
  engine_.worker().post([this, waiting, source = from->file, target = to->file, in, sync] {
    copy_range(waiting, source, target, in, sync);
    end_waiting(waiting->unique);
  });
}

// Copies through a read buffer and staging, on the worker: both sides may wait for devices.
void Channel::copy_range(const std::shared_ptr<Waiting>& waiting, const std::shared_ptr<File>& from,
                         const std::shared_ptr<File>& to, const fuse_copy_file_range_in& in,
                         bool sync) {
  const uint64_t length = std::min(in.len, kCopyBytesMax);
  uint64_t copied = 0;
  int error = waiting->given_up ? EINTR : 0;
  bool drops_pages = false;
  char* buffer = engine_.copy_buffer();
  while (copied < length && error == 0) {
    WaitedRead read;
    read.offset = in.off_in + copied;
    read.length = std::min<uint64_t>(length - copied, wire::kMaxWriteBytes);
    read.buffer = buffer;
    from->read(&read);
    error = read.waiter.wait();
    if (error != 0 || read.bytes == 0) break;
    Payload payload;
    payload.add(const_cast<char*>(read.data), read.bytes);
    Waiter written;
    const auto attempt = [this, &waiting, &to, &payload, &written, &read, &drops_pages,
                          at = in.off_out + copied] {
      Outcome outcome = to->write(at, read.bytes, payload, nullptr, nullptr);
      if (const Retry retry = engine_.retry_of(to->ino(), outcome); retry != Retry::Done) {
        if (!waiting->given_up) return retry;
        outcome = Outcome::failed(EINTR);
      }
      if (outcome.overwrite != 0) {  // somebody has mapped it since the copy began
        drops_pages = true;
        drop_pages(to, outcome.overwrite, at, read.bytes, [] {});
      }
      if (outcome.error == ENOSPC) to->refused(at, read.bytes);
      if (outcome.error == 0) to->accepted(at, read.bytes);
      written.set(outcome.error);
      return Retry::Done;
    };
    if (attempt() != Retry::Done) engine_.park(attempt);
    error = written.wait();
    if (error == 0) copied += read.bytes;
  }
  if (copied == 0 && error != 0) return reply(waiting->unique, error);
  const auto answer = [this, done = Done{waiting->unique, static_cast<uint32_t>(copied), 0}, to,
                       sync] { finish(done, to->ino(), sync); };
  if (!drops_pages) return answer();
  notifier_.post(answer);  // behind the pages
}

}  // namespace fpfs
