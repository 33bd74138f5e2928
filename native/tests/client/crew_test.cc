// Jobs in order, the first failure ends all, and what waits for others is let go when they end.
#include "client/crew.h"

#include <doctest/doctest.h>

#include <atomic>
#include <vector>

namespace fpfs {
namespace {

constexpr double kLong = 60;

TEST_CASE("crew: every job is done once") {
  std::vector<std::atomic<int>> done(1000);
  Crew crew;
  crew.start("test", 4, done.size(), [&](size_t index, size_t thread) {
    CHECK(thread < 4);
    ++done[index];
    return Status();
  });
  REQUIRE(crew.wait(kLong));
  CHECK(crew.status().ok());
  for (const auto& count : done) CHECK(count == 1);
}

TEST_CASE("crew: no jobs") {
  Crew crew;
  crew.start("test", 4, 0, [](size_t, size_t) { return Status(EIO); });
  CHECK(crew.wait(0));
  CHECK(crew.status().ok());
}

TEST_CASE("crew: a failure stops all, and the first is told") {
  std::atomic<size_t> begun{0};
  Crew crew;
  crew.start("test", 1, 1000, [&](size_t index, size_t) {
    ++begun;
    return index == 10 ? Status(EIO, "the eleventh") : Status();
  });
  REQUIRE(crew.wait(kLong));
  CHECK(begun == 11);
  CHECK(crew.status().message() == "the eleventh");
  crew.stop(Status(ECANCELED));
  CHECK(crew.status().error() == EIO);
}

TEST_CASE("crew: jobs meet") {
  std::atomic<int> arrived{0};
  Crew crew;
  crew.start("test", 3, 3, [&](size_t, size_t) {
    ++arrived;
    crew.told();
    return crew.meet([&] { return arrived == 3; }) ? Status() : Status(EIO);
  });
  REQUIRE(crew.wait(kLong));
  CHECK(crew.status().ok());
}

TEST_CASE("crew: stopped, it lets go who waits and begins nothing more") {
  std::atomic<size_t> begun{0};
  Crew crew;
  crew.start("test", 2, 1000, [&](size_t, size_t) {
    ++begun;
    CHECK_FALSE(crew.meet([] { return false; }));
    return Status();
  });
  CHECK_FALSE(crew.wait(0));
  crew.stop(Status(ECANCELED));
  REQUIRE(crew.wait(kLong));
  CHECK(begun <= 2);
  CHECK(crew.status().error() == ECANCELED);
}

}  // namespace
}  // namespace fpfs
