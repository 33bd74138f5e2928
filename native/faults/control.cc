#include "control.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>

namespace fpfs::faults {
namespace {

Control* control = nullptr;

}  // namespace

void open_control() {
  const char* path = ::secure_getenv("FPFS_FAULTS");
  if (path == nullptr) return;
  // The system call itself: open(2) of this process is replaced.
  const auto fd = static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0));
  if (fd < 0) return;
  void* base = ::mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  if (base != MAP_FAILED) control = static_cast<Control*>(base);
}

int fault(Kind kind) {
  if (control == nullptr || std::atomic_ref(control->counting).load() == 0) return kNone;
  const auto index = static_cast<uint32_t>(kind);
  const uint64_t number = std::atomic_ref(control->counts[index]).fetch_add(1) + 1;
  if (control->kind != index || control->at != number) return kNone;
  if (std::atomic_ref(control->fired).exchange(1) != 0) return kNone;
  return control->error;
}

}  // namespace fpfs::faults
