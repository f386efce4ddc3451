// Distinct values, and where each of them is read: a radix sort of value and place in one word.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace presage {

constexpr int kDigitBits = 11;

// `values` are below 2**value_bits and value_bits + place_bits <= 64, count < 2**place_bits.
// `words` has room for 2 * count. Returns the number of distinct values.
inline int64_t transpose(const int64_t* values, int64_t count, int64_t value_bits,
                         int64_t place_bits, int64_t* distinct, int32_t* positions,
                         int32_t* order, int32_t* offsets, uint64_t* words) {
  uint64_t *from = words, *to = words + count;
  for (int64_t i = 0; i < count; i++) from[i] = uint64_t(values[i]) << place_bits | uint64_t(i);
  constexpr uint64_t mask = (1 << kDigitBits) - 1;
  for (int64_t shift = place_bits; shift < place_bits + value_bits; shift += kDigitBits) {
    std::vector<int64_t> next(mask + 2, 0);
    for (int64_t i = 0; i < count; i++) next[((from[i] >> shift) & mask) + 1]++;
    for (uint64_t digit = 0; digit < mask; digit++) next[digit + 1] += next[digit];
    for (int64_t i = 0; i < count; i++) to[next[(from[i] >> shift) & mask]++] = from[i];
    std::swap(from, to);
  }
  int64_t found = -1;
  for (int64_t i = 0; i < count; i++) {
    const int64_t value = int64_t(from[i] >> place_bits);
    const int64_t place = int64_t(from[i] & ((uint64_t(1) << place_bits) - 1));
    if (found < 0 || value != distinct[found]) {
      distinct[++found] = value;
      offsets[found] = int32_t(i);
    }
    positions[place] = int32_t(found);
    order[i] = int32_t(place);
  }
  offsets[found + 1] = int32_t(count);
  return found + 1;
}

}  // namespace presage
