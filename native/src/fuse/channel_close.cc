// FLUSH and RELEASE, which need Python less often than they come.
#include <fcntl.h>

#include "fuse/channel_waiting.h"
#include "fuse/fatal_signal.h"

namespace fpfs {

// A close without an error to report needs no Python; whoever waits for durability goes there. How
// a writer ends is seen before the answer, which its process waits for: afterwards it may be gone,
// or be killed with its file closed.
void Channel::handle_flush(const FuseRequest& request) {
  fuse_flush_in in{};
  if (!request.argument(&in)) return reply(request.unique(), EIO);
  const std::shared_ptr<Handle> handle = engine_.handle(in.fh);
  if (handle == nullptr) return relay(request);
  bool wrote = false;
  bool only_opened = false;
  {
    const MutexLock lock(handle->mutex);
    // A shell that redirects flushes before its first byte, and a forked child that exits flushes
    // what it never wrote: neither may commit, nor says how the writer ended.
    wrote = handle->writers.contains(in.lock_owner) || handle->writers.contains(kOwnerUnknown);
    only_opened = handle->writers.empty() && (handle->flags & (O_CREAT | O_TRUNC)) != 0;
  }
  if (!wrote && !only_opened) return answer_flush(request, *handle);
  const auto thread = static_cast<pid_t>(request.header().pid);
  if (thread == 0 || surely_lives(thread)) return end_flush(request, *handle, 0, wrote);
  const auto answer =
      [this, handle, wrote,
       message = std::string(request.head(), request.head_bytes())](std::optional<int> signal) {
        const Payload nothing;
        FuseRequest flush;
        flush.parse(message.data(), message.size(), nothing);
        // Where the kernel tells who lives, this one does not.
        end_flush(flush, *handle,
                  signal.value_or(kernel_tells_who_lives_ ? arena::kSignalUnknown : 0), wrote);
      };
  inspector_.ask([thread] { return fatal_signal(thread); }, answer);
}

// `signal` ends who flushes, or 0. What a killed writer leaves is not committed by its close, nor
// what one leaves that did not get the space for all of it, and could only give up.
void Channel::end_flush(const FuseRequest& request, Handle& handle, int signal, bool wrote) {
  if (signal == 0 && handle.file->lacks_refused()) signal = arena::kRefusedForSpace;
  note_end(handle, signal);
  if (wrote && signal == 0 && handle.file->ack() != Ack::Early) return relay(request);
  answer_flush(request, handle);
}

void Channel::note_end(Handle& handle, int signal) {
  const MutexLock lock(handle.mutex);
  if (handle.killed_by.exchange(signal) != signal) engine_.arena().record_end(handle.id, signal);
}

void Channel::answer_flush(const FuseRequest& request, Handle& handle) {
  int error = 0;
  {
    const MutexLock lock(handle.mutex);
    error = handle.file->take_error(&handle.errors_seen);
  }
  reply(request.unique(), error);
}

// Nobody waits for it, and Python learns of it before anything that the kernel asks for later. The
// answer may take long: the kernel then drops the pages of what was unlinked.
void Channel::handle_release(Receiver& r, const FuseRequest& request) {
  fuse_release_in in{};
  const bool whole = request.argument(&in);
  let_releases_pass(request.unique());
  const bool known = whole && engine_.release_and_tell(in.fh);
  ++receiving_[r.thread].turn;  // told: the other threads need not wait any longer
  reply(request.unique(), known ? 0 : whole ? EBADF : EIO);
}

}  // namespace fpfs
