// What clients of a mount use, for fpfs.client.
//
// Threads: calls that wait run without the GIL.
#include <cxxabi.h>
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include "base/file_descriptor.h"
#include "bindings.h"
#include "client/crc32.h"
#include "client/moved.h"
#include "client/piece_reader.h"
#include "client/piece_writer.h"

namespace nb = nanobind;

namespace fpfs {
namespace {

using Pieces = std::vector<std::tuple<uintptr_t, uint64_t, uint64_t>>;
using Places = std::vector<std::pair<uint64_t, size_t>>;
using StripTuples =
    std::vector<std::tuple<pid_t, uintptr_t, uint64_t, uint64_t, uint64_t, uint64_t>>;

constexpr double kCloseStepSeconds = 60;

// Without the GIL. Python 3.13 and older end a daemon's thread that wants the GIL back while the
// interpreter goes, by unwinding it, which C++ does not survive here: such a thread stands still
// until the process has ended, as Python 3.14 has it.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      while (true) ::pause();
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

// A transfer, with what it needs until it ends, whatever interrupts its caller: the owners of the
// memory and a descriptor of its own. Goes without the GIL, since what is in flight is waited for.
template <typename T>
struct Transfer {
  nb::object owners;
  FileDescriptor fd;
  std::unique_ptr<T> native;

  Transfer(nb::object memory, int file)
      : owners(std::move(memory)), fd(::fcntl(file, F_DUPFD_CLOEXEC, 0)) {
    if (!fd) check(Status::from_errno("the file's descriptor"));
  }
  ~Transfer() {
    const GilReleased released;
    native.reset();
    fd.reset();
  }
  // Begins nothing more, waits for what is under way and lets go of everything but what it found.
  void close() {
    {
      const GilReleased released;
      native->cancel();
      while (!native->wait(kCloseStepSeconds)) {
      }
      fd.reset();
    }
    owners = nb::none();
  }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
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

Strips to_native(const StripTuples& strips) {
  std::vector<Strip> native;
  native.reserve(strips.size());
  for (const auto& [process, address, offset, run_bytes, count, step] : strips) {
    native.push_back({process, address, offset, run_bytes, count, step});
  }
  auto made = Strips::make(std::move(native));
  if (!made.ok()) check(made.status());
  return made.take();
}

// Nobody would move anything, and nothing would have failed.
void check_threads(uint32_t threads) {
  if (threads == 0) throw nb::value_error("threads is 0: give a number from 1");
}

std::unique_ptr<Transfer<PieceWriter>> write_pieces(const Pieces& pieces, const Places& places,
                                                    const StripTuples& strips, nb::object owners,
                                                    int fd, uint64_t request_bytes,
                                                    uint32_t threads, uint32_t first_crc) {
  check_threads(threads);
  std::vector<CrcPlace> native_places;
  native_places.reserve(places.size());
  for (const auto& [offset, piece] : places) native_places.push_back({offset, piece});
  auto transfer = std::make_unique<Transfer<PieceWriter>>(std::move(owners), fd);
  const PieceWriterConfig config{.fd = transfer->fd.get(),
                                 .request_bytes = request_bytes,
                                 .threads = threads,
                                 .first_crc = first_crc};
  auto started =
      PieceWriter::start(to_native(pieces), std::move(native_places), to_native(strips), config);
  if (!started.ok()) check(started.status());
  transfer->native = started.take();
  return transfer;
}

std::unique_ptr<Transfer<PieceReader>> read_pieces(const Pieces& pieces, nb::object owners, int fd,
                                                   uint64_t request_bytes, uint32_t threads) {
  check_threads(threads);
  auto transfer = std::make_unique<Transfer<PieceReader>>(std::move(owners), fd);
  const PieceReaderConfig config{
      .fd = transfer->fd.get(), .request_bytes = request_bytes, .threads = threads};
  transfer->native = std::make_unique<PieceReader>(to_native(pieces), config);
  return transfer;
}

template <typename T>
nb::class_<Transfer<T>> bind_transfer(nb::module_& module, const char* name) {
  return nb::class_<Transfer<T>>(module, name)
      .def(
          "wait", [](Transfer<T>& self, double seconds) { return self.native->wait(seconds); },
          nb::arg("seconds"), nb::call_guard<GilReleased>())
      .def("close", [](Transfer<T>& self) { self.close(); })
      .def("check", [](Transfer<T>& self) { check(self.native->status()); });
}

}  // namespace

void bind_client(nb::module_& module) {
  bind_transfer<PieceWriter>(module, "PieceWriter")
      .def("crc32", [](Transfer<PieceWriter>& self) { return self.native->crc32(); })
      .def_prop_ro("bytes_written",
                   [](Transfer<PieceWriter>& self) { return self.native->bytes_written(); })
      .def_prop_ro("copied_bytes",
                   [](Transfer<PieceWriter>& self) { return self.native->copied_bytes(); });
  bind_transfer<PieceReader>(module, "PieceReader");
  module.def("write_pieces", &write_pieces, nb::arg("pieces"), nb::arg("places"), nb::kw_only(),
             nb::arg("strips"), nb::arg("owners"), nb::arg("fd"), nb::arg("request_bytes"),
             nb::arg("threads"), nb::arg("first_crc") = 0);
  module.def("allow_reading", &allow_reading);
  module.def("count_moved", &count_moved, nb::arg("count"));
  module.def("moved_bytes", [] { return moved_bytes().load(std::memory_order_relaxed); });
  module.def(
      "read_process",
      [](pid_t process, uintptr_t address, uint64_t bytes) {
        auto text = read_process(process, address, bytes);
        if (!text.ok()) check(text.status());
        return nb::bytes(text.value().data(), text.value().size());
      },
      nb::arg("process"), nb::arg("address"), nb::arg("count"));
  module.def(
      "reserve_file",
      [](int fd, uint64_t size) {
        check([&] {
          const GilReleased released;
          return reserve_file(fd, size);
        }());
      },
      nb::arg("fd"), nb::arg("size"));
  module.def("combine_crc32", &crc32_combine, nb::arg("first"), nb::arg("second"),
             nb::arg("second_bytes"));
  module.def("read_pieces", &read_pieces, nb::arg("pieces"), nb::kw_only(), nb::arg("owners"),
             nb::arg("fd"), nb::arg("request_bytes"), nb::arg("threads"));
}

}  // namespace fpfs
