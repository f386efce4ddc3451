// Kernels for the statistics of a column: exact sums, histograms, frequent values, the smallest hashes. `statistics.pyi` says
// what each function returns.
//
// Every result is independent of the order of the values, except for frequent values, which are counted on a regular sample.
#include <algorithm>
#include <cmath>

#include "common.h"

namespace {

using i128 = __int128;
using u128 = unsigned __int128;

inline u64 bits_of(double number) {
  u64 bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}

// A signed integer of any size that a sum of 2**63 numbers has; two's complement.
template <int kLimbs>
class Integer {
 public:
  // Adds units * 2**shift.
  void add(u128 units, int shift, bool is_negative) {
    int limb = shift / 64;
    const int bits = shift % 64;
    const u64 low = static_cast<u64>(units), high = static_cast<u64>(units >> 64);
    const u64 parts[3] = {low << bits, bits ? low >> (64 - bits) | high << bits : high, bits ? high >> (64 - bits) : 0};
    u64 carry = 0;
    for (int i = 0; limb < kLimbs && (i < 3 || carry); i++, limb++) {
      const u64 part = i < 3 ? parts[i] : 0, before = limbs_[limb];
      if (is_negative) {
        limbs_[limb] = before - part - carry;
        carry = before < part || (before == part && carry);
      } else {
        limbs_[limb] = before + part + carry;
        carry = carry ? limbs_[limb] <= before : limbs_[limb] < before;
      }
    }
  }

  void add(i128 units, int shift) { add(static_cast<u128>(units < 0 ? -units : units), shift, units < 0); }

  nb::bytes bytes() const { return nb::bytes(reinterpret_cast<const char*>(limbs_), sizeof(limbs_)); }

 private:
  u64 limbs_[kLimbs] = {};
};

constexpr int kUnit = 1074;  // the smallest float64 is 2**-1074

// The exact sum of numbers in units of 2**-1074, and that of their squares in units of 2**-2148.
class ExactSums {
 public:
  void add(const double* numbers, i64 count) { add_floats(numbers, count); }
  void add(const float* numbers, i64 count) { add_floats(numbers, count); }

  template <class T>
  void add(const T* numbers, i64 count) {
    i128 total = 0;
    u128 low = 0, high = 0;  // halves of squares
    for (i64 i = 0; i < count; i++) {
      const i128 number = numbers[i];
      const u128 size = number < 0 ? -number : number, square = size * size;
      total += number;
      low += static_cast<u64>(square);
      high += square >> 64;
    }
    sum_.add(total, kUnit);
    squares_.add(low, 2 * kUnit, false);
    squares_.add(high, 2 * kUnit + 64, false);
  }

  // Adds integers whose sums do not overflow 64 bits.
  template <class T>
  void add_small(const T* numbers, i64 count) {
    i64 total = 0, squares = 0;
    for (i64 i = 0; i < count; i++) {
      const i64 number = static_cast<i64>(numbers[i]);
      total += number;
      squares += number * number;
    }
    sum_.add(total, kUnit);
    squares_.add(squares, 2 * kUnit);
  }

  nb::bytes sum() const { return sum_.bytes(); }
  nb::bytes squares() const { return squares_.bytes(); }

 private:
  static constexpr i64 kChunk = 1 << 20;  // squares of 106 bits that 128 bits can sum

  // Mantissas and their squares are added by exponent.
  template <class T>
  void add_floats(const T* numbers, i64 count) {
    std::vector<i128> sums(2048);
    std::vector<u128> squares(2048);
    for (i64 start = 0; start < count; start += kChunk) {
      for (i64 i = start; i < std::min(count, start + kChunk); i++) {
        const u64 bits = bits_of(static_cast<double>(numbers[i])), exponent = bits >> 52 & 2047;
        const i64 mantissa = (bits & ((1ull << 52) - 1)) | (static_cast<u64>(exponent > 0) << 52);
        sums[exponent] += bits >> 63 ? -mantissa : mantissa;
        squares[exponent] += static_cast<u128>(mantissa) * static_cast<u128>(mantissa);
      }
      require(!squares[2047], "values must be finite");
      for (int e = 0; e < 2047; e++) {
        if (!squares[e]) continue;
        const int shift = std::max(e, 1) - 1;
        sum_.add(sums[e], shift);
        squares_.add(squares[e], 2 * shift, false);
        sums[e] = squares[e] = 0;
      }
    }
  }

  Integer<34> sum_;      // 1,074 bits of fractions, 1,024 before, 63 for the count
  Integer<67> squares_;  // twice as many
};

// The range of integers, of which there is at least one.
struct Range {
  template <class T>
  Range(const T* values, i64 count) : minimum(static_cast<i64>(values[0])), maximum(minimum) {
    for (i64 i = 0; i < count; i++) {
      minimum = std::min(minimum, static_cast<i64>(values[i]));
      maximum = std::max(maximum, static_cast<i64>(values[i]));
    }
  }

  // Whether an array may have an element for each value.
  bool is_small() const { return static_cast<u64>(maximum) - static_cast<u64>(minimum) < 1 << 16; }
  size_t size() const { return maximum - minimum + 1; }

  i64 minimum, maximum;
};

// Describes finite numbers, at least one: zeros, minimum, maximum and the exact sums.
std::tuple<i64, double, double, nb::bytes, nb::bytes> totals(Numbers values) {
  require(values.size > 0, "values must be at least one");
  i64 zeros = 0;
  double low, high;
  ExactSums sums;
  {
    nb::gil_scoped_release unlocked;
    typed<true>(values, [&](auto* typed_values) {
      auto minimum = typed_values[0], maximum = typed_values[0];
      for (i64 i = 0; i < values.size; i++) {
        minimum = std::min(minimum, typed_values[i]);
        maximum = std::max(maximum, typed_values[i]);
        zeros += typed_values[i] == 0;
      }
      low = static_cast<double>(minimum), high = static_cast<double>(maximum);
      if constexpr (!std::is_floating_point_v<decltype(minimum)>) {
        const double largest = std::max(std::fabs(low), std::fabs(high));
        if (largest < 1 << 30 && largest * largest * static_cast<double>(values.size) < 0x1p62)
          return sums.add_small(typed_values, values.size);
      }
      sums.add(typed_values, values.size);
    });
  }
  return {zeros, low, high, sums.sum(), sums.squares()};
}

// Counts numbers by the upper bits of their float64.
Array<i64> count_buckets(Numbers values, int bits) {
  require(0 < bits && bits < 32, "bits must be in (0, 32)");
  Array<i64> counts(i64{1} << bits);
  std::fill_n(counts.data(), counts.size(), 0);
  const int shift = 64 - bits;
  typed<true>(values, [&](auto* typed_values) {
    for (i64 i = 0; i < values.size; i++) counts[bits_of(static_cast<double>(typed_values[i]) + 0.0) >> shift]++;  // -0.0 becomes 0.0
  });
  return counts;
}

// Returns the most frequent integers, at most `limit`, with their counts, ties in ascending order. If more are distinct,
// those that are less than 1 / (4 * limit) of all are left out, and most of them need not be counted: the other integers
// with the same bits of a hash are too few together.
std::tuple<Array<i64>, Array<i64>> frequent_values(Numbers values, i64 limit) {
  require(limit > 0, "limit must be positive");
  const i64 count = values.size;
  struct Counted {
    i64 value, count;
  };
  std::vector<Counted> distinct;
  bool has_all = true;
  const auto is_frequent = [&](i64 number) { return 4 * limit * number >= count; };
  typed(values, [&](auto* typed_values) {
    if (!count) return;
    const Range range(typed_values, count);
    if (range.is_small()) {
      std::vector<i64> counts(range.size(), 0);
      for (i64 i = 0; i < count; i++) counts[static_cast<i64>(typed_values[i]) - range.minimum]++;
      for (size_t i = 0; i < counts.size(); i++)
        if (counts[i]) distinct.push_back({range.minimum + static_cast<i64>(i), counts[i]});
      return;
    }
    const auto bits = [&](i64 value) { return static_cast<u64>(value) * kOdd >> 48; };
    std::vector<i64> by_bits(1 << 16, 0);
    for (i64 i = 0; i < count; i++) by_bits[bits(static_cast<i64>(typed_values[i]))]++;
    has_all = std::count_if(by_bits.begin(), by_bits.end(), [](i64 n) { return n > 0; }) <= limit;
    Numbering numbering;
    for (i64 i = 0; i < count; i++) {
      const i64 value = static_cast<i64>(typed_values[i]);
      if (!has_all && !is_frequent(by_bits[bits(value)])) continue;
      const size_t number = numbering.number(static_cast<u64>(value));
      if (number == distinct.size()) distinct.push_back({value, 0});
      distinct[number].count++;
    }
  });
  const auto before = [](const Counted& a, const Counted& b) {
    return a.count != b.count ? a.count > b.count : a.value < b.value;
  };
  if (!has_all || static_cast<i64>(distinct.size()) > limit) {
    const auto is_rare = [&](const Counted& each) { return !is_frequent(each.count); };
    distinct.erase(std::remove_if(distinct.begin(), distinct.end(), is_rare), distinct.end());
  }
  const i64 kept = std::min<i64>(limit, distinct.size());
  if (kept < static_cast<i64>(distinct.size()))
    std::nth_element(distinct.begin(), distinct.begin() + kept, distinct.end(), before);
  std::sort(distinct.begin(), distinct.begin() + kept, before);
  Array<i64> out(kept), out_counts(kept);
  for (i64 i = 0; i < kept; i++) out[i] = distinct[i].value, out_counts[i] = distinct[i].count;
  return {std::move(out), std::move(out_counts)};
}

// Returns the smallest distinct hashes of integers in ascending order, at most `limit`.
Array<u64> smallest_hashes(Numbers values, i64 limit) {
  require(limit > 0, "limit must be positive");
  constexpr i64 kChunk = 1024;
  const i64 count = values.size;
  std::vector<u64> found;
  Numbering numbering;  // of those
  u64 bound = std::numeric_limits<u64>::max();
  const auto add = [&](u64 hash) {
    if (static_cast<size_t>(numbering.number(hash)) == found.size()) found.push_back(hash);
  };
  const auto shrink = [&] {
    std::nth_element(found.begin(), found.begin() + limit - 1, found.end());
    found.resize(limit);
    bound = found.back();
    std::vector<u64> kept;
    kept.swap(found);
    numbering = Numbering();
    for (const u64 hash : kept) add(hash);
  };
  u64 hashes[kChunk];
  typed(values, [&](auto* typed_values) {
    if (!count) return;
    const Range range(typed_values, count);
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
        add(hashes[i]);
        if (static_cast<i64>(found.size()) == 2 * limit) shrink();
      }
    }
  });
  std::sort(found.begin(), found.end());
  Array<u64> out(std::min<i64>(limit, found.size()));
  std::copy_n(found.begin(), out.size(), out.data());
  return out;
}

}  // namespace

NB_MODULE(statistics, m) {
  m.def("totals", totals, nb::arg("values"));
  m.def("count_buckets", count_buckets, nb::arg("values"), nb::arg("bits"), Unlocked());
  m.def("frequent_values", frequent_values, nb::arg("values"), nb::arg("limit"), Unlocked());
  m.def("smallest_hashes", smallest_hashes, nb::arg("values"), nb::arg("limit"), Unlocked());
}
