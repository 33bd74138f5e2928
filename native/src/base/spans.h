// Ranges of numbers, as of blocks of one object or file, apart from each other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>

namespace fpfs {

using Spans = std::map<uint64_t, uint64_t>;  // begin -> end

// Returns whether all of it was there.
inline bool add_span(Spans& spans, uint64_t begin, uint64_t end) {
  auto it = spans.upper_bound(begin);
  if (it != spans.begin() && std::prev(it)->second >= begin) {
    --it;
    if (it->second >= end) return true;
  }
  while (it != spans.end() && it->first <= end) {
    begin = std::min(begin, it->first);
    end = std::max(end, it->second);
    it = spans.erase(it);
  }
  spans[begin] = end;
  return false;
}

inline void cut_span(Spans& spans, uint64_t begin, uint64_t end) {
  auto it = spans.upper_bound(begin);
  if (it != spans.begin() && std::prev(it)->second > begin) --it;
  while (it != spans.end() && it->first < end) {
    const auto [from, to] = *it;
    it = spans.erase(it);
    if (from < begin) spans[from] = begin;
    if (to > end) it = spans.emplace(end, to).first;
  }
}

}  // namespace fpfs
