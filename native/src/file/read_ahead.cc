#include "file/read_ahead.h"

#include <algorithm>
#include <utility>

#include "base/fuse_wire.h"

namespace fpfs {
namespace {

constexpr uint64_t kPieceBytes = wire::kMaxWriteBytes;
// Requests of one sequential reader that are under way at once come in no order.
constexpr uint64_t kDisorderBytes = 4 * kPieceBytes;
constexpr uint32_t kRunMin = 2;

}  // namespace

struct ReadAhead::Piece : ReadJob {
  std::shared_ptr<ReadAhead> owner;  // these two while it is being read
  std::shared_ptr<Piece> self;
  ReadBuffers* buffers = nullptr;
  std::function<void()> freed;
  uint64_t begin = 0;
  uint64_t end = 0;        // as asked for
  uint64_t read_end = 0;   // as delivered: the file may be shorter
  bool is_reading = true;  // this and the next under the owner's lock
  bool is_failed = false;

  ~Piece() override {
    buffers->give(buffer);
    freed();
  }
  void done(int failure, const char*, size_t bytes) override {
    const std::shared_ptr<ReadAhead> keep = std::move(owner);
    keep->piece_done(this, failure, bytes);
  }
  const char* at(uint64_t position) const { return buffer + (position - base); }
};

ReadAhead::ReadAhead(ReadBuffers& buffers, std::shared_ptr<File> file, uint64_t bytes,
                     std::function<void()> freed)
    : buffers_(buffers), file_(std::move(file)), bytes_(bytes), freed_(std::move(freed)) {}

ReadAhead::~ReadAhead() = default;

// The pieces that hold [offset, end), or none.
ReadAhead::Pieces ReadAhead::covering(uint64_t offset, uint64_t end) {
  Pieces found;
  uint64_t at = offset;
  for (const std::shared_ptr<Piece>& piece : pieces_) {
    if (at >= end || piece->begin > at) break;
    if (piece->end <= at) continue;
    found.push_back(piece);
    at = piece->end;
  }
  if (at < end) found.clear();
  return found;
}

bool ReadAhead::are_there(const Pieces& pieces) {
  return std::none_of(pieces.begin(), pieces.end(),
                      [](const auto& piece) { return piece->is_reading; });
}

bool ReadAhead::read(uint64_t offset, size_t length, Hit hit, Miss miss) {
  Waiting wanted{{}, offset, offset + length, std::move(hit), std::move(miss)};
  const uint64_t size = file_->attributes().size;
  Pieces gone;  // after the lock: giving buffers back may start what waits for one
  Pieces started;
  std::vector<Waiting> served;
  bool is_taken = false;
  {
    const MutexLock lock(mutex_);
    wanted.pieces = covering(offset, wanted.end);
    started = advance(offset, wanted.end, size, &gone);
    is_taken = !wanted.pieces.empty();
    if (is_taken) (are_there(wanted.pieces) ? served : waiting_).push_back(std::move(wanted));
  }
  for (const std::shared_ptr<Piece>& piece : started) file_->read(piece.get());
  for (const Waiting& waiting : served) deliver(waiting);
  return is_taken;
}

void ReadAhead::deliver(const Waiting& waiting) {
  const uint64_t sequence = file_->sequence();
  std::vector<Part> parts;
  for (const std::shared_ptr<Piece>& piece : waiting.pieces) {
    if (piece->is_failed || piece->sequence != sequence) {
      Pieces gone;
      {
        const MutexLock lock(mutex_);
        std::erase_if(pieces_, [&](const auto& each) {
          const bool stale = !each->is_reading && (each->is_failed || each->sequence != sequence);
          if (stale) gone.push_back(each);
          return stale;
        });
      }
      return waiting.miss();
    }
    const uint64_t from = std::max(waiting.offset, piece->begin);
    const uint64_t to = std::min(waiting.end, piece->read_end);
    if (from < to) parts.push_back({piece->at(from), to - from});
  }
  waiting.hit(parts);
}

void ReadAhead::forget_before(uint64_t offset, Pieces* gone) {
  while (!pieces_.empty() && pieces_.front()->end <= offset) {
    gone->push_back(std::move(pieces_.front()));
    pieces_.pop_front();
  }
}

// Moves the window to behind a read; the pieces that are to be read next.
ReadAhead::Pieces ReadAhead::advance(uint64_t offset, uint64_t end, uint64_t size, Pieces* gone) {
  if (offset > next_ + kDisorderBytes || end + kDisorderBytes < next_) {
    forget_before(UINT64_MAX, gone);
    next_ = ahead_ = end;
    run_ = 0;
    return {};
  }
  next_ = std::max(next_, end);
  ahead_ = std::max(ahead_, next_);
  if (++run_ < kRunMin) return {};
  forget_before(offset > kDisorderBytes ? offset - kDisorderBytes : 0, gone);
  Pieces started;
  while (ahead_ < std::min(size, next_ + bytes_)) {
    char* buffer = buffers_.take_spare();
    if (buffer == nullptr) break;
    auto piece = std::make_shared<Piece>();
    piece->buffers = &buffers_;
    piece->freed = freed_;
    piece->buffer = buffer;
    piece->owner = shared_from_this();
    piece->self = piece;
    piece->offset = piece->begin = ahead_;
    piece->length = kPieceBytes;
    ahead_ = piece->end = ahead_ + kPieceBytes;
    pieces_.push_back(piece);
    started.push_back(std::move(piece));
  }
  return started;
}

void ReadAhead::piece_done(Piece* piece, int error, size_t length) {
  std::vector<Waiting> served;
  const std::shared_ptr<Piece> keep = std::move(piece->self);
  {
    const MutexLock lock(mutex_);
    piece->is_reading = false;
    piece->is_failed = error != 0;
    piece->read_end = piece->begin + length;
    std::erase_if(waiting_, [&](Waiting& waiting) {
      const bool is_there = are_there(waiting.pieces);
      if (is_there) served.push_back(std::move(waiting));
      return is_there;
    });
  }
  for (const Waiting& waiting : served) deliver(waiting);
}

}  // namespace fpfs
