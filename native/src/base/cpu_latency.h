// Keeps processors out of deep idle states while requests come in quick succession.
//
// A save is a chain of short waits: the program for the channel, the channel for the program, a
// ring for the device. Each may find its processor asleep, and on virtual machines and with deep
// idle states waking it takes longer than the work that it waits for. The kernel takes a bound on
// that time from whoever holds /dev/cpu_dma_latency open (PM QoS), for all processors; it is asked
// for only in bursts.
//
// Threads: all functions from any. Without a path they do nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "base/file_descriptor.h"
#include "base/thread_annotations.h"

namespace fpfs {

class CpuLatency {
 public:
  static constexpr int kQuietMs = 50;

  // `failed` is told, once, why the bound cannot be asked for.
  CpuLatency(std::string path, std::function<void(const std::string&)> failed)
      : path_(std::move(path)), usable_(!path_.empty()), failed_(std::move(failed)) {}

  void request_came() EXCLUDES(mutex_);
  // Whoever then waits for requests must call rest() before, and again after kQuietMs.
  bool bounded() const { return bounded_.load(std::memory_order_relaxed); }
  // Takes the bound back if the last burst is kQuietMs ago.
  void rest() EXCLUDES(mutex_);
  // Takes it back: nobody receives requests for a while, or ever again.
  void give_back() EXCLUDES(mutex_);

 private:
  void bound() EXCLUDES(mutex_);

  const std::string path_;
  std::atomic<bool> usable_;
  std::atomic<bool> bounded_{false};
  std::atomic<int64_t> last_ns_{0};   // when a request came
  std::atomic<int64_t> burst_ns_{0};  // when one came that was part of a burst
  std::atomic<uint32_t> in_a_row_{0};
  Mutex mutex_;
  FileDescriptor held_ GUARDED_BY(mutex_);
  const std::function<void(const std::string&)> failed_;
};

}  // namespace fpfs
