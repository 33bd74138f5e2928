// What the parts of the Python extension share.
#pragma once

#include <nanobind/nanobind.h>

#include "base/status.h"

namespace fpfs {

// Raises OSError(errno, message) unless the status is a success.
void check(const Status& status);

void bind_catalog(nanobind::module_& module);
void bind_client(nanobind::module_& module);

}  // namespace fpfs
