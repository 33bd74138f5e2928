// Comparing what lies on the devices with its checksums, for a scrub.
//
// A verification reads its ranges in pieces, a few at a time, each lane with a buffer of its own:
// the buffers of programs' reads stay theirs. A lane takes the next piece when one has been
// compared, on the thread of the device that delivered it.
#include <algorithm>
#include <cstdlib>

#include "engine/engine.h"
#include "layout/block_checksum.h"

namespace fpfs {
namespace {

constexpr uint64_t kPieceBlocks = 8;  // 512 KiB, as reads of programs
constexpr size_t kLanes = 4;

}  // namespace

class Engine::Verification {
 public:
  Verification(Engine& engine, uint64_t ticket, std::vector<StoredRange> ranges)
      : engine_(engine), ticket_(ticket), ranges_(std::move(ranges)) {
    for (size_t i = 0; i < ranges_.size(); ++i) {
      const uint64_t count = ranges_[i].checksums.size();
      for (uint64_t first = 0; first < count; first += kPieceBlocks) {
        pieces_.push_back({i, first, std::min(count - first, kPieceBlocks)});
      }
    }
  }

  static void begin(const std::shared_ptr<Verification>& self) {
    const size_t count = std::min(kLanes, self->pieces_.size());
    if (count == 0) return self->end();
    self->lanes_ = count;
    for (size_t i = 0; i < count; ++i) (new Lane(self))->next();
  }

 private:
  struct Piece {
    size_t range;
    uint64_t first;  // block of the range
    uint64_t count;
  };

  struct Lane : IoRequest {
    explicit Lane(std::shared_ptr<Verification> verification)
        : all(std::move(verification)),
          memory(static_cast<char*>(std::aligned_alloc(kIoAlignment, kPieceBlocks * kBlockBytes)),
                 std::free) {}
    // Reads the next piece; without one, or at the engine's end, the lane is over.
    void next() {
      for (;;) {
        const size_t index = all->next_.fetch_add(1);
        if (index >= all->pieces_.size() || memory == nullptr || all->engine_.closing_) break;
        piece = all->pieces_[index];
        if (Device* device = prepare(); device != nullptr) return device->submit(this);
        all->add({piece.range, piece.first, piece.count, ENODEV});
      }
      const std::shared_ptr<Verification> whole = std::move(all);
      delete this;
      if (whole->lanes_.fetch_sub(1) == 1) whole->end();
    }
    Device* prepare() {
      const Place& place = all->ranges_[piece.range].place;
      Device* device = all->engine_.device(place.device);
      if (device == nullptr) return nullptr;
      op = IoOp::Read;
      object = device->object(place.object);
      offset = (place.object_block + piece.first) * kBlockBytes;
      length = piece.count * kBlockBytes;
      buffer = memory.get();
      bytes_done = 0;
      return device;
    }
    void complete(int result) override {
      if (result != 0) {
        all->add({piece.range, piece.first, piece.count, -result});
      } else {
        const auto* checksums = all->ranges_[piece.range].checksums.data() + piece.first;
        const std::vector<Checksum> expected(checksums, checksums + piece.count);
        for (const uint64_t i : damaged_blocks(buffer, expected)) {
          all->add({piece.range, piece.first + i, 1, 0});
        }
      }
      next();
    }

    std::shared_ptr<Verification> all;
    std::unique_ptr<char, void (*)(void*)> memory;
    Piece piece{};
  };

  void add(const Damage& damage) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    damage_.push_back(damage);
  }

  void end() EXCLUDES(mutex_) {
    std::vector<Damage> damage;
    {
      const MutexLock lock(mutex_);
      damage = std::move(damage_);
    }
    // Pieces that nobody took were not compared.
    const bool whole = next_ >= pieces_.size() && !engine_.closing_;
    engine_.post(VerifiedEvent{ticket_, whole ? 0 : ESHUTDOWN, std::move(damage)});
    engine_.verification_ended();
  }

  Engine& engine_;
  const uint64_t ticket_;
  const std::vector<StoredRange> ranges_;
  std::vector<Piece> pieces_;
  std::atomic<size_t> next_{0};
  std::atomic<size_t> lanes_{0};
  Mutex mutex_;
  std::vector<Damage> damage_ GUARDED_BY(mutex_);
};

uint64_t Engine::verify(std::vector<StoredRange> ranges) {
  const uint64_t ticket = next_ticket();
  {
    const MutexLock lock(verify_mutex_);
    if (closing_) {
      post(VerifiedEvent{ticket, ESHUTDOWN, {}});
      return ticket;
    }
    ++verifications_;
  }
  Verification::begin(std::make_shared<Verification>(*this, ticket, std::move(ranges)));
  return ticket;
}

void Engine::verification_ended() {
  const MutexLock lock(verify_mutex_);
  --verifications_;
  verified_.notify_all();
}

// The devices must not be closed before: a lane goes from one to the other.
void Engine::end_verifications() {
  MutexLock lock(verify_mutex_);
  closing_ = true;
  while (verifications_ != 0) verified_.wait(verify_mutex_);
}

}  // namespace fpfs
