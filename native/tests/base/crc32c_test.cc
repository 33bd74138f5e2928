// CRC32C: known vectors, and every implementation against a bit-by-bit reference.
#include "base/crc32c.h"

#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace fpfs {
namespace {

uint32_t reference(uint32_t crc, const unsigned char* data, size_t bytes) {
  crc = ~crc;
  for (size_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78U : 0U);
  }
  return ~crc;
}

std::vector<unsigned char> random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<unsigned char> bytes(count);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

TEST_CASE("crc32c: vectors of RFC 3720 B.4 and the check value") {
  const std::string digits = "123456789";
  std::vector<unsigned char> ascending(32);
  std::vector<unsigned char> descending(32);
  for (size_t i = 0; i < 32; ++i) {
    ascending[i] = static_cast<unsigned char>(i);
    descending[i] = static_cast<unsigned char>(31 - i);
  }
  const std::vector<unsigned char> zeros(32, 0);
  const std::vector<unsigned char> ones(32, 0xff);
  for (const auto& implementation : crc32c_implementations()) {
    CAPTURE(implementation.name);
    CHECK(implementation.function(0, nullptr, 0) == 0);
    CHECK(implementation.function(0, digits.data(), digits.size()) == 0xE3069283);
    CHECK(implementation.function(0, zeros.data(), 32) == 0x8A9136AA);
    CHECK(implementation.function(0, ones.data(), 32) == 0x62A8AB43);
    CHECK(implementation.function(0, ascending.data(), 32) == 0x46DD794E);
    CHECK(implementation.function(0, descending.data(), 32) == 0x113FDB5C);
  }
}

TEST_CASE("crc32c: every implementation equals the reference at any length and alignment") {
  const auto data = random_bytes(20000, 1);
  std::mt19937_64 random(2);
  for (int round = 0; round < 400; ++round) {
    // The first rounds walk the short lengths, the others draw from everything.
    const size_t length = round < 200 ? static_cast<size_t>(round) : random() % 15000;
    const size_t start = random() % (data.size() - length);
    const auto before = static_cast<uint32_t>(random());
    const uint32_t expected = reference(before, data.data() + start, length);
    for (const auto& implementation : crc32c_implementations()) {
      CAPTURE(implementation.name);
      CAPTURE(length);
      CHECK(implementation.function(before, data.data() + start, length) == expected);
    }
  }
}

TEST_CASE("crc32c: lengths around the steps of the fast paths") {
  const auto data = random_bytes(70000, 3);
  for (const size_t step : {255U, 256U, 768U, 1024U, 1280U, 4032U, 8064U, 12288U, 65536U}) {
    for (size_t length = step - 1; length <= step + 1; ++length) {
      const uint32_t expected = reference(0, data.data() + 3, length);
      for (const auto& implementation : crc32c_implementations()) {
        CAPTURE(implementation.name);
        CAPTURE(length);
        CHECK(implementation.function(0, data.data() + 3, length) == expected);
      }
    }
  }
}

TEST_CASE("crc32c: pieces continue") {
  const auto data = random_bytes(10000, 4);
  const uint32_t whole = crc32c(0, data.data(), data.size());
  for (const size_t cut : {0U, 1U, 7U, 512U, 4096U, 9999U, 10000U}) {
    const uint32_t first = crc32c(0, data.data(), cut);
    CHECK(crc32c(first, data.data() + cut, data.size() - cut) == whole);
  }
}

TEST_CASE("crc32c: a changed bit changes the checksum") {
  auto data = random_bytes(4096, 5);
  const uint32_t before = crc32c(0, data.data(), data.size());
  for (const size_t at : {0U, 100U, 2047U, 4095U}) {
    data[at] = static_cast<unsigned char>(data[at] ^ 0x10);
    CHECK(crc32c(0, data.data(), data.size()) != before);
    data[at] = static_cast<unsigned char>(data[at] ^ 0x10);
  }
}

// Not an assertion: a figure of this machine, for whoever reads the test's output.
TEST_CASE("crc32c: speed over 64 KiB blocks") {
  const auto data = random_bytes(size_t{64} * 1024, 6);
  for (const auto& implementation : crc32c_implementations()) {
    uint32_t sum = 0;
    const int rounds = 2000;
    const auto start = std::chrono::steady_clock::now();
    for (int round = 0; round < rounds; ++round) {
      sum = implementation.function(sum, data.data(), data.size());
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    const double gigabytes = static_cast<double>(data.size()) * rounds / 1e9;
    MESSAGE(std::string(implementation.name), ": ", gigabytes / elapsed.count(), " GB/s");
    CHECK(sum != 0);
  }
}

}  // namespace
}  // namespace fpfs
