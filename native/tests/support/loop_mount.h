// Small filesystems on loop devices, mounted for one test, and the faults that they can be given.
//
// Needs root, loop devices and mkfs; without them ready() is false and the skip was counted.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "base/file_descriptor.h"
#include "support/device_fixture.h"
#include "support/skips.h"

namespace fpfs::testing {

struct Ext4 {
  static constexpr const char* name = "ext4";
  static constexpr const char* make = "mkfs.ext4 -q -m 0 -F ";
  static constexpr uint64_t image_bytes = uint64_t{64} << 20;
};
struct Xfs {
  static constexpr const char* name = "xfs";
  static constexpr const char* make = "mkfs.xfs -q -f ";
  static constexpr uint64_t image_bytes = uint64_t{320} << 20;  // its least
};

// A small filesystem in a file, mounted by way of a loop device; all of it goes with the object.
class LoopMount {
 public:
  LoopMount(const char* filesystem, const std::string& make, uint64_t image_bytes)
      : filesystem_(filesystem) {
    problem_ = set_up(make, image_bytes);
    if (!problem_.empty()) skip(problem_);
  }
  ~LoopMount() {
    if (mounted_) CHECK(::umount(path().c_str()) == 0);
    if (loop_) ::ioctl(loop_.get(), LOOP_CLR_FD, 0);
  }
  LoopMount(const LoopMount&) = delete;
  LoopMount& operator=(const LoopMount&) = delete;

  bool ready() const { return problem_.empty(); }
  std::string path() const { return directory_.path() + "/mount"; }

  bool remount_read_only() {
    return ::mount(nullptr, path().c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr) == 0;
  }
  // Has it work off what it does beside its callers, as giving back what was removed.
  void sync() const {
    const FileDescriptor root(::open(path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    CHECK(::syncfs(root.get()) == 0);
  }
  // What a lost device looks like: every access fails with EIO from now on. XFS and ext4 share it.
  bool shut_down() {
    const FileDescriptor root(::open(path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    uint32_t without_log_flush = 2;
    return ::ioctl(root.get(), _IOR('X', 125, uint32_t), &without_log_flush) == 0;
  }
  // After shut_down(), with nothing open: what a power failure then would have left.
  bool mount_again() {
    if (::umount(path().c_str()) != 0) return false;
    mounted_ = mount_device();
    return mounted_;
  }

 private:
  std::string set_up(const std::string& make, uint64_t image_bytes) {
    if (::geteuid() != 0) return "loop devices need root";
    const std::string image = directory_.path() + "/image";
    const FileDescriptor file(::open(image.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!file || ::ftruncate(file.get(), static_cast<off_t>(image_bytes)) != 0) return "no image";
    if (std::system((make + image).c_str()) != 0) return make + "failed: is it installed?";
    device_ = attach(file.get());
    if (device_.empty()) return "no loop device: " + error_text(errno);
    std::filesystem::create_directory(path());
    mounted_ = mount_device();
    return mounted_ ? "" : std::string("mounting ") + filesystem_ + ": " + error_text(errno);
  }
  bool mount_device() const {
    // ext4 commits its log every 5 s by itself otherwise, and what a test did not flush with it.
    const char* options = std::strcmp(filesystem_, "ext4") == 0 ? "commit=300" : nullptr;
    return ::mount(device_.c_str(), path().c_str(), filesystem_, 0, options) == 0;
  }

  // Another process may take the free device first: then the next one is tried.
  std::string attach(int image) {
    const FileDescriptor control(::open("/dev/loop-control", O_RDWR | O_CLOEXEC));
    for (int attempt = 0; control && attempt < 20; ++attempt) {
      const int number = ::ioctl(control.get(), LOOP_CTL_GET_FREE);
      if (number < 0) return "";
      const std::string name = "/dev/loop" + std::to_string(number);
      loop_.reset(::open(name.c_str(), O_RDWR | O_CLOEXEC));
      loop_config config{};
      config.fd = static_cast<uint32_t>(image);
      config.info.lo_flags = LO_FLAGS_AUTOCLEAR;
      if (loop_ && ::ioctl(loop_.get(), LOOP_CONFIGURE, &config) == 0) return name;
    }
    return "";
  }

  const char* filesystem_;
  TempDirectory directory_;
  FileDescriptor loop_;
  std::string device_;
  bool mounted_ = false;
  std::string problem_;
};

}  // namespace fpfs::testing
