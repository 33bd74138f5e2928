// Entry of fpfs_native_tests: runs them, and says at the end what was skipped, and why.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "support/skips.h"

int main(int argc, char** argv) {
  doctest::Context context(argc, argv);
  const int result = context.run();
  fpfs::testing::print_skips();
  return result;
}
