#include "catalog/catalog_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <vector>

#include "base/regular_file.h"

namespace fpfs {

using sqlite::kPageBytes;

namespace {

constexpr uint32_t kApplicationId = 0x46504653;  // "FPFS"
constexpr size_t kApplicationIdAt = 68;
constexpr size_t kUserVersionAt = 60;
constexpr size_t kPageCountAt = 28;

// The last format of catalogs without sums.
constexpr uint32_t kFormatWithoutSums = 2;

// Pages that are read at once.
constexpr size_t kPagesAtOnce = 256;

Status damaged(const std::string& what) { return Status(EUCLEAN, what); }

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

Status remove_if_there(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return Status::from_errno("removing " + path);
  }
  return {};
}

}  // namespace

// Collects the latest place of each page in a log.
class FoundLog : public sqlite::LogSink {
 public:
  explicit FoundLog(CatalogFiles& files) : files_(files) {}

  void restarted() override {}
  void frame(uint32_t page, uint64_t offset, const std::byte* /*content*/) override {
    transaction_.emplace_back(page, offset);
  }
  void committed(uint32_t page_count) override {
    for (const auto& [page, offset] : transaction_) files_.log_pages_[page] = offset;
    transaction_.clear();
    files_.page_count_ = page_count;
  }
  void abandoned() override { transaction_.clear(); }

 private:
  CatalogFiles& files_;
  std::vector<std::pair<uint32_t, uint64_t>> transaction_;
};

Status flush_folder(const std::string& path) {
  const FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd || ::fsync(fd.get()) != 0) return Status::from_errno("flushing " + path);
  return {};
}

CatalogFiles::CatalogFiles(std::string path)
    : path_(std::move(path)), folder_(folder_of(path_)), sums_path_(folder_ + "/catalog.sums") {}

Status CatalogFiles::read_log() {
  log_pages_.clear();
  page_count_ = 0;
  const FileDescriptor log(open_regular(log_path(), O_RDONLY));
  if (!log) return errno == ENOENT ? Status() : Status::from_errno("opening " + log_path());
  sqlite::LogReader reader;
  FoundLog found(*this);
  Status status = reader.read(log.get(), found);
  log_salts_ = reader.salts();
  log_frames_ = reader.frames();
  return status;
}

Status CatalogFiles::check() {
  const FileDescriptor database(open_regular(path_, O_RDONLY));
  if (!database) return Status::from_errno("opening " + path_);
  Status status = read_log();
  if (!status.ok()) return status;
  struct stat found {};
  if (::fstat(database.get(), &found) != 0) return Status::from_errno("looking at " + path_);
  const auto pages_there = static_cast<uint64_t>(found.st_size) / kPageBytes;
  Result<PageSums> sums = PageSums::load(sums_path_, pages_there);
  has_sums_ = sums.status().error() != ENOENT;
  if (!has_sums_) {
    status = check_first_page(database.get());
    if (status.ok() && format_ > kFormatWithoutSums) {
      return damaged("the file of its page checksums is missing");
    }
    return status;
  }
  if (!sums.ok()) return sums.status();
  sums_ = sums.take();
  // The database holds more of this log than is left of it: with the rest, pages would be mixed.
  const bool is_cut = log_salts_ == sums_.log_salts && log_frames_ < sums_.log_frames;
  if (is_cut) log_pages_.clear();
  if (log_pages_.empty()) page_count_ = sums_.page_count();
  status = check_pages(database.get());
  return status.ok() ? check_first_page(database.get()) : status;
}

Status CatalogFiles::check_first_page(int database) {
  std::array<std::byte, kPageBytes> page{};
  size_t count = 0;
  Status status;
  const auto in_log = log_pages_.find(1);
  if (in_log != log_pages_.end()) {
    const FileDescriptor log(open_regular(log_path(), O_RDONLY));
    if (!log) return Status::from_errno("opening " + log_path());
    status = sqlite::read_at(log.get(), page.data(), page.size(), in_log->second, &count);
  } else {
    status = sqlite::read_at(database, page.data(), page.size(), 0, &count);
  }
  if (!status.ok()) return status;
  if (sqlite::load_big_endian(page.data() + kApplicationIdAt) != kApplicationId) {
    return damaged("it is not a catalog of fpfs");
  }
  format_ = sqlite::load_big_endian(page.data() + kUserVersionAt);
  if (page_count_ == 0) page_count_ = sqlite::load_big_endian(page.data() + kPageCountAt);
  return {};
}

Status CatalogFiles::check_pages(int database) {
  std::vector<std::byte> buffer(kPagesAtOnce * kPageBytes);
  for (uint32_t first = 1; first <= page_count_; first += kPagesAtOnce) {
    size_t count = 0;
    Status status = sqlite::read_at(database, buffer.data(), buffer.size(),
                                    uint64_t{first - 1} * kPageBytes, &count);
    if (!status.ok()) return status;
    const uint32_t pages = std::min<uint32_t>(kPagesAtOnce, page_count_ - (first - 1));
    for (uint32_t page = first; page < first + pages; ++page) {
      const size_t at = size_t{page - first} * kPageBytes;
      const bool is_there = at + kPageBytes <= count;
      if ((is_there && sums_.fits(page, buffer.data() + at)) || log_pages_.contains(page)) {
        continue;
      }
      return damaged("page " + std::to_string(page) + " of " + std::to_string(page_count_) +
                     (is_there ? " fails its checksum" : " is missing"));
    }
  }
  return {};
}

Status CatalogFiles::store_log_sums(int log) {
  sums_.resize(page_count_);
  std::array<std::byte, kPageBytes> content{};
  for (const auto& [page, offset] : log_pages_) {
    if (page > page_count_) continue;  // the database shrank behind it
    size_t count = 0;
    Status status = sqlite::read_at(log, content.data(), content.size(), offset, &count);
    if (!status.ok()) return status;
    sums_.set(page, content.data());
  }
  sums_.log_salts = log_salts_;
  sums_.log_frames = log_frames_;
  const FileDescriptor file(open_regular(sums_path_, O_RDWR));
  if (!file) return Status::from_errno("opening " + sums_path_);
  return sums_.store(file.get());
}

Status CatalogFiles::copy_log(int log) {
  const FileDescriptor database(open_regular(path_, O_RDWR));
  if (!database) return Status::from_errno("opening " + path_);
  std::array<std::byte, kPageBytes> content{};
  for (const auto& [page, offset] : log_pages_) {
    if (page > page_count_) continue;
    size_t count = 0;
    Status status = sqlite::read_at(log, content.data(), content.size(), offset, &count);
    if (status.ok()) {
      status = sqlite::write_at(database.get(), content.data(), content.size(),
                                uint64_t{page - 1} * kPageBytes);
    }
    if (!status.ok()) return status;
  }
  if (::ftruncate(database.get(), static_cast<off_t>(uint64_t{page_count_} * kPageBytes)) != 0 ||
      ::fdatasync(database.get()) != 0) {
    return Status::from_errno("copying the catalog's log");
  }
  return {};
}

Status CatalogFiles::checkpoint_log() {
  if (!log_pages_.empty()) {
    const FileDescriptor log(open_regular(log_path(), O_RDONLY));
    if (!log) return Status::from_errno("opening " + log_path());
    // In this order: see page_sums.h.
    if (::fdatasync(log.get()) != 0) return Status::from_errno("flushing " + log_path());
    Status status = store_log_sums(log.get());
    if (status.ok()) status = copy_log(log.get());
    if (!status.ok()) return status;
    log_pages_.clear();
  }
  return remove_if_there(log_path());
}

Status CatalogFiles::make_sums(const std::string& filesystem_id) {
  const FileDescriptor database(open_regular(path_, O_RDONLY));
  if (!database) return Status::from_errno("opening " + path_);
  struct stat found {};
  if (::fstat(database.get(), &found) != 0) return Status::from_errno("looking at " + path_);
  sums_ = PageSums(filesystem_id);
  std::array<std::byte, kPageBytes> content{};
  size_t first_bytes = 0;
  Status read = sqlite::read_at(database.get(), content.data(), content.size(), 0, &first_bytes);
  if (!read.ok()) return read;
  // The file may be longer than the database in it says.
  const auto pages_there = static_cast<uint64_t>(found.st_size) / kPageBytes;
  page_count_ = static_cast<uint32_t>(
      std::min<uint64_t>(pages_there, sqlite::load_big_endian(content.data() + kPageCountAt)));
  sums_.resize(page_count_);
  for (uint32_t page = 1; page <= page_count_; ++page) {
    size_t count = 0;
    Status status = sqlite::read_at(database.get(), content.data(), content.size(),
                                    uint64_t{page - 1} * kPageBytes, &count);
    if (!status.ok()) return status;
    sums_.set(page, content.data());
  }
  has_sums_ = true;
  Status status = sums_.replace(sums_path_);
  return status.ok() ? flush_folder(folder_) : status;
}

Status CatalogFiles::copy_pages(const CatalogFiles& source, int into) const {
  const FileDescriptor from(open_regular(source.path_, O_RDONLY));
  if (!from) return Status::from_errno("opening " + source.path_);
  std::vector<std::byte> buffer(kPagesAtOnce * kPageBytes);
  for (uint32_t first = 1; first <= source.sums_.page_count(); first += kPagesAtOnce) {
    const uint32_t pages =
        std::min<uint32_t>(kPagesAtOnce, source.sums_.page_count() - (first - 1));
    const uint64_t offset = uint64_t{first - 1} * kPageBytes;
    size_t count = 0;
    Status status = sqlite::read_at(from.get(), buffer.data(), pages * kPageBytes, offset, &count);
    for (uint32_t i = 0; status.ok() && i < pages; ++i) {
      if ((i + 1) * kPageBytes > count ||
          !source.sums_.fits(first + i, buffer.data() + i * kPageBytes)) {
        status = Status(EIO, source.path_ + " reads differently than before");
      }
    }
    if (status.ok()) status = sqlite::write_at(into, buffer.data(), count, offset);
    if (!status.ok()) return status;
  }
  if (::fdatasync(into) != 0) return Status::from_errno("flushing " + path_);
  return {};
}

Status CatalogFiles::copy_from(const CatalogFiles& source) {
  const std::string made = folder_ + "/.catalog.db.new";
  const FileDescriptor file(make_regular(made));
  if (!file) return Status::from_errno("making " + made);
  Status status = copy_pages(source, file.get());
  // The old log would be taken for one of the new database.
  if (status.ok()) status = remove_if_there(log_path());
  if (status.ok()) status = flush_folder(folder_);
  if (status.ok()) {
    sums_ = source.sums_;
    sums_.log_salts = {};
    sums_.log_frames = 0;
    status = sums_.replace(sums_path_);
  }
  if (status.ok() && ::rename(made.c_str(), path_.c_str()) != 0) {
    status = Status::from_errno("renaming " + made);
  }
  if (status.ok()) return flush_folder(folder_);
  ::unlink(made.c_str());
  return status;
}

}  // namespace fpfs
