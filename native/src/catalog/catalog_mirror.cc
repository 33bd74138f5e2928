#include "catalog/catalog_mirror.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace fpfs {

using sqlite::kPageBytes;
using sqlite::PageSet;

namespace {

constexpr size_t kPagesAtOnce = 256;

// What a log that begins anew keeps of its file, as the leader's: room on a full device.
constexpr uint64_t kLogBytesKept = 4ULL << 20;

// Sets the sums of pages whose latest content lies in a log.
Status set_sums(const std::unordered_map<uint32_t, uint64_t>& places, int log, PageSums* sums) {
  std::array<std::byte, kPageBytes> content{};
  for (const auto& [page, offset] : places) {
    size_t count = 0;
    Status status = sqlite::read_at(log, content.data(), content.size(), offset, &count);
    if (!status.ok()) return status;
    if (page <= sums->page_count()) sums->set(page, content.data());
  }
  return {};
}

}  // namespace

CatalogMirror::CatalogMirror(CatalogFiles files)
    : files_(std::move(files)), sums_(files_.sums()), page_count_(sums_.page_count()) {}

Status CatalogMirror::open() {
  const MutexLock lock(file_mutex_);
  database_.reset(::open(files_.path().c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!database_) return Status::from_errno("opening " + files_.path());
  sums_file_.reset(::open(files_.sums_path().c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!sums_file_) return Status::from_errno("opening " + files_.sums_path());
  log_.reset(::open(files_.log_path().c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW,
                    S_IRUSR | S_IWUSR));
  if (!log_) return Status::from_errno("making " + files_.log_path());
  return flush_folder(files_.folder());
}

Status CatalogMirror::gather_differences(const CatalogFiles& leader) {
  const FileDescriptor theirs(::open(leader.path().c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!theirs) return Status::from_errno("opening " + leader.path());
  const FileDescriptor ours(::open(files_.path().c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!ours) return Status::from_errno("opening " + files_.path());
  PageSet different;
  std::vector<std::byte> wanted(kPagesAtOnce * kPageBytes);
  std::vector<std::byte> found(wanted.size());
  const uint32_t page_count = leader.sums().page_count();
  for (uint32_t first = 1; first <= page_count; first += kPagesAtOnce) {
    const uint64_t offset = uint64_t{first - 1} * kPageBytes;
    size_t wanted_bytes = 0;
    size_t found_bytes = 0;
    Status status =
        sqlite::read_at(theirs.get(), wanted.data(), wanted.size(), offset, &wanted_bytes);
    if (status.ok()) {
      status = sqlite::read_at(ours.get(), found.data(), found.size(), offset, &found_bytes);
    }
    if (!status.ok()) return status;
    for (size_t at = 0; at + kPageBytes <= wanted_bytes; at += kPageBytes) {
      if (at + kPageBytes <= found_bytes &&
          std::memcmp(wanted.data() + at, found.data() + at, kPageBytes) == 0) {
        continue;
      }
      different.put(first + static_cast<uint32_t>(at / kPageBytes), wanted.data() + at);
    }
  }
  different.page_count = page_count;
  add(std::move(different));
  return {};
}

void CatalogMirror::add(PageSet&& pages) {
  if (pages.pages.empty()) return;
  const MutexLock lock(pending_mutex_);
  for (auto& [number, page] : pages.pages) pending_.pages[number] = std::move(page);
  pending_.page_count = pages.page_count;
}

Status CatalogMirror::write_locked() {
  PageSet pages;
  {
    const MutexLock lock(pending_mutex_);
    pages = std::move(pending_);
    pending_ = {};
  }
  if (pages.pages.empty()) return {};
  std::unordered_map<uint32_t, uint64_t> placed;
  Status status = writer_.append(log_.get(), pages, &placed);
  if (!status.ok()) {
    const MutexLock lock(pending_mutex_);
    pending_.put_older(std::move(pages));
    return status;
  }
  flushed_ = false;
  page_count_ = pages.page_count;
  for (const auto& [page, offset] : placed) places_[page] = offset;
  return {};
}

Status CatalogMirror::flush_locked() {
  Status status = write_locked();
  if (!status.ok() || flushed_) return status;
  if (::fdatasync(log_.get()) != 0) return Status::from_errno("flushing " + files_.log_path());
  flushed_ = true;
  return {};
}

Status CatalogMirror::store_sums() {
  sums_.resize(page_count_);
  Status status = set_sums(places_, log_.get(), &sums_);
  if (!status.ok()) return status;
  sums_.log_salts = writer_.salts();
  sums_.log_frames = writer_.frames();
  return sums_.store(sums_file_.get());
}

Status CatalogMirror::copy_log() {
  std::array<std::byte, kPageBytes> content{};
  for (const auto& [page, offset] : places_) {
    if (page > page_count_) continue;
    size_t count = 0;
    Status status = sqlite::read_at(log_.get(), content.data(), content.size(), offset, &count);
    if (status.ok()) {
      status = sqlite::write_at(database_.get(), content.data(), content.size(),
                                uint64_t{page - 1} * kPageBytes);
    }
    if (!status.ok()) return status;
  }
  // An older leader had pages that the newer copy never got.
  if (::ftruncate(database_.get(), static_cast<off_t>(uint64_t{page_count_} * kPageBytes)) != 0 ||
      ::fdatasync(database_.get()) != 0) {
    return Status::from_errno("flushing " + files_.path());
  }
  return {};
}

Status CatalogMirror::checkpoint_locked() {
  // In this order: see page_sums.h.
  Status status = flush_locked();
  if (!status.ok() || places_.empty()) return status;
  status = store_sums();
  if (status.ok()) status = copy_log();
  if (!status.ok()) return status;
  if (writer_.frames() * sqlite::kFrameBytes > kLogBytesKept &&
      ::ftruncate(log_.get(), static_cast<off_t>(kLogBytesKept)) != 0) {
    return Status::from_errno("shortening " + files_.log_path());
  }
  places_.clear();
  writer_.restart();
  return {};
}

Status CatalogMirror::write() {
  const MutexLock lock(file_mutex_);
  return write_locked();
}

Status CatalogMirror::flush() {
  const MutexLock lock(file_mutex_);
  return flush_locked();
}

Status CatalogMirror::checkpoint() {
  const MutexLock lock(file_mutex_);
  return checkpoint_locked();
}

Status CatalogMirror::close() {
  const MutexLock lock(file_mutex_);
  Status status = checkpoint_locked();
  if (!status.ok()) return status;
  if (::unlink(files_.log_path().c_str()) != 0) {
    return Status::from_errno("removing " + files_.log_path());
  }
  return {};
}

uint64_t CatalogMirror::pending_pages() {
  const MutexLock lock(pending_mutex_);
  return pending_.pages.size();
}

uint64_t CatalogMirror::log_bytes() {
  const MutexLock lock(file_mutex_);
  return writer_.frames() * sqlite::kFrameBytes;
}

// Gathers the pages of whole transactions, for the mirror, and where they lie.
class Collector : public sqlite::LogSink {
 public:
  Collector(CatalogLeader& leader, CatalogMirror* mirror) : leader_(leader), mirror_(mirror) {}

  void restarted() override { leader_.places_.clear(); }
  void frame(uint32_t page, uint64_t offset, const std::byte* content) override {
    places_.emplace_back(page, offset);
    if (mirror_ != nullptr) transaction_.put(page, content);
  }
  void committed(uint32_t page_count) override {
    for (const auto& [page, offset] : places_) leader_.places_[page] = offset;
    places_.clear();
    ++transactions_;
    leader_.page_count_ = page_count;
    transaction_.page_count = page_count;
    if (mirror_ != nullptr) mirror_->add(std::move(transaction_));
    transaction_ = {};
  }
  void abandoned() override {
    places_.clear();
    transaction_ = {};
  }
  uint64_t transactions() const { return transactions_; }

 private:
  CatalogLeader& leader_;
  CatalogMirror* mirror_;
  uint64_t transactions_ = 0;
  std::vector<std::pair<uint32_t, uint64_t>> places_;
  PageSet transaction_;
};

CatalogLeader::CatalogLeader(CatalogFiles files)
    : files_(std::move(files)), sums_(files_.sums()), page_count_(sums_.page_count()) {}

Result<uint64_t> CatalogLeader::collect(CatalogMirror* mirror) {
  if (!log_) {
    log_.reset(::open(files_.log_path().c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
    if (!log_) return Status::from_errno("opening " + files_.log_path());
  }
  Collector collector(*this, mirror);
  Status status = reader_.read(log_.get(), collector);
  if (!status.ok()) return status;
  return collector.transactions();
}

Status CatalogLeader::store_sums() {
  if (!log_ || places_.empty()) return {};
  // In this order: see page_sums.h.
  if (::fdatasync(log_.get()) != 0) return Status::from_errno("flushing " + files_.log_path());
  sums_.resize(page_count_);
  Status status = set_sums(places_, log_.get(), &sums_);
  if (!status.ok()) return status;
  sums_.log_salts = reader_.salts();
  sums_.log_frames = reader_.frames();
  if (!sums_file_) {
    sums_file_.reset(::open(files_.sums_path().c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (!sums_file_) return Status::from_errno("opening " + files_.sums_path());
  }
  return sums_.store(sums_file_.get());
}

}  // namespace fpfs
