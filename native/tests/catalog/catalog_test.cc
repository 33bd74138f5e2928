// The catalog's log and sums: what is written is read, what is cut or damaged is not believed.
//
// That SQLite reads these logs, and these functions SQLite's, is tested with SQLite in
// tests/unit/catalog/test_catalog_copies.py.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "catalog/catalog_mirror.h"
#include "catalog/page_sums.h"
#include "catalog/sqlite_log.h"

namespace fpfs {
namespace {

using sqlite::kFrameBytes;
using sqlite::kLogHeaderBytes;
using sqlite::kPageBytes;
using sqlite::Page;
using sqlite::PageSet;

struct Folder {
  Folder() {
    char name[] = "/tmp/fpfs-catalog-test-XXXXXX";
    path = ::mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  FileDescriptor open(const std::string& name) const {
    return FileDescriptor(::open((path + "/" + name).c_str(), O_RDWR | O_CREAT, 0600));
  }

  std::string path;
};

Page filled(int value) {
  Page page;
  page.fill(static_cast<std::byte>(value));
  return page;
}

PageSet transaction(const std::map<uint32_t, int>& pages, uint32_t page_count) {
  PageSet set;
  for (const auto& [number, value] : pages) set.put(number, filled(value).data());
  set.page_count = page_count;
  return set;
}

// What a reader tells, as the pages' first bytes.
class Told : public sqlite::LogSink {
 public:
  void restarted() override { ++restarts; }
  void frame(uint32_t page, uint64_t /*offset*/, const std::byte* content) override {
    open_[page] = static_cast<int>(content[0]);
  }
  void committed(uint32_t page_count) override {
    for (const auto& [page, value] : open_) pages[page] = value;
    open_.clear();
    count = page_count;
  }
  void abandoned() override { open_.clear(); }

  std::map<uint32_t, int> pages;
  uint32_t count = 0;
  int restarts = 0;

 private:
  std::map<uint32_t, int> open_;
};

void append(sqlite::LogWriter& writer, int fd, const PageSet& pages) {
  std::unordered_map<uint32_t, uint64_t> placed;
  REQUIRE(writer.append(fd, pages, &placed).ok());
  CHECK(placed.size() == pages.pages.size());
}

TEST_CASE("catalog: a log is read on from where the last call ended") {
  const Folder folder;
  const FileDescriptor log = folder.open("log");
  sqlite::LogWriter writer;
  sqlite::LogReader reader;
  Told told;
  CHECK(reader.read(log.get(), told).ok());
  CHECK(told.pages.empty());
  append(writer, log.get(), transaction({{1, 10}, {2, 20}}, 2));
  CHECK(reader.read(log.get(), told).ok());
  CHECK(told.pages == std::map<uint32_t, int>{{1, 10}, {2, 20}});
  append(writer, log.get(), transaction({{2, 21}, {3, 30}}, 3));
  append(writer, log.get(), transaction({{4, 40}}, 4));
  told.pages.clear();
  CHECK(reader.read(log.get(), told).ok());
  CHECK(told.pages == std::map<uint32_t, int>{{2, 21}, {3, 30}, {4, 40}});
  CHECK(told.count == 4);
  CHECK(reader.frames() == 5);

  writer.restart();
  append(writer, log.get(), transaction({{1, 11}}, 4));
  told.pages.clear();
  CHECK(reader.read(log.get(), told).ok());
  CHECK(told.restarts == 1);
  CHECK(told.pages == std::map<uint32_t, int>{{1, 11}});
  CHECK(reader.frames() == 1);
}

TEST_CASE("catalog: a log of many frames is read whole") {
  const Folder folder;
  const FileDescriptor log = folder.open("log");
  sqlite::LogWriter writer;
  PageSet pages;
  for (uint32_t number = 1; number <= 3000; ++number) {
    pages.put(number, filled(static_cast<int>(number % 251)).data());
  }
  pages.page_count = 3000;
  append(writer, log.get(), pages);
  sqlite::LogReader reader;
  Told told;
  CHECK(reader.read(log.get(), told).ok());
  REQUIRE(told.pages.size() == 3000);
  CHECK(told.pages[2999] == 2999 % 251);
}

TEST_CASE("catalog: of a log that is cut or damaged anywhere, whole transactions are left") {
  const Folder folder;
  const FileDescriptor log = folder.open("log");
  sqlite::LogWriter writer;
  for (int number = 1; number <= 4; ++number) {
    append(writer, log.get(), transaction({{1, number}, {2, number}}, 2));
  }
  std::vector<std::byte> content(kLogHeaderBytes + 8 * kFrameBytes);
  size_t count = 0;
  REQUIRE(sqlite::read_at(log.get(), content.data(), content.size(), 0, &count).ok());
  REQUIRE(count == content.size());
  const auto whole_before = [](size_t at) {
    return at < kLogHeaderBytes ? 0 : static_cast<int>((at - kLogHeaderBytes) / kFrameBytes / 2);
  };
  for (size_t at = 0; at < content.size(); at += at < 200 ? 1 : 97) {
    const FileDescriptor damaged = folder.open("damaged");
    for (const bool is_cut : {true, false}) {
      std::vector<std::byte> copy = content;
      copy[at] ^= std::byte{0x40};
      REQUIRE(::ftruncate(damaged.get(), 0) == 0);
      const size_t bytes = is_cut ? at : copy.size();
      REQUIRE(sqlite::write_at(damaged.get(), (is_cut ? content : copy).data(), bytes, 0).ok());
      sqlite::LogReader reader;
      Told told;
      CHECK(reader.read(damaged.get(), told).ok());
      // The number in the header that counts logs is no part of what is told.
      CHECK(told.pages[1] == whole_before(at));
      CHECK(told.pages[2] == whole_before(at));
    }
  }
}

TEST_CASE("catalog: sums are loaded as they were stored, and cut or damaged ones are noticed") {
  const Folder folder;
  const std::string path = folder.path + "/catalog.sums";
  PageSums sums("0123456789abcdef");
  sums.resize(3);
  for (uint32_t page = 1; page <= 3; ++page) sums.set(page, filled(static_cast<int>(page)).data());
  sums.log_salts = {7, 8};
  sums.log_frames = 9;
  REQUIRE(sums.replace(path).ok());

  Result<PageSums> loaded = PageSums::load(path);
  REQUIRE(loaded.ok());
  CHECK(loaded.value().count_differences(sums) == 0);
  CHECK(loaded.value().filesystem_id() == "0123456789abcdef");
  CHECK(loaded.value().log_salts == sqlite::LogSalts{7, 8});
  CHECK(loaded.value().log_frames == 9);
  CHECK(loaded.value().fits(2, filled(2).data()));
  CHECK_FALSE(loaded.value().fits(2, filled(3).data()));
  sums.resize(5);
  sums.set(1, filled(9).data());
  CHECK(loaded.value().count_differences(sums) == 3);
  CHECK(sums.count_differences(loaded.value()) == 3);

  REQUIRE(::truncate(path.c_str(), PageSums::kHeaderBytes + 8) == 0);
  loaded = PageSums::load(path);
  REQUIRE(loaded.ok());
  CHECK(loaded.value().fits(2, filled(2).data()));
  CHECK_FALSE(loaded.value().fits(3, filled(3).data()));

  const FileDescriptor file(::open(path.c_str(), O_RDWR));
  for (off_t at = 0; at < static_cast<off_t>(PageSums::kHeaderBytes); ++at) {
    std::byte value{};
    REQUIRE(::pread(file.get(), &value, 1, at) == 1);
    const std::byte changed = value ^ std::byte{1};
    REQUIRE(::pwrite(file.get(), &changed, 1, at) == 1);
    CHECK(PageSums::load(path).status().error() == EUCLEAN);
    REQUIRE(::pwrite(file.get(), &value, 1, at) == 1);
  }
  CHECK(PageSums::load(folder.path + "/none").status().error() == ENOENT);
}

}  // namespace
}  // namespace fpfs
