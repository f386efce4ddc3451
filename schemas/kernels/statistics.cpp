// Kernels for the statistics of a column: exact sums, histograms, frequent values, the smallest hashes.
//
// Called like those of `arrays.cpp`. Every result is independent of the order of the values, except for frequent values,
// which are counted on a regular sample.
#include <algorithm>
#include <cmath>
#include <limits>

#include "common.h"

namespace {

using i128 = __int128;

inline u64 bits_of(double number) {
  u64 bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}

// Sums finite numbers exactly: their mantissas by exponent.
class ExactSum {
 public:
  ExactSum() : bins_(2048, 0) {}

  void add(double number) {
    const u64 bits = bits_of(number);
    const u64 exponent = bits >> 52 & 2047;
    const i64 mantissa = (bits & ((1ull << 52) - 1)) | (static_cast<u64>(exponent > 0) << 52);
    bins_[exponent] += number < 0 ? -mantissa : mantissa;
  }

  void add(i128 units) { whole_ += units; }

  // Writes (exponent, lower half, upper half) of each part of the sum; returns their number.
  i64 write(i64* terms) const {
    i64 count = 0;
    if (whole_) write(terms, count++, 0, whole_);
    for (i64 e = 0; e < 2048; e++)
      if (bins_[e]) write(terms, count++, std::max<i64>(e, 1) - 1075, bins_[e]);
    return count;
  }

 private:
  static void write(i64* terms, i64 index, i64 exponent, i128 units) {
    terms[3 * index] = exponent;
    terms[3 * index + 1] = static_cast<i64>(units);
    terms[3 * index + 2] = static_cast<i64>(units >> 64);
  }

  std::vector<i128> bins_;
  i128 whole_ = 0;
};

inline double square(double number) { return std::min(number * number, std::numeric_limits<double>::max()); }

// `largest` is at least the absolute value of each number.
template <class T>
void add_all(const T* values, i64 count, double largest, ExactSum& sum, ExactSum& squares) {
  if constexpr (std::is_floating_point_v<T>) {
    for (i64 i = 0; i < count; i++) sum.add(static_cast<double>(values[i]));
    for (i64 i = 0; i < count; i++) squares.add(square(static_cast<double>(values[i])));
  } else if (largest < 1 << 30 && largest * largest * static_cast<double>(count) < 0x1p62) {  // no sum overflows
    i64 total = 0, total_squares = 0;
    for (i64 i = 0; i < count; i++) {
      const i64 value = static_cast<i64>(values[i]);
      total += value;
      total_squares += value * value;
    }
    sum.add(static_cast<i128>(total));
    squares.add(static_cast<i128>(total_squares));
  } else {
    constexpr i64 kLimit = 1ll << 31;  // squares of larger numbers are rounded to float64
    i128 total = 0, total_squares = 0;
    for (i64 i = 0; i < count; i++) total += values[i];
    for (i64 i = 0; i < count; i++) {
      const T value = values[i];
      bool is_small;
      if constexpr (std::is_signed_v<T>)
        is_small = value < kLimit && value > -kLimit;
      else
        is_small = value < static_cast<u64>(kLimit);
      if (is_small)
        total_squares += static_cast<i64>(value) * static_cast<i64>(value);
      else
        squares.add(square(static_cast<double>(value)));
    }
    sum.add(total);
    squares.add(total_squares);
  }
}

// The range of every `step`-th integer, of which there is at least one.
struct Range {
  template <class T>
  Range(const T* values, i64 count, i64 step) : minimum(static_cast<i64>(values[0])), maximum(minimum) {
    for (i64 i = 0; i < count; i += step) {
      minimum = std::min(minimum, static_cast<i64>(values[i]));
      maximum = std::max(maximum, static_cast<i64>(values[i]));
    }
  }

  // Whether an array may have an element for each value.
  bool is_small() const { return static_cast<u64>(maximum) - static_cast<u64>(minimum) < 1 << 16; }
  size_t size() const { return maximum - minimum + 1; }

  i64 minimum, maximum;
};

struct Totals {
  i64 num_zeros;
  double minimum, maximum;
  i64 num_terms, num_square_terms;
};

}  // namespace

extern "C" {

// Describes finite numbers, at least one; the terms of sums have room for 2,049 each.
void presage_totals(const void* values, i64 type, i64 count, Totals* out, i64* terms, i64* square_terms) {
  typed(values, type, [&](auto* typed_values) {
    auto minimum = typed_values[0], maximum = typed_values[0];
    i64 zeros = 0;
    for (i64 i = 0; i < count; i++) {
      minimum = std::min(minimum, typed_values[i]);
      maximum = std::max(maximum, typed_values[i]);
      zeros += typed_values[i] == 0;
    }
    ExactSum sum, squares;
    const double low = static_cast<double>(minimum), high = static_cast<double>(maximum);
    add_all(typed_values, count, std::max(std::fabs(low), std::fabs(high)), sum, squares);
    *out = {zeros, low, high, sum.write(terms), squares.write(square_terms)};
  });
}

// Counts numbers by the upper bits of their float64.
void presage_count_buckets(const void* values, i64 type, i64 count, i64 shift, i64* counts) {
  typed(values, type, [&](auto* typed_values) {
    for (i64 i = 0; i < count; i++) counts[bits_of(static_cast<double>(typed_values[i]) + 0.0) >> shift]++;  // -0.0 becomes 0.0
  });
}

// Counts every `step`-th integer; writes the most frequent ones with their counts, ties in ascending order. Returns their
// number, at most `limit`.
i64 presage_frequent_values(const void* values, i64 type, i64 count, i64 step, i64 limit, i64* out, i64* out_counts) {
  struct Counted {
    i64 value, count;
  };
  std::vector<Counted> distinct;
  typed(values, type, [&](auto* typed_values) {
    if (!count) return;
    const Range range(typed_values, count, step);
    if (range.is_small()) {
      std::vector<i64> counts(range.size(), 0);
      for (i64 i = 0; i < count; i += step) counts[static_cast<i64>(typed_values[i]) - range.minimum]++;
      for (size_t i = 0; i < counts.size(); i++)
        if (counts[i]) distinct.push_back({range.minimum + static_cast<i64>(i), counts[i]});
      return;
    }
    Numbering numbering;
    for (i64 i = 0; i < count; i += step) {
      const i64 value = static_cast<i64>(typed_values[i]);
      const size_t number = numbering.number(static_cast<u64>(value));
      if (number == distinct.size()) distinct.push_back({value, 0});
      distinct[number].count++;
    }
  });
  const auto before = [](const Counted& a, const Counted& b) {
    return a.count != b.count ? a.count > b.count : a.value < b.value;
  };
  const i64 kept = std::min<i64>(limit, distinct.size());
  if (kept < static_cast<i64>(distinct.size()))
    std::nth_element(distinct.begin(), distinct.begin() + kept, distinct.end(), before);
  std::sort(distinct.begin(), distinct.begin() + kept, before);
  for (i64 i = 0; i < kept; i++) out[i] = distinct[i].value, out_counts[i] = distinct[i].count;
  return kept;
}

// Writes the smallest distinct hashes of integers in ascending order; returns their number, at most `limit`.
i64 presage_smallest_hashes(const void* values, i64 type, i64 count, i64 limit, u64* out) {
  constexpr i64 kChunk = 1024;
  u64 size = 64;
  while (size < 4 * static_cast<u64>(limit)) size *= 2;
  std::vector<u64> table(size, 0), found;  // 0 marks an empty slot
  u64 bound = std::numeric_limits<u64>::max();
  bool has_zero = false;
  const auto add = [&](u64 hash) {
    u64 at = (hash * kOdd >> 20) & (size - 1);
    while (table[at] && table[at] != hash) at = (at + 1) & (size - 1);
    if (table[at] == hash) return false;
    table[at] = hash;
    found.push_back(hash);
    return true;
  };
  const auto shrink = [&] {
    std::nth_element(found.begin(), found.begin() + limit - 1, found.end());
    found.resize(limit);
    bound = found.back();
    std::vector<u64> kept;
    kept.swap(found);
    std::fill(table.begin(), table.end(), 0);
    for (const u64 hash : kept) add(hash);
  };
  u64 hashes[kChunk];
  typed(values, type, [&](auto* typed_values) {
    if (!count) return;
    const Range range(typed_values, count, 1);
    if (range.is_small()) {
      std::vector<uint8_t> seen(range.size(), 0);
      for (i64 i = 0; i < count; i++) seen[static_cast<i64>(typed_values[i]) - range.minimum] = 1;
      for (size_t i = 0; i < seen.size(); i++)
        if (seen[i]) found.push_back(splitmix64(static_cast<u64>(range.minimum) + i));
      return;
    }
    for (i64 start = 0; start < count; start += kChunk) {
      const i64 end = std::min(count - start, kChunk);
      for (i64 i = 0; i < end; i++) hashes[i] = splitmix64(static_cast<u64>(static_cast<i64>(typed_values[start + i])));
      for (i64 i = 0; i < end; i++) {
        if (hashes[i] > bound) continue;
        has_zero |= !hashes[i];
        if (hashes[i] && add(hashes[i]) && static_cast<i64>(found.size()) == 2 * limit) shrink();
      }
    }
  });
  if (has_zero) found.push_back(0);
  std::sort(found.begin(), found.end());
  const i64 kept = std::min<i64>(limit, found.size());
  std::copy(found.begin(), found.begin() + kept, out);
  return kept;
}

}  // extern "C"
