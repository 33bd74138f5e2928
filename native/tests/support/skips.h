// What this machine lets no test do: said at once, counted, and listed when the run ends.
//
// With FPFS_NO_SKIPS set a skip is a failure: for machines that are known to have everything.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>

namespace fpfs::testing {

// How often, by reason. Only the thread that runs the test cases comes here.
inline std::map<std::string, uint64_t>& skips() {
  static std::map<std::string, uint64_t> counts;
  return counts;
}

// The test case has to return after this.
inline void skip(const std::string& reason) {
  ++skips()[reason];
  const char* const forbidden = std::getenv("FPFS_NO_SKIPS");
  if (forbidden != nullptr && *forbidden != '\0') {
    FAIL_CHECK("skipped although FPFS_NO_SKIPS is set: ", reason);
  } else {
    MESSAGE("skipped: ", reason);
  }
}

inline void print_skips() {
  for (const auto& [reason, count] : skips()) {
    std::cout << "skipped " << count << ": " << reason << "\n";
  }
}

}  // namespace fpfs::testing
