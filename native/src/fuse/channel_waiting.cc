// Requests that wait for room, for space or for a file: kept, and given up when their callers die.
#include <utility>

#include "fuse/channel_waiting.h"
#include "fuse/fatal_signal.h"

namespace fpfs {
namespace {

constexpr std::chrono::milliseconds kLookEvery{100};  // at who waits

}  // namespace

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

}  // namespace fpfs
