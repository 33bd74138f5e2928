// Proves that the sanitizer of this build is on: each deliberate fault must end its process.
#include <doctest/doctest.h>

#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <thread>

#include "child.h"

namespace fpfs {
namespace {

using testing::ChildResult;
using testing::run_child;

// What the compiler cannot see through.
template <typename T>
T opaque(T value) {
  volatile T hidden = value;
  return hidden;
}

TEST_CASE("child: read behind an allocation" * doctest::skip()) {
  const auto memory = std::make_unique<char[]>(64);
  CHECK(memory[opaque(size_t{64})] != 2);
}

TEST_CASE("child: signed overflow" * doctest::skip()) {
  const int sum = opaque(std::numeric_limits<int>::max()) + opaque(1);
  CHECK(sum != opaque(7));
}

TEST_CASE("child: data race" * doctest::skip()) {
  int shared = 0;
  std::thread other([&shared] {
    for (int i = 0; i < 100000; ++i) shared = opaque(shared) + 1;
  });
  for (int i = 0; i < 100000; ++i) shared = opaque(shared) + 1;
  other.join();
  CHECK(shared >= 0);
}

void check_reported(const std::string& test_case, const std::string& report) {
  const ChildResult child = run_child(test_case, [] { return true; });
  CHECK_FALSE(child.passed());
  CHECK_MESSAGE(child.output.find(report) != std::string::npos, child.output);
}

TEST_CASE("sanitizer: it reports what it is there for") {
  const std::string sanitizer = FPFS_SANITIZE;
  if (sanitizer.empty()) {
    MESSAGE("skipped: this build has no sanitizer");
    return;
  }
  if (sanitizer == "address")
    check_reported("child: read behind an allocation", "AddressSanitizer");
  if (sanitizer != "thread") check_reported("child: signed overflow", "signed integer overflow");
  if (sanitizer == "thread") check_reported("child: data race", "ThreadSanitizer: data race");
}

}  // namespace
}  // namespace fpfs
