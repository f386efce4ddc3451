// What the kernels share: typed values, hashes, a hash table, a set of bits.
#pragma once
#include <cstring>
#include <limits>
#include <vector>

#include "border.h"

// Calls `run` with a pointer to typed integers; `and_floats` accepts float32 and float64, too.
template <bool and_floats = false, class Run>
auto typed(Numbers numbers, Run run) {
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return numbers.dtype.code == static_cast<uint8_t>(code) && numbers.dtype.bits == bits;
  };
  using code = nb::dlpack::dtype_code;
  if constexpr (and_floats) {
    if (is(code::Float, 32)) return run(static_cast<const float*>(numbers.data));
    if (is(code::Float, 64)) return run(static_cast<const double*>(numbers.data));
  }
  if (is(code::Int, 8)) return run(static_cast<const int8_t*>(numbers.data));
  if (is(code::Int, 16)) return run(static_cast<const int16_t*>(numbers.data));
  if (is(code::Int, 32)) return run(static_cast<const int32_t*>(numbers.data));
  if (is(code::UInt, 8)) return run(static_cast<const uint8_t*>(numbers.data));
  if (is(code::UInt, 16)) return run(static_cast<const uint16_t*>(numbers.data));
  if (is(code::UInt, 32)) return run(static_cast<const uint32_t*>(numbers.data));
  if (is(code::UInt, 64)) return run(static_cast<const uint64_t*>(numbers.data));
  require(is(code::Int, 64), and_floats ? "values must be integers, float32 or float64" : "values must be integers");
  return run(static_cast<const int64_t*>(numbers.data));
}

constexpr u64 kOdd = 0x9E3779B97F4A7C15ull, kMix = 0xD6E8FEB86659FD93ull;

inline u64 multiply(u64 a, u64 b) {  // 64 x 64 to 128 bits, folded
  unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
}

inline u64 splitmix64(u64 z) {
  z += 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

// Numbers distinct keys in order of first appearance. The table doubles when half full, so that few keys stay in the
// processor's cache.
class Numbering {
 public:
  Numbering() : slots_(1024, Slot{0, -1}) {}

  i32 number(u64 key) {
    u64 at = place(key);
    while (slots_[at].number >= 0 && slots_[at].key != key) at = (at + 1) & (slots_.size() - 1);
    if (slots_[at].number >= 0) return slots_[at].number;
    require(count_ < std::numeric_limits<i32>::max(), "distinct values must be fewer than 2**31");
    slots_[at] = Slot{key, count_};
    if (2 * static_cast<size_t>(++count_) > slots_.size()) grow();
    return count_ - 1;
  }

  i32 count() const { return count_; }

 private:
  struct Slot {
    u64 key;
    i32 number;
  };

  u64 place(u64 key) const { return (key * kOdd >> 20) & (slots_.size() - 1); }

  void grow() {
    std::vector<Slot> old(2 * slots_.size(), Slot{0, -1});
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.number < 0) continue;
      u64 at = place(slot.key);
      while (slots_[at].number >= 0) at = (at + 1) & (slots_.size() - 1);
      slots_[at] = slot;
    }
  }

  std::vector<Slot> slots_;
  i32 count_ = 0;
};

// A set of numbers in [0, size), which is read and emptied in ascending order. A second level of bits marks the words
// that are not empty.
class BitSet {
 public:
  explicit BitSet(u64 size) : words_(size / 64 + 1), used_(size / 4096 + 1) {}

  void add(u64 number) {
    words_[number >> 6] |= 1ull << (number & 63);
    used_[number >> 12] |= 1ull << (number >> 6 & 63);
  }

  template <class Number>
  Number* write(Number* out) {
    for (size_t u = 0; u < used_.size(); u++) {
      for (; used_[u]; used_[u] &= used_[u] - 1) {
        const size_t w = u * 64 + __builtin_ctzll(used_[u]);
        for (; words_[w]; words_[w] &= words_[w] - 1) *out++ = static_cast<Number>(w * 64 + __builtin_ctzll(words_[w]));
      }
    }
    return out;
  }

  // Words that are looked at for each list.
  i64 num_used_words() const { return static_cast<i64>(used_.size()); }

 private:
  std::vector<u64> words_, used_;
};
