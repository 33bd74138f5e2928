// LOOKUP and GETATTR, as far as the name plane has said what to answer; the rest is relayed.
#include <array>
#include <string_view>

#include "fuse/channel.h"

namespace fpfs {
namespace {

constexpr size_t kNameBytesMax = 255;

}  // namespace

// A name that does not exist is remembered by the kernel, too.
void Channel::handle_lookup(const FuseRequest& request) {
  std::array<char, kNameBytesMax + 1> text;  // NOLINT(*-member-init): filled below
  const size_t bytes = request.body_bytes();
  if (bytes == 0 || bytes > text.size()) return relay(request);
  request.copy(0, text.data(), bytes);
  if (text[bytes - 1] != '\0') return relay(request);
  const std::string_view name(text.data(), bytes - 1);
  // Of export over NFS only: no directory lists them.
  if (name == "." || name == "..") return relay(request);
  if (!directories_->lacks(request.nodeid(), name)) return relay(request);
  fuse_entry_out out{};
  out.entry_valid = directories_->valid_s();
  reply(request.unique(), 0, &out, sizeof out);
}

void Channel::handle_getattr(const FuseRequest& request) {
  const std::optional<fuse_attr> attributes = directories_->attributes(request.nodeid());
  if (!attributes.has_value()) return relay(request);
  fuse_attr_out out{};
  out.attr_valid = directories_->valid_s();
  out.attr = *attributes;
  reply(request.unique(), 0, &out, sizeof out);
}

}  // namespace fpfs
