// What the kernels share: typed values, hashes, a hash table.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

using u64 = uint64_t;
using i64 = int64_t;
using i32 = int32_t;

// Calls `run` with typed values; `type` is the kind (i, u or f) times 16 plus the width in bytes, as in numpy.
template <class Run>
auto typed(const void* values, i64 type, Run run) {
  switch (type) {
    case 'i' * 16 + 1: return run(static_cast<const int8_t*>(values));
    case 'i' * 16 + 2: return run(static_cast<const int16_t*>(values));
    case 'i' * 16 + 4: return run(static_cast<const int32_t*>(values));
    case 'u' * 16 + 1: return run(static_cast<const uint8_t*>(values));
    case 'u' * 16 + 2: return run(static_cast<const uint16_t*>(values));
    case 'u' * 16 + 4: return run(static_cast<const uint32_t*>(values));
    case 'u' * 16 + 8: return run(static_cast<const uint64_t*>(values));
    case 'f' * 16 + 4: return run(static_cast<const float*>(values));
    case 'f' * 16 + 8: return run(static_cast<const double*>(values));
    default: return run(static_cast<const int64_t*>(values));
  }
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
