// What waits for staging or device space, so that whoever waits for it can be killed.
#pragma once

#include <memory>

#include "channel.h"

namespace fpfs {

struct Channel::Waiting {
  explicit Waiting(const FuseRequest& request)
      : unique(request.unique()), pid(request.header().pid) {}

  // Whether its caller was killed. (A signal that is handled only interrupts what can restart.)
  bool given_up() const;

  const uint64_t unique;
  const uint32_t pid;
  std::atomic<bool> interrupted{false};
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
