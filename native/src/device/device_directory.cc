#include "device/device_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#include "device/device.h"

namespace fpfs {
namespace {

constexpr const char* kProbeName = ".direct-probe";

std::string folder_name(uint64_t id) {
  std::array<char, 8> name;
  std::snprintf(name.data(), name.size(), "%02x", static_cast<unsigned>(id % kFolders));
  return name.data();
}

std::string object_name(uint64_t id) {
  std::array<char, 24> name;
  std::snprintf(name.data(), name.size(), "%016llx", static_cast<unsigned long long>(id));
  return name.data();
}

int open_at(int directory, const char* name, int flags, mode_t mode = 0) {
  while (true) {
    const int fd = ::openat(directory, name, flags | O_CLOEXEC | O_NOFOLLOW, mode);
    if (fd >= 0) return fd;
    if (errno != EINTR) return -errno;
  }
}

// As statfs(2) tells them. Others write elsewhere (btrfs), or are not known not to.
constexpr std::array<int64_t, 2> kOverwriteInPlace = {0xEF53, 0x58465342};  // ext4, XFS

bool is_full(int error) { return error == ENOSPC || error == EDQUOT; }

int sync_directory(int fd) {
  while (::fsync(fd) != 0) {
    if (errno != EINTR) return -errno;
  }
  return 0;
}

// Reads the zeros back that the probe has written; an errno, or 0.
int read_probe(int fd, void* block) {
  std::memset(block, 1, kIoAlignment);
  const ssize_t n = ::pread(fd, block, kIoAlignment, 0);
  if (n < 0) return errno;
  const char* bytes = static_cast<const char*>(block);
  const bool same = n == ssize_t{kIoAlignment} &&
                    std::all_of(bytes, bytes + kIoAlignment, [](char byte) { return byte == 0; });
  return same ? 0 : EIO;
}

}  // namespace

Status ObjectDirectory::open(const std::string& path) {
  root_.reset(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  if (!root_) return Status::from_errno(path);
  return probe_direct(path);
}

Status ObjectDirectory::probe_direct(const std::string& path) {
  direct_ = false;
  // What a process that died left, or somebody put there.
  if (::unlinkat(root_.get(), kProbeName, 0) != 0 && errno != ENOENT) {
    return Status(errno, path + ": no file can be removed there");
  }
  const int created = open_at(root_.get(), kProbeName, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (is_full(-created)) {
    direct_ = has_direct_object();
    return {};
  }
  if (created < 0) return Status(-created, path + ": no file can be created there");
  const FileDescriptor plain(created);
  int read_error = 0;
  const FileDescriptor direct(open_at(root_.get(), kProbeName, O_RDWR | O_DIRECT));
  if (direct) {
    const std::unique_ptr<void, decltype(&std::free)> block(
        std::aligned_alloc(kIoAlignment, kIoAlignment), &std::free);
    std::memset(block.get(), 0, kIoAlignment);
    const ssize_t n = ::pwrite(direct.get(), block.get(), kIoAlignment, 0);
    direct_ = n == ssize_t{kIoAlignment} || (n < 0 && is_full(errno));
    // Otherwise whoever reads a content would be the first to find out.
    if (n == ssize_t{kIoAlignment}) read_error = read_probe(direct.get(), block.get());
  }
  if (::unlinkat(root_.get(), kProbeName, 0) != 0) return Status::from_errno(kProbeName);
  if (read_error == 0) return {};
  return Status(read_error, path +
                                ": what is written there with O_DIRECT cannot be read with it (" +
                                std::strerror(read_error) + ")");
}

// Without room for another file those that are there tell. A device without objects and without
// room for one is not going to be written to before it has some.
bool ObjectDirectory::has_direct_object() const {
  for (uint64_t id = 0; id < kFolders; ++id) {
    FileDescriptor folder = open_folder(id);
    if (!folder) continue;
    const auto close = [](DIR* opened) { ::closedir(opened); };
    const std::unique_ptr<DIR, decltype(close)> entries(::fdopendir(folder.get()), close);
    if (entries == nullptr) continue;
    (void)folder.release();  // it is the stream's
    while (const dirent* entry = ::readdir(entries.get())) {
      if (entry->d_type != DT_REG) continue;
      const int flags = O_RDONLY | O_DIRECT | O_NONBLOCK;
      return FileDescriptor(open_at(::dirfd(entries.get()), entry->d_name, flags)).get() >= 0;
    }
  }
  return false;
}

FileDescriptor ObjectDirectory::open_folder(uint64_t id) const {
  const int fd = open_at(root_.get(), folder_name(id).c_str(), O_RDONLY | O_DIRECTORY);
  if (fd < 0) errno = -fd;
  return FileDescriptor(std::max(fd, -1));
}

int ObjectDirectory::make_folder(uint64_t id) {
  folder_made_ = true;
  return ::mkdirat(root_.get(), folder_name(id).c_str(), 0700) == 0 || errno == EEXIST ? 0 : -errno;
}

FileDescriptor ObjectDirectory::open_or_make_folder(uint64_t id) {
  FileDescriptor folder = open_folder(id);
  if (folder || errno != ENOENT) return folder;
  if (const int made = make_folder(id); made < 0) {
    errno = -made;
    return {};
  }
  return open_folder(id);
}

int ObjectDirectory::open_object(uint64_t id, OpenMode mode) const {
  const FileDescriptor folder = open_folder(id);
  if (!folder) return -errno;
  // O_NONBLOCK only for the moment of opening: a pipe put in an object's place must not hold the
  // thread, but with the flag left on io_uring would answer EAGAIN instead of waiting.
  const int flags = (mode == OpenMode::ReadOnly ? O_RDONLY : O_RDWR) | (direct_ ? O_DIRECT : 0);
  FileDescriptor file(open_at(folder.get(), object_name(id).c_str(), flags | O_NONBLOCK));
  if (!file) return file.release();  // the negative errno
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return -errno;
  if (!S_ISREG(status.st_mode)) return -EINVAL;
  return ::fcntl(file.get(), F_SETFL, flags) == 0 ? file.release() : -errno;
}

int ObjectDirectory::create_object(uint64_t id) {
  const FileDescriptor folder = open_or_make_folder(id);
  if (!folder) return -errno;
  const int flags = O_RDWR | O_CREAT | O_EXCL | (direct_ ? O_DIRECT : 0);
  return open_at(folder.get(), object_name(id).c_str(), flags, 0600);
}

int ObjectDirectory::rename_object(uint64_t from, uint64_t to) {
  const FileDescriptor source = open_folder(from);
  if (!source) return -errno;
  const FileDescriptor target = open_or_make_folder(to);
  if (!target) return -errno;
  const int result = ::renameat2(source.get(), object_name(from).c_str(), target.get(),
                                 object_name(to).c_str(), RENAME_NOREPLACE);
  if (result != 0) return -errno;
  removed_from_[from % kFolders].store(true);
  return 0;
}

int ObjectDirectory::remove_object(uint64_t id) {
  const FileDescriptor folder = open_folder(id);
  if (!folder) return -errno;
  if (::unlinkat(folder.get(), object_name(id).c_str(), 0) != 0) return -errno;
  removed_from_[id % kFolders].store(true);
  return 0;
}

int ObjectDirectory::sync_removals() {
  int result = 0;
  for (uint64_t id = 0; id < kFolders; ++id) {
    if (!removed_from_[id].exchange(false)) continue;
    const FileDescriptor folder = open_folder(id);
    const int error = folder ? sync_directory(folder.get()) : -errno;
    if (error < 0) result = error;
  }
  return result;
}

int ObjectDirectory::sync_names(const std::vector<uint64_t>& ids) {
  if (folder_made_) {
    if (const int error = sync_directory(root_.get()); error < 0) return error;
    folder_made_ = false;
  }
  for (const uint64_t id : ids) {
    const FileDescriptor folder = open_folder(id);
    const int error = folder ? sync_directory(folder.get()) : -errno;
    if (error < 0) return error;
  }
  return 0;
}

bool ObjectDirectory::overwrites_in_place() const {
  struct statfs status {};
  if (!direct_ || ::fstatfs(root_.get(), &status) != 0) return false;
  return std::find(kOverwriteInPlace.begin(), kOverwriteInPlace.end(), status.f_type) !=
         kOverwriteInPlace.end();
}

uint64_t ObjectDirectory::bytes_total() const {
  struct statvfs status {};
  return ::fstatvfs(root_.get(), &status) == 0 ? uint64_t{status.f_blocks} * status.f_frsize : 0;
}

int64_t ObjectDirectory::bytes_free() const {
  struct statvfs status {};
  while (::fstatvfs(root_.get(), &status) != 0) {
    if (errno != EINTR) return -errno;
  }
  if (status.f_blocks == 0)
    return std::numeric_limits<int64_t>::max();  // it does not count (ramfs)
  const uint64_t bytes = uint64_t{status.f_bavail} * status.f_frsize;
  return static_cast<int64_t>(std::min<uint64_t>(bytes, std::numeric_limits<int64_t>::max()));
}

}  // namespace fpfs
