// Proves that the sanitizer of this build is on: each deliberate fault must end its process.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <thread>

#include "support/child.h"

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

// What the compiler says, as against what this build is called.
#if defined(__has_feature)
constexpr bool kAddress = __has_feature(address_sanitizer);
constexpr bool kThread = __has_feature(thread_sanitizer);
#else
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAddress = true;
#else
constexpr bool kAddress = false;
#endif
#if defined(__SANITIZE_THREAD__)
constexpr bool kThread = true;
#else
constexpr bool kThread = false;
#endif
#endif

TEST_CASE("sanitizer: this build has the one that was asked for, and no other") {
  const std::string sanitizer = FPFS_SANITIZE;
  CHECK(kAddress == (sanitizer == "address"));
  CHECK(kThread == (sanitizer == "thread"));
  const char* const wanted = std::getenv("FPFS_SANITIZE_WANTED");  // by make test-asan and others
  if (wanted != nullptr) CHECK(sanitizer == std::string(wanted));
}

TEST_CASE("sanitizer: it reports what it is there for" *
          doctest::skip(std::string(FPFS_SANITIZE).empty())) {
  const std::string sanitizer = FPFS_SANITIZE;
  if (sanitizer == "address")
    check_reported("child: read behind an allocation", "AddressSanitizer");
  if (sanitizer != "thread") check_reported("child: signed overflow", "signed integer overflow");
  if (sanitizer == "thread") check_reported("child: data race", "ThreadSanitizer: data race");
}

}  // namespace
}  // namespace fpfs
