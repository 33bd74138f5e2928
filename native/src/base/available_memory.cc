#include "base/available_memory.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

namespace fpfs {
namespace {

// The names of one cgroup version's files.
struct Names {
  const char* limit;
  const char* usage;
  // Lines of memory.stat: file pages of the group and those below it.
  const char* inactive;
  const char* active;
  const char* slab;  // of the kernel's caches, what can be dropped
};
constexpr Names kFirst{"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file",
                       "total_active_file", "total_slab_reclaimable"};
constexpr Names kSecond{"/memory.max", "/memory.current", "inactive_file", "active_file",
                        "slab_reclaimable"};

// A hierarchy as it is mounted: its group `root` is seen at `mountpoint`.
struct Mount {
  std::string root;
  std::string mountpoint;
};

// The number in a file; none where there is no file, or "max" in it.
std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

// The number that follows a word at the start of a line.
uint64_t number_after(const std::string& path, const std::string& word, uint64_t otherwise) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string first;
    uint64_t number = 0;
    if (fields >> first >> number && first == word) return number;
  }
  return otherwise;
}

// Whether a list separated by commas has "memory" in it.
bool names_memory(const std::string& list) {
  return ("," + list + ",").find(",memory,") != std::string::npos;
}

// This process's group: in the hierarchy of version 2, or in version 1's for memory.
std::optional<std::string> group(const std::string& root, bool second) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t list = line.find(':');
    const size_t path = list == std::string::npos ? list : line.find(':', list + 1);
    if (path == std::string::npos) continue;
    const std::string controllers = line.substr(list + 1, path - list - 1);
    if (second ? controllers.empty() : names_memory(controllers)) return line.substr(path + 1);
  }
  return std::nullopt;
}

// The hierarchy's mount that is on top: a later one covers those before it.
std::optional<Mount> hierarchy(const std::string& root, bool second) {
  std::ifstream file(root + "/proc/self/mountinfo");
  std::optional<Mount> found;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string skipped, type, source, options;
    Mount mount;
    fields >> skipped >> skipped >> skipped >> mount.root >> mount.mountpoint;
    while (fields >> skipped && skipped != "-") continue;
    fields >> type >> source >> options;
    if (second ? type == "cgroup2" : type == "cgroup" && names_memory(options)) found = mount;
  }
  return found;
}

// Where a mount shows a group, below its mountpoint; none where it does not show it.
std::optional<std::string> below(const Mount& mount, const std::string& group) {
  if (mount.root == "/") return group == "/" ? "" : group;
  if (!group.starts_with(mount.root)) return std::nullopt;
  std::string rest = group.substr(mount.root.size());
  if (!rest.empty() && rest.front() != '/') return std::nullopt;
  return rest;
}

// What is left of one group's own limit.
uint64_t left_of(const std::string& directory, const Names& names) {
  const auto limit = number_in(directory + names.limit);
  const auto usage = number_in(directory + names.usage);
  if (!limit || !usage) return UINT64_MAX;
  const std::string stat = directory + "/memory.stat";
  const uint64_t droppable = number_after(stat, names.inactive, 0) +
                             number_after(stat, names.active, 0) +
                             number_after(stat, names.slab, 0);
  const uint64_t kept = *usage - std::min(*usage, droppable);
  return *limit - std::min(*limit, kept);
}

// What is left of the limits of this process's group and of all above it that can be seen.
uint64_t left_of_groups(const std::string& root, bool second) {
  const auto own = group(root, second);
  const auto mount = hierarchy(root, second);
  if (!own || !mount) return UINT64_MAX;
  // A container may see its own group at the mountpoint, under the name it has outside.
  auto path = below(*mount, *own);
  uint64_t left = UINT64_MAX;
  while (path) {
    const std::string directory = root + mount->mountpoint + *path;
    left = std::min(left, left_of(directory, second ? kSecond : kFirst));
    const size_t last = path->rfind('/');
    if (last == std::string::npos) break;
    path->erase(last);
  }
  return left;
}

}  // namespace

uint64_t available_memory(const std::string& root) {
  const uint64_t kib = number_after(root + "/proc/meminfo", "MemAvailable:", UINT64_MAX / 1024);
  return std::min({kib * 1024, left_of_groups(root, false), left_of_groups(root, true)});
}

}  // namespace fpfs
