// Receiving: prediction, dispatch, replies, start and end of the connection.
#include "fuse/channel.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "fuse/channel_waiting.h"
#include "fuse/fatal_signal.h"

namespace fpfs {
namespace {

constexpr size_t kParkedWritesMax = 16;  // landing buffers beside one for each channel thread
constexpr int kSocketBufferBytes = 4 * 1024 * 1024;
// A stream's next write comes within some tens of microseconds, which is what waking a thread on
// an idle core costs: for so long the thread looks again instead of sleeping.
constexpr std::chrono::microseconds kLookAgain{100};
// A writer waits for these threads, nobody for those that write to the devices behind its back.
constexpr int kChannelNice = -10;
// Until a look at another process counts as late. Where the kernel tells who lives, only processes
// on their way out are looked at, which nobody else waits for.
constexpr std::chrono::milliseconds kLookLimit{2000};
constexpr std::chrono::milliseconds kLookLimitOfAll{10};

// The unique of a RELEASE, or 0.
uint64_t release_in(const char* head) {
  fuse_in_header header{};
  std::memcpy(&header, head, sizeof header);
  return header.opcode == FUSE_RELEASE ? header.unique : 0;
}

// Its pages have to be there when the kernel copies a request to them: one that a SIGKILL
// interrupts at a page that is missing it answers with EIO, instead of sending it again to the next
// server (fuse_dev_do_read).
char* make_landing_buffer() {
  auto* made = static_cast<char*>(std::aligned_alloc(wire::kPageBytes, wire::kMaxWriteBytes));
  if (made != nullptr) std::memset(made, 0, wire::kMaxWriteBytes);
  return made;
}

uint64_t boot_time_ms() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000 + static_cast<uint64_t>(now.tv_nsec) / 1'000'000;
}

}  // namespace

LandingPool::~LandingPool() {
  for (char* buffer : free_) std::free(buffer);
}

char* LandingPool::take(const std::function<void()>& before_wait) {
  MutexLock lock(mutex_);
  if (free_.empty() && made_ == limit_) {
    lock.unlock();
    before_wait();
    lock.lock();
  }
  while (free_.empty() && made_ == limit_ && !stopped_) given_.wait(mutex_);
  if (stopped_) return nullptr;
  if (free_.empty()) {
    ++made_;
    lock.unlock();
    return make_landing_buffer();
  }
  char* buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void LandingPool::give(char* buffer) {
  const MutexLock lock(mutex_);
  free_.push_back(buffer);
  given_.notify_one();
}

void LandingPool::stop() {
  const MutexLock lock(mutex_);
  stopped_ = true;
  given_.notify_all();
}

Channel::Channel(Engine& engine, int fuse_fd, std::shared_ptr<KnownDirectories> directories)
    : engine_(engine),
      fuse_fd_(fuse_fd),
      directories_(std::move(directories)),
      landing_pool_(kParkedWritesMax + engine.config().channel_threads),
      latency_(engine.config().cpu_latency_path,
               [&engine](const std::string& why) {
                 engine.log(20, "processors may sleep deeply while requests come (" + why +
                                    "): where waking them is slow, saves take longer");
               }),
      kernel_tells_who_lives_(surely_lives(gettid())),
      inspector_("fpfs-inspector", kChannelNice,
                 kernel_tells_who_lives_ ? kLookLimit : kLookLimitOfAll),
      reply_(wire::kMaxWriteBytes + wire::kPageBytes),
      notifier_("fpfs-notify"),
      name_notifier_("fpfs-names") {}

Channel::~Channel() {
  stop();
  if (socket_ >= 0) ::close(socket_);
  if (stop_fd_ >= 0) ::close(stop_fd_);
  if (relay_fd_ >= 0) ::close(relay_fd_);
  ::close(fuse_fd_);
}

Result<int> Channel::serve(Engine& engine, int fuse_fd,
                           std::shared_ptr<KnownDirectories> directories, Connection connection) {
  auto made = std::make_unique<Channel>(engine, fuse_fd, std::move(directories));
  Channel& channel = *made;
  engine.attach(std::move(made));
  Requests& requests = engine.arena().requests();
  if (connection == Connection::New) {
    requests.start_over();
    return channel.start(engine.config().channel_threads, std::nullopt);
  }
  Resumed resumed;
  const std::optional<fuse_init_in> init = engine.arena().connection();
  if (!init.has_value()) return Status(ESTALE, "the staging arena knows of no connection");
  resumed.init = *init;
  resumed.after_fault = connection == Connection::LeftByFault;
  Requests::Left left = requests.end(resumed.after_fault, boot_time_ms());
  resumed.unanswered = std::move(left.unanswered);
  resumed.condemned = std::move(left.condemned);
  return channel.start(engine.config().channel_threads, std::move(resumed));
}

Result<int> Channel::start(uint32_t threads, std::optional<Resumed> resumed) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    return Status::from_errno("socketpair");
  }
  stop_fd_ = eventfd(0, EFD_CLOEXEC);
  relay_fd_ = eventfd(0, EFD_CLOEXEC);
  if (stop_fd_ < 0 || relay_fd_ < 0) return Status::from_errno("eventfd");
  // Several threads poll it: a request that another one took must not block this one.
  if (fcntl(fuse_fd_, F_SETFL, fcntl(fuse_fd_, F_GETFL) | O_NONBLOCK) != 0) {
    return Status::from_errno("/dev/fuse: O_NONBLOCK");
  }
  for (const int fd : pair) {
    // Without CAP_NET_ADMIN the system's limit holds; replies are capped to fit in it.
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &kSocketBufferBytes, sizeof(int)) != 0) {
      setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kSocketBufferBytes, sizeof(int));
    }
  }
  socket_ = pair[0];
  if (resumed.has_value()) {
    const MutexLock lock(relay_mutex_);
    kernel_init_ = resumed->init;
    resuming_ = true;
    one_receives_ = true;
    after_fault_ = resumed->after_fault;
    condemned_ = std::move(resumed->condemned);
    expected_ = {resumed->unanswered.begin(), resumed->unanswered.end()};
  }
  receiving_ = std::vector<Receiving>(threads);
  for (uint32_t i = 0; i < threads; ++i) {
    threads_.push_back(start_thread("fpfs-channel-" + std::to_string(i),
                                    [this, i] { receive_loop(static_cast<int>(i)); }));
  }
  threads_.push_back(start_thread("fpfs-relay", [this] { relay_loop(); }));
  return pair[1];
}

void Channel::stop() {
  if (stopping_.exchange(true)) return;
  landing_pool_.stop();
  for (const int fd : {stop_fd_, relay_fd_}) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(fd, &one, sizeof one);
  }
  {
    const MutexLock lock(relay_mutex_);
    resumed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  notifier_.stop();
  name_notifier_.stop();
  inspector_.stop();
}

void Channel::connection_lost(int error) {
  if (lost_.exchange(true)) return;
  engine_.post(ClosedEvent{error});
}

// --- receiving ---

void Channel::receive_loop(int thread) {
  // Ordinary users may not; their writers wait a little longer on a busy machine.
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kChannelNice);
  auto r = std::make_unique<Receiver>();
  r->thread = static_cast<size_t>(thread);
  r->ready.reset(epoll_create1(EPOLL_CLOEXEC));
  for (const auto& [fd, how] : {std::pair{fuse_fd_, EPOLLIN | EPOLLEXCLUSIVE},
                                {socket_, EPOLLIN | EPOLLEXCLUSIVE},
                                {stop_fd_, EPOLLIN}}) {
    epoll_event event{};
    event.events = how;
    event.data.fd = fd;
    if (epoll_ctl(r->ready.get(), EPOLL_CTL_ADD, fd, &event) != 0) return connection_lost(errno);
  }
  r->lease.thread = thread;
  if (!wait_resumed(thread == 0)) return;
  r->landing = landing_pool_.take([] {});
  size_t received = 0;
  if (thread != 0 || receive_resent(*r)) {
    while (r->landing != nullptr && receive(*r, &received)) handle(*r, received);
  }
  latency_.give_back();
  end_lease(*r);
  give_spare(*r);
  if (r->landing != nullptr) landing_pool_.give(r->landing);
}

void Channel::handle(Receiver& r, size_t received) {
  latency_.request_came();
  dispatch(r, received);
  if (receiving_[r.thread].turn % 2 == 1) ++receiving_[r.thread].turn;
  end_lease(r);
}

// Waits for a request, and passes on what pyfuse3 answers meanwhile. False when the channel ends.
bool Channel::wait_readable(Receiver& r) {
  static const bool several_cores = std::thread::hardware_concurrency() > 1;
  for (;;) {
    epoll_event event{};
    int ready = 0;
    if (r.expecting && several_cores) {
      const auto until = std::chrono::steady_clock::now() + kLookAgain;
      do {
        ready = epoll_wait(r.ready.get(), &event, 1, 0);
      } while (ready == 0 && std::chrono::steady_clock::now() < until);
    }
    if (ready <= 0) give_spare(r);
    while (ready <= 0) {
      if (latency_.bounded()) latency_.rest();
      const int timeout_ms = latency_.bounded() ? CpuLatency::kQuietMs : -1;
      ready = epoll_wait(r.ready.get(), &event, 1, timeout_ms);
      if (ready < 0 && errno != EINTR) return false;
    }
    if (stopping_) return false;
    if (event.data.fd != socket_) return true;
    r.expecting = true;  // who has an answer asks again
    if (!relay_replies()) (void)epoll_ctl(r.ready.get(), EPOLL_CTL_DEL, socket_, nullptr);
  }
}

// One request into `head` and `payload`. False when the connection or the channel ends.
bool Channel::receive(Receiver& r, size_t* received) {
  for (;;) {
    if (!wait_readable(r)) return false;
    r.expecting = false;
    predict(r);
    iovec parts[5];
    size_t count = 0;
    parts[count++] = {r.head, sizeof r.head};
    for (size_t i = 0; i < r.payload.count; ++i) {
      parts[count++] = {r.payload.pieces[i].base, r.payload.pieces[i].length};
    }
    Receiving& receiving = receiving_[r.thread];
    receiving.release = 0;
    ++receiving.turn;
    const ssize_t n = readv(fuse_fd_, parts, static_cast<int>(count));
    if (n >= 0) receiving.release = release_in(r.head);
    if (receiving.release == 0) ++receiving.turn;
    if (n >= 0) {
      *received = static_cast<size_t>(n);
      return true;
    }
    const int error = errno;
    end_lease(r);
    if (error == ENODEV || (error != EINTR && error != EAGAIN && error != ENOENT)) {
      connection_lost(error);
      return false;
    }
  }
}

// Chooses where the next payload is to land: where the stream that follows now continues.
void Channel::predict(Receiver& r) {
  r.payload = Payload{};
  r.predicted_file = nullptr;
  size_t room = wire::kMaxWriteBytes;
  const Stream& last = r.streams[r.last_stream];
  const Stream& stream = r.streams[last.successor];
  if (stream.file != nullptr) {
    const uint64_t chunk_bytes = stream.file->chunk_bytes();
    uint64_t offset = stream.next_offset;
    r.predicted_file = stream.file.get();
    r.predicted_offset = offset;
    char* at = nullptr;
    if (const size_t n = std::min(room, stream.file->begin_lease(offset, &r.lease, &at)); n > 0) {
      r.payload.add(at, n);
      room -= n;
      offset += n;
    }
    const bool continues = r.payload.count == 0 || offset % chunk_bytes == 0;
    if (room > 0 && continues && chunk_bytes >= wire::kMaxWriteBytes) {
      if (r.spare == nullptr) r.spare = engine_.arena().take();
      if (r.spare != nullptr) {
        const size_t n = std::min<uint64_t>(room, chunk_bytes - offset % chunk_bytes);
        r.payload.add(r.spare->data + offset % chunk_bytes, n);
      }
    }
  }
  // The kernel wants room for its largest request, whatever comes.
  r.payload.add(r.landing, wire::kMaxWriteBytes);
}

void Channel::note_write(Receiver& r, const std::shared_ptr<File>& file, uint64_t next_offset) {
  size_t index = 0;
  for (size_t i = 0; i < std::size(r.streams); ++i) {
    if (r.streams[i].file == file) {
      index = i;
      break;
    }
    if (r.streams[i].used < r.streams[index].used) index = i;
  }
  Stream& stream = r.streams[index];
  if (stream.file != file) {
    stream.file = file;
    stream.successor = index;
  }
  stream.next_offset = next_offset;
  stream.used = ++r.clock;
  if (r.streams[r.last_stream].file != nullptr) r.streams[r.last_stream].successor = index;
  r.last_stream = index;
}

// The file is being flushed or closed: its open slot must not stay lent.
void Channel::forget_stream(Receiver& r, uint64_t ino) {
  for (size_t i = 0; i < std::size(r.streams); ++i) {
    Stream& stream = r.streams[i];
    if (stream.file == nullptr || stream.file->ino() != ino) continue;
    stream = Stream{};
    stream.successor = i;
  }
}

void Channel::end_lease(Receiver& r) {
  if (r.lease.slot != nullptr) r.lease.file->end_lease(&r.lease);
  r.lease.file.reset();
}

// Nothing is kept from others, nor counted as staged, while nobody writes.
void Channel::give_spare(Receiver& r) {
  if (r.spare == nullptr) return;
  engine_.arena().give(std::exchange(r.spare, nullptr));
  engine_.wake();
}

void Channel::dispatch(Receiver& r, size_t received) {
  FuseRequest request;
  if (!request.parse(r.head, received, r.payload)) {
    engine_.log(40, "malformed request of " + std::to_string(received) + " bytes from the kernel");
    return;
  }
  if (refuse_condemned(request)) return;
  if (engine_.tracer().watches(request.nodeid())) trace_request(request);
  if (is_answered(request.opcode())) {
    engine_.arena().requests().taken(request.unique());
    statistics_.received.fetch_add(1, std::memory_order_relaxed);
  }
  switch (request.opcode()) {
    case FUSE_WRITE:
      r.expecting = true;
      r.received_ns = monotonic_ns();
      return handle_write(r, request);
    case FUSE_READ:
      return handle_read(request);
    case FUSE_LSEEK:
      return handle_lseek(request);
    case FUSE_FALLOCATE:
      return handle_fallocate(request);
    case FUSE_COPY_FILE_RANGE:
      return handle_copy(request);
    case FUSE_LOOKUP:
      r.expecting = true;
      return handle_lookup(request);
    case FUSE_GETATTR:
      r.expecting = true;
      return handle_getattr(request);
    case FUSE_INTERRUPT:
      return reply(request.unique(), ENOSYS);  // look_at_waiting() sees who is killed
    case FUSE_FLUSH:
      forget_stream(r, request.nodeid());
      return handle_flush(request);
    case FUSE_BATCH_FORGET:
      return relay_forgets(request);
    case FUSE_RELEASE:
      forget_stream(r, request.nodeid());
      end_lease(r);
      r.expecting = true;
      return handle_release(r, request);
    case FUSE_SETATTR:
      note_truncation(request);
      [[fallthrough]];
    case FUSE_FSYNC:
      forget_stream(r, request.nodeid());
      end_lease(r);
      r.expecting = true;
      return relay(request);
    default:
      r.expecting = true;
      return relay(request);
  }
}

void Channel::trace_request(const FuseRequest& request) {
  if (!is_answered(request.opcode())) return;
  TraceEvent event;
  event.kind = TraceKind::Request;
  event.detail = request.opcode();
  event.ino = request.nodeid();
  fuse_write_in write{};
  fuse_read_in read{};
  if (request.opcode() == FUSE_WRITE && request.argument(&write)) {
    event.offset = write.offset;
    event.length = write.size;
  } else if (request.opcode() == FUSE_READ && request.argument(&read)) {
    event.offset = read.offset;
    event.length = read.size;
  }
  event.at_ns[0] = monotonic_ns();
  engine_.tracer().request_received(request.unique(), event);
}

// --- replies ---

void Channel::reply(uint64_t unique, int error, const void* body, size_t body_bytes) {
  std::array<iovec, 2> parts{iovec{}, {const_cast<void*>(body), body_bytes}};
  send_reply(unique, error, parts.data(), body_bytes > 0 ? 2 : 1);
}

void Channel::reply_parts(uint64_t unique, int error, std::vector<iovec> body) {
  body.insert(body.begin(), iovec{});
  send_reply(unique, error, body.data(), body.size());
}

// Fills in the header, for which the first of the parts has room.
void Channel::send_reply(uint64_t unique, int error, iovec* parts, size_t count) {
  fuse_out_header out{};
  out.error = -error;
  out.unique = unique;
  parts[0] = {&out, sizeof out};
  for (size_t i = 0; i < count; ++i) out.len += static_cast<uint32_t>(parts[i].iov_len);
  engine_.arena().requests().answering(unique);
  // ENOENT: the request was interrupted and is gone. ENODEV: the connection is. Nobody waits then.
  if (writev(fuse_fd_, parts, static_cast<int>(count)) < 0 && errno != ENOENT && errno != ENODEV) {
    engine_.log(40, "reply to the kernel: " + std::string(std::strerror(errno)));
  }
  engine_.arena().requests().answered(unique);
  if (engine_.tracer().watches_any()) engine_.tracer().request_answered(unique, error);
}

void Channel::reply_done(const Done& done) {
  if (!done.bytes.has_value()) return reply(done.unique, 0);
  fuse_write_out out{};
  out.size = *done.bytes;
  reply(done.unique, 0, &out, sizeof out);
  if (done.received_ns != 0) {
    statistics_.write_to_ack.record(monotonic_ns() - done.received_ns);
  }
}

}  // namespace fpfs
