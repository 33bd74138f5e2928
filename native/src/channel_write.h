// A write that waits for staging or device space, in a landing buffer of its own.
#pragma once

#include <memory>

#include "channel.h"

namespace fpfs {

struct Channel::ParkedWrite {
  uint64_t unique = 0;
  uint32_t pid = 0;
  WriteArguments arguments;
  std::shared_ptr<File> file;
  char* buffer = nullptr;

  Mutex mutex;
  bool finished GUARDED_BY(mutex) = false;
  std::atomic<bool> interrupted{false};
};

}  // namespace fpfs
