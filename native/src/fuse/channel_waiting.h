// What waits for staging or device space, so that whoever waits for it can be killed.
#pragma once

#include <memory>

#include "fuse/channel.h"

namespace fpfs {

struct Channel::Waiting {
  explicit Waiting(const FuseRequest& request)
      : unique(request.unique()), thread(static_cast<pid_t>(request.header().pid)) {}

  const uint64_t unique;
  const pid_t thread;                  // of its caller
  std::atomic<bool> looked_at{false};  // somebody looks whether the caller was killed
  std::atomic<bool> given_up{false};   // it was
};

// A write in a landing buffer of its own.
struct Channel::ParkedWrite : Waiting {
  using Waiting::Waiting;

  WriteArguments arguments;
  std::shared_ptr<File> file;
  int64_t received_ns = 0;
  char* buffer = nullptr;

  Mutex mutex;
  bool finished GUARDED_BY(mutex) = false;
};

}  // namespace fpfs
