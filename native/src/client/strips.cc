#include "client/strips.h"

#include <sys/prctl.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <string>
#include <utility>

namespace fpfs {
namespace {

uint64_t end_of(const Strip& strip) {
  return strip.offset + (strip.count - 1) * strip.step + strip.run_bytes;
}

// Reads into several places what lies in one piece in a process.
Status scatter(pid_t process, uintptr_t address, const iovec* places, size_t count) {
  uint64_t bytes = 0;
  for (size_t index = 0; index < count; ++index) bytes += places[index].iov_len;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): an address of another process
  const iovec source{reinterpret_cast<void*>(address), bytes};
  const ssize_t read = ::process_vm_readv(process, places, count, &source, 1, 0);
  const std::string what = "read process " + std::to_string(process);
  if (read < 0) return Status::from_errno(what);
  // Its memory ends there.
  if (static_cast<uint64_t>(read) < bytes) return Status(EFAULT, what + ": " + error_text(EFAULT));
  return {};
}

// Gathers places for scatter() and reads into them when there are as many as one call takes.
class Scatter {
 public:
  explicit Scatter(pid_t process) : process_(process) {}

  // The places' sources follow each other, from `address` on.
  Status add(uintptr_t address, char* to, uint64_t bytes) {
    if (process_ == 0) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr): Python has addresses of tensors as numbers
      std::memcpy(to, reinterpret_cast<const char*>(address), bytes);
      return {};
    }
    if (count_ == 0) address_ = address;
    places_[count_++] = {to, bytes};
    return count_ == places_.size() ? flush() : Status();
  }
  Status flush() {
    if (count_ == 0) return {};
    const size_t count = std::exchange(count_, 0);
    return scatter(process_, address_, places_.data(), count);
  }

 private:
  const pid_t process_;
  std::array<iovec, IOV_MAX> places_;
  size_t count_ = 0;
  uintptr_t address_ = 0;
};

// Copies what a strip has of the bytes; adds how many that are.
Status copy_from(const Strip& strip, uint64_t offset, uint64_t bytes, char* to, uint64_t* copied) {
  const uint64_t end = offset + bytes;
  uint64_t run = offset <= strip.offset ? 0 : (offset - strip.offset) / strip.step;
  Scatter scatter(strip.process);
  for (; run < strip.count; ++run) {
    const uint64_t at = strip.offset + run * strip.step;
    if (at >= end) break;
    const uint64_t from = std::max(at, offset);
    const uint64_t until = std::min(at + strip.run_bytes, end);
    if (from >= until) continue;  // `offset` lies behind the first run
    const uintptr_t source = strip.address + run * strip.run_bytes + (from - at);
    if (Status status = scatter.add(source, to + (from - offset), until - from); !status.ok()) {
      return status;
    }
    *copied += until - from;
  }
  return scatter.flush();
}

}  // namespace

Result<Strips> Strips::make(std::vector<Strip> strips) {
  Strips made;
  made.strips_ = std::move(strips);
  std::sort(made.strips_.begin(), made.strips_.end(),
            [](const Strip& a, const Strip& b) { return a.offset < b.offset; });
  uint64_t last = 0;
  for (Strip& strip : made.strips_) {
    if (strip.count == 1) strip.step = std::max(strip.step, strip.run_bytes);
    if (strip.count == 0 || strip.run_bytes == 0 || strip.step < strip.run_bytes) {
      return Status(EINVAL, "runs of a strip overlap");
    }
    last = std::max(last, end_of(strip));
    made.ends_.push_back(last);
  }
  return made;
}

Status Strips::copy(uint64_t offset, uint64_t bytes, char* to) const {
  uint64_t copied = 0;
  const auto first = std::upper_bound(ends_.begin(), ends_.end(), offset);
  for (auto index = static_cast<size_t>(first - ends_.begin()); index < strips_.size(); ++index) {
    const Strip& strip = strips_[index];
    if (strip.offset >= offset + bytes) break;
    if (Status status = copy_from(strip, offset, bytes, to, &copied); !status.ok()) return status;
  }
  if (copied != bytes) {
    return Status(EINVAL, "the strips have " + std::to_string(copied) + " of the " +
                              std::to_string(bytes) + " bytes at " + std::to_string(offset));
  }
  return {};
}

void allow_reading() {
  // Fails on kernels without Yama, which do not ask.
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

Result<std::string> read_process(pid_t process, uintptr_t address, uint64_t bytes) {
  std::string text(bytes, '\0');
  const iovec place{text.data(), bytes};
  if (Status status = scatter(process, address, &place, 1); !status.ok()) return status;
  return text;
}

}  // namespace fpfs
