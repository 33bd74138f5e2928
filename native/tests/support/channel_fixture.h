// The channel with a socket in the place of /dev/fuse: the kernel's side, and pyfuse3's.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "base/file_descriptor.h"
#include "base/fuse_wire.h"
#include "fuse/known_directories.h"
#include "support/damage.h"

namespace fpfs::testing {

inline constexpr uint64_t kChunkBytes = wire::kMaxWriteBytes;
inline constexpr uint64_t kSlots = 16;
inline constexpr uint64_t kIno = 1;
inline constexpr uint64_t kHandle = 11;
inline constexpr uint32_t kNobody = 0x7ffffff0;  // no process has this number
// A message of a socket holds no more without privileges; with its headers.
inline constexpr size_t kPieceBytes = 150'000;

struct Reply {
  int error = 0;
  std::string body;
};

template <typename T>
std::string bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// The kernel's side of the connection, and pyfuse3's.
class Kernel {
 public:
  explicit Kernel(Ack ack = Ack::Early, uint32_t channel_threads = 1)
      : fixture_(options(ack, channel_threads)) {
    int pair[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    kernel_.reset(pair[0]);
    auto served = Channel::serve(fixture_.engine(), pair[1], directories_, Connection::New);
    REQUIRE_MESSAGE(served.ok(), served.status().message());
    python_.reset(served.take());
    open(kIno, kHandle);
  }
  // The channel's threads end before the connection does.
  ~Kernel() { fixture_.engine().close(); }

  EngineFixture& fixture() { return fixture_; }
  Engine& engine() { return fixture_.engine(); }
  std::shared_ptr<File> file() { return engine().file(kIno); }
  void open(uint64_t ino, uint64_t handle) {
    fixture_.load(ino);
    REQUIRE(engine().open_handle(handle, ino, O_RDWR).ok());
  }

  uint64_t send(uint32_t opcode, const std::string& body, uint32_t pid = kNobody) {
    send_as(unique_ += 2, opcode, body, pid);
    return unique_;
  }
  void send_as(uint64_t unique, uint32_t opcode, const std::string& body, uint32_t pid = kNobody) {
    fuse_in_header header{};
    header.len = static_cast<uint32_t>(sizeof header + body.size());
    header.opcode = opcode;
    header.unique = unique;
    header.nodeid = kIno;
    header.pid = pid;
    const std::string message = bytes_of(header) + body;
    REQUIRE(::send(kernel_.get(), message.data(), message.size(), 0) ==
            static_cast<ssize_t>(message.size()));
  }
  Reply wait(uint64_t unique) {
    while (!replies_.contains(unique)) receive();
    return replies_.extract(unique).mapped();
  }
  Reply ask(uint32_t opcode, const std::string& body) { return wait(send(opcode, body)); }
  bool answered(uint64_t unique) const { return replies_.contains(unique); }

  // The unique of the next message to the kernel; a notification has 0.
  uint64_t next_told(int flags = 0) {
    std::string message(2 * kPieceBytes, '\0');
    fuse_out_header header{};
    REQUIRE(recv(kernel_.get(), message.data(), message.size(), flags) >= ssize_t{sizeof header});
    std::memcpy(&header, message.data(), sizeof header);
    return header.unique;
  }

  // The operation of the next request that pyfuse3 gets.
  uint32_t relayed() {
    fuse_in_header header{};
    REQUIRE(recv(python_.get(), &header, sizeof header, 0) == sizeof header);
    return header.opcode;
  }

  // Whether pyfuse3 gets a request; the channel answers it otherwise.
  bool is_relayed(uint64_t unique) {
    while (!replies_.contains(unique)) {
      pollfd sides[2] = {{kernel_.get(), POLLIN, 0}, {python_.get(), POLLIN, 0}};
      REQUIRE(poll(sides, 2, -1) > 0);
      if ((sides[0].revents & POLLIN) != 0) receive();
      if ((sides[1].revents & POLLIN) == 0) continue;
      fuse_in_header header{};
      REQUIRE(recv(python_.get(), &header, sizeof header, 0) == sizeof header);
      if (header.unique == unique) return true;
    }
    return false;
  }

  // An error as pyfuse3's answer.
  void answer(uint64_t unique, int error) {
    fuse_out_header header{};
    header.len = sizeof header;
    header.error = -error;
    header.unique = unique;
    REQUIRE(::send(python_.get(), &header, sizeof header, 0) == sizeof header);
  }

  static std::string write_body(uint64_t offset, const std::string& bytes, uint32_t flags = 0,
                                uint64_t handle = kHandle, uint64_t owner = 0) {
    fuse_write_in in{};
    in.fh = handle;
    in.offset = offset;
    in.size = static_cast<uint32_t>(bytes.size());
    in.flags = flags;
    in.lock_owner = owner;
    in.write_flags = owner != 0 ? FUSE_WRITE_LOCKOWNER : 0;
    return bytes_of(in) + bytes;
  }
  static std::string read_body(uint64_t offset, uint32_t size, uint64_t handle = kHandle) {
    fuse_read_in in{};
    in.fh = handle;
    in.offset = offset;
    in.size = size;
    in.read_flags = FUSE_READ_LOCKOWNER;  // as of read(2)
    return bytes_of(in);
  }
  int write(uint64_t offset, const std::string& bytes, uint64_t handle = kHandle) {
    return ask(FUSE_WRITE, write_body(offset, bytes, 0, handle)).error;
  }
  void write_whole(uint64_t offset, const std::string& bytes) {
    const Reply reply = ask(FUSE_WRITE, write_body(offset, bytes));
    REQUIRE(reply.error == 0);
    REQUIRE(written(reply) == bytes.size());
  }
  static uint32_t written(const Reply& reply) {
    fuse_write_out out{};
    REQUIRE(reply.body.size() == sizeof out);
    std::memcpy(&out, reply.body.data(), sizeof out);
    return out.size;
  }
  void check(const std::string& model) {
    for (uint64_t at = 0; at <= model.size(); at += kPieceBytes) {
      const Reply reply = ask(FUSE_READ, read_body(at, kPieceBytes));
      REQUIRE(reply.error == 0);
      REQUIRE((reply.body == model.substr(at, kPieceBytes)));
    }
  }

 private:
  void receive() {
    std::string message(2 * kPieceBytes, '\0');
    const ssize_t n = recv(kernel_.get(), message.data(), message.size(), 0);
    fuse_out_header header{};
    REQUIRE(n >= static_cast<ssize_t>(sizeof header));
    std::memcpy(&header, message.data(), sizeof header);
    REQUIRE(header.len == static_cast<size_t>(n));
    REQUIRE_FALSE(replies_.contains(header.unique));
    replies_[header.unique] = {-header.error,
                               message.substr(sizeof header, header.len - sizeof header)};
  }

  static EngineOptions options(Ack ack, uint32_t channel_threads) {
    EngineOptions made{1, kChunkBytes, kSlots};
    made.ack = ack;
    made.channel_threads = channel_threads;
    return made;
  }
  const std::shared_ptr<KnownDirectories> directories_ =
      std::make_shared<KnownDirectories>(10, 10, 60);
  EngineFixture fixture_;
  FileDescriptor kernel_;
  FileDescriptor python_;
  uint64_t unique_ = 0;
  std::map<uint64_t, Reply> replies_;
};

// All slots but those `in_use`, so that writes have to wait; given back at the end. The spare of a
// channel thread that goes to sleep comes back by itself, so that is waited for.
class NoSlots {
 public:
  explicit NoSlots(Engine& engine, uint64_t in_use = 0) : engine_(engine) {
    while (taken_.size() < kSlots - in_use) {
      if (Slot* slot = engine_.arena().take(); slot != nullptr) taken_.push_back(slot);
    }
  }
  ~NoSlots() { give(); }
  void give() {
    for (Slot* slot : std::exchange(taken_, {})) engine_.arena().give(slot);
    engine_.wake();
  }

 private:
  Engine& engine_;
  std::vector<Slot*> taken_;
};

inline std::string fallocate_body(uint32_t mode, uint64_t offset, uint64_t length,
                                  uint64_t handle = kHandle) {
  fuse_fallocate_in in{};
  in.fh = handle;
  in.offset = offset;
  in.length = length;
  in.mode = mode;
  return bytes_of(in);
}

inline std::string lseek_body(uint32_t whence, uint64_t offset, uint64_t handle = kHandle) {
  fuse_lseek_in in{};
  in.fh = handle;
  in.offset = offset;
  in.whence = whence;
  return bytes_of(in);
}

inline std::string copy_body(uint64_t from, uint64_t from_offset, uint64_t to, uint64_t to_offset,
                             uint64_t length) {
  fuse_copy_file_range_in in{};
  in.fh_in = from;
  in.off_in = from_offset;
  in.fh_out = to;
  in.off_out = to_offset;
  in.len = length;
  return bytes_of(in);
}

inline std::string flush_body(uint64_t owner) {
  fuse_flush_in in{};
  in.fh = kHandle;
  in.lock_owner = owner;
  return bytes_of(in);
}

inline std::string release_body(uint64_t handle) {
  fuse_release_in in{};
  in.fh = handle;
  return bytes_of(in);
}

// The handles that were released since the last call, in that order.
inline std::vector<uint64_t> released(Engine& engine) {
  std::vector<uint64_t> handles;
  for (const auto& [handle, killed_by] : engine.take_released()) handles.push_back(handle);
  return handles;
}

// A child that has ended, and that nobody has reaped: it shows how it ended as a process does
// while its files are being closed.
class Zombie {
 public:
  explicit Zombie(int signal) : pid_(::fork()) {
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      ::signal(signal, SIG_DFL);  // doctest's handler would report it as a failure
      if (signal != 0) ::kill(::getpid(), signal);  // which stays pending of the process
      ::_exit(0);
    }
    siginfo_t info{};
    REQUIRE(::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT) == 0);
  }
  ~Zombie() { ::waitpid(pid_, nullptr, 0); }
  Zombie(const Zombie&) = delete;
  Zombie& operator=(const Zombie&) = delete;
  uint32_t pid() const { return static_cast<uint32_t>(pid_); }

 private:
  const pid_t pid_;
};

// Waits until the channel has so many writes waiting.
inline void wait_parked(Kernel& kernel, uint64_t count) {
  while (Channel::of(kernel.engine())->statistics().parked_now != count) std::this_thread::yield();
}

}  // namespace fpfs::testing
