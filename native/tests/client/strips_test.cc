// Columns of a matrix in the memory of several processes, put together again.
#include "client/strips.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include <csignal>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "client/piece_writer.h"

namespace fpfs {
namespace {

constexpr size_t kMemoryBytes = size_t{1} << 20;
constexpr size_t kGuardBytes = 4096;

std::string random_text(std::mt19937_64& random, uint64_t bytes) {
  std::string text(bytes, '\0');
  for (char& byte : text) byte = static_cast<char>(random());
  return text;
}

// A process that has a text where this one has zeros.
class Other {
 public:
  explicit Other(const std::string& text)
      : memory_(
            static_cast<char*>(::mmap(nullptr, kMemoryBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    REQUIRE(::mprotect(memory_ + kMemoryBytes, kGuardBytes, PROT_NONE) == 0);
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      text.copy(memory_, text.size());
      if (::write(ends[1], "x", 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    char done = 0;
    REQUIRE(::read(ends[0], &done, 1) == 1);
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~Other() {
    end();
    ::munmap(memory_, kMemoryBytes + kGuardBytes);
  }
  Other(const Other&) = delete;
  Other& operator=(const Other&) = delete;

  pid_t pid() const { return pid_; }
  uintptr_t address(uint64_t at) const { return reinterpret_cast<uintptr_t>(memory_) + at; }
  void end() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

 private:
  char* memory_;
  pid_t pid_ = -1;
};

// A matrix of bytes whose columns are cut into parts; every second part is the other process's.
struct Matrix {
  std::string whole;
  std::vector<std::string> own;  // of parts that are this process's
  std::string other;             // the other's, one behind the other
  struct Part {
    uint64_t column, columns;
  };
  std::vector<Part> parts;
  uint64_t rows, columns;

  Matrix(std::mt19937_64& random, uint64_t of_rows, uint64_t of_columns)
      : whole(random_text(random, of_rows * of_columns)), rows(of_rows), columns(of_columns) {
    for (uint64_t column = 0; column < columns;) {
      const uint64_t count = std::min(columns - column, 1 + random() % columns);
      parts.push_back({column, count});
      std::string text;
      for (uint64_t row = 0; row < rows; ++row) text += whole.substr(row * columns + column, count);
      if (parts.size() % 2 == 0) other += text;
      own.push_back(std::move(text));
      column += count;
    }
  }

  // Where the whole begins at `offset` in a file.
  std::vector<Strip> strips(const Other& process, uint64_t offset) const {
    std::vector<Strip> made;
    uint64_t at = 0;
    for (size_t index = 0; index < parts.size(); ++index) {
      const bool is_other = index % 2 == 1;
      const uintptr_t address =
          is_other ? process.address(at) : reinterpret_cast<uintptr_t>(own[index].data());
      if (is_other) at += own[index].size();
      made.push_back({is_other ? process.pid() : 0, address, offset + parts[index].column,
                      parts[index].columns, rows, columns});
    }
    return made;
  }
};

TEST_CASE("strips: columns of several processes, from anywhere to anywhere") {
  std::mt19937_64 random(1);
  for (int round = 0; round < 60; ++round) {
    CAPTURE(round);
    // Some have more runs than one call of the kernel takes.
    const Matrix matrix(random, 1 + random() % (round % 3 == 0 ? 5000 : 50), 1 + random() % 60);
    const Other other(matrix.other);
    const uint64_t offset = random() % 1000;
    Result<Strips> strips = Strips::make(matrix.strips(other, offset));
    REQUIRE(strips.ok());
    for (int range = 0; range < 20; ++range) {
      const uint64_t from = random() % matrix.whole.size();
      const uint64_t bytes = 1 + random() % (matrix.whole.size() - from);
      std::string found(bytes, '\0');
      REQUIRE(strips.value().copy(offset + from, bytes, found.data()).ok());
      CHECK(found == matrix.whole.substr(from, bytes));
    }
  }
}

TEST_CASE("strips: a piece of a file is written from them, its CRC32 behind it") {
  std::mt19937_64 random(2);
  const Matrix matrix(random, 900, 100);
  const Other other(matrix.other);
  std::string before = random_text(random, 5000);
  std::string after(4, '\0');
  const FileDescriptor file(::memfd_create("strips", MFD_CLOEXEC));
  Result<Strips> strips = Strips::make(matrix.strips(other, before.size()));
  auto started = PieceWriter::start({{before.data(), before.size(), 0},
                                     {nullptr, matrix.whole.size(), before.size()},
                                     {after.data(), 4, before.size() + matrix.whole.size()}},
                                    {{before.size() + matrix.whole.size(), 1}}, strips.take(),
                                    {.fd = file.get(), .request_bytes = 4096, .threads = 3});
  REQUIRE(started.ok());
  const auto writer = started.take();
  REQUIRE(writer->wait(60));
  REQUIRE(writer->status().ok());
  const auto sum =
      static_cast<uint32_t>(::crc32(0, reinterpret_cast<const unsigned char*>(matrix.whole.data()),
                                    static_cast<uInt>(matrix.whole.size())));
  CHECK(writer->crc32()[1] == sum);
  std::string expected = before + matrix.whole + std::string(4, '\0');
  std::memcpy(&expected[expected.size() - 4], &sum, 4);
  std::string found(expected.size() + 1, '\0');
  const ssize_t read = ::pread(file.get(), found.data(), found.size(), 0);
  found.resize(static_cast<size_t>(read));
  CHECK(found == expected);
}

TEST_CASE("strips: what is in none, what may not be read, and who is no more") {
  Other other("text");
  char to[100];
  CHECK(Strips::make({{0, 1, 0, 8, 3, 7}}).status().error() == EINVAL);
  CHECK(Strips::make({{0, 1, 0, 8, 0, 8}}).status().error() == EINVAL);
  // A gap between runs, and behind the last.
  Result<Strips> gap = Strips::make({{other.pid(), other.address(0), 10, 2, 2, 3}});
  CHECK(gap.value().copy(10, 2, to).ok());
  CHECK(gap.value().copy(10, 5, to).error() == EINVAL);
  CHECK(gap.value().copy(14, 2, to).error() == EINVAL);
  CHECK(gap.value().copy(9, 1, to).error() == EINVAL);
  // The end of its memory.
  Result<Strips> end = Strips::make({{other.pid(), other.address(kMemoryBytes - 4), 0, 8, 1, 8}});
  CHECK(end.value().copy(0, 4, to).ok());
  CHECK(end.value().copy(0, 8, to).error() == EFAULT);
  CHECK(read_process(other.pid(), other.address(0), 4).value() == "text");
  CHECK(read_process(other.pid(), 1, 4).status().error() == EFAULT);
  other.end();
  CHECK(end.value().copy(0, 4, to).error() == ESRCH);
  CHECK(read_process(other.pid(), other.address(0), 4).status().error() == ESRCH);
}

}  // namespace
}  // namespace fpfs
