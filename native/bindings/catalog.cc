// The catalog's copies, for fpfs.core.engine.
//
// Threads: calls that wait for a device run without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "bindings.h"
#include "catalog/catalog_files.h"
#include "catalog/catalog_mirror.h"

namespace nb = nanobind;

namespace fpfs {
namespace {

template <typename T, typename... Arguments>
auto blocking(Status (T::*method)(Arguments...)) {
  return [method](T& object, Arguments... arguments) {
    const Status status = [&] {
      const nb::gil_scoped_release release;
      return (object.*method)(arguments...);
    }();
    check(status);
  };
}

void bind_files(nb::module_& module) {
  nb::class_<CatalogFiles>(module, "CatalogFiles")
      .def(nb::init<std::string>(), nb::arg("path"))
      .def("check", blocking(&CatalogFiles::check))
      .def("checkpoint_log", blocking(&CatalogFiles::checkpoint_log))
      .def("make_sums", blocking(&CatalogFiles::make_sums), nb::arg("filesystem_id"))
      .def("copy_from", blocking(&CatalogFiles::copy_from), nb::arg("source"))
      .def("count_differences", &CatalogFiles::count_differences, nb::arg("other"))
      .def_prop_ro("has_sums", &CatalogFiles::has_sums)
      .def_prop_ro("format", &CatalogFiles::format)
      .def_prop_ro("filesystem_id",
                   [](const CatalogFiles& files) { return files.sums().filesystem_id(); });
}

void bind_copies(nb::module_& module) {
  nb::class_<CatalogMirror>(module, "CatalogMirror")
      .def(
          "__init__",
          [](CatalogMirror* self, const CatalogFiles& files) { new (self) CatalogMirror(files); },
          nb::arg("files"))
      .def("open", blocking(&CatalogMirror::open))
      .def("gather_differences", blocking(&CatalogMirror::gather_differences), nb::arg("leader"))
      .def("write", blocking(&CatalogMirror::write))
      .def("flush", blocking(&CatalogMirror::flush))
      .def("checkpoint", blocking(&CatalogMirror::checkpoint))
      .def("close", blocking(&CatalogMirror::close))
      .def_prop_ro("log_bytes", &CatalogMirror::log_bytes, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("pending_pages", &CatalogMirror::pending_pages);
  nb::class_<CatalogLeader>(module, "CatalogLeader")
      .def(
          "__init__",
          [](CatalogLeader* self, const CatalogFiles& files) { new (self) CatalogLeader(files); },
          nb::arg("files"))
      .def(
          "collect",
          [](CatalogLeader& leader, CatalogMirror* mirror) {
            // What it reads was written a moment ago: less than another thread with the lock costs.
            Result<uint64_t> count = leader.collect(mirror);
            check(count.status());
            return count.value();
          },
          nb::arg("mirror").none())
      .def("store_sums", blocking(&CatalogLeader::store_sums));
}

}  // namespace

void check(const Status& status) {
  if (status.ok()) return;
  const std::string message =
      status.message().empty() ? std::strerror(status.error()) : status.message();
  PyErr_SetObject(PyExc_OSError, nb::make_tuple(status.error(), message).ptr());
  throw nb::python_error();
}

void bind_catalog(nb::module_& module) {
  bind_files(module);
  bind_copies(module);
}

}  // namespace fpfs
