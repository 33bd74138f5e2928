#include "engine/engine.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "base/fuse_wire.h"

namespace fpfs {
namespace {

constexpr size_t kReadBufferCount = 48;
constexpr uint64_t kSlotCountMin = 16;
constexpr uint64_t kSmallestChunk = 128 * 1024;
// Longer than a program that writes one small file after the other takes between two of them.
constexpr long kTellReleasedNs = 2'000'000;
constexpr size_t kPressureSlots = 8;  // written out early when nothing else frees a slot

// A device request whose completion is a function; deletes itself.
struct CallRequest : IoRequest {
  std::function<void(int)> call;
  void complete(int result) override {
    const auto function = std::move(call);
    delete this;
    function(result);
  }
};

// Counts down to one Done event.
struct Countdown {
  std::atomic<size_t> left;
  std::atomic<int> error{0};
  explicit Countdown(size_t n) : left(n) {}
};

}  // namespace

bool Handle::writable() const { return (flags & O_ACCMODE) != O_RDONLY; }

void Handle::keep_pages() {
  if (keeps_pages) return;
  file->keep_pages();  // before the mark: who finds that may read at once
  if (keeps_pages.exchange(true)) file->keep_no_pages();
}

Result<std::unique_ptr<Engine>> Engine::open(const EngineConfig& config) {
  std::unique_ptr<Engine> engine(new Engine(config));
  if (Status status = engine->start(); !status.ok()) {
    engine->close();
    return status;
  }
  return engine;
}

Status Engine::start() {
  if (Status status = open_event_fd(); !status.ok()) return status;
  if (config_.staging_bytes / config_.slot_bytes < kSlotCountMin) {
    return Status(EINVAL, "staging must hold at least " + std::to_string(kSlotCountMin) +
                              " chunks of " + std::to_string(config_.slot_bytes) + " bytes");
  }
  if (config_.slot_bytes % kBlockBytes != 0 || config_.slot_bytes > kSlotBlocksMax * kBlockBytes) {
    return Status(EINVAL, "a slot is a multiple of 64 KiB, up to " +
                              std::to_string(kSlotBlocksMax * kBlockBytes) + " bytes");
  }
  if (Status status = open_arena(); !status.ok()) return status;
  read_buffers_ =
      std::make_unique<ReadBuffers>(kReadBufferCount, ReadJob::buffer_bytes(wire::kMaxWriteBytes));
  copy_buffer_ = read_buffers_->take();

  regions_ = {{arena_->data(), arena_->data_bytes()}, read_buffers_->region()};
  for (const auto& [number, path] : config_.devices) {
    if (Status status = add_device(number, path); !status.ok()) return status;
  }
  return {};
}

Status Engine::open_arena() {
  const Arena::Config config{config_.arena_path, config_.filesystem_id, config_.staging_bytes,
                             config_.slot_bytes, config_.journal_area_bytes};
  if (config_.take_over) {
    if (Status status = check_arena_owner(); !status.ok()) return status;
  }
  std::string warning;
  Remains remains;
  auto arena = config_.take_over ? Arena::attach(config, -1, &remains, &warning)
                                 : Arena::create(config, &warning);
  if (!arena.ok() && arena.status().error() == ENODATA) {
    ::unlink(config.path.c_str());
    arena = Arena::create(config, &warning);
  }
  if (!arena.ok()) return arena.status();
  arena_ = arena.take();
  if (!warning.empty()) log(30, warning);
  sort_remains(std::move(remains));
  return {};
}

Status Engine::open_event_fd() {
  const auto failed = [] { return Status::from_errno("descriptors of events"); };
  wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake_.get() < 0) return failed();
  released_late_.reset(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (released_late_.get() < 0) return failed();
  event_fd_.reset(epoll_create1(EPOLL_CLOEXEC));
  if (event_fd_.get() < 0) return failed();
  for (const int fd : {wake_.get(), released_late_.get()}) {
    epoll_event readable{};
    readable.events = EPOLLIN;
    if (epoll_ctl(event_fd_.get(), EPOLL_CTL_ADD, fd, &readable) != 0) return failed();
  }
  return {};
}

Engine::~Engine() { close(); }

void Engine::close() {
  if (std::exchange(closed_, true)) return;
  gives_way_ = false;  // nobody would answer
  retry_refused_soon();
  if (kernel_side_ != nullptr) kernel_side_->stop();
  worker_.stop();
  waker_.stop();
  end_verifications();
  for (Device* device : devices()) device->close();
  // What was taken over, and then not served, is left to the next one.
  const bool is_left = config_.take_over && kernel_side_ == nullptr;
  if (arena_ != nullptr && !is_left) arena_->remove();
  {
    // Files hold slots and slots hold files: the circle ends here.
    const MutexLock lock(table_mutex_);
    handles_.clear();
    files_.clear();
  }
  // Whoever waits for events learns that there will be no more.
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
}

// --- events ---

std::vector<Event> Engine::take_events() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t woken = ::read(wake_.get(), &count, sizeof count);
  const bool late = ::read(released_late_.get(), &count, sizeof count) > 0;
  const MutexLock lock(event_mutex_);
  if (late) events_.emplace_back(ReleasedEvent{});
  return std::exchange(events_, {});
}

void Engine::post(Event event) {
  const MutexLock lock(event_mutex_);
  events_.push_back(std::move(event));
  const uint64_t one = 1;
  // Only a full counter could refuse this, and then the reader has been told already.
  [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
}

void Engine::log(int level, const std::string& message) { post(LogEvent{level, message}); }

// --- files and handles ---

// A chunk larger than a slot becomes a run of chunks. One that is no multiple was made under a
// mount with other slots: what lies where is in the map, so its new chunks may have another size.
Status Engine::check_placement(Placement* placement) const {
  if (placement->devices.empty() || placement->chunk_bytes == 0 ||
      placement->chunk_bytes % kBlockBytes != 0) {
    return Status(EINVAL, "a chunk is a multiple of 64 KiB, on at least one device");
  }
  if (placement->chunk_bytes > arena_->slot_bytes()) {
    placement->run = placement->chunk_bytes / arena_->slot_bytes();
    placement->chunk_bytes = arena_->slot_bytes();
  }
  return {};
}

Status Engine::place(uint64_t ino, Placement placement) {
  const std::shared_ptr<File> found = file(ino);
  if (found == nullptr) return Status(ENOENT, "inode is not loaded");
  const Status status = check_placement(&placement);
  return status.ok() ? found->place(std::move(placement)) : status;
}

Status Engine::load(uint64_t ino, Placement placement, uint64_t size, int64_t mtime_ns,
                    int64_t ctime_ns, std::optional<std::string> content,
                    const std::vector<std::pair<uint32_t, std::string>>& segments) {
  Status status = check_placement(&placement);
  if (!status.ok()) return status;
  auto loaded = std::make_shared<File>(*this, ino, std::move(placement));
  loaded->set_flow({.ack = config_.ack});
  status = loaded->load(size, mtime_ns, ctime_ns, std::move(content), segments);
  if (!status.ok())
    return Status(status.error(), "inode " + std::to_string(ino) + ": " + status.message());
  const MutexLock lock(table_mutex_);
  if (!files_.emplace(ino, std::move(loaded)).second) return Status(EEXIST, "inode is loaded");
  return {};
}

std::shared_ptr<File> Engine::file(uint64_t ino) {
  const MutexLock lock(table_mutex_);
  const auto it = files_.find(ino);
  return it == files_.end() ? nullptr : it->second;
}

Status Engine::unload(uint64_t ino) {
  const std::shared_ptr<File> found = file(ino);
  if (found == nullptr) return Status(ENOENT, "inode is not loaded");
  return found->retire([this, ino, &found] {
    const MutexLock lock(table_mutex_);
    const auto it = files_.find(ino);
    if (it == files_.end() || it->second != found) return Status(ENOENT, "inode is not loaded");
    if (counts_.contains(ino)) return Status(EBUSY, "inode has open handles");
    files_.erase(it);
    return Status();
  });
}

Status Engine::revert(uint64_t ino, uint64_t size, int64_t mtime_ns, int64_t ctime_ns,
                      std::optional<std::string> content,
                      const std::vector<std::pair<uint32_t, std::string>>& segments) {
  const std::shared_ptr<File> found = file(ino);
  if (found == nullptr) return Status(ENOENT, "inode is not loaded");
  Status status = found->revert(size, mtime_ns, ctime_ns, std::move(content), segments);
  if (status.ok()) invalidate(ino);
  return status;
}

void Engine::invalidate(uint64_t ino) {
  if (kernel_side_ == nullptr) return;
  // At once: who opens the file next is not to read as much as another size says.
  kernel_side_->invalidate_attributes(ino);
  kernel_side_->invalidate(ino, 0, -1, [] {});
}

uint64_t Engine::find_out_known(uint64_t ino) {
  const uint64_t ticket = next_ticket();
  const auto told = [this, ticket](bool known) { post(DoneEvent{ticket, known ? 0 : ENOENT}); };
  if (kernel_side_ != nullptr) {
    kernel_side_->find_out(ino, told);
  } else {
    told(true);
  }
  return ticket;
}

void Engine::invalidate_name(uint64_t directory, std::string name) {
  if (kernel_side_ != nullptr) kernel_side_->invalidate_name(directory, std::move(name));
}

uint64_t Engine::names_invalidated() {
  const uint64_t ticket = next_ticket();
  const auto done = [this, ticket] { post(DoneEvent{ticket, 0}); };
  if (kernel_side_ != nullptr) {
    kernel_side_->after_names(done);
  } else {
    done();
  }
  return ticket;
}

Status Engine::record_handle(uint64_t handle, uint64_t ino, uint32_t flags, uint32_t request) {
  arena::HandleRecord record{};
  record.handle = handle;
  record.ino = ino;
  record.flags = flags;
  record.request = request;
  return arena_->record_handle(record);
}

Status Engine::open_handle(uint64_t id, uint64_t ino, uint32_t flags, uint32_t request) {
  if (Status status = record_handle(id, ino, flags, request); !status.ok()) return status;
  Status status = register_handle(id, ino, flags);
  if (!status.ok()) arena_->forget_handle(id);
  return status;
}

Status Engine::register_handle(uint64_t id, uint64_t ino, uint32_t flags) {
  auto handle = std::make_shared<Handle>();
  handle->id = id;
  handle->flags = flags;
  handle->file = file(ino);
  if (handle->file == nullptr) return Status(ENOENT, "inode is not loaded");
  {
    const MutexLock lock(handle->mutex);
    handle->errors_seen = handle->file->error_count();
  }
  const MutexLock lock(table_mutex_);
  const auto it = files_.find(ino);
  if (it == files_.end() || it->second != handle->file) {
    return Status(ENOENT, "inode was unloaded");
  }
  Counts& counts = counts_[ino];
  ++counts.handles;
  if (handle->writable()) ++counts.writers;
  handles_[id] = std::move(handle);
  return {};
}

size_t Engine::handle_count() {
  const MutexLock lock(table_mutex_);
  return handles_.size();
}

std::shared_ptr<Handle> Engine::release_handle(uint64_t id) {
  std::shared_ptr<Handle> gone;
  bool last_writer = false;
  {
    const MutexLock lock(table_mutex_);
    const auto it = handles_.find(id);
    if (it == handles_.end()) return nullptr;
    gone = std::move(it->second);
    handles_.erase(it);
    Counts& counts = counts_[gone->file->ino()];
    if (gone->writable()) last_writer = --counts.writers == 0;
    if (gone->keeps_pages) gone->file->keep_no_pages();
    if (--counts.handles == 0) counts_.erase(gone->file->ino());
  }
  // Before the handle is forgotten: a restart has to know one of both.
  if (last_writer) gone->file->closed(gone->killed_by);
  arena_->forget_handle(id);
  return gone;
}

bool Engine::release_and_tell(uint64_t id) {
  const std::shared_ptr<Handle> gone = release_handle(id);
  if (gone == nullptr) return false;
  set_gives_way();  // it may have been the last of a file without a name
  tell_released({id, gone->killed_by});
  return true;
}

void Engine::tell_released(Released released) {
  const MutexLock lock(released_mutex_);
  released_.push_back(released);
  if (released_.size() > 1) return;
  itimerspec soon{};
  soon.it_value.tv_nsec = kTellReleasedNs;
  // It cannot fail: the descriptor and the time are right.
  (void)timerfd_settime(released_late_.get(), 0, &soon, nullptr);
}

void Engine::release_given_up(uint64_t unique) {
  for (const arena::HandleRecord& record : left_handles_) {
    if ((record.request | wire::kNumberResent) !=
        wire::request_number(unique | wire::kUniqueResent)) {
      continue;
    }
    if (const std::shared_ptr<Handle> found = handle(record.handle); found != nullptr) {
      found->killed_by = SIGKILL;
      release_and_tell(record.handle);
    } else if ((record.flags & O_DIRECTORY) != 0) {
      tell_released({record.handle, 0});
    }
  }
}

std::vector<Engine::Released> Engine::take_released() {
  const MutexLock lock(released_mutex_);
  return std::exchange(released_, {});
}

std::shared_ptr<Handle> Engine::handle(uint64_t id) {
  const MutexLock lock(table_mutex_);
  const auto it = handles_.find(id);
  return it == handles_.end() ? nullptr : it->second;
}

bool Engine::set_cached(const std::shared_ptr<Handle>& handle) {
  const MutexLock lock(table_mutex_);
  const Counts& counts = counts_[handle->file->ino()];
  if (counts.writers != 0 || !handle->file->cached()) return false;
  handle->keep_pages();
  return true;
}

// --- operations with a ticket ---

uint64_t Engine::drain(uint64_t ino, bool last) {
  const uint64_t ticket = next_ticket();
  const std::shared_ptr<File> found = file(ino);
  if (found == nullptr) {
    post(DrainedEvent{ticket, ENOENT, {}});
    return ticket;
  }
  found->drain(last, [this, ticket](int error, SnapshotData snapshot) {
    post(DrainedEvent{ticket, error, std::move(snapshot)});
  });
  return ticket;
}

uint64_t Engine::drop(uint64_t ino) {
  const uint64_t ticket = next_ticket();
  const std::shared_ptr<File> found = file(ino);
  if (found == nullptr) {
    post(DroppedEvent{ticket, {}});
    return ticket;
  }
  found->drop([this, ticket, ino](std::vector<ObjectKey> objects) {
    {
      const MutexLock lock(table_mutex_);
      files_.erase(ino);
    }
    post(DroppedEvent{ticket, std::move(objects)});
  });
  return ticket;
}

uint64_t Engine::truncate(uint64_t ino, uint64_t size) {
  const uint64_t ticket = next_ticket();
  const std::shared_ptr<File> found = file(ino);
  if (found == nullptr) {
    post(DoneEvent{ticket, ENOENT});
    return ticket;
  }
  found->truncate(size, [this, ticket](int error) { post(DoneEvent{ticket, error}); });
  return ticket;
}

uint64_t Engine::discard(std::vector<Extent> ranges) {
  const uint64_t ticket = next_ticket();
  auto countdown = std::make_shared<Countdown>(ranges.size() + 1);
  const auto part = [this, ticket, countdown](int result) {
    // An object that is gone was removed before a crash kept that from being recorded.
    if (result != 0 && result != -ENOENT) countdown->error = -result;
    retry_refused();
    if (countdown->left.fetch_sub(1) == 1) post(DoneEvent{ticket, countdown->error});
  };
  after_reads([this, ranges = std::move(ranges), part] {
    for (const Extent& range : ranges) punch(range, part);
    part(0);
  });
  return ticket;
}

void Engine::punch(const Extent& range, std::function<void(int)> done) {
  Device* target = device(range.place.device);
  if (target == nullptr) return done(-ENODEV);
  auto* request = new CallRequest();
  request->op = IoOp::Punch;
  request->object = target->object(range.place.object);
  request->offset = uint64_t{range.place.object_block} * kBlockBytes;
  request->length = range.count * kBlockBytes;
  request->call = std::move(done);
  target->submit(request);
}

void Engine::give_back(std::vector<Extent> places, std::function<void()> done) {
  auto countdown = std::make_shared<Countdown>(places.size());
  const auto part = [this, countdown, done = std::move(done)](int) {
    retry_refused();
    if (countdown->left.fetch_sub(1) == 1) done();
  };
  after_reads([this, places = std::move(places), part] {
    for (const Extent& each : places) {
      Device* target = device(each.place.device);
      if (each.count != 0) {
        punch(each, part);
      } else if (target != nullptr) {
        target->remove_object(each.place.object, part);
      } else {
        part(ENODEV);
      }
    }
  });
}

uint64_t Engine::remove_objects(std::vector<ObjectKey> objects) {
  const uint64_t ticket = next_ticket();
  auto countdown = std::make_shared<Countdown>(objects.size() + 1);
  const auto part = [this, ticket, countdown](int error) {
    // As above: gone is what it should be.
    if (error != 0 && std::abs(error) != ENOENT) countdown->error = std::abs(error);
    retry_refused();
    if (countdown->left.fetch_sub(1) == 1) post(DoneEvent{ticket, countdown->error});
  };
  after_reads([this, objects = std::move(objects), part] {
    for (const auto& [number, id] : objects) {
      Device* target = device(number);
      if (target == nullptr) {
        part(ENODEV);
      } else {
        target->remove_object(id, part);
      }
    }
    part(0);
  });
  return ticket;
}

// --- reads in flight ---

unsigned Engine::read_begin() {
  const MutexLock lock(phase_mutex_);
  ++reads_[phase_];
  return phase_;
}

void Engine::read_end(unsigned phase) {
  std::vector<std::function<void()>> run;
  {
    const MutexLock lock(phase_mutex_);
    if (--reads_[phase] != 0 || !flipping_ || phase == phase_) return;
    run = std::exchange(now_, {});
    flipping_ = !later_.empty();
    if (flipping_) {
      now_ = std::exchange(later_, {});
      phase_ ^= 1;
      if (reads_[phase_ ^ 1] == 0) {
        run.insert(run.end(), now_.begin(), now_.end());
        now_.clear();
        flipping_ = false;
      }
    }
  }
  for (const auto& action : run) action();
}

// Runs `action` when every read that is in flight now has ended.
void Engine::after_reads(std::function<void()> action) {
  {
    const MutexLock lock(phase_mutex_);
    if (flipping_) {
      later_.push_back(std::move(action));
      return;
    }
    if (reads_[phase_] != 0) {
      now_.push_back(std::move(action));
      phase_ ^= 1;
      flipping_ = true;
      return;
    }
  }
  action();
}

// --- parked operations ---

void Engine::park(std::function<Retry()> retry) {
  {
    const MutexLock lock(park_mutex_);
    parked_.push_back(std::move(retry));
  }
  // What it waits for may have come between its last attempt and now.
  wake_soon();
}

// What found no space for small files is said again only when there was some in between.
void Engine::say_leaving_refused() {
  if (std::exchange(said_leaving_refused_, true)) return;
  log(30,
      "no device has space for the small files that wait in memory to be committed: writes "
      "wait for their commits, and for space");
}

void Engine::retry_refused() {
  retries_.fetch_add(1);
  {
    const MutexLock lock(park_mutex_);
    retry_refused_locked();
  }
  wake();
}

// Those that were refused have waited longer.
void Engine::retry_refused_locked() {
  parked_.insert(parked_.begin(), std::make_move_iterator(refused_.begin()),
                 std::make_move_iterator(refused_.end()));
  refused_.clear();
}

void Engine::wake() {
  {
    const MutexLock lock(park_mutex_);
    wake_again_ = true;
    if (waking_ || parked_.empty()) return;
    waking_ = true;
  }
  for (;;) {
    std::vector<std::function<Retry()>> attempts;
    {
      const MutexLock lock(park_mutex_);
      if (!std::exchange(wake_again_, false) || parked_.empty()) {
        waking_ = false;
        return;
      }
      attempts = std::exchange(parked_, {});
    }
    const uint64_t retries_before = retries();
    std::vector<std::function<Retry()>> waiting;
    std::vector<std::function<Retry()>> refused;
    for (auto& attempt : attempts) {
      const Retry retry = attempt();
      if (retry != Retry::Done) {
        (retry == Retry::Waiting ? waiting : refused).push_back(std::move(attempt));
      }
    }
    const bool some_wait = !waiting.empty();
    {
      const MutexLock lock(park_mutex_);
      // Those that waited longer come first.
      parked_.insert(parked_.begin(), std::make_move_iterator(waiting.begin()),
                     std::make_move_iterator(waiting.end()));
      refused_.insert(refused_.end(), std::make_move_iterator(refused.begin()),
                      std::make_move_iterator(refused.end()));
      if (retries() != retries_before) {  // after an attempt, maybe
        retry_refused_locked();
        wake_again_ = true;
      }
    }
    if (some_wait) relieve_pressure();
  }
}

// Something waits and may find too few slots: write out the oldest partly filled ones.
void Engine::relieve_pressure() {
  const uint64_t slots_free = arena_->free_count();
  // A write may need several slots at once, and one for the inline content that it ends.
  const uint64_t slots_wanted = (wire::kMaxWriteBytes - 1) / kSmallestChunk + 3;
  if (slots_free >= slots_wanted) return;
  // Sealed slots will be free soon; a spare and an orphan a channel thread will not.
  const uint64_t held_back = 2 * config_.channel_threads + 2;
  if (arena_->slot_count() - slots_free - arena_->aged_count() > held_back) return;
  // One that cannot go (no space for what was inline, or lent) does not keep others from going.
  const uint64_t retries_before = retries();
  size_t leaving = 0;
  for (const Arena::Aged& aged : arena_->oldest(arena_->slot_count())) {
    const bool may_grow = leaving_refused_ != retries_before;
    const Pressure pressure = aged.file->seal_for_pressure(aged.slot, aged.chunk, may_grow);
    if (pressure == Pressure::Refused && may_grow) {
      leaving_refused_ = retries_before;
      say_leaving_refused();
    }
    if (pressure == Pressure::Placed) said_leaving_refused_ = false;
    const bool stays = pressure == Pressure::Refused || pressure == Pressure::Kept;
    if (!stays && ++leaving == kPressureSlots) return;
  }
}

// --- what waits, and what serves the kernel ---

Retry Engine::retry_of(uint64_t ino, const Outcome& outcome) {
  if (outcome.progress == Progress::Wait) return Retry::Waiting;
  if (outcome.error != ENOSPC) return Retry::Done;
  if (!gives_way_) {
    if (refused_last_.exchange(ino) != ino) post(SpaceEvent{ino, true});
    return Retry::Done;
  }
  if (!room_asked_.exchange(true)) post(SpaceEvent{ino, false});
  return Retry::Refused;
}

void Engine::room_made(bool more) {
  gives_way_ = more;
  room_asked_ = false;
  retry_refused_soon();
}

void Engine::complete_write(uint64_t ticket, int error) {
  if (kernel_side_ != nullptr) kernel_side_->complete_write(ticket, error);
}

}  // namespace fpfs
