// What the channel may say of directories without asking Python: attributes, and that a name does
// not exist.
//
// The kernel looks every name up before it makes it, and asks for the directory's attributes again
// after each change of its names: half of the requests that making a small file takes. Answered
// here, they take 20 us instead of 150.
//
// Ownership: shared by the name plane, which alone changes it, and the channel, which asks.
// Threads: all methods from any thread. The name plane changes it together with its own memory,
//   before the request that caused the change is answered; so an answer from here is one that the
//   name plane would give at that moment.
#pragma once

#include <linux/fuse.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/thread_annotations.h"

namespace fpfs {

class KnownDirectories {
 public:
  // All sets together hold at most `names_max` names; a directory with more than `listed_max` is
  // not worth listing. The kernel may keep what it is told for `valid_s` seconds.
  KnownDirectories(size_t names_max, size_t listed_max, uint64_t valid_s)
      : names_max_(names_max), listed_max_(listed_max), valid_s_(valid_s) {}

  uint64_t valid_s() const { return valid_s_; }

  // The attributes of `attributes.ino`, until they are set again or the directory is forgotten.
  void set_attributes(const fuse_attr& attributes) EXCLUDES(mutex_);
  std::optional<fuse_attr> attributes(uint64_t directory) EXCLUDES(mutex_);
  bool has_attributes(uint64_t directory) EXCLUDES(mutex_);

  // Whether the directory certainly has no such name.
  bool lacks(uint64_t directory, std::string_view name) EXCLUDES(mutex_);
  // Whether the directory's names are worth listing: they are not known, nor too many.
  bool wants(uint64_t directory) EXCLUDES(mutex_);
  // These are all names of the directory. Too many are refused until it is forgotten.
  void listed(uint64_t directory, const std::vector<std::string>& names) EXCLUDES(mutex_);
  void added(uint64_t directory, const std::string& name) EXCLUDES(mutex_);
  void removed(uint64_t directory, const std::string& name) EXCLUDES(mutex_);
  void forget(uint64_t directory) EXCLUDES(mutex_);

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  using Names = std::unordered_set<std::string, Hash, std::equal_to<>>;
  struct Directory {
    std::optional<fuse_attr> attributes;
    std::optional<Names> names;  // all of them, or unknown
    bool refused = false;        // too many names to know them
  };
  void give_up_names(Directory& directory, bool refused) REQUIRES(mutex_);

  const size_t names_max_;
  const size_t listed_max_;
  const uint64_t valid_s_;
  Mutex mutex_;
  std::unordered_map<uint64_t, Directory> directories_ GUARDED_BY(mutex_);
  size_t names_ GUARDED_BY(mutex_) = 0;  // in all sets
};

}  // namespace fpfs
