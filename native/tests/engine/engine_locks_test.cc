// The order of an engine's locks: a file's own outside the table of files.
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "base/file_descriptor.h"
#include "support/engine_fixture.h"
#include "support/skips.h"

namespace fpfs::testing {
namespace {

constexpr size_t kPage = 4096;

// A page that whoever touches it waits for, until fill().
class PagedOut {
 public:
  PagedOut() : fault_(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC))) {
    if (!fault_) {
      skip("userfaultfd: " + error_text(errno));
      return;
    }
    uffdio_api api{};
    api.api = UFFD_API;
    REQUIRE(::ioctl(fault_.get(), UFFDIO_API, &api) == 0);
    page_ = static_cast<char*>(
        ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(page_ != MAP_FAILED);
    uffdio_register whole{};
    whole.range = {reinterpret_cast<uint64_t>(page_), kPage};
    whole.mode = UFFDIO_REGISTER_MODE_MISSING;
    REQUIRE(::ioctl(fault_.get(), UFFDIO_REGISTER, &whole) == 0);
  }
  ~PagedOut() {
    if (page_ != nullptr) ::munmap(page_, kPage);
  }
  PagedOut(const PagedOut&) = delete;
  PagedOut& operator=(const PagedOut&) = delete;

  char* page() const { return page_; }
  // Returns when somebody waits for it.
  void wait_for_reader() const {
    uffd_msg message{};
    REQUIRE(::read(fault_.get(), &message, sizeof message) == sizeof message);
  }
  void fill() const {
    uffdio_zeropage zeros{};
    zeros.range = {reinterpret_cast<uint64_t>(page_), kPage};
    CHECK(::ioctl(fault_.get(), UFFDIO_ZEROPAGE, &zeros) == 0);
  }

 private:
  FileDescriptor fault_;
  char* page_ = nullptr;
};

// A call in a thread of its own.
class Call {
 public:
  explicit Call(std::function<void()> call)
      : thread_([this, call = std::move(call)] {
          tid_ = ::gettid();
          call();
          done_ = true;
        }) {}
  ~Call() { thread_.join(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Returns when it has ended, or waits for a lock; whether it has ended.
  bool ends() const {
    while (!done_ && !waits_for_lock()) std::this_thread::yield();
    return done_;
  }

 private:
  bool waits_for_lock() const {
    if (tid_ == 0) return false;
    std::ifstream file("/proc/self/task/" + std::to_string(tid_) + "/syscall");
    long number = -1;
    return file >> number && number == SYS_futex;
  }

  std::atomic<pid_t> tid_{0};
  std::atomic<bool> done_{false};
  std::thread thread_;
};

TEST_CASE("engine: an inode that is busy when it is to be unloaded holds up no other") {
  const PagedOut memory;
  if (memory.page() == nullptr) return;
  EngineFixture fixture;
  Engine& engine = fixture.engine();
  const auto file = fixture.load(1);
  fixture.load(2);
  Payload payload;
  payload.add(memory.page(), kPage);
  Outcome written = Outcome::wait();
  Status unloaded;
  {
    const Call write([&] { written = file->write(0, kPage, payload, nullptr, nullptr); });
    memory.wait_for_reader();  // with the file's lock held
    const Call unload([&] { unloaded = engine.unload(1); });
    CHECK_FALSE(unload.ends());
    const Call look([&] { (void)engine.file(2); });
    CHECK(look.ends());
    memory.fill();
  }
  CHECK(written.progress == Progress::Done);
  CHECK(written.error == 0);
  CHECK(unloaded.error() == EBUSY);
}

TEST_CASE(
    "engine: who opens an inode while it is unloaded has it, or is told that it is not there") {
  EngineFixture fixture;
  Engine& engine = fixture.engine();
  fixture.load(1);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> unloads{0};
  {
    const Call unload([&] {
      while (!stop) {
        if (!engine.unload(1).ok()) continue;
        ++unloads;
        fixture.load(1);
      }
    });
    uint64_t opened = 0;
    for (uint64_t id = 1; opened < 100'000 || unloads == 0; ++id) {
      if (!engine.open_handle(id, 1, O_RDWR).ok()) continue;
      ++opened;
      const bool same = engine.handle(id)->file == engine.file(1);
      engine.release_handle(id);
      CHECK(same);
      if (!same) break;
    }
    stop = true;
  }
}

}  // namespace
}  // namespace fpfs::testing
