// Reads places of a file into pieces of memory, several requests at once.
//
// Ownership: the pieces' memory and the descriptor are the caller's, and stay until the reader is
// destroyed.
// Threads: the reader has threads of its own. All functions from any one thread.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "client/crew.h"
#include "client/piece.h"

namespace fpfs {

struct PieceReaderConfig {
  int fd = -1;
  // Requests begin and end at multiples of these in the file.
  uint64_t request_bytes = uint64_t{1} << 20;
  uint32_t threads = 2;
};

class PieceReader {
 public:
  // Begins to read. EIO: the file ends before a piece does.
  PieceReader(const std::vector<Piece>& pieces, const PieceReaderConfig& config);

  // Waits until everything is read, or until one request has failed and the others have ended.
  // Whether that is so now.
  bool wait(double seconds) { return crew_.wait(seconds); }
  // No request begins after that.
  void cancel() { crew_.stop(Status(ECANCELED, "cancelled")); }
  // The first failure, once wait() has returned true. ECANCELED: cancelled.
  Status status() const { return crew_.status(); }

 private:
  Status read(const Piece& request) const;

  const PieceReaderConfig config_;
  std::vector<Piece> requests_;  // constant once the crew works
  Crew crew_;                    // last: its threads end before the rest goes
};

}  // namespace fpfs
