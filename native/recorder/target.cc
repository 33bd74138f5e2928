#include "target.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <vector>

namespace fpfs::recorder {
namespace {

// Never destroyed: other libraries write files while the process ends.
std::vector<std::string>& folders() {
  static auto* names = new std::vector<std::string>;
  return *names;
}

bool is_recorded(std::string_view path) {
  for (const std::string& folder : folders()) {
    if (path.starts_with(folder) && (path.size() == folder.size() || path[folder.size()] == '/')) {
      return true;
    }
  }
  return false;
}

std::string read_link(const std::string& path) {
  std::array<char, PATH_MAX> buffer;
  const ssize_t bytes = ::readlink(path.c_str(), buffer.data(), buffer.size());
  return bytes < 0 ? std::string() : std::string(buffer.data(), static_cast<size_t>(bytes));
}

std::string descriptor_path(int fd) { return read_link("/proc/self/fd/" + std::to_string(fd)); }

}  // namespace

void open_targets() {
  const char* names = ::secure_getenv("FPFS_RECORD_FOLDERS");
  std::string_view rest = names == nullptr ? "" : names;
  while (!rest.empty()) {
    const size_t end = rest.find(':');
    folders().emplace_back(rest.substr(0, end));
    rest = end == std::string_view::npos ? "" : rest.substr(end + 1);
  }
}

Target target_of(int fd) {
  Target target;
  if (folders().empty()) return target;
  const int saved_errno = errno;
  struct stat status {};
  if (::fstat(fd, &status) == 0 && (S_ISREG(status.st_mode) || S_ISDIR(status.st_mode))) {
    target.path = descriptor_path(fd);
    target.recorded = is_recorded(target.path);
    target.folder = S_ISDIR(status.st_mode);
    target.file = status.st_ino;
  }
  errno = saved_errno;
  return target;
}

std::string path_of(int directory, const char* name) {
  if (folders().empty() || name == nullptr) return {};
  const int saved_errno = errno;
  std::string path = name;
  if (name[0] != '/') {
    path = (directory == AT_FDCWD ? read_link("/proc/self/cwd") : descriptor_path(directory)) +
           "/" + path;
  }
  path = std::filesystem::path(path).lexically_normal();
  errno = saved_errno;
  return is_recorded(path) ? path : std::string();
}

}  // namespace fpfs::recorder
