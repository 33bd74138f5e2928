#include "base/cpu_latency.h"

#include <fcntl.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>

namespace fpfs {
namespace {

// So many requests, each so soon after the one before, are a burst.
constexpr uint32_t kBurst = 8;
constexpr int64_t kGapNs = 5'000'000;
constexpr int64_t kQuietNs = int64_t{CpuLatency::kQuietMs} * 1'000'000;

// Hardware keeps its shallow states, which take some microseconds to leave. A guest has a single
// one that hands the processor to the host, and says that leaving it takes one microsecond: there
// only zero keeps the processor.
int32_t bearable_us() {
  std::ifstream file("/sys/devices/system/cpu/cpuidle/current_driver");
  std::string driver;
  file >> driver;
  return driver == "haltpoll" ? 0 : 10;
}

int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void CpuLatency::request_came() {
  if (!usable_.load(std::memory_order_relaxed)) return;
  const int64_t now = now_ns();
  const int64_t last = last_ns_.exchange(now, std::memory_order_relaxed);
  if (now - last > kGapNs) in_a_row_.store(0, std::memory_order_relaxed);
  if (in_a_row_.fetch_add(1, std::memory_order_relaxed) + 1 < kBurst) return;
  burst_ns_.store(now, std::memory_order_relaxed);
  if (!bounded()) bound();
}

void CpuLatency::bound() {
  const int32_t bound = bearable_us();
  int error = 0;
  {
    const MutexLock lock(mutex_);
    if (held_) return;
    FileDescriptor file(::open(path_.c_str(), O_WRONLY | O_CLOEXEC));
    if (file && ::write(file.get(), &bound, sizeof bound) == sizeof bound) {
      held_ = std::move(file);
      bounded_.store(true, std::memory_order_relaxed);
      return;
    }
    error = errno;
  }
  if (usable_.exchange(false)) failed_(path_ + ": " + std::strerror(error));
}

void CpuLatency::rest() {
  if (now_ns() - burst_ns_.load(std::memory_order_relaxed) >= kQuietNs) give_back();
}

void CpuLatency::give_back() {
  const MutexLock lock(mutex_);
  bounded_.store(false, std::memory_order_relaxed);
  in_a_row_.store(0, std::memory_order_relaxed);
  held_.reset();
}

}  // namespace fpfs
