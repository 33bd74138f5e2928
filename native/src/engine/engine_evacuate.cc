// Copying blocks from their places to a fresh object of another device, past every cache.
//
// What is copied is compared with its checksums on the way. A lane reads a piece, writes it, and
// takes the next one, on the threads of the devices; the new object is flushed at the end. Nobody
// else knows of it until then.
#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "engine/engine.h"
#include "layout/block_checksum.h"

namespace fpfs {
namespace {

constexpr uint64_t kPieceBlocks = 8;  // 512 KiB
constexpr size_t kLanes = 4;

}  // namespace

class Engine::Copying {
 public:
  Copying(Engine& engine, uint64_t ticket, uint16_t to, std::vector<CopiedRange> ranges)
      : engine_(engine), ticket_(ticket), to_(to), ranges_(std::move(ranges)) {
    for (size_t i = 0; i < ranges_.size(); ++i) {
      const CopiedRange& range = ranges_[i];
      for (uint64_t first = 0; first < range.count && !range.place.unwritten;
           first += kPieceBlocks) {
        pieces_.push_back({i, first, std::min(range.count - first, kPieceBlocks), blocks_ + first});
      }
      blocks_ += range.count;
    }
  }

  static void begin(const std::shared_ptr<Copying>& self) {
    Device* device = self->engine_.device(self->to_);
    if (device == nullptr) return self->end(ENODEV);
    device->create_object([self, device](int error, ObjectRef object, uint64_t id) {
      if (error != 0) return self->end(error);
      self->object_ = std::move(object);
      self->id_ = id;
      // All of it at once: a full device is found out here, with its reserve kept.
      (new Single(self, [self](int result) {
        result == 0 ? copy(self) : self->end(-result);
      }))->submit(device, IoOp::Allocate, self->blocks_ * kBlockBytes);
    });
  }

 private:
  struct Piece {
    size_t range;
    uint64_t first;  // block of the range
    uint64_t count;
    uint64_t to;  // block of the new object
  };

  // A request on the new object; deletes itself.
  struct Single : IoRequest {
    Single(std::shared_ptr<Copying> copying, std::function<void(int)> call)
        : all(std::move(copying)), done(std::move(call)) {}
    void submit(Device* device, IoOp what, uint64_t bytes) {
      op = what;
      object = all->object_;
      offset = 0;
      length = bytes;
      device->submit(this);
    }
    void complete(int result) override {
      const auto call = std::move(done);
      delete this;
      call(result);
    }
    std::shared_ptr<Copying> all;
    std::function<void(int)> done;
  };

  struct Lane : IoRequest {
    explicit Lane(std::shared_ptr<Copying> copying)
        : all(std::move(copying)),
          memory(static_cast<char*>(std::aligned_alloc(kIoAlignment, kPieceBlocks * kBlockBytes)),
                 std::free) {}
    // Reads the next piece; without one, or when something has failed, the lane is over.
    void next() {
      for (;;) {
        const size_t index = all->next_.fetch_add(1);
        if (index >= all->pieces_.size() || all->error_ != 0) break;
        if (memory == nullptr) all->error_ = ENOMEM;
        if (all->engine_.closing_) all->error_ = ESHUTDOWN;
        if (all->error_ != 0) break;
        piece = all->pieces_[index];
        const Place& place = all->ranges_[piece.range].place;
        Device* device = all->engine_.device(place.device);
        if (device != nullptr) {
          prepare(IoOp::Read, device->object(place.object), place.object_block + piece.first);
          return device->submit(this);
        }
        all->add({piece.range, piece.first, piece.count, ENODEV});
      }
      const std::shared_ptr<Copying> whole = std::move(all);
      delete this;
      if (whole->lanes_.fetch_sub(1) == 1) flush(whole);
    }
    void prepare(IoOp what, ObjectRef in, uint64_t block) {
      op = what;
      object = std::move(in);
      offset = block * kBlockBytes;
      length = piece.count * kBlockBytes;
      buffer = memory.get();
      bytes_done = 0;
    }
    void complete(int result) override {
      if (op == IoOp::Write) {
        if (result != 0) all->error_ = -result;
        return next();
      }
      if (result != 0) {
        all->add({piece.range, piece.first, piece.count, -result});
        return next();
      }
      check();
      Device* device = all->engine_.device(all->to_);
      if (device == nullptr) {
        all->error_ = ENODEV;
        return next();
      }
      prepare(IoOp::Write, all->object_, piece.to);
      device->submit(this);
    }
    void check() {
      const std::vector<uint32_t>& known = all->ranges_[piece.range].checksums;
      if (known.empty()) return;
      const auto from = known.begin() + static_cast<int64_t>(piece.first);
      const std::vector<Checksum> expected(from, from + static_cast<int64_t>(piece.count));
      for (const uint64_t i : damaged_blocks(buffer, expected)) {
        all->add({piece.range, piece.first + i, 1, 0});
      }
    }

    std::shared_ptr<Copying> all;
    std::unique_ptr<char, void (*)(void*)> memory;
    Piece piece{};
  };

  static void copy(const std::shared_ptr<Copying>& self) {
    const size_t count = std::min(kLanes, self->pieces_.size());
    if (count == 0) return flush(self);
    self->lanes_ = count;
    for (size_t i = 0; i < count; ++i) (new Lane(self))->next();
  }

  static void flush(const std::shared_ptr<Copying>& self) {
    Device* device = self->engine_.device(self->to_);
    if (device == nullptr) self->error_ = ENODEV;
    if (self->error_ != 0) return self->end(self->error_);
    (new Single(self, [self](int result) { self->end(-result); }))->submit(device, IoOp::Flush, 0);
  }

  void add(const Damage& damage) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    damage_.push_back(damage);
  }

  // An object that is not whole is nobody's.
  void end(int error) EXCLUDES(mutex_) {
    std::vector<Damage> damage;
    {
      const MutexLock lock(mutex_);
      damage = std::move(damage_);
    }
    if (error != 0 && object_ != nullptr) {
      if (Device* device = engine_.device(to_); device != nullptr) {
        device->remove_object(id_, [](int) {});
      }
    }
    engine_.post(CopiedEvent{ticket_, error, id_, std::move(damage)});
    engine_.verification_ended();
  }

  Engine& engine_;
  const uint64_t ticket_;
  const uint16_t to_;
  const std::vector<CopiedRange> ranges_;
  std::vector<Piece> pieces_;
  uint64_t blocks_ = 0;
  ObjectRef object_;
  uint64_t id_ = 0;
  std::atomic<int> error_{0};
  std::atomic<size_t> next_{0};
  std::atomic<size_t> lanes_{0};
  Mutex mutex_;
  std::vector<Damage> damage_ GUARDED_BY(mutex_);
};

uint64_t Engine::copy(uint16_t to, std::vector<CopiedRange> ranges) {
  const uint64_t ticket = next_ticket();
  {
    const MutexLock lock(verify_mutex_);
    if (closing_) {
      post(CopiedEvent{ticket, ESHUTDOWN, 0, {}});
      return ticket;
    }
    ++verifications_;
  }
  Copying::begin(std::make_shared<Copying>(*this, ticket, to, std::move(ranges)));
  return ticket;
}

}  // namespace fpfs
