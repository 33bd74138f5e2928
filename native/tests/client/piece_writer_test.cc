// Pieces written and read by several threads: every byte at its place, every CRC32 right, also
// where it is stored in the file itself; failures end it, and are told.
#include "client/piece_writer.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "client/crc32.h"
#include "client/piece_reader.h"

namespace fpfs {
namespace {

constexpr uint64_t kRequestBytes = 4096;
constexpr double kLong = 60;

uint32_t zlib_crc(const char* data, uint64_t bytes) {
  return static_cast<uint32_t>(
      ::crc32(0, reinterpret_cast<const unsigned char*>(data), static_cast<uInt>(bytes)));
}

std::string random_text(std::mt19937_64& random, uint64_t bytes) {
  std::string text(bytes, '\0');
  for (char& byte : text) byte = static_cast<char>(random());
  return text;
}

FileDescriptor memory_file() { return FileDescriptor(::memfd_create("pieces", MFD_CLOEXEC)); }

std::string content(int fd) {
  std::string text(static_cast<size_t>(::lseek(fd, 0, SEEK_END)), '\0');
  REQUIRE(::pread(fd, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  return text;
}

// Pieces of random lengths, some of none and some of many requests, behind each other, with gaps
// before some. Every second one holds the CRC32 of the one before, at a random place.
struct Case {
  std::vector<std::string> texts;
  std::vector<Piece> pieces;
  std::vector<CrcPlace> places;
  std::string expected;
};

Case random_case(std::mt19937_64& random) {
  Case made;
  const size_t count = random() % 12;
  std::vector<std::pair<uint64_t, uint64_t>> spans;
  uint64_t at = random() % (2 * kRequestBytes);
  for (size_t index = 0; index < count; ++index) {
    const uint64_t lengths[] = {0, random() % 10, random() % 3000, random() % (5 * kRequestBytes)};
    const uint64_t bytes = lengths[random() % 4];
    made.texts.push_back(random_text(random, bytes));
    spans.emplace_back(at, bytes);
    if (index > 0 && bytes >= sizeof(uint32_t)) {
      made.places.push_back({at + random() % (bytes - 3), index - 1});
    }
    at += bytes + (random() % 3 == 0 ? random() % kRequestBytes : 0);
  }
  made.expected.assign(at, '\0');
  for (size_t index = 0; index < count; ++index) {
    made.pieces.push_back({made.texts[index].data(), spans[index].second, spans[index].first});
    made.texts[index].copy(&made.expected[spans[index].first], spans[index].second);
  }
  for (const CrcPlace& place : made.places) {
    const uint32_t crc = zlib_crc(made.texts[place.piece].data(), made.texts[place.piece].size());
    std::memcpy(&made.expected[place.offset], &crc, sizeof crc);
  }
  return made;
}

TEST_CASE("piece writer: random pieces, their CRC32s and the places of these") {
  std::mt19937_64 random(1);
  for (int round = 0; round < 300; ++round) {
    CAPTURE(round);
    Case made = random_case(random);
    std::vector<uint32_t> sums;
    for (const std::string& text : made.texts) sums.push_back(zlib_crc(text.data(), text.size()));
    const FileDescriptor file = memory_file();
    REQUIRE(reserve_file(file.get(), made.expected.size()).ok());
    const auto threads = static_cast<uint32_t>(1 + random() % 6);
    auto started =
        PieceWriter::start(made.pieces, made.places, {},
                           {.fd = file.get(), .request_bytes = kRequestBytes, .threads = threads});
    REQUIRE(started.ok());
    const auto writer = started.take();
    REQUIRE(writer->wait(kLong));
    REQUIRE(writer->status().ok());
    CHECK(content(file.get()) == made.expected);
    CHECK(writer->crc32() == sums);
  }
}

TEST_CASE("piece writer: a piece that another writer began has the CRC32 of both parts") {
  std::mt19937_64 random(3);
  std::string text = random_text(random, 5 * kRequestBytes + 17);
  std::string behind(sizeof(uint32_t), '\0');
  const FileDescriptor file = memory_file();
  uint32_t crc = 0;
  const uint64_t cuts[] = {0, 2 * kRequestBytes, 2 * kRequestBytes + 5, text.size()};
  for (int part = 0; part < 3; ++part) {
    const uint64_t from = cuts[part], to = cuts[part + 1];
    std::vector<Piece> pieces{{text.data() + from, to - from, from}};
    std::vector<CrcPlace> places;
    if (part == 2) {
      pieces.push_back({behind.data(), behind.size(), to});
      places.push_back({to, 0});
    }
    auto started = PieceWriter::start(
        pieces, places, {},
        {.fd = file.get(), .request_bytes = kRequestBytes, .threads = 2, .first_crc = crc});
    const auto writer = started.take();
    REQUIRE(writer->wait(kLong));
    REQUIRE(writer->status().ok());
    crc = writer->crc32().front();
    CHECK(crc == zlib_crc(text.data(), to));
  }
  std::string stored(sizeof crc, '\0');
  std::memcpy(stored.data(), &crc, sizeof crc);
  CHECK(content(file.get()) == text + stored);
}

TEST_CASE("piece writer: what lies in one piece is not copied") {
  std::mt19937_64 random(2);
  std::string text = random_text(random, 8 * kRequestBytes);
  const FileDescriptor file = memory_file();
  auto started =
      PieceWriter::start({{text.data(), 3 * kRequestBytes, 0},
                          {text.data() + 3 * kRequestBytes, 5 * kRequestBytes, 3 * kRequestBytes}},
                         {}, {}, {.fd = file.get(), .request_bytes = kRequestBytes, .threads = 2});
  const auto writer = started.take();
  REQUIRE(writer->wait(kLong));
  CHECK(writer->copied_bytes() == 0);
  CHECK(writer->bytes_written() == text.size());
  CHECK(content(file.get()) == text);
}

TEST_CASE("piece writer: pieces out of order, and CRC32s before their end, are refused") {
  std::string text(100, 'x');
  const PieceWriterConfig config{.fd = 0, .request_bytes = kRequestBytes};
  const std::vector<Piece> pieces{{text.data(), 50, 0}, {text.data(), 50, 50}};
  CHECK(PieceWriter::start({pieces[1], pieces[0]}, {}, {}, config).status().error() == EINVAL);
  CHECK(PieceWriter::start(pieces, {{49, 0}}, {}, config).status().error() == EINVAL);
  CHECK(PieceWriter::start(pieces, {{60, 2}}, {}, config).status().error() == EINVAL);
  CHECK(PieceWriter::start(pieces, {{70, 0}, {60, 0}}, {}, config).status().error() == EINVAL);
}

TEST_CASE("piece writer: the first failure ends it") {
  std::string text(64 * kRequestBytes, 'x');
  const FileDescriptor full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  auto started = PieceWriter::start(
      {{text.data(), text.size() / 2, 0}, {text.data(), text.size() / 2, text.size() / 2}},
      {{text.size() - 4, 0}}, {}, {.fd = full.get(), .request_bytes = kRequestBytes, .threads = 3});
  const auto writer = started.take();
  REQUIRE(writer->wait(kLong));
  CHECK(writer->status().error() == ENOSPC);
  CHECK(writer->bytes_written() == 0);
}

TEST_CASE("piece reader: random pieces come back") {
  std::mt19937_64 random(3);
  for (int round = 0; round < 100; ++round) {
    CAPTURE(round);
    Case made = random_case(random);
    const FileDescriptor file = memory_file();
    REQUIRE(::pwrite(file.get(), made.expected.data(), made.expected.size(), 0) ==
            static_cast<ssize_t>(made.expected.size()));
    std::vector<std::string> found;
    for (const Piece& piece : made.pieces) found.emplace_back(piece.bytes, '\0');
    std::vector<Piece> pieces;
    for (size_t index = 0; index < found.size(); ++index) {
      pieces.push_back({found[index].data(), found[index].size(), made.pieces[index].offset});
    }
    PieceReader reader(pieces, {.fd = file.get(), .request_bytes = kRequestBytes, .threads = 3});
    REQUIRE(reader.wait(kLong));
    CHECK(reader.status().ok());
    for (size_t index = 0; index < found.size(); ++index) {
      CHECK(found[index] == made.expected.substr(pieces[index].offset, pieces[index].bytes));
    }
  }
}

TEST_CASE("piece reader: a file that ends before a piece does") {
  std::string text(10 * kRequestBytes, '\0');
  const FileDescriptor file = memory_file();
  REQUIRE(reserve_file(file.get(), 5 * kRequestBytes).ok());
  PieceReader reader(
      // One request reaches behind the end: of two, either might fail first.
      {{text.data(), kRequestBytes, 0}, {text.data(), 5 * kRequestBytes, kRequestBytes}},
      {.fd = file.get(), .request_bytes = kRequestBytes, .threads = 2});
  REQUIRE(reader.wait(kLong));
  CHECK(reader.status().error() == EIO);
  CHECK(reader.status().message() == "the file ends at 20480");
}

TEST_CASE("crc32: as zlib has it, also joined") {
  std::mt19937_64 random(4);
  for (const uint64_t bytes : {0, 1, 15, 16, 17, 255, 4096, 100'000}) {
    CAPTURE(bytes);
    const std::string text = random_text(random, bytes);
    CHECK(fpfs::crc32(0, text.data(), bytes) == zlib_crc(text.data(), bytes));
    const uint64_t cut = bytes / 3;
    const uint32_t first = fpfs::crc32(0, text.data(), cut);
    const uint32_t second = fpfs::crc32(0, text.data() + cut, bytes - cut);
    CHECK(fpfs::crc32(first, text.data() + cut, bytes - cut) == zlib_crc(text.data(), bytes));
    CHECK(crc32_combine(first, second, bytes - cut) == zlib_crc(text.data(), bytes));
  }
}

}  // namespace
}  // namespace fpfs
