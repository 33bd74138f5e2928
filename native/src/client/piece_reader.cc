#include "client/piece_reader.h"

#include <unistd.h>

#include <algorithm>
#include <string>

#include "base/huge_pages.h"
#include "client/moved.h"

namespace fpfs {

PieceReader::PieceReader(const std::vector<Piece>& pieces, const PieceReaderConfig& config)
    : config_(config) {
  for (const Piece& piece : pieces) {
    prefer_huge_pages(piece.data, piece.bytes);
    for (uint64_t done = 0; done < piece.bytes;) {
      const uint64_t at = piece.offset + done;
      const uint64_t bytes =
          std::min(piece.bytes - done, config_.request_bytes - at % config_.request_bytes);
      requests_.push_back({piece.data + done, bytes, at});
      done += bytes;
    }
  }
  crew_.start("fpfs-read", config_.threads, requests_.size(),
              [this](size_t index, size_t) { return read(requests_[index]); });
}

Status PieceReader::read(const Piece& request) const {
  for (uint64_t done = 0; done < request.bytes;) {
    const uint64_t at = request.offset + done;
    const ssize_t count =
        ::pread(config_.fd, request.data + done, request.bytes - done, static_cast<off_t>(at));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return Status::from_errno("read at " + std::to_string(at));
    if (count == 0) return Status(EIO, "the file ends at " + std::to_string(at));
    count_moved(static_cast<uint64_t>(count));
    done += static_cast<uint64_t>(count);
  }
  return {};
}

}  // namespace fpfs
