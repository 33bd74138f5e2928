// A simulated accelerator, as torch sees one: its memory is not the processor's, and what is queued
// on a stream is done later, in order. So a program that reads device memory itself ends by
// SIGSEGV, and one that does not wait for a copy finds other bytes.
//
// Memory is mapped twice: torch has addresses that nobody may touch, streams use the others. What
// is freed is overwritten when the stream it was allocated on comes to that, as a caching allocator
// gives it to others then. `simulated_hold` stops a stream until it lets it go on.
//
// Copies are as CUDA's: from and to pinned memory asynchronous where asked for, otherwise waited
// for; between device memory asynchronous. Everything else is done by the processor's kernels, on
// copies.
//
// Threads: each stream has one, which never ends.
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
constexpr int kFreed = 0xDB;

std::atomic<uint64_t> device_bytes{0};
std::atomic<uint64_t> bytes_free{0};  // as it is told: there is always more
std::atomic<uint64_t> copies_begun{0};

// What a stream passes before each job.
class Gate {
 public:
  void hold(bool is_held) {
    const std::lock_guard lock(mutex_);
    is_held_ = is_held;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !is_held_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_held_ = false;
};

class Queue {
 public:
  Queue() {
    std::thread([this] { work(); }).detach();
  }
  uint64_t add(std::function<void()> job) {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    changed_.notify_all();
    return ++added_;
  }
  void wait() { wait(added()); }
  void wait(uint64_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= number; });
  }
  bool is_done(uint64_t number) {
    const std::lock_guard lock(mutex_);
    return done_ >= number;
  }
  void hold(bool is_held) { gate_.hold(is_held); }
  uint64_t added() {
    const std::lock_guard lock(mutex_);
    return added_;
  }

 private:
  void work() {
    for (;;) {
      std::function<void()> job;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      gate_.pass();
      job();
      const std::lock_guard lock(mutex_);
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Gate gate_;
  std::deque<std::function<void()>> jobs_;
  uint64_t added_ = 0;
  uint64_t done_ = 0;
};

// Streams of all devices: number d is the default one of device d.
class Queues {
 public:
  Queues() {
    for (int device = 0; device < kDevices; ++device) queues_.push_back(new Queue);
  }
  Queue& at(c10::StreamId id) {
    const std::lock_guard lock(mutex_);
    return *queues_.at(static_cast<size_t>(id));
  }
  c10::StreamId add() {
    const std::lock_guard lock(mutex_);
    queues_.push_back(new Queue);
    return static_cast<c10::StreamId>(queues_.size() - 1);
  }
  std::vector<Queue*> all() {
    const std::lock_guard lock(mutex_);
    return queues_;
  }

 private:
  std::mutex mutex_;
  std::vector<Queue*> queues_;
};

Queues& queues() {
  static auto* made = new Queues;
  return *made;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

c10::StreamId current_stream(c10::DeviceIndex device) {
  const auto found = current_streams.find(device);
  return found == current_streams.end() ? device : found->second;
}

// --- memory -----------------------------------------------------------------------------------

struct Block {
  char* address;  // torch's: nobody may touch it
  char* shadow;
  size_t bytes;
  c10::DeviceIndex device;
  c10::StreamId stream;
};

class DeviceAllocator : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, current_device);
    if (bytes == 0) return {nullptr, device};
    auto* block = new Block(take(bytes, device.index()));
    {
      const std::lock_guard lock(mutex_);
      blocks_[block->address] = block;
    }
    device_bytes += block->bytes;
    return {block->address, block, &DeviceAllocator::free, device};
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {bytes_free, bytes_free + device_bytes};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "device memory is copied by streams");
  }

  // Where streams find what torch has at an address.
  char* shadow_of(const void* address) {
    if (address == nullptr) return nullptr;
    const std::lock_guard lock(mutex_);
    const auto* wanted = static_cast<const char*>(address);
    auto found = blocks_.upper_bound(const_cast<char*>(wanted));
    TORCH_CHECK(found != blocks_.begin(), "no device memory");
    const Block& block = *std::prev(found)->second;
    const auto offset = static_cast<size_t>(wanted - block.address);
    TORCH_CHECK(offset <= block.bytes, "no device memory");
    return block.shadow + offset;
  }

 private:
  static void free(void* context);

  Block take(size_t wanted, c10::DeviceIndex device) {
    const size_t page = 4096;
    const size_t bytes = (wanted + page - 1) / page * page;
    const c10::StreamId stream = current_stream(device);
    {
      const std::lock_guard lock(mutex_);
      for (auto at = spare_.begin(); at != spare_.end(); ++at) {
        // Whose stream it is need not wait for what was done with it before.
        if (at->bytes == bytes && at->device == device && at->stream == stream) {
          Block block = *at;
          spare_.erase(at);
          return block;
        }
      }
    }
    const int fd = ::memfd_create("simulated", MFD_CLOEXEC);
    TORCH_CHECK(fd >= 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) == 0, "no device memory");
    void* shadow = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    void* address = ::mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, fd, 0);
    ::close(fd);
    TORCH_CHECK(shadow != MAP_FAILED && address != MAP_FAILED, "no device memory");
    return {static_cast<char*>(address), static_cast<char*>(shadow), bytes, device, stream};
  }

  std::mutex mutex_;
  std::map<char*, Block*> blocks_;
  std::vector<Block> spare_;
};

DeviceAllocator& device_allocator() {
  static auto* made = new DeviceAllocator;
  return *made;
}

void DeviceAllocator::free(void* context) {
  auto* block = static_cast<Block*>(context);
  device_bytes -= block->bytes;
  DeviceAllocator& allocator = device_allocator();
  queues().at(block->stream).add([copy = *block] { std::memset(copy.shadow, kFreed, copy.bytes); });
  const std::lock_guard lock(allocator.mutex_);
  allocator.spare_.push_back(*block);
  allocator.blocks_.erase(block->address);
  delete block;
}

class PinnedAllocator : public c10::Allocator {
 public:
  std::atomic<bool> is_refused{false};

  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(!is_refused, "no memory can be pinned");
    const size_t line = 64;
    const size_t rounded = (bytes / line + 1) * line;
    void* memory = std::aligned_alloc(line, rounded);
    TORCH_CHECK(memory != nullptr, "no memory");
    add(memory, rounded);
    return {memory, memory, &PinnedAllocator::free, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  void add(void* memory, size_t bytes) {
    const std::lock_guard lock(mutex_);
    ranges_[static_cast<char*>(memory)] = bytes;
    bytes_ += bytes;
    most_bytes_ = std::max(most_bytes_, bytes_);
  }
  void remove(void* memory) {
    const std::lock_guard lock(mutex_);
    bytes_ -= ranges_[static_cast<char*>(memory)];
    ranges_.erase(static_cast<char*>(memory));
  }
  bool has(const void* address) {
    const std::lock_guard lock(mutex_);
    const auto* wanted = static_cast<const char*>(address);
    const auto found = ranges_.upper_bound(const_cast<char*>(wanted));
    if (found == ranges_.begin()) return false;
    const auto& [begin, bytes] = *std::prev(found);
    return wanted < begin + bytes;
  }
  uint64_t bytes() {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }
  uint64_t most_bytes() {
    const std::lock_guard lock(mutex_);
    return std::exchange(most_bytes_, bytes_);
  }

 private:
  static void free(void* memory);

  std::mutex mutex_;
  std::map<char*, size_t> ranges_;
  uint64_t bytes_ = 0;
  uint64_t most_bytes_ = 0;
};

PinnedAllocator& pinned_allocator() {
  static auto* made = new PinnedAllocator;
  return *made;
}

void PinnedAllocator::free(void* memory) {
  pinned_allocator().remove(memory);
  // A caching allocator keeps it until the streams that use it have come so far.
  const std::shared_ptr<void> last(memory, std::free);
  for (Queue* queue : queues().all()) queue->add([last] {});
}

// --- streams and events -----------------------------------------------------------------------

struct Event {
  c10::StreamId stream;
  uint64_t number;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device former(kType, current_device);
    setDevice(device);
    return former;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no such device");
    if (device.has_index()) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return of(current_stream(index(device)), device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return of(index(device), device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return of(queues().add(), device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return of(queues().add(), device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream former = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return former;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {stream.id(), queues().at(stream.id()).added()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const Event wanted = *static_cast<Event*>(event);
    queues().at(stream.id()).add([wanted] { queues().at(wanted.stream).wait(wanted.number); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const Event wanted = *static_cast<Event*>(event);
    return queues().at(wanted.stream).is_done(wanted.number);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const Event wanted = *static_cast<Event*>(event);
    queues().at(wanted.stream).wait(wanted.number);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Queue& queue = queues().at(stream.id());
    return queue.is_done(queue.added());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    queues().at(stream.id()).wait();
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    for (Queue* queue : queues().all()) queue->wait();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

 private:
  static c10::DeviceIndex index(c10::Device device) {
    return device.has_index() ? device.index() : current_device;
  }
  static c10::Stream of(c10::StreamId id, c10::Device device) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index(device)), id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  bool isPinnedPtr(const void* data) const override { return pinned_allocator().has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Device getDeviceFromPtr(void*) const override { return {kType, current_device}; }
  void resizePrivateUse1Bytes(const c10::Storage&, size_t) const override {
    TORCH_CHECK(false, "a simulated storage is not resized");
  }
};

// --- operations -------------------------------------------------------------------------------

bool is_device(const at::Tensor& tensor) { return tensor.device().type() == kType; }

// A tensor that the processor may touch, of the same elements. It keeps no memory.
at::Tensor seen(const at::Tensor& tensor) {
  void* data = tensor.data_ptr();
  if (is_device(tensor)) data = device_allocator().shadow_of(data);
  return at::from_blob(data, tensor.sizes(), tensor.strides(),
                       tensor.options().device(c10::DeviceType::CPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const at::Tensor& of = is_device(from) ? from : to;
  const at::Tensor& host = is_device(from) ? to : from;
  const bool is_waited_for =
      !is_device(host) && !(non_blocking && pinned_allocator().has(host.data_ptr()));
  Queue& queue = queues().at(current_stream(of.device().index()));
  const uint64_t number = queue.add([source = seen(from), target = seen(to)] {
    const c10::InferenceMode guard;
    target.copy_(source.expand_as(target));
  });
  ++copies_begun;
  if (is_waited_for) queue.wait(number);
  return to;
}

// What cpu_fallback does with results.
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) {
    const at::Tensor made = at::empty(from.sizes(), to.options());
    at::Tensor target = to;
    at::cpu::set_(target, made.storage(), 0, made.sizes(), made.strides());
  }
  return copy_from(from, to, false);
}

at::Tensor& set_source(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                       at::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto bytes = static_cast<int64_t>(source.nbytes());
  const int64_t size = bytes / static_cast<int64_t>(self.element_size());
  return at::cpu::set_(self, std::move(source), 0, {size}, {1});
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType, current_device)));
  return at::detail::empty_generic(size, &device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType, current_device)));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

at::Scalar local_scalar(const at::Tensor& tensor) { return tensor.cpu().item(); }

void on_the_processor(const c10::OperatorHandle& operation, c10::Stack* stack) {
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, module) {
  module.impl("empty.memory_format", &empty);
  module.impl("empty_strided", &empty_strided);
  module.impl("_copy_from", &copy_from);
  module.impl("_copy_from_and_resize", &copy_from_and_resize);
  module.impl("_local_scalar_dense", &local_scalar);
  module.impl("as_strided", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                               std::optional<int64_t> offset) {
    return at::cpu::as_strided(self, size, stride, offset);
  });
  module.impl("view", [](const at::Tensor& self, at::IntArrayRef size) {
    return at::cpu::view(self, size);
  });
  module.impl("_reshape_alias",
              [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
                return at::cpu::_reshape_alias(self, size, stride);
              });
  module.impl("set_.source_Storage_storage_offset", &set_source);
  module.impl("set_.source_Storage", &set_storage);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, module) {
  module.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_processor>());
}

}  // namespace

extern "C" {

void simulated_register() {
  c10::SetAllocator(kType, &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}
void simulated_hold(int64_t stream, bool is_held) { queues().at(stream).hold(is_held); }
void simulated_tell_free(uint64_t bytes) { bytes_free = bytes; }
uint64_t simulated_device_bytes() { return device_bytes; }
uint64_t simulated_pinned_bytes() { return pinned_allocator().bytes(); }
uint64_t simulated_most_pinned_bytes() { return pinned_allocator().most_bytes(); }
uint64_t simulated_copies() { return copies_begun; }
void simulated_refuse_pinning() { pinned_allocator().is_refused = true; }
void simulated_pin(void* memory, uint64_t bytes) { pinned_allocator().add(memory, bytes); }
void simulated_unpin(void* memory) { pinned_allocator().remove(memory); }
}
