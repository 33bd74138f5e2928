#include "fuse/known_directories.h"

#include <utility>

namespace fpfs {

void KnownDirectories::set_attributes(const fuse_attr& attributes) {
  const MutexLock lock(mutex_);
  directories_[attributes.ino].attributes = attributes;
}

std::optional<fuse_attr> KnownDirectories::attributes(uint64_t directory) {
  const MutexLock lock(mutex_);
  const auto it = directories_.find(directory);
  return it == directories_.end() ? std::nullopt : it->second.attributes;
}

bool KnownDirectories::has_attributes(uint64_t directory) {
  const MutexLock lock(mutex_);
  const auto it = directories_.find(directory);
  return it != directories_.end() && it->second.attributes.has_value();
}

bool KnownDirectories::lacks(uint64_t directory, std::string_view name) {
  const MutexLock lock(mutex_);
  const auto it = directories_.find(directory);
  if (it == directories_.end() || !it->second.names.has_value()) return false;
  return !it->second.names->contains(name);
}

bool KnownDirectories::wants(uint64_t directory) {
  const MutexLock lock(mutex_);
  const auto it = directories_.find(directory);
  return it == directories_.end() || (!it->second.names.has_value() && !it->second.refused);
}

void KnownDirectories::listed(uint64_t directory, const std::vector<std::string>& names) {
  const MutexLock lock(mutex_);
  Directory& known = directories_[directory];
  give_up_names(known, false);
  if (names.size() > listed_max_ || names_ + names.size() > names_max_) {
    known.refused = true;
    return;
  }
  known.names.emplace(names.begin(), names.end());
  names_ += known.names->size();
}

void KnownDirectories::added(uint64_t directory, const std::string& name) {
  const MutexLock lock(mutex_);
  const auto it = directories_.find(directory);
  if (it == directories_.end() || !it->second.names.has_value()) return;
  if (!it->second.names->insert(name).second) return;
  ++names_;
  if (names_ > names_max_) give_up_names(it->second, true);
}

void KnownDirectories::removed(uint64_t directory, const std::string& name) {
  const MutexLock lock(mutex_);
  const auto it = directories_.find(directory);
  if (it == directories_.end() || !it->second.names.has_value()) return;
  names_ -= it->second.names->erase(name);
}

void KnownDirectories::forget(uint64_t directory) {
  const MutexLock lock(mutex_);
  const auto it = directories_.find(directory);
  if (it == directories_.end()) return;
  give_up_names(it->second, false);
  directories_.erase(it);
}

void KnownDirectories::give_up_names(Directory& directory, bool refused) {
  if (directory.names.has_value()) names_ -= directory.names->size();
  directory.names.reset();
  directory.refused = refused;
}

}  // namespace fpfs
