// Opening files of directories that may come from anywhere: regular files only.
//
// What stands in a file's place must not lead elsewhere (a link), hold whoever opens it (a pipe),
// or do something by being opened (a device).
//
// Threads: any. Errno: as open(2), ELOOP for a symbolic link, EINVAL for what is no regular file.
#pragma once

#include <string>

#include "base/file_descriptor.h"

namespace fpfs {

// `flags` are those of open(2) without O_CREAT. Empty, with errno set, where that fails.
FileDescriptor open_regular(const std::string& path, int flags);

// An empty file for writing, in place of whatever has the name; mode 0600.
FileDescriptor make_regular(const std::string& path);

}  // namespace fpfs
