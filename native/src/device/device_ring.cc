#include "device/device_ring.h"

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cassert>

namespace fpfs {
namespace {

// The kernel takes at most this much as one buffer.
constexpr uint64_t kPieceBytesMax = uint64_t{1} << 30;

Status failed(int negative_errno, const char* what) {
  return Status(-negative_errno, std::string(what) + ": " + error_text(-negative_errno));
}

}  // namespace

Ring::~Ring() {
  if (opened_) io_uring_queue_exit(&ring_);
}

Status Ring::open(uint32_t entries) {
  // Completions are handled when this one thread asks for them, without interrupting it: in steps
  // for kernels since 6.1, 6.0, 5.19, and before. A kernel that lacks a flag says EINVAL.
  constexpr unsigned cooperative = IORING_SETUP_COOP_TASKRUN;
  constexpr unsigned single = cooperative | IORING_SETUP_SINGLE_ISSUER;
  constexpr std::array<unsigned, 4> flags_to_try = {single | IORING_SETUP_DEFER_TASKRUN, single,
                                                    cooperative, 0};
  int result = -EINVAL;
  for (const unsigned flags : flags_to_try) {
    result = io_uring_queue_init(entries, &ring_, flags);
    if (result != -EINVAL) break;
  }
  if (result < 0) return failed(result, "io_uring_setup");
  opened_ = true;
  return {};
}

Status Ring::register_buffers(const std::vector<MemoryRegion>& regions) {
  std::vector<MemoryRegion> pieces;
  std::vector<iovec> vectors;
  for (const MemoryRegion& region : regions) {
    for (uint64_t start = 0; start < region.length; start += kPieceBytesMax) {
      const uint64_t bytes = std::min(region.length - start, kPieceBytesMax);
      pieces.push_back({region.base + start, bytes});
      vectors.push_back({region.base + start, bytes});
    }
  }
  if (vectors.empty()) return {};
  const int result =
      io_uring_register_buffers(&ring_, vectors.data(), static_cast<unsigned>(vectors.size()));
  if (result < 0) return failed(result, "registering buffers");
  pieces_ = std::move(pieces);
  return {};
}

Status Ring::register_files(uint32_t files_max) {
  // Sparse tables came with 5.19; a table of -1 is the same to older kernels.
  int result = io_uring_register_files_sparse(&ring_, files_max);
  if (result == -EINVAL) {
    const std::vector<int> none(files_max, -1);
    result = io_uring_register_files(&ring_, none.data(), files_max);
  }
  if (result < 0) return failed(result, "registering files");
  for (int slot = static_cast<int>(files_max) - 1; slot >= 0; --slot) slots_free_.push_back(slot);
  return {};
}

int Ring::buffer_index(const char* buffer, uint64_t length) const {
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const MemoryRegion& piece = pieces_[i];
    if (buffer < piece.base || buffer >= piece.base + piece.length) continue;
    const auto rest = static_cast<uint64_t>(piece.base + piece.length - buffer);
    return length <= rest ? static_cast<int>(i) : -1;  // -1: the range crosses two pieces
  }
  return -1;
}

void Ring::add_file(OpenFile* file) {
  if (file->slot >= 0 || slots_free_.empty()) return;
  const int slot = slots_free_.back();
  const int fd = file->fd.get();
  if (io_uring_register_files_update(&ring_, static_cast<unsigned>(slot), &fd, 1) != 1) return;
  slots_free_.pop_back();
  file->slot = slot;
}

void Ring::remove_file(OpenFile* file) {
  if (file->slot < 0) return;
  const int none = -1;
  const int result =
      io_uring_register_files_update(&ring_, static_cast<unsigned>(file->slot), &none, 1);
  // A slot that could not be emptied keeps its file open until the ring goes: it is not used again.
  if (result == 1) slots_free_.push_back(file->slot);
  file->slot = -1;
}

}  // namespace fpfs
