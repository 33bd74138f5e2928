#include "base/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace fpfs {
namespace {

FileDescriptor none(int error) {
  errno = error;
  return {};
}

}  // namespace

FileDescriptor open_regular(const std::string& path, int flags) {
  struct stat found {};
  if (::lstat(path.c_str(), &found) != 0) return {};
  if (S_ISLNK(found.st_mode)) return none(ELOOP);
  if (!S_ISREG(found.st_mode)) return none(EINVAL);
  FileDescriptor file(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!file) return file;
  if (::fstat(file.get(), &found) != 0) return none(errno);
  if (!S_ISREG(found.st_mode)) return none(EINVAL);
  return file;
}

FileDescriptor make_regular(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return {};
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
  return FileDescriptor(::open(path.c_str(), kFlags, S_IRUSR | S_IWUSR));
}

}  // namespace fpfs
