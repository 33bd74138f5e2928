// Requests that were taken from the kernel and are not answered, as the next server finds them.
//
// A request that makes a server die is sent again to the next one, and would end that, too. So each
// is noted in the arena from its receipt to its answer; when a server has died by a fault, what is
// noted is blamed for it, and what was blamed too often is not tried again.
//
// What is noted and does not come again was given up by the kernel, which answers a caller that is
// killed before the next server has taken it. The kernel knows nothing then of what it came to.
//
// Ownership: the records are the arena's.
// Threads: taken, answered and is_under_way from any; the others before requests are received.
#pragma once

#include <cstdint>
#include <vector>

#include "staging/arena_format.h"

namespace fpfs {

// Deaths by a fault within this time count together.
inline constexpr uint64_t kBlameMs = 60'000;

class Requests {
 public:
  Requests() = default;
  // `records`: arena::kRequestsMax of them, zeros or what an earlier process left.
  explicit Requests(arena::RequestRecord* records) : records_(records) {}

  // Of requests whose numbers differ by arena::kRequestsMax the later one is known.
  void taken(uint64_t unique);
  // Its answer is about to be given: from now on it may have been.
  void answering(uint64_t unique);
  // Or given up by the kernel.
  void answered(uint64_t unique);
  // Taken by this server.
  bool is_under_way(uint64_t unique) const;

  // Forgets everything: the requests were of another connection.
  void start_over();
  struct Left {
    uint64_t under_way = 0;            // how many the server had taken that has ended
    std::vector<uint64_t> unanswered;  // uniques of those that no server has surely answered
    std::vector<uint64_t> condemned;   // uniques of those that are not to be tried again
  };
  // Ends the time of the server that took what is noted. `by_fault`: it died of a fault, at
  // `now_ms` of a clock that goes on from server to server.
  Left end(bool by_fault, uint64_t now_ms);

 private:
  arena::RequestRecord* records_ = nullptr;
};

}  // namespace fpfs
