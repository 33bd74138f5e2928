// Requests under way: what is noted of them, and who is blamed for a server's death.
#include "staging/requests.h"

#include <doctest/doctest.h>

#include <array>
#include <vector>

#include "base/fuse_wire.h"

namespace fpfs::testing {
namespace {

constexpr uint64_t kNowMs = 1'000'000;

struct Table {
  std::array<arena::RequestRecord, arena::kRequestsMax> records{};
  Requests requests{records.data()};

  // Servers that take `uniques`, answer none, and die of a fault, one every `every_ms`.
  Requests::Left die(uint32_t times, const std::vector<uint64_t>& uniques, uint64_t every_ms = 10) {
    Requests::Left left;
    for (uint32_t i = 0; i < times; ++i) {
      for (const uint64_t unique : uniques) requests.taken(unique);
      left = requests.end(true, now_ms += every_ms);
    }
    return left;
  }
  uint64_t now_ms = kNowMs;
};

}  // namespace

TEST_CASE("requests: one is under way from its receipt to its answer") {
  Table table;
  CHECK_FALSE(table.requests.is_under_way(8));
  table.requests.taken(8);
  CHECK(table.requests.is_under_way(8));
  CHECK(table.requests.is_under_way(8 | wire::kUniqueResent));
  CHECK_FALSE(table.requests.is_under_way(10));
  table.requests.answered(10);
  table.requests.answered(0);  // of a notification
  CHECK(table.requests.is_under_way(8));
  table.requests.answered(8 | wire::kUniqueResent);
  CHECK_FALSE(table.requests.is_under_way(8));
  CHECK(table.requests.end(true, kNowMs).under_way == 0);
}

TEST_CASE("requests: of two in one place the later is known") {
  Table table;
  const uint64_t later = 8 + 2 * arena::kRequestsMax;
  table.requests.taken(8);
  table.requests.taken(later);
  table.requests.answered(8);
  CHECK(table.requests.is_under_way(later));
  CHECK(table.requests.end(false, kNowMs).under_way == 1);
  CHECK_FALSE(table.requests.is_under_way(later));
}

TEST_CASE("requests: what was not answered is known until it is") {
  Table table;
  for (const uint64_t unique : {8, 10, 12, 14}) table.requests.taken(unique);
  table.requests.answered(10);
  table.requests.answering(12);  // perhaps it was
  CHECK(table.requests.is_under_way(12));
  CHECK(table.requests.end(false, kNowMs).unanswered == std::vector<uint64_t>{8, 14});
  // The next server took nothing: it is not to blame for anything, and knows what it is to expect.
  CHECK_FALSE(table.requests.is_under_way(8));
  for (uint64_t death = 1; death <= 10; ++death) {
    const Requests::Left left = table.requests.end(true, kNowMs + death);
    CHECK(left.unanswered == std::vector<uint64_t>{8, 14});
    CHECK(left.under_way == 0);
    CHECK(left.condemned.empty());
  }
  table.requests.taken(8 | wire::kUniqueResent);
  CHECK(table.requests.is_under_way(8));
  table.requests.answering(8 | wire::kUniqueResent);
  table.requests.answered(8 | wire::kUniqueResent);
  table.requests.answered(14);  // given up
  CHECK(table.requests.end(true, kNowMs).unanswered.empty());
}

TEST_CASE("requests: a wrong bit makes no request of what is none") {
  Table table;
  table.requests.taken(8);
  table.requests.answered(8);
  for (size_t at = 0; at < arena::kRequestsMax; at += 7) {
    for (int bit = 0; bit < 64; ++bit) {
      table.records[at].unique ^= uint64_t{1} << bit;
      CHECK(table.requests.end(false, kNowMs).unanswered.empty());
      table.records[at].check ^= uint64_t{1} << bit;
      CHECK(table.requests.end(false, kNowMs).unanswered.empty());
    }
  }
}

TEST_CASE("requests: five deaths within a minute condemn what was under way at each") {
  Table table;
  CHECK(table.die(4, {8, 10, 12}).condemned.empty());
  table.requests.taken(8);
  table.requests.taken(10);
  table.requests.answered(10);
  table.requests.taken(14);
  const Requests::Left left = table.requests.end(true, table.now_ms);
  CHECK(left.under_way == 2);
  CHECK(left.condemned == std::vector<uint64_t>{8});
  // The server after the next has to know it, too, where the next did not come to it.
  CHECK(table.requests.end(false, table.now_ms).condemned == std::vector<uint64_t>{8});
}

TEST_CASE("requests: only faults count, and only within a minute") {
  Table table;
  for (int i = 0; i < 20; ++i) {
    table.requests.taken(8);
    CHECK(table.requests.end(false, table.now_ms).condemned.empty());
  }
  CHECK(table.die(20, {8}, kBlameMs / 4 + 1).condemned.empty());
  CHECK(table.die(20, {10}, kBlameMs / 4).condemned == std::vector<uint64_t>{10});
}

TEST_CASE("requests: another request in the same place begins without blame") {
  Table table;
  CHECK(table.die(4, {8}).condemned.empty());
  const uint64_t later = 8 + 2 * arena::kRequestsMax;
  CHECK(table.die(4, {later}).condemned.empty());
  CHECK(table.die(1, {later}).condemned == std::vector<uint64_t>{later});
}

TEST_CASE("requests: another connection's are forgotten") {
  Table table;
  CHECK(table.die(5, {8}).condemned.size() == 1);
  table.requests.taken(8);
  table.requests.start_over();
  CHECK(table.die(4, {8}).condemned.empty());
}

}  // namespace fpfs::testing
