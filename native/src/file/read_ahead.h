// Reading ahead of one open file: what a sequential reader is going to ask for is on its way from
// the devices, or in memory, by then.
//
// The kernel reads ahead for those who go through its page cache, by a fixed amount; a direct
// reader gets one request after the other. This is for both, as far as the file's policy says.
//
// Invariants:
//   * What was read ahead is answered only if the file has not changed since it was planned.
//   * Half of the read buffers are left to reads that somebody waits for.
// Ownership: a piece that is being read keeps itself, and this, until its device has answered.
// Threads: any. Callbacks run without locks held, on the caller's or a device's thread.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "base/thread_annotations.h"
#include "file/file.h"
#include "file/read_buffers.h"

namespace fpfs {

class ReadAhead : public std::enable_shared_from_this<ReadAhead> {
 public:
  struct Part {
    const char* data;
    size_t length;
  };
  using Hit = std::function<void(const std::vector<Part>& parts)>;  // valid during the call
  using Miss = std::function<void()>;

  // Reads up to `bytes` ahead; `freed` is called when a buffer was given back.
  ReadAhead(ReadBuffers& buffers, std::shared_ptr<File> file, uint64_t bytes,
            std::function<void()> freed);
  ~ReadAhead();
  // Somebody asks for these bytes: starts what is to be read next. Whether they were read ahead, or
  // are being read: then one of the two is called, when they are there; `miss` if they are of no
  // use. (In one step: what this has not, nobody else starts to read ahead.)
  bool read(uint64_t offset, size_t length, Hit hit, Miss miss) EXCLUDES(mutex_);

 private:
  struct Piece;
  using Pieces = std::vector<std::shared_ptr<Piece>>;
  struct Waiting {
    Pieces pieces;
    uint64_t offset;
    uint64_t end;
    Hit hit;
    Miss miss;
  };
  Pieces covering(uint64_t offset, uint64_t end) REQUIRES(mutex_);
  static bool are_there(const Pieces& pieces);
  Pieces advance(uint64_t offset, uint64_t end, uint64_t size, Pieces* gone) REQUIRES(mutex_);
  void forget_before(uint64_t offset, Pieces* gone) REQUIRES(mutex_);
  void piece_done(Piece* piece, int error, size_t length) EXCLUDES(mutex_);
  void deliver(const Waiting& waiting);

  ReadBuffers& buffers_;
  const std::shared_ptr<File> file_;
  const uint64_t bytes_;
  const std::function<void()> freed_;
  Mutex mutex_;
  std::deque<std::shared_ptr<Piece>> pieces_ GUARDED_BY(mutex_);  // in order of their offsets
  std::vector<Waiting> waiting_ GUARDED_BY(mutex_);
  uint64_t next_ GUARDED_BY(mutex_) = 0;   // where a sequential reader goes on
  uint64_t ahead_ GUARDED_BY(mutex_) = 0;  // what is before was read, or asked for
  uint32_t run_ GUARDED_BY(mutex_) = 0;    // reads in sequence
};

}  // namespace fpfs
