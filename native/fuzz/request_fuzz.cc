// Fuzzes the parser of FUSE requests alone: any bytes, scattered over pieces in any way.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fuse/fuse_request.h"

namespace {

using fpfs::FuseRequest;
using fpfs::Payload;
using fpfs::WriteArguments;

// The rest of a request in heap blocks of exactly its size, so that any byte beyond is a fault.
class Scattered {
 public:
  Scattered(const uint8_t* data, size_t bytes, size_t piece_bytes) {
    while (bytes > 0) {
      const size_t n = blocks_.size() == 3 ? bytes : std::min(bytes, piece_bytes);
      blocks_.emplace_back(data, data + n);
      payload_.add(reinterpret_cast<char*>(blocks_.back().data()), n);
      data += n;
      bytes -= n;
    }
  }
  const Payload& payload() const { return payload_; }

 private:
  std::vector<std::vector<uint8_t>> blocks_;
  Payload payload_;
};

template <typename... Arguments>
void take_arguments(const FuseRequest& request) {
  const auto take = [&request](auto argument) {
    if (request.argument(&argument) && request.body_bytes() < sizeof argument) std::abort();
  };
  (take(Arguments{}), ...);
}

void check_write(const FuseRequest& request) {
  WriteArguments write;
  if (fpfs::parse_write(request, &write) != 0) return;
  const bool whole = request.body_bytes() == sizeof(fuse_write_in) + write.size;
  const bool in_range = write.offset + write.size <= fpfs::kFileBytesMax;
  if (!whole || !in_range || write.size > fpfs::wire::kMaxWriteBytes) std::abort();
}

void check_request(const FuseRequest& request, const std::vector<uint8_t>& message) {
  take_arguments<fuse_write_in, fuse_read_in, fuse_init_in, fuse_flush_in, fuse_lseek_in,
                 fuse_fallocate_in, fuse_copy_file_range_in, fuse_interrupt_in,
                 fuse_batch_forget_in>(request);
  check_write(request);
  // The body comes out as it went in, wherever it was cut.
  std::vector<char> body(request.body_bytes());
  request.copy(0, body.data(), body.size());
  if (!std::equal(body.begin(), body.end(), message.begin() + sizeof(fuse_in_header),
                  [](char a, uint8_t b) { return static_cast<uint8_t>(a) == b; })) {
    std::abort();
  }
}

void fuzz_init_reply(const uint8_t* data, size_t bytes) {
  fuse_init_in kernel{};
  std::memcpy(&kernel, data, std::min(bytes, sizeof kernel));
  std::vector<char> reply(data, data + bytes);
  fpfs::patch_init_reply(kernel, reply.data(), reply.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  if (bytes < 2) return 0;
  const uint8_t choice = data[0];
  std::vector<uint8_t> message(data + 1, data + bytes);
  // Most inputs get a length field that fits: otherwise they end at the first check.
  if ((choice & 1) == 0 && message.size() >= sizeof(fuse_in_header)) {
    const auto length = static_cast<uint32_t>(message.size());
    std::memcpy(message.data(), &length, sizeof length);
  }
  std::vector<char> head(fpfs::wire::kWriteHeaderBytes);
  const size_t head_bytes = std::min(head.size(), message.size());
  std::copy_n(message.begin(), head_bytes, head.begin());
  const Scattered rest(message.data() + head_bytes, message.size() - head_bytes,
                       size_t{1} + (choice >> 1));
  FuseRequest request;
  if (request.parse(head.data(), message.size(), rest.payload())) check_request(request, message);
  fuzz_init_reply(message.data(), message.size());
  return 0;
}
