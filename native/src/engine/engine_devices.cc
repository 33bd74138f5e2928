// The engine's devices: which there are, what they are good for, and changes of that in use.
//
// Whoever looks a device up may go on with it although it is removed meanwhile: a Member lives as
// long as the engine, and a device that was closed answers everything with ENODEV.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "engine/engine.h"

namespace fpfs {
namespace {

constexpr size_t kDamageLoggedMax = 10'000;  // places; more are counted only

}  // namespace

Engine::Member* Engine::member(uint16_t number) const {
  return number < kDevicesMax ? by_number_[number].load(std::memory_order_acquire) : nullptr;
}

Status Engine::add_device(uint16_t number, const std::string& path, bool draining) {
  if (number >= kDevicesMax) return Status(EINVAL, "a device's number is below 65,535");
  if (member(number) != nullptr) return Status(EEXIST, "there is a device of this number");
  DeviceConfig config;
  config.number = number;
  config.path = path;
  config.depth = config_.depth;
  config.backend = config_.backend;
  config.object_id_first = config_.object_base << 32;
  config.reserve_bytes = config_.reserve_bytes;
  config.kept_percent = config_.kept_percent;
  config.kept_bytes_min = 2 * config_.first_object_bytes;
  config.tracer = tracer_.get();
  config.log = [this](int level, const std::string& message) { log(level, message); };
  auto opened = Device::open(config, regions_);
  if (!opened.ok()) return opened.status();
  auto made = std::make_unique<Member>();
  made->device = opened.take();
  made->draining = draining;
  made->device->keep_removed(!draining);
  const MutexLock lock(devices_mutex_);
  by_number_[number].store(made.get(), std::memory_order_release);
  members_.push_back(std::move(made));
  retry_refused_soon();
  return {};
}

void Engine::set_draining(uint16_t number, bool draining) {
  if (Member* found = member(number); found != nullptr) {
    found->draining = draining;
    found->device->keep_removed(!draining);  // nothing new goes to one that is drained
  }
  retry_refused_soon();
}

// Reads that are under way end first, so that none of them fails.
uint64_t Engine::remove_device(uint16_t number) {
  const uint64_t ticket = next_ticket();
  Member* found = nullptr;
  if (number < kDevicesMax) {
    const MutexLock lock(devices_mutex_);
    found = by_number_[number].exchange(nullptr);
  }
  if (found == nullptr) {
    post(DoneEvent{ticket, ENODEV});
    return ticket;
  }
  after_reads([this, ticket, found] {
    worker_.post([this, ticket, found] {
      found->device->close();
      post(DoneEvent{ticket, 0});
    });
  });
  return ticket;
}

std::vector<Device*> Engine::devices() const {
  std::vector<Device*> found;
  const MutexLock lock(devices_mutex_);
  for (const auto& each : members_) {
    if (member(each->device->number()) == each.get()) found.push_back(each->device.get());
  }
  return found;
}

Device* Engine::device(uint16_t number) {
  const Member* found = member(number);
  return found == nullptr ? nullptr : found->device.get();
}

// One that is missing is as good as failed.
bool Engine::device_failed(uint16_t number) const {
  const Member* found = member(number);
  return found == nullptr || found->failed != 0;
}

bool Engine::takes_chunks(uint16_t number) const {
  const Member* found = member(number);
  return found != nullptr && found->failed == 0 && !found->draining;
}

std::vector<uint16_t> Engine::chunk_devices() const {
  std::vector<uint16_t> found;
  for (const Device* device : devices()) {
    if (takes_chunks(device->number())) found.push_back(device->number());
  }
  std::sort(found.begin(), found.end());
  return found;
}

void Engine::mark_device_failed(uint16_t number, int error) {
  Member* found = member(number);
  if (found == nullptr || found->failed.exchange(error) != 0) return;
  log(40, "device " + std::to_string(number) + " failed (" + std::strerror(error) +
              "): new chunks avoid it until the next mount");
}

// Each place is logged once: a program may read it for hours.
void Engine::report_damage(uint64_t ino, uint64_t block, const Place& place) {
  if (Member* found = member(place.device); found != nullptr) ++found->checksum_errors;
  {
    const MutexLock lock(damage_mutex_);
    if (damage_.size() >= kDamageLoggedMax) return;
    if (!damage_.emplace(place.device, place.object, place.object_block).second) return;
  }
  char object[17];
  std::snprintf(object, sizeof object, "%016lx", place.object);
  log(40, "inode " + std::to_string(ino) + ": its block " + std::to_string(block) +
              " (64 KiB) is damaged: block " + std::to_string(place.object_block) + " of object " +
              object + " on device " + std::to_string(place.device) +
              " does not match its checksum");
}

// A file is named once for each device, not at each of its reads.
void Engine::report_unreadable(uint64_t ino, uint16_t device, int error) {
  Member* found = member(device);
  if (found != nullptr) ++found->read_errors;
  {
    const MutexLock lock(damage_mutex_);
    if (unreadable_.size() >= kDamageLoggedMax) return;
    if (!unreadable_.emplace(ino, device).second) return;
  }
  log(40, "inode " + std::to_string(ino) + ": what lies on device " + std::to_string(device) +
              " cannot be read: " +
              (found == nullptr ? "the device is missing" : std::strerror(error)));
}

uint64_t Engine::read_errors(uint16_t device) const {
  const Member* found = member(device);
  return found == nullptr ? 0 : found->read_errors.load();
}

uint64_t Engine::checksum_errors(uint16_t device) const {
  const Member* found = member(device);
  return found == nullptr ? 0 : found->checksum_errors.load();
}

}  // namespace fpfs
