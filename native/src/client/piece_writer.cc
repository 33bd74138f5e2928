#include "client/piece_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "base/huge_pages.h"
#include "client/crc32.h"
#include "client/crew.h"
#include "client/moved.h"

// How it works: the file's range is cut into requests at multiples of request_bytes. Each thread
// takes the next request, computes the CRC32s of the parts of pieces in it, tells them, and only
// then waits for what earlier requests owe to the CRC32s that are stored in this one. Requests are
// taken in order and nobody waits before all that is asked of this request is told, so each wait
// ends: the earliest request waits for nobody.

namespace fpfs {
namespace {

// A step of copying and summing: what is read for one stays in the processor's cache for the other.
constexpr uint64_t kStepBytes = uint64_t{64} << 10;

// A buffer that a thread copies to, made when it is first needed.
class CopyBuffer {
 public:
  CopyBuffer() = default;
  ~CopyBuffer() {
    if (data_ != nullptr) unmap_private(data_, bytes_);
  }
  CopyBuffer(const CopyBuffer&) = delete;
  CopyBuffer& operator=(const CopyBuffer&) = delete;

  // Null: no memory. Always asked for as many bytes.
  char* data(uint64_t bytes) {
    if (data_ == nullptr) data_ = map_private(bytes);
    bytes_ = bytes;
    return data_;
  }

 private:
  char* data_ = nullptr;
  uint64_t bytes_ = 0;
};

Status write_whole(int fd, const char* data, uint64_t bytes, uint64_t offset) {
  while (bytes > 0) {
    const ssize_t written = ::pwrite(fd, data, bytes, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return Status::from_errno("write at " + std::to_string(offset));
    if (written == 0) return Status(EIO, "write at " + std::to_string(offset) + " wrote nothing");
    data += written;
    bytes -= static_cast<uint64_t>(written);
    offset += static_cast<uint64_t>(written);
  }
  return {};
}

}  // namespace

Status reserve_file(int fd, uint64_t bytes) {
  const auto length = static_cast<off_t>(bytes);
  int result = 0;
  do {
    result = bytes == 0 ? 0 : ::fallocate(fd, 0, 0, length);
  } while (result != 0 && errno == EINTR);
  // Not glibc's posix_fallocate: it would write to every block there.
  if (result != 0 && errno == EOPNOTSUPP) result = ::ftruncate(fd, length);
  return result == 0 ? Status() : Status::from_errno("reserve " + std::to_string(bytes) + " bytes");
}

class PieceWriter::Run {
 public:
  Run(std::vector<Piece> pieces, std::vector<CrcPlace> places, Strips strips,
      const PieceWriterConfig& config)
      : config_(config),
        pieces_(std::move(pieces)),
        places_(std::move(places)),
        strips_(std::move(strips)) {}

  Status check() const;
  void start();
  Crew& crew() { return crew_; }
  std::vector<uint32_t> crc32() const;
  uint64_t copied_bytes() const { return copied_bytes_; }
  uint64_t bytes_written() const { return bytes_written_.load(std::memory_order_relaxed); }

 private:
  // Pieces, or parts of them, that follow each other without a gap.
  struct Request {
    uint64_t offset;
    uint64_t bytes;
    size_t first_piece;
  };
  // The part of a piece that lies in one request. A piece's parts follow each other in parts_.
  struct Part {
    uint32_t crc;
    uint64_t bytes;
  };

  uint64_t window(uint64_t offset) const { return offset / config_.request_bytes; }
  void cut_into_requests();
  Status write(const Request& request, CopyBuffer& buffer);
  Result<char*> gather(const Request& request, char* copy);
  Result<uint32_t> copy_and_sum(const Piece& piece, uint64_t offset, uint64_t bytes, char* copy);
  void tell(size_t piece, uint64_t offset, Part part);
  bool enter_crcs(const Request& request, char* data);
  uint32_t crc_of(size_t piece) const;

  const PieceWriterConfig config_;
  const std::vector<Piece> pieces_;
  const std::vector<CrcPlace> places_;
  const Strips strips_;

  // Constant once the crew works.
  std::vector<Request> requests_;
  std::vector<size_t> first_part_;   // of each piece
  std::vector<CopyBuffer> buffers_;  // one for each thread

  std::vector<Part> parts_;  // each is written by one thread, and read when none is missing
  std::vector<std::atomic<uint32_t>> parts_missing_;  // of each piece
  std::atomic<uint64_t> copied_bytes_{0};
  std::atomic<uint64_t> bytes_written_{0};
  Crew crew_;  // last: its threads end before the rest goes
};

Status PieceWriter::Run::check() const {
  uint64_t end = 0;
  for (const Piece& piece : pieces_) {
    if (piece.offset < end) return Status(EINVAL, "a piece lies before the end of another");
    end = piece.offset + piece.bytes;
  }
  for (const CrcPlace& place : places_) {
    if (place.piece >= pieces_.size() ||
        place.offset < pieces_[place.piece].offset + pieces_[place.piece].bytes) {
      return Status(EINVAL, "a CRC32 is to be stored before the end of what it is of");
    }
  }
  const auto before = [](const CrcPlace& a, const CrcPlace& b) { return a.offset < b.offset; };
  if (!std::is_sorted(places_.begin(), places_.end(), before)) {
    return Status(EINVAL, "places of CRC32s are not in order");
  }
  return {};
}

void PieceWriter::Run::cut_into_requests() {
  for (size_t index = 0; index < pieces_.size(); ++index) {
    const Piece& piece = pieces_[index];
    first_part_.push_back(first_part_.empty() ? 0 : first_part_.back() + parts_missing_[index - 1]);
    const uint64_t end = piece.offset + piece.bytes;
    for (uint64_t at = piece.offset; at < end;) {
      const uint64_t next = std::min(end, (window(at) + 1) * config_.request_bytes);
      Request* last = requests_.empty() ? nullptr : &requests_.back();
      if (last != nullptr && last->offset + last->bytes == at &&
          window(last->offset) == window(at)) {
        last->bytes += next - at;
      } else {
        requests_.push_back({at, next - at, index});
      }
      ++parts_missing_[index];
      at = next;
    }
  }
  parts_.resize(pieces_.empty() ? 0 : first_part_.back() + parts_missing_.back());
}

void PieceWriter::Run::start() {
  parts_missing_ = std::vector<std::atomic<uint32_t>>(pieces_.size());
  cut_into_requests();
  buffers_ = std::vector<CopyBuffer>(config_.threads);
  crew_.start("fpfs-write", config_.threads, requests_.size(), [this](size_t index, size_t thread) {
    return write(requests_[index], buffers_[thread]);
  });
}

Status PieceWriter::Run::write(const Request& request, CopyBuffer& buffer) {
  const Piece& first = pieces_[request.first_piece];
  char* copy = nullptr;
  if (first.data == nullptr || first.offset + first.bytes < request.offset + request.bytes) {
    copy = buffer.data(config_.request_bytes);
    if (copy == nullptr) return Status(ENOMEM, "no memory for a buffer");
    copied_bytes_.fetch_add(request.bytes, std::memory_order_relaxed);
  }
  Result<char*> data = gather(request, copy);
  if (!data.ok()) return data.status();
  crew_.told();
  if (!enter_crcs(request, data.value())) return {};
  Status status = write_whole(config_.fd, data.value(), request.bytes, request.offset);
  if (status.ok()) {
    bytes_written_.fetch_add(request.bytes, std::memory_order_relaxed);
    count_moved(request.bytes);
  }
  return status;
}

// Computes the CRC32s of what the request holds; copies it, unless `copy` is null. Returns where
// it lies together.
Result<char*> PieceWriter::Run::gather(const Request& request, char* copy) {
  const uint64_t end = request.offset + request.bytes;
  char* data = copy;
  for (size_t index = request.first_piece; index < pieces_.size(); ++index) {
    const Piece& piece = pieces_[index];
    if (piece.offset >= end) break;
    const uint64_t from = std::max(piece.offset, request.offset);
    const uint64_t bytes = std::min(piece.offset + piece.bytes, end) - from;
    if (bytes == 0) continue;
    if (copy == nullptr) data = piece.data + (from - piece.offset);
    Result<uint32_t> crc = copy_and_sum(piece, from, bytes,
                                        copy == nullptr ? nullptr : copy + (from - request.offset));
    if (!crc.ok()) return crc.status();
    tell(index, from, {crc.value(), bytes});
  }
  return data;
}

// Returns the CRC32 of bytes of a piece; copies them, unless `copy` is null.
Result<uint32_t> PieceWriter::Run::copy_and_sum(const Piece& piece, uint64_t offset, uint64_t bytes,
                                                char* copy) {
  uint32_t crc = 0;
  for (uint64_t at = 0; at < bytes; at += kStepBytes) {
    const uint64_t step = std::min(kStepBytes, bytes - at);
    if (piece.data != nullptr) {
      const char* source = piece.data + (offset - piece.offset) + at;
      crc = fpfs::crc32(crc, source, step);
      if (copy != nullptr) std::memcpy(copy + at, source, step);
    } else {
      if (Status status = strips_.copy(offset + at, step, copy + at); !status.ok()) return status;
      crc = fpfs::crc32(crc, copy + at, step);
    }
  }
  return crc;
}

void PieceWriter::Run::tell(size_t piece, uint64_t offset, Part part) {
  parts_[first_part_[piece] + (window(offset) - window(pieces_[piece].offset))] = part;
  parts_missing_[piece].fetch_sub(1, std::memory_order_release);
}

// Stores the CRC32s whose places lie in the request, once they are known. False: all are to stop.
bool PieceWriter::Run::enter_crcs(const Request& request, char* data) {
  auto place = std::partition_point(places_.begin(), places_.end(), [&](const CrcPlace& other) {
    return other.offset + sizeof(uint32_t) <= request.offset;
  });
  for (; place != places_.end() && place->offset < request.offset + request.bytes; ++place) {
    const std::atomic<uint32_t>& missing = parts_missing_[place->piece];
    const auto is_told = [&] { return missing.load(std::memory_order_acquire) == 0; };
    if (!crew_.meet(is_told)) return false;
    const uint32_t crc = crc_of(place->piece);
    // A request may end in the middle of a place.
    for (uint64_t byte = 0; byte < sizeof crc; ++byte) {
      const uint64_t at = place->offset + byte - request.offset;  // wraps before its begin
      if (at < request.bytes) data[at] = static_cast<char>(crc >> (8 * byte));
    }
  }
  return true;
}

uint32_t PieceWriter::Run::crc_of(size_t piece) const {
  uint32_t crc = piece == 0 ? config_.first_crc : 0;
  const size_t end = piece + 1 < first_part_.size() ? first_part_[piece + 1] : parts_.size();
  for (size_t index = first_part_[piece]; index < end; ++index) {
    crc = crc32_combine(crc, parts_[index].crc, parts_[index].bytes);
  }
  return crc;
}

std::vector<uint32_t> PieceWriter::Run::crc32() const {
  std::vector<uint32_t> crcs;
  crcs.reserve(pieces_.size());
  for (size_t piece = 0; piece < pieces_.size(); ++piece) crcs.push_back(crc_of(piece));
  return crcs;
}

Result<std::unique_ptr<PieceWriter>> PieceWriter::start(std::vector<Piece> pieces,
                                                        std::vector<CrcPlace> places, Strips strips,
                                                        const PieceWriterConfig& config) {
  auto run = std::make_unique<Run>(std::move(pieces), std::move(places), std::move(strips), config);
  if (Status status = run->check(); !status.ok()) return status;
  run->start();
  return std::unique_ptr<PieceWriter>(new PieceWriter(std::move(run)));
}

PieceWriter::PieceWriter(std::unique_ptr<Run> run) : run_(std::move(run)) {}

PieceWriter::~PieceWriter() = default;

bool PieceWriter::wait(double seconds) { return run_->crew().wait(seconds); }

void PieceWriter::cancel() { run_->crew().stop(Status(ECANCELED, "cancelled")); }

Status PieceWriter::status() const { return run_->crew().status(); }

std::vector<uint32_t> PieceWriter::crc32() const { return run_->crc32(); }

uint64_t PieceWriter::copied_bytes() const { return run_->copied_bytes(); }

uint64_t PieceWriter::bytes_written() const { return run_->bytes_written(); }

}  // namespace fpfs
