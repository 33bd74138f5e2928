#include "catalog/sqlite_log.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <random>
#include <vector>

namespace fpfs::sqlite {
namespace {

static_assert(std::endian::native == std::endian::little, "the magic below says so");

// The last bit says that checksums are of big-endian words; ours are little-endian.
constexpr uint32_t kMagic = 0x377f0682;
constexpr uint32_t kVersion = 3007000;

// Frames read at once: what a small transaction writes, then more and more.
constexpr size_t kFramesFirst = 8;
constexpr size_t kFramesMax = 256;

void store_big_endian(std::byte* data, uint32_t value) {
  value = __builtin_bswap32(value);
  std::memcpy(data, &value, sizeof value);
}

LogChecksum load_checksum(const std::byte* data) {
  return {load_big_endian(data), load_big_endian(data + 4)};
}

}  // namespace

uint32_t load_big_endian(const std::byte* data) {
  uint32_t value = 0;
  std::memcpy(&value, data, sizeof value);
  return __builtin_bswap32(value);
}

Status read_at(int fd, void* data, size_t bytes, uint64_t offset, size_t* bytes_read) {
  *bytes_read = 0;
  while (*bytes_read < bytes) {
    const ssize_t count = ::pread(fd, static_cast<char*>(data) + *bytes_read, bytes - *bytes_read,
                                  static_cast<off_t>(offset + *bytes_read));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return Status::from_errno("reading the catalog");
    if (count == 0) break;
    *bytes_read += static_cast<size_t>(count);
  }
  return {};
}

Status write_at(int fd, const void* data, size_t bytes, uint64_t offset) {
  size_t written = 0;
  while (written < bytes) {
    const ssize_t count = ::pwrite(fd, static_cast<const char*>(data) + written, bytes - written,
                                   static_cast<off_t>(offset + written));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return Status::from_errno("writing the catalog");
    written += static_cast<size_t>(count);
  }
  return {};
}

void PageSet::put(uint32_t number, const std::byte* content) {
  auto& page = pages[number];
  if (page == nullptr) page = std::make_unique<Page>();
  std::memcpy(page->data(), content, kPageBytes);
}

void PageSet::put_older(PageSet&& older) {
  for (auto& [number, page] : older.pages) pages.try_emplace(number, std::move(page));
  if (page_count == 0) page_count = older.page_count;
}

LogChecksum log_checksum(LogChecksum sum, const std::byte* data, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 8) {
    uint32_t words[2];
    std::memcpy(words, data + at, sizeof words);
    sum.first += words[0] + sum.second;
    sum.second += words[1] + sum.first;
  }
  return sum;
}

Status LogReader::read_header(int fd, LogSink& sink) {
  std::array<std::byte, kLogHeaderBytes> header{};
  size_t count = 0;
  Status status = read_at(fd, header.data(), header.size(), 0, &count);
  if (!status.ok()) return status;
  const LogChecksum sum = log_checksum({}, header.data(), 24);
  const bool is_sound = count == header.size() && load_big_endian(header.data()) == kMagic &&
                        load_big_endian(header.data() + 4) == kVersion &&
                        load_big_endian(header.data() + 8) == kPageBytes &&
                        load_checksum(header.data() + 24) == sum;
  const LogSalts salts{load_big_endian(header.data() + 16), load_big_endian(header.data() + 20)};
  if (is_sound && has_header_ && salts == salts_) return {};
  if (has_header_) sink.restarted();
  has_header_ = is_sound;
  salts_ = is_sound ? salts : LogSalts{};
  committed_sum_ = sum;
  frames_ = 0;
  return {};
}

bool LogReader::take(const std::byte* frame, uint64_t offset, LogSink& sink) {
  const LogSalts salts{load_big_endian(frame + 8), load_big_endian(frame + 12)};
  const uint32_t page = load_big_endian(frame);
  if (salts != salts_ || page == 0) return false;
  LogChecksum sum = log_checksum(sum_, frame, 8);
  sum = log_checksum(sum, frame + kFrameHeaderBytes, kPageBytes);
  if (sum != load_checksum(frame + 16)) return false;
  sum_ = sum;
  ++frames_read_;
  sink.frame(page, offset + kFrameHeaderBytes, frame + kFrameHeaderBytes);
  const uint32_t page_count = load_big_endian(frame + 4);
  if (page_count != 0) {
    sink.committed(page_count);
    frames_ = frames_read_;
    committed_sum_ = sum_;
  }
  return true;
}

Status LogReader::read(int fd, LogSink& sink) {
  Status status = read_header(fd, sink);
  if (!status.ok() || !has_header_) return status;
  sum_ = committed_sum_;
  frames_read_ = frames_;
  std::vector<std::byte> buffer;
  for (size_t frames = kFramesFirst;; frames = std::min(frames * 4, kFramesMax)) {
    buffer.resize(frames * kFrameBytes);
    const uint64_t offset = kLogHeaderBytes + frames_read_ * kFrameBytes;
    size_t count = 0;
    status = read_at(fd, buffer.data(), buffer.size(), offset, &count);
    if (!status.ok()) break;
    size_t at = 0;
    while (at + kFrameBytes <= count && take(buffer.data() + at, offset + at, sink)) {
      at += kFrameBytes;
    }
    if (at < buffer.size()) break;
  }
  sink.abandoned();
  return status;
}

LogWriter::LogWriter() {
  std::random_device random;
  salts_ = {random(), random()};
}

void LogWriter::restart() {
  std::random_device random;
  ++salts_.first;
  salts_.second = random();
  ++generation_;
  frames_ = 0;
}

std::string LogWriter::header() {
  std::string header(kLogHeaderBytes, '\0');
  auto* data = reinterpret_cast<std::byte*>(header.data());
  store_big_endian(data, kMagic);
  store_big_endian(data + 4, kVersion);
  store_big_endian(data + 8, kPageBytes);
  store_big_endian(data + 12, generation_);
  store_big_endian(data + 16, salts_.first);
  store_big_endian(data + 20, salts_.second);
  sum_ = log_checksum({}, data, 24);
  store_big_endian(data + 24, sum_.first);
  store_big_endian(data + 28, sum_.second);
  return header;
}

Status LogWriter::append(int fd, const PageSet& pages,
                         std::unordered_map<uint32_t, uint64_t>* placed) {
  std::string buffer;
  uint64_t offset = kLogHeaderBytes + frames_ * kFrameBytes;
  if (frames_ == 0) {
    buffer = header();
    offset = 0;
  }
  LogChecksum sum = sum_;
  uint64_t frames = frames_;
  size_t left = pages.pages.size();
  buffer.reserve(std::min(left, kFramesMax) * kFrameBytes + kLogHeaderBytes);
  for (const auto& [number, page] : pages.pages) {
    std::array<std::byte, kFrameHeaderBytes> frame{};
    store_big_endian(frame.data(), number);
    store_big_endian(frame.data() + 4, --left == 0 ? pages.page_count : 0);
    store_big_endian(frame.data() + 8, salts_.first);
    store_big_endian(frame.data() + 12, salts_.second);
    sum = log_checksum(sum, frame.data(), 8);
    sum = log_checksum(sum, page->data(), kPageBytes);
    store_big_endian(frame.data() + 16, sum.first);
    store_big_endian(frame.data() + 20, sum.second);
    placed->insert_or_assign(number, offset + buffer.size() + kFrameHeaderBytes);
    buffer.append(reinterpret_cast<const char*>(frame.data()), frame.size());
    buffer.append(reinterpret_cast<const char*>(page->data()), kPageBytes);
    ++frames;
    if (left == 0 || frames % kFramesMax == 0) {
      Status status = write_at(fd, buffer.data(), buffer.size(), offset);
      if (!status.ok()) return status;
      offset += buffer.size();
      buffer.clear();
    }
  }
  sum_ = sum;
  frames_ = frames;
  return {};
}

}  // namespace fpfs::sqlite
