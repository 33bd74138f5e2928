#include "device/device_open_files.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <utility>

namespace fpfs {

OpenFiles::OpenFiles(ObjectDirectory& directory, uint32_t files_max, Retire retire)
    : directory_(directory), files_max_(files_max), retire_(std::move(retire)) {}

bool OpenFiles::try_acquire(IoRequest* request) {
  MutexLock lock(mutex_);
  const auto found = files_.find(request->object->id());
  if (found == files_.end()) return false;
  pin(found->second.get(), request);
  return true;
}

int OpenFiles::acquire(IoRequest* request) {
  if (try_acquire(request)) return 0;
  const uint64_t id = request->object->id();
  // What a device holds stays readable when its filesystem has turned read-only.
  OpenMode mode = OpenMode::ReadWrite;
  int opened = directory_.open_object(id, mode);
  if (opened == -EROFS) {
    mode = OpenMode::ReadOnly;
    opened = directory_.open_object(id, mode);
  }
  if (opened < 0) return opened;
  FileDescriptor fd(opened);
  Retired retired;
  {
    MutexLock lock(mutex_);
    const auto found = files_.find(id);  // another thread may have been faster
    pin(found != files_.end() ? found->second.get() : insert(id, std::move(fd), mode), request);
    shrink(&retired);
  }
  hand_over(std::move(retired));
  return 0;
}

void OpenFiles::add(uint64_t id, FileDescriptor fd) {
  Retired retired;
  {
    MutexLock lock(mutex_);
    OpenFile* file = insert(id, std::move(fd), OpenMode::ReadWrite);
    file->ours = true;
    update_idle(file);
    shrink(&retired);
  }
  hand_over(std::move(retired));
}

void OpenFiles::release(IoRequest* request, int result) {
  OpenFile* file = std::exchange(request->open_file, nullptr);
  Retired retired;
  {
    MutexLock lock(mutex_);
    // A flush covers the writes that had finished when it was submitted; pin() noted how many.
    if (request->op == IoOp::Write) ++file->writes_finished;
    if (request->op == IoOp::Flush && result == 0) {
      file->writes_flushed = std::max(file->writes_flushed, request->bytes_done);
    }
    assert(file->users > 0);
    --file->users;
    if (file->removed) {
      if (file->users == 0) retired.emplace_back(file);
    } else {
      update_idle(file);
      shrink(&retired);
    }
  }
  hand_over(std::move(retired));
}

bool OpenFiles::forget(uint64_t id) {
  Retired retired;
  bool closed = true;
  {
    MutexLock lock(mutex_);
    const auto found = files_.find(id);
    if (found != files_.end()) {
      take(found->second.get(), &retired);
      closed = !retired.empty();
    }
  }
  hand_over(std::move(retired));
  return closed;
}

void OpenFiles::clear() {
  Retired retired;
  {
    MutexLock lock(mutex_);
    while (!files_.empty()) {
      assert(files_.begin()->second->users == 0);
      take(files_.begin()->second.get(), &retired);
    }
  }
  hand_over(std::move(retired));
}

uint64_t OpenFiles::count() const {
  MutexLock lock(mutex_);
  return files_.size();
}

void OpenFiles::pin(OpenFile* file, IoRequest* request) {
  set_idle(file, false);
  ++file->users;
  request->open_file = file;
  request->bytes_done = request->op == IoOp::Flush ? file->writes_finished : 0;
}

OpenFile* OpenFiles::insert(uint64_t id, FileDescriptor fd, OpenMode mode) {
  auto file = std::make_unique<OpenFile>();
  file->id = id;
  file->fd = std::move(fd);
  file->mode = mode;
  OpenFile* raw = file.get();
  files_[id] = std::move(file);
  return raw;
}

void OpenFiles::update_idle(OpenFile* file) {
  const bool flushed = directory_.direct() || file->writes_flushed == file->writes_finished;
  set_idle(file, file->users == 0 && flushed);
}

void OpenFiles::set_idle(OpenFile* file, bool idle) {
  if (file->idle == idle) return;
  file->idle = idle;
  if (idle) {
    file->idle_at = idle_.insert(idle_.end(), file);
  } else {
    idle_.erase(file->idle_at);
  }
}

void OpenFiles::shrink(Retired* retired) {
  while (files_.size() > files_max_ && !idle_.empty()) take(idle_.front(), retired);
}

// Out of the table; a file in use is left to the request that finishes last.
void OpenFiles::take(OpenFile* file, Retired* retired) {
  set_idle(file, false);
  const auto found = files_.find(file->id);
  assert(found != files_.end() && found->second.get() == file);
  file->removed = true;
  std::unique_ptr<OpenFile> owned = std::move(found->second);
  files_.erase(found);
  if (file->users == 0) {
    retired->push_back(std::move(owned));
  } else {
    (void)owned.release();
  }
}

void OpenFiles::hand_over(Retired retired) {
  for (auto& file : retired) retire_(std::move(file));
}

}  // namespace fpfs
