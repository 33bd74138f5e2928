// Which files are recorded: everything in the folders that the environment names.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace fpfs::recorder {

// What a descriptor refers to. `recorded` is false for everything outside of the recorded folders.
struct Target {
  bool recorded = false;
  bool folder = false;
  uint64_t file = 0;
  std::string path;
};

// Reads the folders' names. Once, before anything else.
void open_targets();

// Both keep errno as it is.
Target target_of(int fd);
// The absolute path of a name relative to a directory (AT_FDCWD, too); empty if it is not recorded.
std::string path_of(int directory, const char* name);

}  // namespace fpfs::recorder
