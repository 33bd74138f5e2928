// What the kernel sends again after a server has died. After a fault it is taken one request after
// the other, so that the next death tells which of them it is, and not those that were tried too
// often. What does not come again was given up.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "fuse/channel.h"

namespace fpfs {
namespace {

using std::chrono::steady_clock;

// For so long the next request waits until one is answered, and others until all are that were
// sent again: some cannot be answered before others are.
constexpr std::chrono::milliseconds kAnswerWait{200};
constexpr std::chrono::seconds kAnswersWait{2};
constexpr int kLookMs = 1;
constexpr int kNotifyIncEpoch = 8;  // FUSE_NOTIFY_INC_EPOCH, Linux 6.16

}  // namespace

// The kernel hands out what it sends again before anything else; so the first request that is new,
// or none, tells that it was all. False when the channel ends.
bool Channel::receive_resent(Receiver& r) {
  {
    const MutexLock lock(relay_mutex_);
    if (!one_receives_) return true;
  }
  const auto end = steady_clock::now() + (after_fault_ ? kAnswersWait : kAnswersWait.zero());
  bool goes_on = true;
  while (goes_on) {
    pollfd request{fuse_fd_, POLLIN, 0};
    const int is_there = poll(&request, 1, 0);
    if (is_there < 0 && errno == EINTR) continue;
    if (is_there <= 0) break;
    size_t received = 0;
    goes_on = r.landing != nullptr && receive(r, &received);
    if (!goes_on) break;
    fuse_in_header header{};
    std::memcpy(&header, r.head, sizeof header);
    const bool is_resent = (header.unique & wire::kUniqueResent) != 0;
    const bool is_new = is_answered(header.opcode) && !is_resent;
    expected_.erase(header.unique & ~wire::kUniqueResent);
    if (is_new) end_given_up();  // before it is looked at
    handle(r, received);
    if (is_new) break;
    if (is_resent) wait_answered(header.unique, std::min(end, steady_clock::now() + kAnswerWait));
  }
  if (goes_on) end_given_up();
  const MutexLock lock(relay_mutex_);
  one_receives_ = false;
  resumed_.notify_all();
  return goes_on;
}

// What the server before had taken and the kernel does not send again: whoever waited for the
// answer was killed, and the kernel knows nothing of what was done. What was opened is closed,
// then, and the kernel's names are looked up anew.
void Channel::end_given_up() {
  if (expected_.empty()) return;
  for (const uint64_t unique : expected_) {
    engine_.release_given_up(unique);
    engine_.arena().requests().answered(unique);
  }
  engine_.log(20, "the kernel has given up " + std::to_string(expected_.size()) +
                      " requests that a server which died had taken: who asked was killed");
  expected_.clear();
  fuse_out_header forget_names{};
  forget_names.len = sizeof forget_names;
  forget_names.error = kNotifyIncEpoch;
  if (::write(fuse_fd_, &forget_names, sizeof forget_names) < 0 && errno != ENODEV) {
    engine_.log(20, "the kernel cannot be told to look names up anew (" +
                        std::string(std::strerror(errno)) +
                        "; Linux 6.16 can): it may show some as they were for a day");
  }
}

void Channel::wait_answered(uint64_t unique, steady_clock::time_point until) {
  while (steady_clock::now() < until && engine_.arena().requests().is_under_way(unique)) {
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
