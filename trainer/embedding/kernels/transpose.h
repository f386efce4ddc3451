// Distinct values and their positions: a radix sort of value and position in one word.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace presage {

constexpr int kDigitBits = 11;

// `values` are below 2**value_bits, value_bits + position_bits <= 64, count < 2**position_bits.
// `words` has 2 * count entries. Returns the number of distinct values.
inline int64_t transpose(const int64_t* values, int64_t count, int64_t value_bits,
                         int64_t position_bits, int64_t* distinct, int32_t* positions,
                         int32_t* order, int32_t* offsets, uint64_t* words) {
  uint64_t *from = words, *to = words + count;
  for (int64_t i = 0; i < count; i++) from[i] = uint64_t(values[i]) << position_bits | uint64_t(i);
  constexpr uint64_t mask = (1 << kDigitBits) - 1;
  for (int64_t shift = position_bits; shift < position_bits + value_bits; shift += kDigitBits) {
    std::vector<int64_t> next(mask + 2, 0);
    for (int64_t i = 0; i < count; i++) next[((from[i] >> shift) & mask) + 1]++;
    for (uint64_t digit = 0; digit < mask; digit++) next[digit + 1] += next[digit];
    for (int64_t i = 0; i < count; i++) to[next[(from[i] >> shift) & mask]++] = from[i];
    std::swap(from, to);
  }
  int64_t last = -1;
  for (int64_t i = 0; i < count; i++) {
    const int64_t value = int64_t(from[i] >> position_bits);
    const int64_t position = int64_t(from[i] & ((uint64_t(1) << position_bits) - 1));
    if (last < 0 || value != distinct[last]) {
      distinct[++last] = value;
      offsets[last] = int32_t(i);
    }
    positions[position] = int32_t(last);
    order[i] = int32_t(position);
  }
  offsets[last + 1] = int32_t(count);
  return last + 1;
}

}  // namespace presage
