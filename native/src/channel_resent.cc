// What the kernel sends again after a server has died of a fault: one request after the other, so
// that the next death tells which of them it is, and not those that were tried too often.
#include <poll.h>

#include <algorithm>

#include "channel.h"

namespace fpfs {
namespace {

using std::chrono::steady_clock;

// For so long the next request waits until one is answered, and others until all are that were
// sent again: some cannot be answered before others are.
constexpr std::chrono::milliseconds kAnswerWait{200};
constexpr std::chrono::seconds kAnswersWait{2};
constexpr int kLookMs = 1;

}  // namespace

// The kernel hands out what it sends again before anything else; so the first request that is new,
// or none, tells that it was all. False when the channel ends.
bool Channel::receive_one_by_one(Receiver& r) {
  {
    const MutexLock lock(relay_mutex_);
    if (!one_by_one_) return true;
  }
  bool is_open = true;
  const auto end = steady_clock::now() + kAnswersWait;
  while (r.landing != nullptr && steady_clock::now() < end) {
    pollfd request{fuse_fd_, POLLIN, 0};
    if (poll(&request, 1, 0) <= 0) break;
    size_t received = 0;
    is_open = receive(r, &received);
    if (!is_open) break;
    fuse_in_header header{};
    std::memcpy(&header, r.head, sizeof header);
    handle(r, received);
    if (!is_answered(header.opcode)) continue;
    if ((header.unique & wire::kUniqueResent) == 0) break;
    wait_answered(header.unique, std::min(end, steady_clock::now() + kAnswerWait));
  }
  const MutexLock lock(relay_mutex_);
  one_by_one_ = false;
  resumed_.notify_all();
  return is_open;
}

void Channel::wait_answered(uint64_t unique, steady_clock::time_point until) {
  while (engine_.arena().requests().is_under_way(unique) && steady_clock::now() < until) {
    pollfd answer{socket_, POLLIN, 0};
    if (poll(&answer, 1, kLookMs) > 0 && !relay_replies()) return;
    if (stopping_) return;
  }
}

// A request that server after server has died of. It is answered when the log tells of it: this
// server may be the next to die, of another request.
bool Channel::refuse_condemned(const FuseRequest& request) {
  const fuse_in_header& header = request.header();
  if (condemned_.empty() || (header.unique & wire::kUniqueResent) == 0) return false;
  const uint64_t unique = header.unique & ~wire::kUniqueResent;
  if (std::find(condemned_.begin(), condemned_.end(), unique) == condemned_.end()) return false;
  const uint64_t ticket = keep_unanswered({.unique = header.unique, .bytes = std::nullopt});
  std::string message = std::string(operation_name(header.opcode)) + " (request " +
                        std::to_string(unique) + ") of inode " + std::to_string(header.nodeid) +
                        " by user " + std::to_string(header.uid) + ", process " +
                        std::to_string(header.pid) +
                        ", is answered with EIO: " + std::to_string(arena::kDeathsMax) +
                        " servers died of it within " + std::to_string(kBlameMs / 1000) + " s";
  engine_.post(LogEvent{40, std::move(message), ticket});
  return true;
}

}  // namespace fpfs
