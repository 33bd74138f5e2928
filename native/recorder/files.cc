// The calls of libc that change device directories, recorded and passed on.
//
// SQLite, Python and the native code reach them through the dynamic linker, so a preloaded library
// comes first. What libc itself calls inside is not seen, and does not have to be: posix_fallocate
// is recorded as a whole. Calls that no replay knows are recorded as Unknown, which fails the run.
//
// Threads: any; nothing is shared but the log.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <string>
#include <vector>

#include "log.h"
#include "next.h"
#include "target.h"

namespace fpfs::recorder {
namespace {

// Before the program's own constructors, some of which open files.
[[gnu::constructor(101)]] void start() {
  open_targets();
  open_log();
}

// The end of an operation: its result, or the negative errno.
template <typename Result>
Result ended(uint64_t begin, Result result, uint64_t file = 0) {
  const auto code = result < 0 ? -static_cast<int64_t>(errno) : static_cast<int64_t>(result);
  if (begin != 0) {
    append({.kind = Kind::End, .begin = begin, .file = file, .a = static_cast<uint64_t>(code)});
  }
  return result;
}

void unknown(const char* what, int fd) {
  const Target target = target_of(fd);
  if (target.recorded) append({.kind = Kind::Unknown, .path = what, .other = target.path});
}

// --- names ----------------------------------------------------------------------------------

struct Opening {
  uint64_t begin = 0;
  bool creates = false;
};

Opening opening(int directory, const char* name, int flags) {
  Opening result;
  if ((flags & (O_CREAT | O_TRUNC)) == 0) return result;
  const std::string path = path_of(directory, name);
  if (path.empty()) return result;
  struct stat status {};
  const int saved_errno = errno;
  const bool exists = ::stat(path.c_str(), &status) == 0;
  errno = saved_errno;
  if (!exists && (flags & O_CREAT) != 0) {
    result.creates = true;
    result.begin = append({.kind = Kind::Create, .path = path});
  } else if (exists && (flags & O_TRUNC) != 0) {
    result.begin = append({.kind = Kind::Truncate, .file = status.st_ino, .path = path});
  }
  return result;
}

int opened(const Opening& opening, int fd) {
  if (opening.begin == 0) return fd;
  const uint64_t file = opening.creates && fd >= 0 ? target_of(fd).file : 0;
  return ended(opening.begin, fd, file);
}

mode_t mode_of(int flags, va_list arguments) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

int remove(Kind kind, int directory, const char* name, int flags) {
  const std::string path = path_of(directory, name);
  const uint64_t begin = path.empty() ? 0 : append({.kind = kind, .path = path});
  return ended(begin, FPFS_NEXT(unlinkat)(directory, name, flags));
}

int move(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  const std::string path = path_of(from_folder, from);
  const std::string other = path_of(to_folder, to);
  uint64_t begin = 0;
  // One that replaces nothing is as any other where it succeeds.
  const bool has_flags = (flags & ~unsigned{RENAME_NOREPLACE}) != 0;
  if (has_flags || path.empty() != other.empty()) {
    append({.kind = Kind::Unknown, .path = "rename in, out or with flags", .other = path + other});
  } else if (!path.empty()) {
    begin = append({.kind = Kind::Rename, .path = path, .other = other});
  }
  return ended(begin, FPFS_NEXT(renameat2)(from_folder, from, to_folder, to, flags));
}

int make_folder(int directory, const char* name, mode_t mode) {
  const std::string path = path_of(directory, name);
  const uint64_t begin = path.empty() ? 0 : append({.kind = Kind::MakeFolder, .path = path});
  return ended(begin, FPFS_NEXT(mkdirat)(directory, name, mode));
}

int link(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  const std::string path = path_of(from_folder, from);
  const std::string other = path_of(to_folder, to);
  const uint64_t begin =
      other.empty() ? 0 : append({.kind = Kind::Link, .path = path, .other = other});
  return ended(begin, FPFS_NEXT(linkat)(from_folder, from, to_folder, to, flags));
}

// --- contents -------------------------------------------------------------------------------

uint64_t write_begins(int fd, const Piece* pieces, size_t count, off_t offset, bool at_position) {
  const Target target = target_of(fd);
  if (!target.recorded) return 0;
  const int flags = ::fcntl(fd, F_GETFL);
  if (at_position) {
    offset = ::lseek(fd, 0, (flags & O_APPEND) != 0 ? SEEK_END : SEEK_CUR);
  }
  uint64_t bytes = 0;
  for (size_t i = 0; i < count; ++i) bytes += pieces[i].bytes;
  return append({.kind = Kind::Write,
                 .file = target.file,
                 .a = static_cast<uint64_t>(offset),
                 .b = bytes,
                 .mode = (flags & O_DSYNC) != 0 ? 1U : 0U,
                 .path = target.path},
                pieces, count);
}

uint64_t write_begins(int fd, const iovec* vectors, int count, off_t offset, bool at_position) {
  if (!target_of(fd).recorded) return 0;
  std::vector<Piece> pieces;
  for (int i = 0; i < count; ++i) pieces.push_back({vectors[i].iov_base, vectors[i].iov_len});
  return write_begins(fd, pieces.data(), pieces.size(), offset, at_position);
}

uint64_t file_begins(Kind kind, int fd, uint64_t a, uint64_t b = 0, int mode = 0) {
  const Target target = target_of(fd);
  if (!target.recorded) return 0;
  const Kind real_kind = kind == Kind::SyncFile && target.folder ? Kind::SyncFolder : kind;
  return append({.kind = real_kind,
                 .file = target.file,
                 .a = a,
                 .b = b,
                 .mode = static_cast<uint32_t>(mode),
                 .path = target.path});
}

uint64_t truncate_begins(const char* name, off_t size) {
  const std::string path = path_of(AT_FDCWD, name);
  struct stat status {};
  if (path.empty() || ::stat(path.c_str(), &status) != 0) return 0;
  return append({.kind = Kind::Truncate,
                 .file = status.st_ino,
                 .a = static_cast<uint64_t>(size),
                 .path = path});
}

// posix_fallocate gives its error back instead of setting errno.
int allocated(uint64_t begin, int error) {
  if (begin != 0) {
    append({.kind = Kind::End, .begin = begin, .a = static_cast<uint64_t>(-int64_t{error})});
  }
  return error;
}

}  // namespace
}  // namespace fpfs::recorder

using fpfs::recorder::Kind;
using fpfs::recorder::Piece;
namespace recorder = fpfs::recorder;

// A function and its name for files beyond 2 GiB, which is the same on 64-bit systems.
#define FPFS_OPEN(name)                                                 \
  int name(const char* path, int flags, ...) {                          \
    va_list arguments;                                                  \
    va_start(arguments, flags);                                         \
    const mode_t mode = recorder::mode_of(flags, arguments);            \
    va_end(arguments);                                                  \
    const auto begun = recorder::opening(AT_FDCWD, path, flags);        \
    return recorder::opened(begun, FPFS_NEXT(name)(path, flags, mode)); \
  }
#define FPFS_OPENAT(name)                                                       \
  int name(int folder, const char* path, int flags, ...) {                      \
    va_list arguments;                                                          \
    va_start(arguments, flags);                                                 \
    const mode_t mode = recorder::mode_of(flags, arguments);                    \
    va_end(arguments);                                                          \
    const auto begun = recorder::opening(folder, path, flags);                  \
    return recorder::opened(begun, FPFS_NEXT(name)(folder, path, flags, mode)); \
  }
#define FPFS_PWRITE(name)                                                        \
  ssize_t name(int fd, const void* bytes, size_t count, off_t offset) {          \
    const Piece piece{bytes, count};                                             \
    const uint64_t begun = recorder::write_begins(fd, &piece, 1, offset, false); \
    return recorder::ended(begun, FPFS_NEXT(name)(fd, bytes, count, offset));    \
  }
#define FPFS_PWRITEV(name)                                                            \
  ssize_t name(int fd, const iovec* vectors, int count, off_t offset) {               \
    const uint64_t begun = recorder::write_begins(fd, vectors, count, offset, false); \
    return recorder::ended(begun, FPFS_NEXT(name)(fd, vectors, count, offset));       \
  }
#define FPFS_PWRITEV2(name)                                                                  \
  ssize_t name(int fd, const iovec* vectors, int count, off_t offset, int flags) {           \
    if (flags != 0) recorder::unknown("pwritev2 with flags", fd);                            \
    const uint64_t begun = recorder::write_begins(fd, vectors, count, offset, offset == -1); \
    return recorder::ended(begun, FPFS_NEXT(name)(fd, vectors, count, offset, flags));       \
  }
#define FPFS_TRUNCATE(name)                                       \
  int name(const char* path, off_t size) noexcept {               \
    const uint64_t begun = recorder::truncate_begins(path, size); \
    return recorder::ended(begun, FPFS_NEXT(name)(path, size));   \
  }
#define FPFS_FTRUNCATE(name)                                                                       \
  int name(int fd, off_t size) noexcept {                                                          \
    const uint64_t begun = recorder::file_begins(Kind::Truncate, fd, static_cast<uint64_t>(size)); \
    return recorder::ended(begun, FPFS_NEXT(name)(fd, size));                                      \
  }
#define FPFS_FALLOCATE(name)                                                                    \
  int name(int fd, int mode, off_t offset, off_t count) {                                       \
    const uint64_t begun = recorder::file_begins(                                               \
        Kind::Allocate, fd, static_cast<uint64_t>(offset), static_cast<uint64_t>(count), mode); \
    return recorder::ended(begun, FPFS_NEXT(name)(fd, mode, offset, count));                    \
  }
#define FPFS_POSIX_FALLOCATE(name)                                                        \
  int name(int fd, off_t offset, off_t count) {                                           \
    const uint64_t begun = recorder::file_begins(                                         \
        Kind::Allocate, fd, static_cast<uint64_t>(offset), static_cast<uint64_t>(count)); \
    return recorder::allocated(begun, FPFS_NEXT(name)(fd, offset, count));                \
  }
#define FPFS_SYNC(name)                                                  \
  int name(int fd) {                                                     \
    const uint64_t begun = recorder::file_begins(Kind::SyncFile, fd, 0); \
    return recorder::ended(begun, FPFS_NEXT(name)(fd));                  \
  }
#define FPFS_MMAP(name)                                                           \
  void* name(void* where, size_t bytes, int protection, int flags, int fd,        \
             off_t offset) noexcept {                                             \
    if ((flags & MAP_SHARED) != 0 && (protection & PROT_WRITE) != 0 && fd >= 0) { \
      recorder::unknown("mmap", fd);                                              \
    }                                                                             \
    return FPFS_NEXT(name)(where, bytes, protection, flags, fd, offset);          \
  }

extern "C" {

FPFS_OPEN(open)
FPFS_OPEN(open64)
FPFS_OPENAT(openat)
FPFS_OPENAT(openat64)
int creat(const char* path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

int unlink(const char* path) noexcept { return recorder::remove(Kind::Remove, AT_FDCWD, path, 0); }
int rmdir(const char* path) noexcept {
  return recorder::remove(Kind::RemoveFolder, AT_FDCWD, path, AT_REMOVEDIR);
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  const Kind kind = (flags & AT_REMOVEDIR) != 0 ? Kind::RemoveFolder : Kind::Remove;
  return recorder::remove(kind, folder, path, flags);
}
int rename(const char* from, const char* to) noexcept {
  return recorder::move(AT_FDCWD, from, AT_FDCWD, to, 0);
}
int renameat(int from_folder, const char* from, int to_folder, const char* to) noexcept {
  return recorder::move(from_folder, from, to_folder, to, 0);
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to,
              unsigned flags) noexcept {
  return recorder::move(from_folder, from, to_folder, to, flags);
}
int mkdir(const char* path, mode_t mode) noexcept {
  return recorder::make_folder(AT_FDCWD, path, mode);
}
int mkdirat(int folder, const char* path, mode_t mode) noexcept {
  return recorder::make_folder(folder, path, mode);
}
int link(const char* from, const char* to) noexcept {
  return recorder::link(AT_FDCWD, from, AT_FDCWD, to, 0);
}
int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) noexcept {
  return recorder::link(from_folder, from, to_folder, to, flags);
}

ssize_t write(int fd, const void* bytes, size_t count) {
  const Piece piece{bytes, count};
  const uint64_t begun = recorder::write_begins(fd, &piece, 1, 0, true);
  return recorder::ended(begun, FPFS_NEXT(write)(fd, bytes, count));
}
ssize_t writev(int fd, const iovec* vectors, int count) {
  const uint64_t begun = recorder::write_begins(fd, vectors, count, 0, true);
  return recorder::ended(begun, FPFS_NEXT(writev)(fd, vectors, count));
}
FPFS_PWRITE(pwrite)
FPFS_PWRITE(pwrite64)
FPFS_PWRITEV(pwritev)
FPFS_PWRITEV(pwritev64)
FPFS_PWRITEV2(pwritev2)
FPFS_PWRITEV2(pwritev64v2)
FPFS_TRUNCATE(truncate)
FPFS_TRUNCATE(truncate64)
FPFS_FTRUNCATE(ftruncate)
FPFS_FTRUNCATE(ftruncate64)
FPFS_FALLOCATE(fallocate)
FPFS_FALLOCATE(fallocate64)
FPFS_POSIX_FALLOCATE(posix_fallocate)
FPFS_POSIX_FALLOCATE(posix_fallocate64)
FPFS_SYNC(fsync)
FPFS_SYNC(fdatasync)

FPFS_MMAP(mmap)
FPFS_MMAP(mmap64)
ssize_t copy_file_range(int from, off64_t* from_offset, int to, off64_t* to_offset, size_t count,
                        unsigned flags) {
  recorder::unknown("copy_file_range", to);
  return FPFS_NEXT(copy_file_range)(from, from_offset, to, to_offset, count, flags);
}
ssize_t sendfile(int to, int from, off_t* offset, size_t count) noexcept {
  recorder::unknown("sendfile", to);
  return FPFS_NEXT(sendfile)(to, from, offset, count);
}

// For the workload: a word of its own in the order of everything else.
[[gnu::visibility("default")]] void fpfs_recorder_mark(const char* word, size_t bytes) {
  const Piece piece{word, bytes};
  recorder::append({.kind = Kind::Mark}, &piece, 1);
}

}  // extern "C"
