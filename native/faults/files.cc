// Calls of libc on a device's objects and catalog that fail when they are asked to.
//
// SQLite, Python and the native code reach them through the dynamic linker, so a preloaded library
// comes first. Everything else is passed on.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <string>

#include "../recorder/next.h"
#include "../recorder/target.h"
#include "control.h"

namespace fpfs::faults {
namespace {

using recorder::path_of;
using recorder::Target;
using recorder::target_of;

[[gnu::constructor(101)]] void start() {
  recorder::open_targets();
  open_control();
}

bool is_object(const std::string& path) { return path.find("/objects/") != std::string::npos; }

bool is_catalog(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash != std::string::npos && path.find("catalog.", slash) != std::string::npos;
}

Kind write_kind(int fd) {
  const Target target = target_of(fd);
  return target.recorded && is_catalog(target.path) ? Kind::CatalogWrite : Kind::None;
}

Kind flush_kind(int fd) {
  const Target target = target_of(fd);
  if (!target.recorded) return Kind::None;
  if (target.folder) return is_object(target.path + "/") ? Kind::FolderFlush : Kind::None;
  return is_catalog(target.path) ? Kind::CatalogFlush : Kind::None;
}

Kind object_kind(int fd, Kind kind) {
  const Target target = target_of(fd);
  return target.recorded && is_object(target.path) ? kind : Kind::None;
}

Kind name_kind(int folder, const char* name, Kind kind) {
  return is_object(path_of(folder, name)) ? kind : Kind::None;
}

int fault_of(Kind kind) { return kind == Kind::None ? kNone : fault(kind); }

int fail(int error) {
  errno = error;
  return -1;
}

// A write that is not to fail may be asked to do a part.
template <typename Write>
ssize_t writing(int fd, size_t count, Write write) {
  const int error = fault_of(write_kind(fd));
  if (error > 0) return fail(error);
  return write(error == 0 ? count / 2 : count);
}

template <typename Call>
int calling(Kind kind, Call call) {
  const int error = fault_of(kind);
  return error > 0 ? fail(error) : call();
}

mode_t mode_of(int flags, va_list arguments) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

}  // namespace
}  // namespace fpfs::faults

namespace faults = fpfs::faults;
using fpfs::faults::Kind;

// A function and its name for files beyond 2 GiB, which is the same on 64-bit systems.
#define FPFS_PWRITE(name)                                                                          \
  ssize_t name(int fd, const void* bytes, size_t count, off_t offset) {                            \
    return faults::writing(fd, count,                                                              \
                           [&](size_t part) { return FPFS_NEXT(name)(fd, bytes, part, offset); }); \
  }
#define FPFS_PREAD(name)                                                                \
  ssize_t name(int fd, void* bytes, size_t count, off_t offset) {                       \
    const int error = faults::fault_of(faults::object_kind(fd, Kind::Read));            \
    return error > 0 ? faults::fail(error) : FPFS_NEXT(name)(fd, bytes, count, offset); \
  }
#define FPFS_FTRUNCATE(name)                                           \
  int name(int fd, off_t size) noexcept {                              \
    return faults::calling(faults::object_kind(fd, Kind::Truncate),    \
                           [&] { return FPFS_NEXT(name)(fd, size); }); \
  }
#define FPFS_FALLOCATE(name)                                                                \
  int name(int fd, int mode, off_t offset, off_t count) {                                   \
    const Kind kind = mode == 0 ? faults::object_kind(fd, Kind::Allocate) : Kind::None;     \
    return faults::calling(kind, [&] { return FPFS_NEXT(name)(fd, mode, offset, count); }); \
  }
#define FPFS_SYNC(name)                                                                  \
  int name(int fd) {                                                                     \
    return faults::calling(faults::flush_kind(fd), [&] { return FPFS_NEXT(name)(fd); }); \
  }
#define FPFS_OPENAT(name)                                                                     \
  int name(int folder, const char* path, int flags, ...) {                                    \
    va_list arguments;                                                                        \
    va_start(arguments, flags);                                                               \
    const mode_t mode = faults::mode_of(flags, arguments);                                    \
    va_end(arguments);                                                                        \
    const Kind kind =                                                                         \
        (flags & O_CREAT) != 0 ? faults::name_kind(folder, path, Kind::Create) : Kind::None;  \
    return faults::calling(kind, [&] { return FPFS_NEXT(name)(folder, path, flags, mode); }); \
  }

extern "C" {

ssize_t write(int fd, const void* bytes, size_t count) {
  return faults::writing(fd, count, [&](size_t part) { return FPFS_NEXT(write)(fd, bytes, part); });
}
FPFS_PWRITE(pwrite)
FPFS_PWRITE(pwrite64)
FPFS_PREAD(pread)
FPFS_PREAD(pread64)
FPFS_FTRUNCATE(ftruncate)
FPFS_FTRUNCATE(ftruncate64)
FPFS_FALLOCATE(fallocate)
FPFS_FALLOCATE(fallocate64)
FPFS_SYNC(fsync)
FPFS_SYNC(fdatasync)
FPFS_OPENAT(openat)
FPFS_OPENAT(openat64)
int unlinkat(int folder, const char* path, int flags) noexcept {
  return faults::calling(faults::name_kind(folder, path, Kind::Remove),
                         [&] { return FPFS_NEXT(unlinkat)(folder, path, flags); });
}

}  // extern "C"
