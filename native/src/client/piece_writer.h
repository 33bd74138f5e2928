// Writes pieces of memory to their places in a file, several requests at once, and computes the
// CRC32 of each piece on the way. A zip archive holds it behind the piece: it is entered into what
// is written there before that is written, so no byte of the file is written twice.
//
// A piece without memory of its own is copied from strips, which may lie in other processes.
//
// Ownership: the pieces' memory and the descriptors are the caller's, and stay until the writer is
// destroyed. The memory must not change meanwhile; the writer may store CRC32s in their places.
// Threads: the writer has threads of its own. All functions from any one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "client/piece.h"
#include "client/strips.h"

namespace fpfs {

// Where the CRC32 of a piece is stored, little-endian, in the memory of a later piece.
struct CrcPlace {
  uint64_t offset;  // in the file
  size_t piece;     // whose CRC32
};

struct PieceWriterConfig {
  int fd = -1;
  // Requests begin and end at multiples of these in the file. What is summed up for one is still in
  // the processor's cache when the kernel copies it.
  uint64_t request_bytes = uint64_t{256} << 10;
  uint32_t threads = 2;
  // Of what was written before of the first piece, by another writer: so its CRC32 is of both.
  uint32_t first_crc = 0;
};

// Makes a file `bytes` long. ENOSPC: it lacks room. Where the filesystem cannot reserve room, the
// file is only made so long.
Status reserve_file(int fd, uint64_t bytes);

class PieceWriter {
 public:
  // The pieces lie in the order of their offsets and do not overlap; nor do the places of CRC32s,
  // each of which lies in one piece, behind the piece whose CRC32 it wants. The strips have all of
  // the pieces without memory. Begins to write. EINVAL: they do not lie so.
  static Result<std::unique_ptr<PieceWriter>> start(std::vector<Piece> pieces,
                                                    std::vector<CrcPlace> places, Strips strips,
                                                    const PieceWriterConfig& config);
  // Cancels and waits for what is in flight.
  ~PieceWriter();
  PieceWriter(const PieceWriter&) = delete;
  PieceWriter& operator=(const PieceWriter&) = delete;

  // Waits until everything is written, or until one request has failed and the others have ended.
  // Whether that is so now.
  bool wait(double seconds);
  // No request begins after that.
  void cancel();
  // So far. For any thread.
  uint64_t bytes_written() const;

  // The rest may be called once wait() has returned true.

  // The first failure. ECANCELED: cancelled.
  Status status() const;
  // Of each piece.
  std::vector<uint32_t> crc32() const;
  // What was copied before it was written, since it came from several pieces or from strips.
  uint64_t copied_bytes() const;

 private:
  class Run;

  explicit PieceWriter(std::unique_ptr<Run> run);

  std::unique_ptr<Run> run_;
};

}  // namespace fpfs
