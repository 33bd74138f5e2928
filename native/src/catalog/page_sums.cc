#include "catalog/page_sums.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "base/file_descriptor.h"
#include "base/regular_file.h"

namespace fpfs {
namespace {

constexpr char kMagic[9] = "FPFSUMS1";

// Pages that a log can add to a database: more than any log has frames.
constexpr uint64_t kPagesAddedMax = 1 << 20;

struct Header {
  char magic[8];
  char filesystem_id[PageSums::kNameBytesMax];
  uint32_t page_count;
  uint32_t log_salt_first;
  uint32_t log_salt_second;
  uint32_t zero;
  uint64_t log_frames;
  char zeros[444];
  uint32_t crc;  // of everything before
};
static_assert(sizeof(Header) == PageSums::kHeaderBytes);

uint32_t header_crc(const Header& header) { return crc32c(0, &header, offsetof(Header, crc)); }

}  // namespace

PageSums::PageSums(std::string filesystem_id) : filesystem_id_(std::move(filesystem_id)) {}

Result<PageSums> PageSums::load(const std::string& path, uint64_t pages_there) {
  const FileDescriptor fd(open_regular(path, O_RDONLY));
  if (!fd) return Status::from_errno("opening " + path);
  Header header{};
  size_t count = 0;
  Status status = sqlite::read_at(fd.get(), &header, sizeof header, 0, &count);
  if (!status.ok()) return status;
  if (count < sizeof header || std::memcmp(header.magic, kMagic, sizeof header.magic) != 0 ||
      header.crc != header_crc(header)) {
    return Status(EUCLEAN, "the file of its page checksums is damaged");
  }
  PageSums sums(std::string(header.filesystem_id,
                            ::strnlen(header.filesystem_id, sizeof header.filesystem_id)));
  sums.log_salts = {header.log_salt_first, header.log_salt_second};
  sums.log_frames = header.log_frames;
  struct stat found {};
  if (::fstat(fd.get(), &found) != 0) return Status::from_errno("looking at " + path);
  if (header.page_count > pages_there + kPagesAddedMax) {
    return Status(EUCLEAN, "its page checksums are of " + std::to_string(header.page_count) +
                               " pages, and it has " + std::to_string(pages_there));
  }
  const uint64_t there =
      (std::max<uint64_t>(found.st_size, kHeaderBytes) - kHeaderBytes) / sizeof(uint32_t);
  if (header.page_count > there + kPagesAddedMax) {
    return Status(EUCLEAN, "the file of its page checksums is cut short");
  }
  sums.known_ = std::min<uint64_t>(there, header.page_count);
  sums.sums_.resize(header.page_count);
  status = sqlite::read_at(fd.get(), sums.sums_.data(), sums.known_ * sizeof(uint32_t),
                           kHeaderBytes, &count);
  if (!status.ok()) return status;
  sums.known_ = count / sizeof(uint32_t);
  return sums;
}

std::string PageSums::encode() const {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof header.magic);
  std::memcpy(header.filesystem_id, filesystem_id_.data(),
              std::min(filesystem_id_.size(), sizeof header.filesystem_id));
  header.page_count = page_count();
  header.log_salt_first = log_salts.first;
  header.log_salt_second = log_salts.second;
  header.log_frames = log_frames;
  header.crc = header_crc(header);
  std::string text(kHeaderBytes + sums_.size() * sizeof(uint32_t), '\0');
  std::memcpy(text.data(), &header, sizeof header);
  if (!sums_.empty()) {
    std::memcpy(text.data() + kHeaderBytes, sums_.data(), sums_.size() * sizeof(uint32_t));
  }
  return text;
}

Status PageSums::store(int fd) const {
  const std::string text = encode();
  Status status = sqlite::write_at(fd, text.data(), text.size(), 0);
  if (!status.ok()) return status;
  if (::fdatasync(fd) != 0) return Status::from_errno("flushing the catalog's page checksums");
  return {};
}

Status PageSums::replace(const std::string& path) const {
  const std::string made = path + ".new";
  const FileDescriptor fd(make_regular(made));
  if (!fd) return Status::from_errno("making " + made);
  Status status = store(fd.get());
  if (!status.ok()) return status;
  if (::rename(made.c_str(), path.c_str()) != 0) return Status::from_errno("renaming " + made);
  return {};
}

bool PageSums::fits(uint32_t page, const std::byte* content) const {
  return page <= known_ && sums_[page - 1] == crc32c(0, content, sqlite::kPageBytes);
}

uint32_t PageSums::count_differences(const PageSums& other) const {
  const size_t common = std::min(sums_.size(), other.sums_.size());
  size_t count = std::max(sums_.size(), other.sums_.size()) - common;
  for (size_t i = 0; i < common; ++i) count += sums_[i] != other.sums_[i] ? 1 : 0;
  return static_cast<uint32_t>(count);
}

void PageSums::resize(uint32_t page_count) {
  sums_.resize(page_count);
  known_ = page_count;
}

void PageSums::set(uint32_t page, const std::byte* content) {
  sums_[page - 1] = crc32c(0, content, sqlite::kPageBytes);
}

}  // namespace fpfs
