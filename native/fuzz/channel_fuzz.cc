// Fuzzes the whole channel: a real engine with two open files, fed with requests over a socket that
// stands in for /dev/fuse, while its socket for pyfuse3 gets arbitrary replies.
//
// The input is a list of messages: a byte that chooses the opcode and how the message is bent, a
// length byte, then bytes for the body. Handles and lengths are made to fit mostly, so that
// requests get past the first checks. A request that the channel answers itself follows every
// input; one that gets no answer ends the run, so a channel that hangs does not hang the fuzzer.
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "fuse/channel.h"
#include "fuse/known_directories.h"

// Threads of the engine allocate and free while an input runs: that looks like leaks to the fuzzer.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }

namespace {

using namespace fpfs;

constexpr uint64_t kMarker = 0xF1A5F1A5F1A5F1A5;
constexpr uint64_t kHandleWrite = 1;
constexpr uint64_t kHandleRead = 2;
constexpr uint64_t kChunkBytes = 256 * 1024;
constexpr uint64_t kHandleNever = UINT64_MAX;  // is never open
constexpr int kInputsEachFile = 200;
constexpr std::chrono::seconds kAnswerLimit{60};  // far beyond what a busy machine takes

// Whatever the channel treats in a way of its own, some of which it answers itself.
constexpr std::array<uint32_t, 18> kOpcodes = {
    FUSE_WRITE,     FUSE_READ,        FUSE_FLUSH,           FUSE_LSEEK,
    FUSE_FALLOCATE, FUSE_INTERRUPT,   FUSE_COPY_FILE_RANGE, FUSE_INIT,
    FUSE_OPEN,      FUSE_CREATE,      FUSE_READDIR,         FUSE_BATCH_FORGET,
    FUSE_SETATTR,   FUSE_LOOKUP,      FUSE_RELEASE,         FUSE_GETATTR,
    FUSE_FSYNC,     FUSE_READDIRPLUS,
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "channel_fuzz: %s\n", what);
  std::abort();
}

// Where the handle lies in the body of a request that has one.
size_t handle_offset(uint32_t opcode) {
  if (opcode == FUSE_SETATTR) return offsetof(fuse_setattr_in, fh);
  if (opcode == FUSE_GETATTR) return offsetof(fuse_getattr_in, fh);
  return 0;
}

// Bytes of the input, zeros when it is used up.
class Input {
 public:
  Input(const uint8_t* data, size_t bytes) : data_(data), left_(bytes) {}
  bool empty() const { return left_ == 0; }
  uint8_t byte() {
    uint8_t value = 0;
    take(&value, 1);
    return value;
  }
  void take(void* to, size_t bytes) {
    const size_t n = std::min(bytes, left_);
    if (bytes == 0) return;
    std::memset(to, 0, bytes);
    std::memcpy(to, data_, n);
    data_ += n;
    left_ -= n;
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

class Harness {
 public:
  Harness() {
    std::string pattern = (std::filesystem::temp_directory_path() / "fpfs-fuzz-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) std::abort();
    directory_ = pattern;
    EngineConfig config;
    for (uint16_t number = 0; number < 2; ++number) {
      const std::string path = directory_ + "/" + std::to_string(number);
      std::filesystem::create_directories(path);
      config.devices.emplace_back(number, path);
    }
    config.slot_bytes = kChunkBytes;
    config.staging_bytes = 64 * kChunkBytes;
    auto opened = Engine::open(config);
    if (!opened.ok()) std::abort();
    engine_ = opened.take();
    std::array<int, 2> pair{};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair.data()) != 0) std::abort();
    constexpr int buffer_bytes = 64 << 20;
    for (const int fd : pair) {
      ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
      ::setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &buffer_bytes, sizeof buffer_bytes);
    }
    kernel_ = pair[0];
    const timeval limit{kAnswerLimit.count(), 0};
    if (::setsockopt(kernel_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) != 0) std::abort();
    auto served = Channel::serve(*engine_, pair[1], directories_, Connection::New);
    if (!served.ok()) std::abort();
    python_ = served.take();
  }
  ~Harness() {
    engine_->close();
    std::filesystem::remove_all(directory_);
  }
  Harness(const Harness&) = delete;
  Harness& operator=(const Harness&) = delete;

  void run(Input input) {
    if (inputs_++ % kInputsEachFile == 0) fresh_file();
    for (int count = 0; count < 16 && !input.empty(); ++count) {
      send_request(&input);
      drain(python_);
    }
    ask_whether_alive();
    open_what_was_released();
    for (const Event& event : engine_->take_events()) {
      if (const auto* write = std::get_if<SyncWriteEvent>(&event)) {
        engine_->complete_write(write->ticket, 0);
      }
      if (const auto* dropped = std::get_if<DroppedEvent>(&event)) {
        engine_->remove_objects(dropped->objects);
      }
    }
  }

 private:
  void fresh_file() {
    if (ino_ != 0) {
      for (const uint64_t handle : {kHandleWrite, kHandleRead}) engine_->release_handle(handle);
      engine_->drop(ino_);
      directories_->forget(ino_);
    }
    ++ino_;
    const Placement placement{kChunkBytes, {0, 1}, ino_};
    const bool loaded = engine_->load(ino_, placement, 0, 0, 0, std::nullopt, {}).ok() &&
                        engine_->open_handle(kHandleWrite, ino_, O_RDWR).ok() &&
                        engine_->open_handle(kHandleRead, ino_, O_RDONLY).ok();
    if (!loaded) std::abort();
    // Of every other one it knows attributes and names, as of a directory that pyfuse3 has told.
    if (ino_ % 2 == 0) return;
    fuse_attr attributes{};
    attributes.ino = ino_;
    directories_->set_attributes(attributes);
    directories_->listed(ino_, {"a"});
  }

  // The channel has looked at all of the input: what is released now stays so without this.
  void open_what_was_released() {
    for (const auto& [handle, killed_by] : engine_->take_released()) {
      const uint32_t flags = handle == kHandleRead ? O_RDONLY : O_RDWR;
      if (!engine_->open_handle(handle, ino_, flags).ok()) std::abort();
    }
  }

  void send_request(Input* input) {
    const uint8_t choice = input->byte();
    const uint8_t bend = input->byte();
    if (choice >= 240) return send_reply(input);
    fuse_in_header header{};
    header.opcode = kOpcodes[choice % kOpcodes.size()];
    header.unique = 2 * ++unique_;
    header.nodeid = ino_;
    std::vector<char> body(bend % 4 == 3 ? size_t{bend} * 1024 : bend);
    input->take(body.data(), std::min<size_t>(body.size(), 96));
    fit(header.opcode, bend, &body);
    header.len = static_cast<uint32_t>(sizeof header + body.size());
    if (bend == 255) input->take(&header, sizeof header);
    if (header.opcode == FUSE_FALLOCATE) spare_the_disk(&body);
    std::vector<char> message(sizeof header + body.size());
    std::memcpy(message.data(), &header, sizeof header);
    std::copy(body.begin(), body.end(), message.begin() + sizeof header);
    if (bend == 254) message.resize(choice);  // cut off
    if (::send(kernel_, message.data(), message.size(), MSG_NOSIGNAL) < 0) {
      fail("the channel takes no more requests");
    }
    drain(kernel_);
  }

  // Puts in a handle that is open, the length that a write must state, a request to interrupt, and
  // the end of a name.
  void fit(uint32_t opcode, uint8_t bend, std::vector<char>* body) const {
    if (bend % 8 == 7) return;
    if (opcode == FUSE_LOOKUP) {
      if (!body->empty()) body->back() = '\0';
      return;
    }
    const size_t least = opcode == FUSE_SETATTR ? sizeof(fuse_setattr_in) : sizeof(fuse_write_in);
    if (body->size() < least) body->resize(least);
    uint64_t value = bend % 2 == 0 ? kHandleWrite : kHandleRead;
    if (opcode == FUSE_INTERRUPT) value = 2 * (unique_ - std::min<uint64_t>(unique_, bend / 16));
    std::memcpy(body->data() + handle_offset(opcode), &value, sizeof value);
    if (opcode == FUSE_WRITE) {
      const auto bytes = static_cast<uint32_t>(body->size() - sizeof(fuse_write_in));
      std::memcpy(body->data() + offsetof(fuse_write_in, size), &bytes, sizeof bytes);
    }
    if (opcode == FUSE_COPY_FILE_RANGE) {
      body->resize(sizeof(fuse_copy_file_range_in));
      std::memcpy(body->data() + offsetof(fuse_copy_file_range_in, fh_out), &value, sizeof value);
      uint64_t bytes = 0;  // what is copied takes room too
      std::memcpy(&bytes, body->data() + offsetof(fuse_copy_file_range_in, len), sizeof bytes);
      bytes %= 4 * kChunkBytes;
      std::memcpy(body->data() + offsetof(fuse_copy_file_range_in, len), &bytes, sizeof bytes);
    }
  }

  // An allocation takes little, or more than there can be: never all that the machine has left.
  static void spare_the_disk(std::vector<char>* body) {
    fuse_fallocate_in in{};
    if (body->size() < sizeof in) return;
    std::memcpy(&in, body->data(), sizeof in);
    if (in.length < kFileBytesMax / 2) in.length %= 4 * kChunkBytes;
    std::memcpy(body->data(), &in, sizeof in);
  }

  // What pyfuse3 would answer, to the latest request or to none.
  void send_reply(Input* input) {
    std::vector<char> message(sizeof(fuse_out_header) + input->byte());
    input->take(message.data(), message.size());
    fuse_out_header header{};
    std::memcpy(&header, message.data(), sizeof header);
    header.unique = 2 * unique_ + (header.unique % 4 == 3 ? 1 : 0);
    std::memcpy(message.data(), &header, sizeof header);
    ::send(python_, message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  // A seek is answered by the channel itself, after it has looked at all that was sent before.
  void ask_whether_alive() {
    struct {
      fuse_in_header header;
      fuse_lseek_in body;
    } message{};
    message.header.len = sizeof message;
    message.header.opcode = FUSE_LSEEK;
    message.header.unique = kMarker;
    message.header.nodeid = ino_;
    message.body.fh = kHandleNever;
    if (::send(kernel_, &message, sizeof message, MSG_NOSIGNAL) < 0) {
      fail("the channel takes no more requests");
    }
    const auto give_up = std::chrono::steady_clock::now() + kAnswerLimit;
    while (!drain(kernel_)) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          give_up - std::chrono::steady_clock::now());
      if (left.count() <= 0) fail("the channel does not answer");
      pollfd wait[2] = {{kernel_, POLLIN, 0}, {python_, POLLIN, 0}};
      ::poll(wait, 2, static_cast<int>(left.count()));
      drain(python_);
    }
  }

  // Takes what lies there; whether the answer to the marker was among it.
  bool drain(int fd) {
    bool marker = false;
    while (true) {
      const ssize_t n = ::recv(fd, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
      if (n < static_cast<ssize_t>(sizeof(fuse_out_header))) {
        if (n < 0) return marker;
        continue;
      }
      fuse_out_header header{};
      std::memcpy(&header, buffer_.data(), sizeof header);
      marker = marker || (fd == kernel_ && header.unique == kMarker);
    }
  }

  std::string directory_;
  const std::shared_ptr<KnownDirectories> directories_ =
      std::make_shared<KnownDirectories>(10, 10, 1);
  std::unique_ptr<Engine> engine_;
  int kernel_ = -1;
  int python_ = -1;
  uint64_t ino_ = 0;
  uint64_t unique_ = 0;
  uint64_t inputs_ = 0;
  std::vector<char> buffer_ = std::vector<char>(size_t{2} << 20);
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  static Harness harness;
  harness.run(Input(data, bytes));
  return 0;
}
