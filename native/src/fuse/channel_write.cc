// WRITE: into staging and answered, or parked until there is room.
#include "fuse/channel_waiting.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace fpfs {

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
  const WriteArguments& arguments = write.arguments;
  if (outcome.error == ENOSPC) {
    write.file->refused(arguments.offset, arguments.size);
    if (const auto handle = engine_.handle(arguments.handle); handle != nullptr) {
      note_end(*handle, arena::kRefusedForSpace);  // for a server that takes over
    }
  }
  if (outcome.error != 0) return reply(write.unique, outcome.error);
  write.file->accepted(arguments.offset, arguments.size);
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

}  // namespace fpfs
