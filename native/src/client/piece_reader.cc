#include "client/piece_reader.h"

#include <unistd.h>

#include <algorithm>
#include <string>

namespace fpfs {

PieceReader::PieceReader(std::vector<Piece> pieces, const PieceReaderConfig& config)
    : config_(config), missing_(pieces.size()) {
  for (size_t index = 0; index < pieces.size(); ++index) {
    const Piece& piece = pieces[index];
    missing_[index].store(piece.bytes, std::memory_order_relaxed);
    for (uint64_t done = 0; done < piece.bytes;) {
      const uint64_t at = piece.offset + done;
      const uint64_t bytes =
          std::min(piece.bytes - done, config_.request_bytes - at % config_.request_bytes);
      requests_.push_back({{piece.data + done, bytes, at}, index});
      done += bytes;
    }
  }
  crew_.start("fpfs-read", config_.threads, requests_.size(),
              [this](size_t index, size_t) { return read(requests_[index]); });
}

bool PieceReader::wait_for(size_t piece) {
  return crew_.meet([&] { return missing_[piece].load(std::memory_order_acquire) == 0; });
}

Status PieceReader::read(const Request& request) {
  const Piece& part = request.part;
  for (uint64_t done = 0; done < part.bytes;) {
    const ssize_t count = ::pread(config_.fd, part.data + done, part.bytes - done,
                                  static_cast<off_t>(part.offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return Status::from_errno("read at " + std::to_string(part.offset + done));
    if (count == 0) return Status(EIO, "the file ends at " + std::to_string(part.offset + done));
    done += static_cast<uint64_t>(count);
  }
  if (missing_[request.piece].fetch_sub(part.bytes, std::memory_order_acq_rel) == part.bytes) {
    crew_.told();
  }
  return {};
}

}  // namespace fpfs
