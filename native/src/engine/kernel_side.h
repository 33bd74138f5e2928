// What serves the kernel, as the engine sees it: whom to tell of changes that come from elsewhere.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace fpfs {

class KernelSide {
 public:
  KernelSide() = default;
  virtual ~KernelSide() = default;
  KernelSide(const KernelSide&) = delete;
  KernelSide& operator=(const KernelSide&) = delete;

  // Ends its threads and its connection.
  virtual void stop() = 0;
  // Answers a write that waited until it was durable.
  virtual void complete_write(uint64_t ticket, int error) = 0;
  // Drops the kernel's attributes of an inode, and its pages of a range (length -1: to the end),
  // then runs `then`, in a thread of its own.
  virtual void invalidate(uint64_t ino, int64_t offset, int64_t length,
                          std::function<void()> then) = 0;
  // Drops its attributes alone, before it returns: nobody can keep the kernel from that. Those that
  // it was answered with before are dropped, too.
  virtual void invalidate_attributes(uint64_t ino) = 0;
  // Tells `then`, in that thread, whether the kernel refers to an inode: true where it cannot say.
  virtual void find_out(uint64_t ino, std::function<void(bool known)> then) = 0;
  // Drops what the kernel knows of a name, present or absent.
  virtual void invalidate_name(uint64_t directory, std::string name) = 0;
  // Runs `then`, in a thread of its own, when the names so far are dropped: who holds a directory
  // holds that up.
  virtual void after_names(std::function<void()> then) = 0;
};

}  // namespace fpfs
