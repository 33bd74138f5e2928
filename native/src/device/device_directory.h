// The objects directory of a device: paths of objects, and the blocking calls on them.
//
// An object with id 0x12ab lies at `ab/00000000000012ab`. Names are resolved from a descriptor of
// the directory and never through symbolic links, so a hostile directory leads nowhere else.
//
// Threads: all methods may run at the same time, and may block. Results are 0, or a descriptor, or
// a negative errno.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "base/status.h"

namespace fpfs {

inline constexpr uint64_t kFolders = 256;

enum class OpenMode { ReadWrite, ReadOnly };

class ObjectDirectory {
 public:
  // Opens the directory and finds out, with one aligned write that is read back, whether O_DIRECT
  // works there. One without room for that is opened all the same; one that writes and cannot read
  // is not.
  Status open(const std::string& path);

  bool direct() const { return direct_; }
  // Whether writing to a block that was written before takes no space and changes no metadata.
  bool overwrites_in_place() const;

  int open_object(uint64_t id, OpenMode mode) const;
  int remove_object(uint64_t id);
  // Makes an empty object. Its name is durable only after sync_names(). One thread at a time for
  // these three.
  int create_object(uint64_t id);
  int rename_object(uint64_t from, uint64_t to);  // never over another
  int sync_names(const std::vector<uint64_t>& ids);
  // Makes durable that the objects removed so far are gone.
  int sync_removals();
  // Bytes that an unprivileged writer may still use, or a negative errno.
  int64_t bytes_free() const;
  uint64_t bytes_total() const;

 private:
  Status probe_direct(const std::string& path);
  bool has_direct_object() const;
  int make_folder(uint64_t id);
  FileDescriptor open_or_make_folder(uint64_t id);  // or errno
  FileDescriptor open_folder(uint64_t id) const;

  FileDescriptor root_;
  bool direct_ = false;
  bool folder_made_ = false;                                // since the last sync_names()
  std::array<std::atomic<bool>, kFolders> removed_from_{};  // since the last sync_removals()
};

}  // namespace fpfs
