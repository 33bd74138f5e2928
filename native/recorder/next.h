// The function that would have been called without the recorder.
#pragma once

#include <dlfcn.h>

namespace fpfs::recorder {

template <typename Function>
Function* next(Function* /*same_type*/, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace fpfs::recorder

// Looked up once for each place it is used at.
#define FPFS_NEXT(name)                                                \
  ([]() {                                                              \
    static auto* const found = ::fpfs::recorder::next(&::name, #name); \
    return found;                                                      \
  }())
