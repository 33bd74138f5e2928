#include "device/device_pool.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "layout/block_map.h"

namespace fpfs {
namespace {

// Objects made between two looks at who waits: their folders are made durable together.
constexpr uint32_t kBatchObjectsMax = 64;

// Bytes of an object up to the first block that is a hole, or was preallocated and never written;
// 0 where that is not its end, and of one that has another name, too.
uint64_t written_alone(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || status.st_nlink != 1) return 0;
  const off_t written = ::lseek(fd, 0, SEEK_HOLE);
  return written != status.st_size ? 0 : static_cast<uint64_t>(written) / kBlockBytes * kBlockBytes;
}

}  // namespace

ObjectPool::ObjectPool(ObjectDirectory& directory, OpenFiles& files, Worker& worker,
                       uint64_t id_first, uint32_t objects_ready)
    : directory_(directory),
      files_(files),
      worker_(worker),
      objects_ready_(objects_ready),
      id_next_(id_first) {}

void ObjectPool::start(uint64_t bytes_min, uint64_t bytes_max) {
  MutexLock lock(mutex_);
  kept_bytes_min_ = bytes_min;
  kept_bytes_max_ = bytes_max;
  if (objects_ready_ > 0) refill_soon();
}

void ObjectPool::take(Done done) {
  uint64_t id = 0;
  {
    MutexLock lock(mutex_);
    if (ready_.empty() || !waiting_.empty()) {
      waiting_.push_back(std::move(done));
      refill_soon();
      return;
    }
    id = ready_.front();
    ready_.pop_front();
    // From half empty on, so that several objects share one round of directory flushes.
    if (ready_.size() <= objects_ready_ / 2) refill_soon();
  }
  done(0, std::make_shared<Object>(id), id);
}

int ObjectPool::clear() {
  std::deque<uint64_t> ids;
  {
    MutexLock lock(mutex_);
    ids.swap(ready_);
    for (const KeptObject& kept : std::exchange(kept_, {})) ids.push_back(kept.id);
    kept_bytes_ = 0;
  }
  int error = 0;
  for (const uint64_t id : ids) {
    files_.forget(id);
    const int removed = directory_.remove_object(id);
    if (removed < 0) error = removed;
  }
  return error;
}

bool ObjectPool::keep(uint64_t id) {
  FileDescriptor fd(directory_.open_object(id, OpenMode::ReadWrite));
  const uint64_t bytes = fd ? written_alone(fd.get()) : 0;
  if (!wants(bytes)) return false;
  // The catalog wants room, too.
  if (directory_.bytes_free() < kFreeBytesMin) return false;
  const uint64_t id_new = id_next_++;
  if (directory_.rename_object(id, id_new) < 0) return false;
  // From here on nobody opens it by the old name; who has done so is seen now, or has ended. Of a
  // process that was killed transfers may be under way: allocating waits for them.
  const bool is_kept =
      directory_.sync_names({id, id_new}) == 0 && files_.forget(id) &&
      ::fallocate(fd.get(), FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(bytes)) == 0 &&
      written_alone(fd.get()) == bytes;
  if (!is_kept) {
    // One that cannot be removed is found by the next mount that looks for what nobody refers to.
    (void)directory_.remove_object(id_new);
    return true;
  }
  files_.add(id_new, std::move(fd));
  MutexLock lock(mutex_);
  kept_.push_back({std::make_shared<Object>(id_new), id_new, bytes});
  kept_bytes_ += bytes;
  return true;
}

bool ObjectPool::wants(uint64_t bytes) const {
  MutexLock lock(mutex_);
  return kept_bytes_min_ <= bytes && bytes <= kept_bytes_max_;
}

uint64_t ObjectPool::kept_surplus() const {
  MutexLock lock(mutex_);
  return kept_bytes_ - std::min(kept_bytes_, kept_bytes_max_);
}

std::optional<KeptObject> ObjectPool::take_kept(uint64_t bytes_max) {
  MutexLock lock(mutex_);
  auto best = kept_.end();
  for (auto it = kept_.begin(); it != kept_.end(); ++it) {
    if (it->bytes <= bytes_max && (best == kept_.end() || it->bytes > best->bytes)) best = it;
  }
  if (best == kept_.end()) return std::nullopt;
  KeptObject taken = std::move(*best);
  kept_.erase(best);
  kept_bytes_ -= taken.bytes;
  return taken;
}

std::vector<uint64_t> ObjectPool::give_up_kept(uint64_t bytes) {
  std::vector<uint64_t> ids;
  MutexLock lock(mutex_);
  auto it = kept_.begin();
  for (uint64_t found = 0; it != kept_.end() && found < bytes; ++it) {
    ids.push_back(it->id);
    found += it->bytes;
    kept_bytes_ -= it->bytes;
  }
  kept_.erase(kept_.begin(), it);
  return ids;
}

uint64_t ObjectPool::kept_bytes() const {
  MutexLock lock(mutex_);
  return kept_bytes_;
}

void ObjectPool::refill_soon() {
  if (std::exchange(refilling_, true)) return;
  worker_.post([this] { refill(); });
}

uint32_t ObjectPool::missing(uint64_t* asked) const {
  MutexLock lock(mutex_);
  *asked = served_ + waiting_.size();
  const size_t wanted = objects_ready_ + waiting_.size();
  const size_t missing = wanted > ready_.size() ? wanted - ready_.size() : 0;
  return static_cast<uint32_t>(std::min<size_t>(missing, kBatchObjectsMax));
}

void ObjectPool::refill() {
  int error = 0;
  uint64_t asked = 0;
  while (error == 0) {
    const uint32_t count = missing(&asked);
    if (count == 0) break;
    std::vector<uint64_t> ids;
    error = make(count, &ids);
    {
      MutexLock lock(mutex_);
      ready_.insert(ready_.end(), ids.begin(), ids.end());
    }
    deliver();
  }
  // Without objects those who waited learn why; who came meanwhile is tried for again.
  if (error != 0) fail(error, asked);
  MutexLock lock(mutex_);
  refilling_ = false;
  if (!waiting_.empty()) refill_soon();
}

// Makes up to `count` objects and returns the ids of those whose names are durable.
int ObjectPool::make(uint32_t count, std::vector<uint64_t>* ids) {
  int error = 0;
  std::vector<std::pair<uint64_t, FileDescriptor>> made;
  while (made.size() < count && error == 0) {
    const uint64_t id = id_next_++;
    const int fd = directory_.create_object(id);
    if (fd >= 0) {
      made.emplace_back(id, FileDescriptor(fd));
    } else if (fd != -EEXIST) {  // an id in use, which the catalog forgot, is passed over
      error = fd;
    }
  }
  for (const auto& [id, fd] : made) ids->push_back(id);
  if (const int synced = directory_.sync_names(*ids); synced < 0) {
    // Best effort: the flush's error is the one that counts, and recovery collects unused objects.
    for (const uint64_t id : *ids) (void)directory_.remove_object(id);
    ids->clear();
    return synced;
  }
  for (auto& [id, fd] : made) files_.add(id, std::move(fd));
  return error;
}

void ObjectPool::deliver() {
  while (true) {
    Done done;
    uint64_t id = 0;
    {
      MutexLock lock(mutex_);
      if (waiting_.empty() || ready_.empty()) return;
      done = std::move(waiting_.front());
      waiting_.pop_front();
      ++served_;
      id = ready_.front();
      ready_.pop_front();
    }
    done(0, std::make_shared<Object>(id), id);
  }
}

void ObjectPool::fail(int error, uint64_t asked) {
  std::deque<Done> failed;
  {
    MutexLock lock(mutex_);
    for (; served_ < asked && !waiting_.empty(); ++served_) {
      failed.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
  }
  for (const Done& done : failed) done(error, nullptr, 0);
}

}  // namespace fpfs
