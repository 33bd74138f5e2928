// The Python extension fpfs._native: the only place that knows Python.
//
// Threads: calls come from the interpreter's threads; the GIL is released wherever a native lock
// may
//   be waited for. Nothing native calls back into Python: events are fetched with take_events().
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "base/crc32c.h"
#include "bindings.h"
#include "device/device_directory.h"
#include "engine/engine.h"
#include "fuse/channel.h"
#include "fuse/known_directories.h"
#include "layout/block_checksum.h"

namespace nb = nanobind;
using namespace fpfs;

namespace {

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

std::string from_bytes(const nb::bytes& data) { return std::string(data.c_str(), data.size()); }

std::shared_ptr<File> loaded(Engine& engine, uint64_t ino) {
  std::shared_ptr<File> file = engine.file(ino);
  if (file == nullptr) check(Status(ENOENT, "inode " + std::to_string(ino) + " is not loaded"));
  return file;
}

void committed(Engine& engine, uint64_t ino, uint64_t sequence) {
  const std::shared_ptr<File> file = loaded(engine, ino);
  const nb::gil_scoped_release release;
  file->committed(sequence);
}

nb::tuple snapshot_tuple(const SnapshotData& data) {
  nb::list segments;
  for (const auto& [index, blob] : data.segments) {
    segments.append(nb::make_tuple(index, to_bytes(blob)));
  }
  nb::list garbage;
  for (const Extent& extent : data.garbage) {
    garbage.append(nb::make_tuple(extent.place.device, extent.place.object,
                                  extent.place.object_block, extent.count));
  }
  nb::object content = nb::none();
  if (data.inline_content.has_value()) content = to_bytes(*data.inline_content);
  return nb::make_tuple(data.sequence, data.size, data.mtime_ns, data.ctime_ns, content, segments,
                        data.objects, data.dead, garbage, data.noted, data.acknowledged_ns);
}

// (kind, ticket or level or errno, payload...)
nb::tuple event_tuple(const Event& event) {
  return std::visit(
      [](const auto& e) -> nb::tuple {
        using T = std::decay_t<decltype(e)>;
        if constexpr (std::is_same_v<T, DrainedEvent>) {
          return nb::make_tuple("drained", e.ticket, e.error, snapshot_tuple(e.snapshot));
        } else if constexpr (std::is_same_v<T, DroppedEvent>) {
          return nb::make_tuple("dropped", e.ticket, e.objects);
        } else if constexpr (std::is_same_v<T, DoneEvent>) {
          return nb::make_tuple("done", e.ticket, e.error);
        } else if constexpr (std::is_same_v<T, SyncWriteEvent>) {
          return nb::make_tuple("sync_write", e.ticket, e.ino);
        } else if constexpr (std::is_same_v<T, VerifiedEvent>) {
          nb::list damage;
          for (const auto& [range, first, count, error] : e.damage) {
            damage.append(nb::make_tuple(range, first, count, error));
          }
          return nb::make_tuple("done", e.ticket, e.error, damage);
        } else if constexpr (std::is_same_v<T, CopiedEvent>) {
          nb::list damage;
          for (const auto& [range, first, count, error] : e.damage) {
            damage.append(nb::make_tuple(range, first, count, error));
          }
          return nb::make_tuple("done", e.ticket, e.error, nb::make_tuple(e.object, damage));
        } else if constexpr (std::is_same_v<T, LogEvent>) {
          return nb::make_tuple("log", e.level, e.message, e.ticket);
        } else if constexpr (std::is_same_v<T, ReleasedEvent>) {
          return nb::make_tuple("released");
        } else if constexpr (std::is_same_v<T, SpaceEvent>) {
          return nb::make_tuple("space", e.ino, e.refused);
        } else {
          return nb::make_tuple("closed", e.error);
        }
      },
      event);
}

nb::dict histogram(const DurationCounts& durations) {
  nb::list counts;
  for (const uint64_t count : durations.counts) counts.append(count);
  nb::dict result;
  result["counts"] = counts;
  result["sum_ns"] = durations.sum_ns;
  return result;
}

nb::dict statistics(Engine& engine) {
  nb::dict staging;
  Arena& arena = engine.arena();
  const uint64_t total = arena.data_bytes();
  staging["slot_bytes"] = arena.slot_bytes();
  staging["bytes_total"] = total;
  staging["bytes_used"] = total - arena.free_count() * arena.slot_bytes();
  staging["pinned"] = arena.pinned();
  nb::dict devices;
  for (const Device* device : engine.devices()) {
    const DeviceStatistics s = device->statistics();
    nb::dict entry;
    entry["bytes_written"] = s.bytes_written;
    entry["bytes_read"] = s.bytes_read;
    entry["in_flight"] = s.requests_in_flight;
    entry["in_flight_max"] = s.requests_in_flight_max;
    entry["queued"] = s.requests_queued;
    entry["errors"] = s.errors;
    entry["kept_bytes"] = s.kept_bytes;
    entry["write_latency"] = histogram(s.write_latency);
    entry["read_latency"] = histogram(s.read_latency);
    entry["flush_latency"] = histogram(s.flush_latency);
    entry["checksum_errors"] = engine.checksum_errors(device->number());
    entry["read_errors"] = engine.read_errors(device->number());
    entry["backend"] = s.io_uring ? "io_uring" : "threads";
    entry["direct"] = s.direct;
    entry["buffers_registered"] = s.buffers_registered;
    entry["failed"] = engine.device_failed(device->number());
    devices[nb::int_(device->number())] = entry;
  }
  nb::dict channel;
  if (Channel::of(engine) != nullptr) {
    const ChannelStatistics& s = Channel::of(engine)->statistics();
    channel["writes"] = s.writes.load();
    channel["write_bytes"] = s.write_bytes.load();
    channel["writes_in_place"] = s.writes_in_place.load();
    channel["writes_parked"] = s.writes_parked.load();
    channel["writes_waiting"] = s.parked_now.load();
    channel["reads"] = s.reads.load();
    channel["read_bytes"] = s.read_bytes.load();
    channel["reads_ahead"] = s.reads_ahead.load();
    channel["relayed"] = s.relayed.load();
    channel["write_to_ack"] = histogram(s.write_to_ack.read());
    channel["handles"] = engine.handle_count();
  }
  nb::dict result;
  result["staging"] = staging;
  result["devices"] = devices;
  result["channel"] = channel;
  return result;
}

Ack ack_of(const std::string& name) {
  return name == "durable" ? Ack::Durable : name == "close" ? Ack::Close : Ack::Early;
}

EngineConfig make_config(std::vector<std::pair<uint16_t, std::string>> devices,
                         std::string arena_path, std::string filesystem_id, uint64_t staging_bytes,
                         uint64_t slot_bytes, uint32_t depth, const std::string& backend,
                         uint32_t channel_threads, uint64_t object_base, uint64_t reserve_bytes,
                         uint32_t kept_percent, uint64_t first_object_bytes, const std::string& ack,
                         std::string cpu_latency_path, bool take_over, bool checksums) {
  EngineConfig config;
  config.devices = std::move(devices);
  config.arena_path = std::move(arena_path);
  config.filesystem_id = std::move(filesystem_id);
  config.staging_bytes = staging_bytes;
  config.slot_bytes = slot_bytes;
  config.depth = depth;
  config.backend = backend == "io_uring"  ? IoBackend::IoUring
                   : backend == "threads" ? IoBackend::Threads
                                          : IoBackend::Auto;
  config.channel_threads = channel_threads;
  config.object_base = object_base;
  config.reserve_bytes = reserve_bytes;
  config.kept_percent = kept_percent;
  config.first_object_bytes = first_object_bytes;
  config.ack = ack_of(ack);
  config.cpu_latency_path = std::move(cpu_latency_path);
  config.take_over = take_over;
  config.checksums = checksums;
  return config;
}

std::optional<std::string> text_of(const std::optional<nb::bytes>& content) {
  if (!content.has_value()) return std::nullopt;
  return from_bytes(*content);
}

std::vector<std::pair<uint32_t, std::string>> blobs_of(
    const std::vector<std::pair<uint32_t, nb::bytes>>& segments) {
  std::vector<std::pair<uint32_t, std::string>> blobs;
  for (const auto& [index, blob] : segments) blobs.emplace_back(index, from_bytes(blob));
  return blobs;
}

// What concerns one loaded inode or open handle.
void bind_files(nb::class_<Engine>& type) {
  type.def("load",
           [](Engine& engine, uint64_t ino, uint64_t size, int64_t mtime_ns, int64_t ctime_ns,
              const std::optional<nb::bytes>& content,
              const std::vector<std::pair<uint32_t, nb::bytes>>& segments, uint64_t chunk_bytes,
              std::vector<uint16_t> devices, uint64_t first) {
             Placement placement{chunk_bytes, std::move(devices), first};
             check(engine.load(ino, std::move(placement), size, mtime_ns, ctime_ns,
                               text_of(content), blobs_of(segments)));
           })
      .def("place",
           [](Engine& engine, uint64_t ino, uint64_t chunk_bytes, std::vector<uint16_t> devices,
              uint64_t first) {
             check(engine.place(ino, Placement{chunk_bytes, std::move(devices), first}));
           })
      .def(
          "set_flow",
          [](Engine& engine, uint64_t ino, const std::string& ack, uint32_t depth, uint32_t buffers,
             bool cached, uint64_t read_ahead) {
            loaded(engine, ino)->set_flow({ack_of(ack), depth, buffers, cached, read_ahead});
          },
          nb::arg("ino"), nb::kw_only(), nb::arg("ack"), nb::arg("depth"), nb::arg("buffers"),
          nb::arg("cached"), nb::arg("read_ahead"))
      .def("revert",
           [](Engine& engine, uint64_t ino, uint64_t size, int64_t mtime_ns, int64_t ctime_ns,
              const std::optional<nb::bytes>& content,
              const std::vector<std::pair<uint32_t, nb::bytes>>& segments) {
             check(engine.revert(ino, size, mtime_ns, ctime_ns, text_of(content),
                                 blobs_of(segments)));
           })
      .def("loaded", [](Engine& engine, uint64_t ino) { return engine.file(ino) != nullptr; })
      .def("unload", [](Engine& engine, uint64_t ino) { check(engine.unload(ino)); })
      .def("open", [](Engine& engine, uint64_t handle, uint64_t ino, uint32_t flags,
                      uint32_t request) { check(engine.open_handle(handle, ino, flags, request)); })
      .def("restore_handle",
           [](Engine& engine, uint64_t handle, uint64_t ino, uint32_t flags) {
             check(engine.restore_handle(handle, ino, flags));
           })
      .def(
          "release",
          [](Engine& engine, uint64_t handle) { return engine.release_handle(handle) != nullptr; },
          nb::call_guard<nb::gil_scoped_release>())
      .def("attributes",
           [](Engine& engine, uint64_t ino) {
             const File::Attributes a = loaded(engine, ino)->attributes();
             return nb::make_tuple(a.size, a.allocated_bytes, a.mtime_ns, a.ctime_ns,
                                   a.privileges_dropped, a.dirty, a.only_longer);
           })
      .def(
          "set_times",
          [](Engine& engine, uint64_t ino, std::optional<int64_t> mtime_ns, int64_t ctime_ns) {
            loaded(engine, ino)->set_times(mtime_ns, ctime_ns);
          },
          nb::arg("ino"), nb::arg("mtime_ns").none(), nb::arg("ctime_ns"))
      .def("drop_privileges",
           [](Engine& engine, uint64_t ino) { loaded(engine, ino)->drop_privileges(); })
      .def("privileges_restored",
           [](Engine& engine, uint64_t ino) { loaded(engine, ino)->privileges_restored(); })
      .def("take_error",
           [](Engine& engine, uint64_t id) {
             const std::shared_ptr<Handle> handle = engine.handle(id);
             if (handle == nullptr) return 0;
             const MutexLock lock(handle->mutex);
             return handle->file->take_error(&handle->errors_seen);
           })
      .def("committed", &committed);
}

// What it did and does.
void bind_figures(nb::class_<Engine>& type) {
  type.def("unsaved",
           [](Engine& engine, uint64_t ino) {
             const File::Unsaved unsaved = loaded(engine, ino)->unsaved();
             return nb::make_tuple(unsaved.bytes_acknowledged, unsaved.bytes_uncommitted,
                                   unsaved.bytes_staged, unsaved.oldest_ns);
           })
      .def("tracer", &Engine::shared_tracer)
      .def("statistics", &statistics);
}

// Handles that the kernel has released, and what it may still hold back.
void bind_released(nb::class_<Engine>& type) {
  type.def("take_released",
           [](Engine& engine) {
             nb::list result;
             for (const Engine::Released& released : engine.take_released()) {
               result.append(nb::make_tuple(released.handle, released.killed_by));
             }
             return result;
           })
      .def("requests_received",
           [](Engine& engine) {
             Channel* channel = Channel::of(engine);
             return channel == nullptr ? 0 : channel->statistics().received.load();
           })
      .def(
          "has_received",
          [](Engine& engine, uint64_t requests) {
            Channel* channel = Channel::of(engine);
            return channel == nullptr || channel->has_received(requests);
          },
          nb::arg("requests"), nb::call_guard<nb::gil_scoped_release>());
}

// What a process that died has left in the arena.
void bind_takeover(nb::class_<Engine>& type) {
  type.def("left",
           [](Engine& engine) {
             const Engine::Left left = engine.left();
             nb::list handles;
             for (const arena::HandleRecord& record : left.handles) {
               handles.append(
                   nb::make_tuple(record.handle, record.ino, record.flags, record.request));
             }
             nb::list changed;
             for (const Engine::Left::Changed& inode : left.changed) {
               changed.append(nb::make_tuple(inode.ino, inode.sequence, inode.killed_by,
                                             static_cast<int>(inode.part)));
             }
             nb::list suspects;
             for (const uint64_t ino : left.suspects) suspects.append(ino);
             return nb::make_tuple(handles, changed, suspects, left.all_suspect,
                                   left.handles_damaged);
           })
      .def("spoil", &Engine::spoil, nb::call_guard<nb::gil_scoped_release>())
      .def("begin", &Engine::begin, nb::call_guard<nb::gil_scoped_release>())
      .def("invalidate", &Engine::invalidate, nb::call_guard<nb::gil_scoped_release>())
      .def("invalidate_name",
           [](Engine& engine, uint64_t directory, const nb::bytes& name) {
             engine.invalidate_name(directory, from_bytes(name));
           })
      .def("names_invalidated", &Engine::names_invalidated,
           nb::call_guard<nb::gil_scoped_release>())
      .def("recover", &Engine::recover, nb::call_guard<nb::gil_scoped_release>())
      .def("recover_later", &Engine::recover_later, nb::call_guard<nb::gil_scoped_release>())
      .def("abandon", &Engine::abandon, nb::call_guard<nb::gil_scoped_release>())
      .def("find_out_known", &Engine::find_out_known, nb::call_guard<nb::gil_scoped_release>())
      .def("held_objects", &Engine::held_objects, nb::call_guard<nb::gil_scoped_release>())
      .def("forget_handle",
           [](Engine& engine, uint64_t handle) { engine.arena().forget_handle(handle); })
      .def("record_handle",
           [](Engine& engine, uint64_t handle, uint64_t ino, uint32_t flags, uint32_t request) {
             check(engine.record_handle(handle, ino, flags, request));
           });
}

// Devices that come, drain and go, and what is moved from one to another.
void bind_devices(nb::class_<Engine>& type) {
  type.def(
          "add_device",
          [](Engine& engine, uint16_t number, const std::string& path, bool draining) {
            const Status status = [&] {
              const nb::gil_scoped_release release;
              return engine.add_device(number, path, draining);
            }();
            check(status);
          },
          nb::arg("number"), nb::arg("path"), nb::arg("draining"))
      .def(
          "copy",
          [](Engine& engine, uint16_t to,
             const std::vector<std::tuple<uint16_t, uint64_t, uint32_t, uint64_t, bool,
                                          std::vector<uint32_t>>>& ranges) {
            std::vector<CopiedRange> copied;
            for (const auto& [device, object, block, count, unwritten, checksums] : ranges) {
              copied.push_back({Place{object, block, device, unwritten}, count, checksums});
            }
            const nb::gil_scoped_release release;
            return engine.copy(to, std::move(copied));
          },
          nb::arg("to"), nb::arg("ranges"))
      .def("begin_move",
           [](Engine& engine, uint64_t ino, uint16_t device) {
             const std::shared_ptr<File> file = engine.file(ino);
             return file != nullptr && file->begin_move(device);
           })
      .def("end_move",
           [](Engine& engine, uint64_t ino,
              const std::vector<std::tuple<uint16_t, uint64_t, uint32_t, uint64_t, uint16_t,
                                           uint64_t, uint32_t>>& moves) {
             std::vector<Move> moved;
             for (const auto& [device, object, block, count, to, to_object, to_block] : moves) {
               moved.push_back({Place{object, block, device, false},
                                Place{to_object, to_block, to, false}, count});
             }
             // One that was dropped meanwhile is not there any more.
             if (const std::shared_ptr<File> file = engine.file(ino); file != nullptr) {
               file->end_move(moved);
             }
           })
      .def("set_draining", &Engine::set_draining, nb::arg("number"), nb::arg("draining"))
      .def("remove_device", &Engine::remove_device, nb::arg("number"),
           nb::call_guard<nb::gil_scoped_release>());
}

// What runs in the background and is answered by an event, and the life of the engine.
void bind_plane(nb::class_<Engine>& type) {
  type.def("__init__",
           [](Engine*, nb::args) { throw nb::type_error("use fpfs._native.open_engine"); })
      .def_prop_ro("event_fd", &Engine::event_fd)
      .def("take_events",
           [](Engine& engine) {
             nb::list result;
             for (const Event& event : engine.take_events()) result.append(event_tuple(event));
             return result;
           })
      .def("drain", &Engine::drain, nb::call_guard<nb::gil_scoped_release>())
      .def("drop", &Engine::drop, nb::call_guard<nb::gil_scoped_release>())
      .def("truncate", &Engine::truncate, nb::call_guard<nb::gil_scoped_release>())
      .def("discard",
           [](Engine& engine,
              const std::vector<std::tuple<uint16_t, uint64_t, uint32_t, uint64_t>>& ranges) {
             std::vector<Extent> extents;
             for (const auto& [device, object, block, count] : ranges) {
               extents.push_back(Extent{0, count, Place{object, block, device, false}});
             }
             return engine.discard(std::move(extents));
           })
      .def("remove_objects", &Engine::remove_objects, nb::call_guard<nb::gil_scoped_release>())
      .def("verify",
           [](Engine& engine,
              const std::vector<std::tuple<uint16_t, uint64_t, uint32_t, std::vector<uint32_t>>>&
                  ranges) {
             std::vector<StoredRange> stored;
             for (const auto& [device, object, block, checksums] : ranges) {
               stored.push_back({Place{object, block, device, false}, checksums});
             }
             const nb::gil_scoped_release release;
             return engine.verify(std::move(stored));
           })
      .def("report_damage",
           [](Engine& engine, uint64_t ino, uint64_t block, uint16_t device, uint64_t object,
              uint32_t object_block) {
             engine.report_damage(ino, block, Place{object, object_block, device, false});
           })
      .def("serve",
           [](Engine& engine, int fd, std::shared_ptr<KnownDirectories> directories,
              const std::string& connection) {
             Result<int> result = Channel::serve(engine, fd, std::move(directories),
                                                 connection == "new"    ? Connection::New
                                                 : connection == "left" ? Connection::Left
                                                                        : Connection::LeftByFault);
             check(result.status());
             return result.value();
           })
      .def("complete_write", &Engine::complete_write, nb::call_guard<nb::gil_scoped_release>())
      .def("set_gives_way", &Engine::set_gives_way)
      .def("room_made", &Engine::room_made, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>());
}

constexpr int64_t kNanosecondsASecond = 1'000'000'000;

// Seconds since 1970, negative ones as the kernel's unsigned fields hold them, and the rest.
std::pair<uint64_t, uint32_t> split_time(int64_t ns) {
  int64_t seconds = ns / kNanosecondsASecond;
  int64_t rest = ns % kNanosecondsASecond;
  if (rest < 0) {
    --seconds;
    rest += kNanosecondsASecond;
  }
  return {static_cast<uint64_t>(seconds), static_cast<uint32_t>(rest)};
}

void bind_directories(nb::module_& module) {
  nb::class_<KnownDirectories>(module, "KnownDirectories")
      .def(nb::init<size_t, size_t, uint64_t>(), nb::kw_only(), nb::arg("names_max"),
           nb::arg("listed_max"), nb::arg("valid_s"))
      .def(
          "set_attributes",
          [](KnownDirectories& known, uint64_t ino, uint32_t mode, uint32_t nlink, uint32_t uid,
             uint32_t gid, int64_t atime_ns, int64_t mtime_ns, int64_t ctime_ns) {
            fuse_attr attributes{};
            attributes.ino = ino;
            attributes.mode = mode;
            attributes.nlink = nlink;
            attributes.uid = uid;
            attributes.gid = gid;
            attributes.blksize = static_cast<uint32_t>(kBlockBytes);
            std::tie(attributes.atime, attributes.atimensec) = split_time(atime_ns);
            std::tie(attributes.mtime, attributes.mtimensec) = split_time(mtime_ns);
            std::tie(attributes.ctime, attributes.ctimensec) = split_time(ctime_ns);
            known.set_attributes(attributes);
          },
          nb::kw_only(), nb::arg("ino"), nb::arg("mode"), nb::arg("nlink"), nb::arg("uid"),
          nb::arg("gid"), nb::arg("atime_ns"), nb::arg("mtime_ns"), nb::arg("ctime_ns"))
      .def("has_attributes", &KnownDirectories::has_attributes, nb::arg("directory"))
      .def(
          "lacks",
          [](KnownDirectories& known, uint64_t directory, const nb::bytes& name) {
            return known.lacks(directory, std::string_view(name.c_str(), name.size()));
          },
          nb::arg("directory"), nb::arg("name"))
      .def("wants", &KnownDirectories::wants, nb::arg("directory"))
      .def(
          "listed",
          [](KnownDirectories& known, uint64_t directory, const std::vector<nb::bytes>& names) {
            std::vector<std::string> texts;
            texts.reserve(names.size());
            for (const nb::bytes& name : names) texts.push_back(from_bytes(name));
            known.listed(directory, texts);
          },
          nb::arg("directory"), nb::arg("names"))
      .def(
          "added",
          [](KnownDirectories& known, uint64_t directory, const nb::bytes& name) {
            known.added(directory, from_bytes(name));
          },
          nb::arg("directory"), nb::arg("name"))
      .def(
          "removed",
          [](KnownDirectories& known, uint64_t directory, const nb::bytes& name) {
            known.removed(directory, from_bytes(name));
          },
          nb::arg("directory"), nb::arg("name"))
      .def("forget", &KnownDirectories::forget, nb::arg("directory"));
}

void bind_tracer(nb::module_& module) {
  nb::class_<Tracer>(module, "Tracer")
      .def(nb::init<>())
      .def("start", &Tracer::start, nb::arg("ino"), nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &Tracer::stop)
      .def("lost", &Tracer::lost)
      .def(
          "take",
          [](Tracer& tracer, size_t max) {
            nb::list result;
            for (const TraceEvent& event : tracer.take(max)) {
              result.append(nb::make_tuple(static_cast<int>(event.kind), event.op, event.device,
                                           event.detail, event.error, event.offset, event.length,
                                           event.at_ns[0], event.at_ns[1], event.at_ns[2],
                                           event.at_ns[3]));
            }
            return result;
          },
          nb::arg("events_max"));
}

void bind_open(nb::module_& module) {
  module.def(
      "open_engine",
      [](std::vector<std::pair<uint16_t, std::string>> devices, std::string arena_path,
         std::string filesystem_id, uint64_t staging_bytes, uint64_t slot_bytes, uint32_t depth,
         const std::string& backend, uint32_t channel_threads, uint64_t object_base,
         uint64_t reserve_bytes, uint32_t kept_percent, uint64_t first_object_bytes,
         const std::string& ack, std::string cpu_latency_path, bool take_over, bool checksums) {
        Result<std::unique_ptr<Engine>> result = [&] {
          const nb::gil_scoped_release release;
          return Engine::open(make_config(
              std::move(devices), std::move(arena_path), std::move(filesystem_id), staging_bytes,
              slot_bytes, depth, backend, channel_threads, object_base, reserve_bytes, kept_percent,
              first_object_bytes, ack, std::move(cpu_latency_path), take_over, checksums));
        }();
        check(result.status());
        return result.take();
      },
      nb::kw_only(), nb::arg("devices"), nb::arg("arena_path"), nb::arg("filesystem_id"),
      nb::arg("staging_bytes"), nb::arg("slot_bytes"), nb::arg("depth"), nb::arg("backend"),
      nb::arg("channel_threads"), nb::arg("object_base"), nb::arg("reserve_bytes"),
      nb::arg("kept_percent"), nb::arg("first_object_bytes"), nb::arg("ack"),
      nb::arg("cpu_latency_path"), nb::arg("take_over"), nb::arg("checksums"));
}

}  // namespace

NB_MODULE(_native, module) {
  // At exit Python may still hold the engine in a traceback; the process ends all the same.
  nb::set_leak_warnings(false);
  module.doc() = "The native byte plane of fpfs. Use fpfs.core.engine, not this module.";
  module.def(
      "check_objects_directory",
      [](const std::string& path) {
        ObjectDirectory directory;
        Status status;
        {
          const nb::gil_scoped_release release;
          status = directory.open(path);
        }
        check(status);
      },
      nb::arg("path"));
  module.def("crc32c", [](nb::bytes data) { return crc32c(0, data.c_str(), data.size()); });

  module.attr("ARENA_FORMAT") = arena::kFormat;
  module.attr("DURATION_BOUNDS") = kDurationBounds;
  module.attr("DURATION_UNIT_NS") = kDurationUnitNs;
  module.def("checksum_blocks", [](nb::bytes data) {
    const nb::gil_scoped_release release;
    return checksum_blocks(data.c_str(), data.size());
  });

  bind_directories(module);
  bind_catalog(module);
  bind_client(module);
  bind_tracer(module);
  nb::class_<Engine> type(module, "Engine");
  bind_files(type);
  bind_figures(type);
  bind_released(type);
  bind_plane(type);
  bind_devices(type);
  bind_takeover(type);
  bind_open(module);
}
