// WRITE: into staging and answered, or parked until there is room.
#include "fuse/channel_write.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "fuse/fatal_signal.h"

namespace fpfs {
namespace {

constexpr std::chrono::milliseconds kLookEvery{100};  // at who waits

}  // namespace

void Channel::handle_write(Receiver& r, const FuseRequest& request) {
  statistics_.writes.fetch_add(1, std::memory_order_relaxed);
  WriteArguments arguments;
  if (const int error = parse_write(request, &arguments); error != 0) {
    return reply(request.unique(), error);
  }
  const std::shared_ptr<Handle> handle = engine_.handle(arguments.handle);
  if (handle == nullptr) return reply(request.unique(), EBADF);
  const std::shared_ptr<File>& file = handle->file;
  {
    const MutexLock lock(handle->mutex);
    if (const int error = file->take_error(&handle->errors_seen); error != 0) {
      return reply(request.unique(), error);
    }
  }
  note_writer(*handle, arguments.owner);
  // Who opens with O_DIRECT and drops it later, as dd does before an odd tail, writes through the
  // page cache from then on.
  if ((handle->flags & O_DIRECT) != 0 && !arguments.direct) arguments.from_page_cache = true;
  arguments.sync = arguments.sync || file->ack() == Ack::Durable;
  if (arguments.sync) let_releases_pass();  // what was closed before becomes durable with it
  // After a write the kernel asks for times and sizes again, but goes on with the mode it knows.
  if (arguments.kill_privileges && file->drop_privileges()) invalidate_attributes(file->ino());
  statistics_.write_bytes.fetch_add(arguments.size, std::memory_order_relaxed);
  if (r.predicted_file != file.get() || r.predicted_offset != arguments.offset) {
    // What landed in a slot is not where it belongs, and the write may go to that very slot.
    gather(r, arguments.size);
  }
  if (!r.payload.lies_at(r.landing, 0)) {
    statistics_.writes_in_place.fetch_add(1, std::memory_order_relaxed);
  }
  note_write(r, file, arguments.offset + arguments.size);

  const Outcome outcome = file->write(arguments.offset, arguments.size, r.payload, &r.spare,
                                      &r.lease, arguments.source());
  auto write = std::make_unique<ParkedWrite>(request);
  write->arguments = arguments;
  write->file = file;
  write->received_ns = r.received_ns;
  if (engine_.retry_of(file->ino(), outcome) == Retry::Done) return finish_write(*write, outcome);
  park_write(r, std::move(write));
}

// Moves the payload together in the landing buffer. Its last piece was received at the start of
// that buffer, so it moves up before the earlier pieces take that place.
void Channel::gather(Receiver& r, size_t bytes) {
  std::array<size_t, std::extent_v<decltype(Payload::pieces)>> begins{};
  size_t begin = 0;
  for (size_t i = 0; i < r.payload.count; ++i) {
    begins[i] = begin;
    begin += r.payload.pieces[i].length;
  }
  for (size_t i = r.payload.count; i-- > 0;) {
    if (begins[i] >= bytes) continue;
    const Payload::Piece& piece = r.payload.pieces[i];
    std::memmove(r.landing + begins[i], piece.base, std::min(piece.length, bytes - begins[i]));
  }
  r.payload = Payload{};
  r.payload.add(r.landing, bytes);
}

// Keeps the payload in a landing buffer of its own; without a copy if it was received in one.
void Channel::park_write(Receiver& r, std::unique_ptr<ParkedWrite> write) {
  statistics_.writes_parked.fetch_add(1, std::memory_order_relaxed);
  if (!r.payload.lies_at(r.landing, 0)) gather(r, write->arguments.size);
  write->buffer = r.landing;
  r.landing = nullptr;
  end_lease(r);
  const std::shared_ptr<ParkedWrite> shared = std::move(write);
  keep_waiting(shared);
  statistics_.parked_now.fetch_add(1);
  engine_.park([this, shared] { return attempt(*shared); });
  // Waits when too many writes wait already: somebody else passes replies on meanwhile.
  bool waited = false;
  r.landing = landing_pool_.take([&] {
    waited = true;
    latency_.give_back();
    receivers_waiting_.fetch_add(1);
    wake_relay();
  });
  if (waited) receivers_waiting_.fetch_sub(1);
}

Retry Channel::attempt(ParkedWrite& write) {
  Outcome outcome;
  {
    const MutexLock lock(write.mutex);
    if (write.finished) return Retry::Done;
    Payload payload;
    payload.add(write.buffer, write.arguments.size);
    outcome = write.file->write(write.arguments.offset, write.arguments.size, payload, nullptr,
                                nullptr, write.arguments.source());
    if (const Retry retry = engine_.retry_of(write.file->ino(), outcome); retry != Retry::Done) {
      if (!write.given_up) return retry;
      outcome = Outcome::failed(EINTR);
    }
    write.finished = true;
  }
  statistics_.parked_now.fetch_sub(1);
  landing_pool_.give(write.buffer);
  finish_write(write, outcome);
  end_waiting(write.unique);
  return Retry::Done;
}

// Answers a write whose bytes are staged, or that failed.
void Channel::finish_write(const ParkedWrite& write, const Outcome& outcome) {
  if (outcome.error != 0) return reply(write.unique, outcome.error);
  const WriteArguments& arguments = write.arguments;
  const Done done{write.unique, arguments.size, write.received_ns};
  const uint64_t ino = write.file->ino();
  if (outcome.overwrite == 0) return finish(done, ino, arguments.sync);
  drop_pages(write.file, outcome.overwrite, arguments.offset, arguments.size,
             [this, done, ino, sync = arguments.sync] { finish(done, ino, sync); });
}

// Pages of bytes that have been written since the kernel read them. Those that a map has changed
// are written back meanwhile, without these bytes. (Pages that come from the page cache are locked
// while they are written: dropping those would wait for the reply.)
void Channel::drop_pages(const std::shared_ptr<File>& file, uint64_t overwrite, uint64_t offset,
                         size_t length, std::function<void()> then) {
  invalidate(file->ino(), static_cast<int64_t>(offset), static_cast<int64_t>(length),
             [file, overwrite, then = std::move(then)] {
               file->pages_dropped(overwrite);
               then();
             });
}

// Answers what succeeded, at once or when it is durable.
void Channel::finish(const Done& done, uint64_t ino, bool sync) {
  if (!sync) return reply_done(done);
  engine_.post(SyncWriteEvent{keep_unanswered(done), ino});
}

// Until complete_write() is called with the ticket.
uint64_t Channel::keep_unanswered(const Done& done) {
  const uint64_t ticket = engine_.next_ticket();
  const MutexLock lock(sync_mutex_);
  unanswered_[ticket] = done;
  return ticket;
}

void Channel::complete_write(uint64_t ticket, int error) {
  Done done;
  {
    const MutexLock lock(sync_mutex_);
    const auto it = unanswered_.find(ticket);
    if (it == unanswered_.end()) return;
    done = it->second;
    unanswered_.erase(it);
  }
  if (error != 0) return reply(done.unique, error);
  reply_done(done);
}

// What `owner` wrote through the handle is lost with it, or has to be durable when it closes.
void Channel::note_writer(Handle& handle, uint64_t owner) {
  const MutexLock lock(handle.mutex);
  handle.writers.insert(owner);
}

// Whether a change through this handle is answered only when it is durable.
bool Channel::waits_for_changes(const Handle& handle) const {
  return handle.file->ack() == Ack::Durable || (handle.flags & (O_SYNC | O_DSYNC)) != 0;
}

void Channel::keep_waiting(const std::shared_ptr<Waiting>& waiting) {
  const MutexLock lock(parked_mutex_);
  parked_[waiting->unique] = waiting;
  if (!std::exchange(looks_, true)) wake_relay();
}

void Channel::end_waiting(uint64_t unique) {
  const MutexLock lock(parked_mutex_);
  parked_.erase(unique);
}

// Asks whether the callers of what waits were killed, every 100 ms. (INTERRUPT would tell it sooner
// and once: of signals that are handled, too, while the request is still being received, while no
// thread is left to receive it, or to a server that has died.) Returns the milliseconds until the
// next time; -1: when something waits.
int Channel::look_at_waiting() {
  using std::chrono::steady_clock;
  const auto now = steady_clock::now();
  if (now < next_look_) {
    return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(next_look_ - now).count());
  }
  std::vector<std::shared_ptr<Waiting>> all;
  {
    const MutexLock lock(parked_mutex_);
    looks_ = !parked_.empty();
    if (!looks_) return -1;
    for (const auto& [unique, waiting] : parked_) {
      if (!waiting->given_up) all.push_back(waiting);
    }
  }
  next_look_ = now + kLookEvery;
  for (const std::shared_ptr<Waiting>& waiting : all) {
    if (waiting->looked_at.exchange(true)) continue;
    inspector_.ask([waiting] { return is_killed(waiting->thread) ? 1 : 0; },
                   [this, waiting](std::optional<int> killed) {
                     waiting->looked_at = false;
                     if (killed.value_or(0) == 0) return;
                     waiting->given_up = true;
                     engine_.retry_refused_soon();
                   });
  }
  return static_cast<int>(kLookEvery.count());
}

// --- reading ---

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
  if (is_for_page(in)) handle->keep_pages();
  const std::shared_ptr<ReadAhead> ahead = read_ahead_of(*handle);
  // (What is overwritten has to be planned anew.)
  if (ahead != nullptr && !file->is_being_overwritten()) {
    const uint64_t unique = request.unique();
    const bool is_taken = ahead->read(
        in.offset, in.size, [this, unique](const auto& parts) { reply_read(unique, parts); },
        [this, unique, file, in] { read_or_park(unique, file, in); });
    ahead->follow(in.offset, in.size);
    if (is_taken) return;
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
