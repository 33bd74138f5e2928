// What a transfer's result means, the same for every backend: go on, wait, or done.
#pragma once

#include "device/device.h"

namespace fpfs {

enum class TransferStep {
  Finished,  // with the request's result
  Again,     // submit the rest
  Blocked,   // the kernel will not do it without blocking: use a thread that may
};

struct TransferAdvance {
  TransferStep step;
  int result;
};

// Where in its range a request goes on. After a short transfer that is the start of the last,
// partly done block, since O_DIRECT takes whole blocks only.
uint64_t transfer_start(const IoRequest& request);

// Enters a result of read, write or flush (bytes or a negative errno) that began at
// transfer_start(). A read that makes no progress has met the object's end: zeros fill the rest.
TransferAdvance transfer_advance(IoRequest* request, int result);

// Does a whole request (of any kind) with blocking calls; its file is open. 0 or a negative errno.
int transfer_blocking(IoRequest* request);

}  // namespace fpfs
