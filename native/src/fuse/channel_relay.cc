// The relay: requests to pyfuse3 unchanged, its replies back to the kernel, notifications.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "fuse/channel.h"

namespace fpfs {
namespace {

constexpr uint64_t kReplayedUnique = UINT64_MAX;  // the kernel's are smaller
constexpr int kNotifyResend = 7;                  // FUSE_NOTIFY_RESEND, Linux 6.9
constexpr int64_t kNoPages = -1;                  // of an inode that changed

}  // namespace

// The kernel handed a RELEASE out before this request, but the thread that took it may be slower.
// RELEASEs pass in their own order: each waits for those `before` it, so no two for each other.
void Channel::let_releases_pass(uint64_t before) const {
  for (const Receiving& other : receiving_) {
    const uint64_t seen = other.turn;
    while (seen % 2 == 1 && other.turn == seen && other.release < before) std::this_thread::yield();
  }
}

bool Channel::has_received(uint64_t requests) {
  {
    const MutexLock lock(relay_mutex_);
    if (resuming_ || one_receives_) return false;
  }
  // It hands them out in their order. What a thread takes now is looked at below.
  pollfd request{fuse_fd_, POLLIN, 0};
  const bool has_more = poll(&request, 1, 0) > 0 && (request.revents & POLLIN) != 0;
  if (has_more && statistics_.received < requests) return false;
  let_releases_pass();
  return true;
}

// The request's number takes the place of the caller's pid, which pyfuse3 hands on without looking
// at it: handlers tell by it what was done already when the kernel sends a request again.
void Channel::relay(const FuseRequest& request) {
  let_releases_pass();
  statistics_.relayed.fetch_add(1, std::memory_order_relaxed);
  const uint32_t opcode = request.opcode();
  if (opcode == FUSE_INIT || opcode == FUSE_OPEN || opcode == FUSE_CREATE) {
    const MutexLock lock(relay_mutex_);
    watched_[request.unique()] = opcode;
    if (opcode == FUSE_INIT && request.argument(&kernel_init_)) {
      engine_.arena().record_connection(kernel_init_);
    }
  }
  iovec parts[6];
  size_t count = 0;
  char head[wire::kWriteHeaderBytes];
  std::memcpy(head, request.head(), request.head_bytes());
  const uint32_t number = wire::request_number(request.unique());
  std::memcpy(head + offsetof(fuse_in_header, pid), &number, sizeof number);
  parts[count++] = {head, request.head_bytes()};
  size_t left = sizeof(fuse_in_header) + request.body_bytes() - request.head_bytes();
  fuse_read_in directory{};
  if ((opcode == FUSE_READDIR || opcode == FUSE_READDIRPLUS) && request.argument(&directory)) {
    directory.size = std::min(directory.size, wire::kRelayReplyBytesMax);
    std::memcpy(head + sizeof(fuse_in_header), &directory, sizeof directory);
  }
  for (size_t i = 0; i < request.rest().count && left > 0; ++i) {
    const size_t n = std::min(left, request.rest().pieces[i].length);
    parts[count++] = {request.rest().pieces[i].base, n};
    left -= n;
  }
  send(parts, count);
}

// A batch can be longer than a socket message may be: it is passed on in parts.
void Channel::relay_forgets(const FuseRequest& request) {
  fuse_batch_forget_in in{};
  if (!request.argument(&in)) return;
  constexpr size_t kBatch = 1024;
  const size_t there = (request.body_bytes() - sizeof in) / sizeof(fuse_forget_one);
  size_t left = std::min<size_t>(in.count, there);
  size_t from = sizeof in;
  std::vector<fuse_forget_one> forgets;
  while (left > 0) {
    const size_t n = std::min(left, kBatch);
    forgets.resize(n);
    request.copy(from, reinterpret_cast<char*>(forgets.data()), n * sizeof(fuse_forget_one));
    fuse_in_header header = request.header();
    fuse_batch_forget_in part{};
    part.count = static_cast<uint32_t>(n);
    header.len = static_cast<uint32_t>(sizeof header + sizeof part + n * sizeof(fuse_forget_one));
    const iovec parts[3] = {{&header, sizeof header},
                            {&part, sizeof part},
                            {forgets.data(), n * sizeof(fuse_forget_one)}};
    send(parts, 3);
    from += n * sizeof(fuse_forget_one);
    left -= n;
  }
}

// Never blocks a channel thread: what pyfuse3 cannot take yet goes to the backlog, in order.
void Channel::send(const iovec* parts, size_t count) {
  const MutexLock lock(relay_mutex_);
  if (backlog_.empty()) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = count;
    if (sendmsg(socket_, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      if (errno != EPIPE && errno != ECONNRESET) {
        engine_.log(40, "relay to pyfuse3: " + std::string(std::strerror(errno)));
      }
      return;
    }
  }
  std::string copy;
  for (size_t i = 0; i < count; ++i) {
    copy.append(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
  }
  backlog_.push_back(std::move(copy));
  wake_relay();
}

void Channel::flush_backlog() {
  const MutexLock lock(relay_mutex_);
  while (!backlog_.empty()) {
    const std::string& message = backlog_.front();
    if (::send(socket_, message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) return;
    backlog_.pop_front();
  }
}

void Channel::wake_relay() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(relay_fd_, &one, sizeof one);
}

// pyfuse3 begins with INIT, which the kernel sent to the process that served it before. Then the
// kernel hands out again what that process had taken and not answered.
bool Channel::resume() {
  struct {
    fuse_in_header header;
    fuse_init_in init;
  } message{};
  {
    const MutexLock lock(relay_mutex_);
    if (!resuming_) return true;
    message.init = kernel_init_;
  }
  message.header.len = sizeof message;
  message.header.opcode = FUSE_INIT;
  message.header.unique = kReplayedUnique;
  if (::send(socket_, &message, sizeof message, MSG_NOSIGNAL) < 0) return false;
  pollfd wait[2] = {{socket_, POLLIN, 0}, {stop_fd_, POLLIN, 0}};
  while (poll(wait, 2, -1) < 0) {
    if (errno != EINTR) return false;
  }
  std::vector<char> reply(wire::kMaxWriteBytes);
  fuse_out_header answer{};
  if (stopping_ || recv(socket_, reply.data(), reply.size(), 0) < ssize_t{sizeof answer}) {
    return false;
  }
  std::memcpy(&answer, reply.data(), sizeof answer);
  if (answer.unique != kReplayedUnique || answer.error != 0) {
    engine_.log(50, "pyfuse3 did not take over the connection");
    return false;
  }
  fuse_out_header resend{};
  resend.len = sizeof resend;
  resend.error = kNotifyResend;
  // ENODEV: the connection has ended, as the channel threads will see.
  if (::write(fuse_fd_, &resend, sizeof resend) < 0 && errno != ENODEV) {
    engine_.log(50, "the kernel does not send again what a server that died left unanswered (" +
                        std::string(std::strerror(errno)) +
                        "; Linux 6.9 does): the mount ends, and the next one takes over");
    return false;
  }
  const MutexLock lock(relay_mutex_);
  resuming_ = false;
  resumed_.notify_all();
  return true;
}

bool Channel::is_resuming() {
  const MutexLock lock(relay_mutex_);
  return resuming_;
}

// Nothing is received from the kernel before that, and by other threads than the `first` not before
// it has what comes again. They wait like those without a landing buffer: should the first have to
// wait for one, too, replies are passed on. False when the channel ends.
bool Channel::wait_resumed(bool first) {
  if (!first) receivers_waiting_.fetch_add(1);
  {
    const MutexLock lock(relay_mutex_);
    while ((resuming_ || (one_receives_ && !first)) && !stopping_) resumed_.wait(relay_mutex_);
  }
  if (!first) receivers_waiting_.fetch_sub(1);
  return !stopping_;
}

// What channel threads must not wait for: room in the socket, and replies while they all wait.
void Channel::relay_loop() {
  if (!resume()) return connection_lost(ENOTCONN);
  while (!stopping_) {
    short events = 0;
    {
      const MutexLock lock(relay_mutex_);
      if (!backlog_.empty()) events |= POLLOUT;
    }
    if (receivers_waiting_ >= engine_.config().channel_threads) events |= POLLIN;
    const int look_ms = look_at_waiting();
    pollfd wait[3] = {
        {socket_, events, 0}, {relay_fd_, POLLIN, 0}, {inspector_.late_fd(), POLLIN, 0}};
    if (poll(wait, 3, look_ms) < 0 && errno != EINTR) return;
    if (stopping_) return;
    if ((wait[1].revents & POLLIN) != 0) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t n = ::read(relay_fd_, &count, sizeof count);
    }
    if ((wait[2].revents & POLLIN) != 0 && inspector_.give_up_late()) {
      engine_.log(30,
                  "a look at another process takes too long: until it has ended, nothing is "
                  "known of how writers end");
    }
    if ((wait[0].revents & POLLOUT) != 0) flush_backlog();
    if ((wait[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0 && !relay_replies()) return;
  }
}

// Passes on what pyfuse3 has answered. False when it has closed its end.
bool Channel::relay_replies() {
  for (;;) {
    const MutexLock passing(reply_mutex_);
    const ssize_t n = recv(socket_, reply_.data(), reply_.size(), MSG_DONTWAIT);
    if (n == 0) return false;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    auto bytes = static_cast<size_t>(n);
    fuse_out_header header{};
    if (bytes < sizeof header) continue;
    std::memcpy(&header, reply_.data(), sizeof header);
    uint32_t opcode = 0;
    fuse_init_in kernel_init{};
    {
      const MutexLock lock(relay_mutex_);
      if (const auto it = watched_.find(header.unique); it != watched_.end()) {
        opcode = it->second;
        watched_.erase(it);
      }
      kernel_init = kernel_init_;
    }
    if (header.error == 0 && opcode == FUSE_INIT) {
      patch_init_reply(kernel_init, reply_.data() + sizeof header, bytes - sizeof header);
    } else if (header.error == 0 && opcode == FUSE_OPEN) {
      patch_open_reply(reply_.data(), bytes, sizeof header);
    } else if (header.error == 0 && opcode == FUSE_CREATE) {
      patch_open_reply(reply_.data(), bytes, sizeof header + sizeof(fuse_entry_out));
    }
    engine_.arena().requests().answering(header.unique);
    // ENOENT and ENODEV: nobody waits for this reply any more.
    if (::write(fuse_fd_, reply_.data(), bytes) < 0 && errno != ENOENT && errno != ENODEV) {
      engine_.log(40, "reply of pyfuse3 to the kernel: " + std::string(std::strerror(errno)));
    }
    engine_.arena().requests().answered(header.unique);
    if (engine_.tracer().watches_any()) {
      engine_.tracer().request_answered(header.unique, -header.error);
    }
  }
}

// How the kernel is to treat the new handle's pages.
void Channel::patch_open_reply(char* message, size_t bytes, size_t open_offset) {
  fuse_open_out out{};
  if (bytes < open_offset + sizeof out) return;
  std::memcpy(&out, message + open_offset, sizeof out);
  const std::shared_ptr<Handle> handle = engine_.handle(out.fh);
  if (handle == nullptr) return;  // not a regular file
  if (!handle->writable()) {
    out.open_flags |= wire::kOpenNoFlush;
    if (!engine_.set_cached(handle)) {
      out.open_flags &= ~uint32_t{FOPEN_KEEP_CACHE};
      out.open_flags |= FOPEN_DIRECT_IO;  // somebody writes: every read asks
    }
  } else if ((handle->flags & O_DIRECT) == 0) {
    out.open_flags &= ~uint32_t{FOPEN_KEEP_CACHE};
    out.open_flags |= FOPEN_DIRECT_IO | wire::kOpenParallelDirectWrites;
  } else {
    // Without FOPEN_DIRECT_IO the kernel keeps several requests of one O_DIRECT call in flight.
    out.open_flags &= ~uint32_t{FOPEN_DIRECT_IO | FOPEN_KEEP_CACHE};
  }
  std::memcpy(message + open_offset, &out, sizeof out);
}

// --- notifications ---

// In a thread of its own: the kernel may wait here for pages that readers hold until a channel
// thread has answered them.
void Channel::invalidate(uint64_t ino, int64_t offset, int64_t length, std::function<void()> then) {
  notifier_.post([this, ino, offset, length, then = std::move(then)] {
    notify_inode(ino, offset, length);
    then();
  });
}

// What pyfuse3 answered before may tell of the old attributes. If the kernel learned of the inode
// from an answer that came behind the notification, it would keep them.
void Channel::invalidate_attributes(uint64_t ino) {
  if (!is_resuming()) (void)relay_replies();  // should pyfuse3 have ended, others find out
  notify_inode(ino, kNoPages, 0);             // which tells of errors
}

void Channel::find_out(uint64_t ino, std::function<void(bool known)> then) {
  notifier_.post(
      [this, ino, then = std::move(then)] { then(notify_inode(ino, kNoPages, 0) != ENOENT); });
}

// The kernel takes the directory's lock for it, which somebody may hold for as long as he likes: a
// reader of the directory whose memory never comes. Nobody waits for this thread without a limit.
// (That all names are looked up anew, which takes no lock, would not do: what is mounted on one of
// them is detached, and a reader that goes on puts the old name back.)
void Channel::invalidate_name(uint64_t directory, std::string name) {
  name_notifier_.post([this, directory, name = std::move(name)] {
    fuse_notify_inval_entry_out body{};
    body.parent = directory;
    body.namelen = static_cast<uint32_t>(name.size());
    // The name is followed by a zero.
    notify(FUSE_NOTIFY_INVAL_ENTRY,
           {{&body, sizeof body}, {const_cast<char*>(name.c_str()), name.size() + 1}});
  });
}

void Channel::after_names(std::function<void()> then) { name_notifier_.post(std::move(then)); }

// Its attributes, and its pages of a range.
int Channel::notify_inode(uint64_t ino, int64_t offset, int64_t length) {
  fuse_notify_inval_inode_out body{};
  body.ino = ino;
  body.off = offset;
  body.len = length;
  return notify(FUSE_NOTIFY_INVAL_INODE, {{&body, sizeof body}});
}

// Returns the kernel's errno, or 0.
int Channel::notify(int code, std::vector<iovec> body) {
  fuse_out_header header{};
  header.len = sizeof header;
  for (const iovec& part : body) header.len += static_cast<uint32_t>(part.iov_len);
  header.error = code;
  body.insert(body.begin(), {&header, sizeof header});
  // ENOENT: the kernel does not know the inode or the name any more, so it has nothing of it.
  if (writev(fuse_fd_, body.data(), static_cast<int>(body.size())) >= 0) return 0;
  const int error = errno;
  if (error != ENOENT && error != ENODEV) {
    engine_.log(40, "telling the kernel of a change: " + std::string(std::strerror(error)));
  }
  return error;
}

}  // namespace fpfs
