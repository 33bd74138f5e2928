// What clients of a mount use, for fpfs.client.
//
// Threads: calls that wait run without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "client/piece_reader.h"
#include "client/piece_writer.h"

namespace nb = nanobind;

namespace fpfs {
namespace {

using Pieces = std::vector<std::tuple<uintptr_t, uint64_t, uint64_t>>;
using Places = std::vector<std::pair<uint64_t, size_t>>;

// Goes without the GIL, since what is in flight is waited for.
template <typename T>
struct Unlocked {
  std::unique_ptr<T> native;

  explicit Unlocked(std::unique_ptr<T> started) : native(std::move(started)) {}
  ~Unlocked() {
    const nb::gil_scoped_release release;
    native.reset();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
};

std::vector<Piece> to_native(const Pieces& pieces) {
  std::vector<Piece> native;
  native.reserve(pieces.size());
  for (const auto& [address, bytes, offset] : pieces) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): Python has addresses of tensors as numbers
    native.push_back({reinterpret_cast<char*>(address), bytes, offset});
  }
  return native;
}

std::unique_ptr<Unlocked<PieceWriter>> write_pieces(const Pieces& pieces, const Places& places,
                                                    int fd, uint64_t request_bytes,
                                                    uint32_t threads) {
  std::vector<CrcPlace> native_places;
  native_places.reserve(places.size());
  for (const auto& [offset, piece] : places) native_places.push_back({offset, piece});
  auto started = PieceWriter::start(to_native(pieces), std::move(native_places),
                                    {.fd = fd, .request_bytes = request_bytes, .threads = threads});
  if (!started.ok()) check(started.status());
  return std::make_unique<Unlocked<PieceWriter>>(started.take());
}

std::unique_ptr<Unlocked<PieceReader>> read_pieces(const Pieces& pieces, int fd,
                                                   uint64_t request_bytes, uint32_t threads) {
  const PieceReaderConfig config{.fd = fd, .request_bytes = request_bytes, .threads = threads};
  return std::make_unique<Unlocked<PieceReader>>(
      std::make_unique<PieceReader>(to_native(pieces), config));
}

template <typename T>
nb::class_<Unlocked<T>> bind_transfer(nb::module_& module, const char* name) {
  return nb::class_<Unlocked<T>>(module, name)
      .def(
          "wait", [](Unlocked<T>& self, double seconds) { return self.native->wait(seconds); },
          nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>())
      .def("cancel", [](Unlocked<T>& self) { self.native->cancel(); })
      .def("check", [](Unlocked<T>& self) { check(self.native->status()); });
}

}  // namespace

void bind_client(nb::module_& module) {
  bind_transfer<PieceWriter>(module, "PieceWriter")
      .def("crc32", [](Unlocked<PieceWriter>& self) { return self.native->crc32(); })
      .def_prop_ro("copied_bytes",
                   [](Unlocked<PieceWriter>& self) { return self.native->copied_bytes(); });
  bind_transfer<PieceReader>(module, "PieceReader")
      .def(
          "wait_for",
          [](Unlocked<PieceReader>& self, size_t piece) { return self.native->wait_for(piece); },
          nb::arg("piece"), nb::call_guard<nb::gil_scoped_release>());
  module.def("write_pieces", &write_pieces, nb::arg("pieces"), nb::arg("places"), nb::kw_only(),
             nb::arg("fd"), nb::arg("request_bytes"), nb::arg("threads"));
  module.def(
      "reserve_file",
      [](int fd, uint64_t size) {
        check([&] {
          const nb::gil_scoped_release release;
          return reserve_file(fd, size);
        }());
      },
      nb::arg("fd"), nb::arg("size"));
  module.def("read_pieces", &read_pieces, nb::arg("pieces"), nb::kw_only(), nb::arg("fd"),
             nb::arg("request_bytes"), nb::arg("threads"));
}

}  // namespace fpfs
