// READ: answered from pages kept in memory, or when the devices have them; parked without a buffer.
#include <fcntl.h>

#include <cstring>
#include <utility>

#include "fuse/channel_waiting.h"

namespace fpfs {

// Whoever calls read(2) on a handle that has no pages is named; a page is read for nobody.
static bool is_for_page(const fuse_read_in& in) {
  return (in.read_flags & FUSE_READ_LOCKOWNER) == 0;
}

struct Channel::FuseRead : ReadJob {
  Channel* channel = nullptr;
  uint64_t unique = 0;
  void done(int failure, const char* data, size_t bytes) override {
    Channel& owner = *channel;
    if (failure != 0) {
      owner.reply(unique, failure);
    } else {
      owner.statistics_.read_bytes.fetch_add(bytes, std::memory_order_relaxed);
      owner.reply(unique, 0, data, bytes);
    }
    owner.engine_.read_buffers().give(buffer);
    delete this;
    owner.engine_.wake();
  }
};

void Channel::handle_read(const FuseRequest& request) {
  statistics_.reads.fetch_add(1, std::memory_order_relaxed);
  fuse_read_in in{};
  if (!request.argument(&in)) return reply(request.unique(), EIO);
  if (in.size > wire::kMaxWriteBytes) return reply(request.unique(), EINVAL);
  const std::shared_ptr<Handle> handle = engine_.handle(in.fh);
  if (handle == nullptr) return reply(request.unique(), EBADF);
  const std::shared_ptr<File>& file = handle->file;
  if (is_for_page(in)) {
    // posix_fadvise(2) alone asks for that. Who only writes has no pages: see Pages of the inodes.
    if ((handle->flags & O_ACCMODE) == O_WRONLY) return reply(request.unique(), EBADF);
    handle->keep_pages();
  }
  const std::shared_ptr<ReadAhead> ahead = read_ahead_of(*handle);
  // (What is overwritten has to be planned anew.)
  if (ahead != nullptr && !file->is_being_overwritten()) {
    const uint64_t unique = request.unique();
    if (ahead->read(
            in.offset, in.size, [this, unique](const auto& parts) { reply_read(unique, parts); },
            [this, unique, file, in] { read_or_park(unique, file, in); })) {
      return;
    }
  }
  read_or_park(request.unique(), file, in);
}

// Null where there is none: for those who write, and where the policy has none.
std::shared_ptr<ReadAhead> Channel::read_ahead_of(Handle& handle) {
  const uint64_t bytes = handle.file->read_ahead();
  if (bytes == 0 || handle.writable()) return nullptr;
  const MutexLock lock(handle.mutex);
  if (handle.ahead == nullptr) {
    handle.ahead = std::make_shared<ReadAhead>(engine_.read_buffers(), handle.file, bytes,
                                               [this] { engine_.wake(); });
  }
  return handle.ahead;
}

void Channel::reply_read(uint64_t unique, const std::vector<ReadAhead::Part>& parts) {
  size_t bytes = 0;
  std::vector<iovec> body;
  for (const ReadAhead::Part& part : parts) {
    body.push_back({const_cast<char*>(part.data), part.length});
    bytes += part.length;
  }
  statistics_.read_bytes.fetch_add(bytes, std::memory_order_relaxed);
  statistics_.reads_ahead.fetch_add(1, std::memory_order_relaxed);
  reply_parts(unique, 0, std::move(body));
}

void Channel::read_or_park(uint64_t unique, const std::shared_ptr<File>& file,
                           const fuse_read_in& in) {
  if (start_read(unique, file, in)) return;
  engine_.park([this, unique, file, in] {
    return start_read(unique, file, in) ? Retry::Done : Retry::Waiting;
  });
}

bool Channel::start_read(uint64_t unique, const std::shared_ptr<File>& file,
                         const fuse_read_in& in) {
  char* buffer = engine_.read_buffers().take();
  if (buffer == nullptr) return false;
  auto* job = new FuseRead();
  job->channel = this;
  job->unique = unique;
  job->offset = in.offset;
  job->length = in.size;
  job->for_page = is_for_page(in);
  job->buffer = buffer;
  file->read(job);
  return true;
}

}  // namespace fpfs
