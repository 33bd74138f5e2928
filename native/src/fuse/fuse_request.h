// A FUSE request as received: header and body checked against each other, nothing believed.
//
// A request arrives scattered: its first 80 bytes in `head`, the rest in a Payload. parse() looks
// at lengths only as far as the bytes go that are there, so that no malformed request reads
// outside.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/fuse_wire.h"
#include "base/lock_owner.h"
#include "file/file.h"

namespace fpfs {

class FuseRequest {
 public:
  // False: not a request (shorter than its header, or its length field is not its length).
  bool parse(const char* head, size_t received, const Payload& rest);

  const fuse_in_header& header() const { return header_; }
  uint32_t opcode() const { return header_.opcode; }
  uint64_t unique() const { return header_.unique; }
  uint64_t nodeid() const { return header_.nodeid; }

  // Copies the operation's argument; false if the request is too short for it.
  template <typename T>
  bool argument(T* value) const {
    if (body_bytes_ < sizeof(T)) return false;
    copy(0, reinterpret_cast<char*>(value), sizeof(T));
    return true;
  }
  size_t body_bytes() const { return body_bytes_; }
  // Copies [from, from + length) of the body.
  void copy(size_t from, char* to, size_t length) const;
  const char* head() const { return head_; }
  size_t head_bytes() const { return head_bytes_; }
  const Payload& rest() const { return *rest_; }

 private:
  fuse_in_header header_{};
  const char* head_ = nullptr;
  size_t head_bytes_ = 0;
  const Payload* rest_ = nullptr;
  size_t body_bytes_ = 0;
};

// Whether the kernel expects an answer to such a request.
inline bool is_answered(uint32_t opcode) {
  return opcode != FUSE_FORGET && opcode != FUSE_BATCH_FORGET && opcode != FUSE_INTERRUPT;
}

// As in the kernel's header, for the log.
std::string operation_name(uint32_t opcode);

// How a native WRITE is to be done; errno that refuses it, or 0.
struct WriteArguments {
  uint64_t handle = 0;
  uint64_t offset = 0;
  uint32_t size = 0;
  uint64_t owner = kOwnerUnknown;
  bool from_page_cache = false;
  Source source() const { return from_page_cache ? Source::Page : Source::Caller; }
  bool direct = false;  // O_DIRECT as the descriptor has it now
  bool kill_privileges = false;
  bool sync = false;
};
int parse_write(const FuseRequest& request, WriteArguments* write);

// What the channel changes in the kernel's and libfuse's handshake. `reply` is a fuse_init_out as
// long as `reply_bytes`; fields that it is too short for are left alone.
void patch_init_reply(const fuse_init_in& kernel, char* reply, size_t reply_bytes);

}  // namespace fpfs
