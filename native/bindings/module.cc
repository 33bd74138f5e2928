// The Python extension fpfs._native: the only place that knows Python.
#include <nanobind/nanobind.h>

NB_MODULE(_native, module) {
  module.doc() = "The native byte plane of fpfs.";
  module.def("version", [] { return 1; }, "Version of the binding.");
}
