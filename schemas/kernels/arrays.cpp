// Kernels over flat arrays: distinct tuples, gathers of lists, distinct values of lists.
//
// Called through ctypes without the lock of Python; they allocate nothing that outlives a call. `arrays.py` checks
// shapes and types, and has a slower reference of each in numpy.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using u64 = uint64_t;
using i64 = int64_t;
using i32 = int32_t;

constexpr u64 kOdd = 0x9E3779B97F4A7C15ull, kMix = 0xD6E8FEB86659FD93ull;

inline u64 multiply(u64 a, u64 b) {  // 64 x 64 to 128 bits, folded
  unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
}

inline u64 load(const uint8_t* p, size_t bytes) {
  u64 word = 0;
  std::memcpy(&word, p, bytes);
  return word;
}

// Two lanes, so that their multiplications overlap.
inline u64 hash_bytes(const uint8_t* p, size_t size, u64 seed) {
  u64 a = multiply(seed ^ kMix, size * kMix + 1), b = multiply(seed, kMix);
  const uint8_t* end = p + size;
  for (; p + 32 <= end; p += 32) {
    a = multiply(load(p, 8) ^ a, load(p + 8, 8) ^ seed);
    b = multiply(load(p + 16, 8) ^ b, load(p + 24, 8) ^ seed);
  }
  for (; p + 8 <= end; p += 8) a = multiply(load(p, 8) ^ a, seed);
  if (p < end) a = multiply(load(p, end - p) ^ a, ~seed);
  return multiply(a ^ kOdd, b ^ kMix);
}

inline u64 splitmix64(u64 z) {
  z += 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

// One column: fixed-width values, or lists of them with `num_rows + 1` offsets.
struct Column {
  const uint8_t* values;
  const i64* offsets;
  i64 width;
};

template <class T>
void hash_fixed(const uint8_t* values, i64 rows, u64 seed, u64* hashes) {
  for (i64 i = 0; i < rows; i++) {
    T value;
    std::memcpy(&value, values + i * sizeof(T), sizeof(T));
    hashes[i] = multiply(hashes[i] ^ static_cast<u64>(value) ^ seed, kOdd);
  }
}

void hash_column(const Column& c, i64 rows, u64 seed, u64* hashes) {
  if (c.offsets) {
    for (i64 i = 0; i < rows; i++) {
      const size_t size = (c.offsets[i + 1] - c.offsets[i]) * c.width;
      hashes[i] = multiply(hashes[i] ^ hash_bytes(c.values + c.offsets[i] * c.width, size, seed), kOdd);
    }
    return;
  }
  switch (c.width) {
    case 1: return hash_fixed<uint8_t>(c.values, rows, seed, hashes);
    case 2: return hash_fixed<uint16_t>(c.values, rows, seed, hashes);
    case 4: return hash_fixed<uint32_t>(c.values, rows, seed, hashes);
    default: return hash_fixed<u64>(c.values, rows, seed, hashes);
  }
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

bool equal_rows(const Column& c, i64 a, i64 b) {
  if (!c.offsets) return std::memcmp(c.values + a * c.width, c.values + b * c.width, c.width) == 0;
  const i64 length = c.offsets[a + 1] - c.offsets[a];
  return length == c.offsets[b + 1] - c.offsets[b] &&
         std::memcmp(c.values + c.offsets[a] * c.width, c.values + c.offsets[b] * c.width, length * c.width) == 0;
}

template <class T>
bool fixed_equal(const Column& c, i64 rows, const i32* number, const i64* first) {
  const T* values = reinterpret_cast<const T*>(c.values);
  T different = 0;
  for (i64 i = 0; i < rows; i++) different |= values[i] ^ values[first[number[i]]];
  return different == 0;
}

bool column_equal(const Column& c, i64 rows, const i32* number, const i64* first) {
  if (!c.offsets) {
    switch (c.width) {
      case 1: return fixed_equal<uint8_t>(c, rows, number, first);
      case 2: return fixed_equal<uint16_t>(c, rows, number, first);
      case 4: return fixed_equal<uint32_t>(c, rows, number, first);
      default: return fixed_equal<u64>(c, rows, number, first);
    }
  }
  for (i64 i = 0; i < rows; i++) {
    const i64 representative = first[number[i]];
    if (representative != i && !equal_rows(c, i, representative)) return false;
  }
  return true;
}

template <class T>
void take_values(const T* values, const i64* rows, i64 num_rows, T* out) {
  for (i64 i = 0; i < num_rows; i++) out[i] = values[rows[i]];
}

}  // namespace

extern "C" {

// Numbers the distinct rows of all columns taken together, in order of first appearance. Returns their count, or -1 if
// different rows have equal hashes under this seed.
i64 presage_unique_tuples(const Column* columns, i64 num_columns, i64 num_rows, u64 seed, i64* first, i32* inverse) {
  std::vector<u64> hashes(num_rows, seed);
  for (i64 c = 0; c < num_columns; c++) hash_column(columns[c], num_rows, (seed + c + 1) * kOdd, hashes.data());
  Numbering numbering;
  for (i64 i = 0; i < num_rows; i++) {
    if (i && hashes[i] == hashes[i - 1]) {  // consecutive rows often repeat
      inverse[i] = inverse[i - 1];
      continue;
    }
    const i32 before = numbering.count();
    inverse[i] = numbering.number(hashes[i]);
    if (numbering.count() > before) first[before] = i;
  }
  for (i64 c = 0; c < num_columns; c++)
    if (!column_equal(columns[c], num_rows, inverse, first)) return -1;
  return numbering.count();
}

void presage_take(const void* values, i64 width, const i64* rows, i64 num_rows, void* out) {
  switch (width) {
    case 1: return take_values(static_cast<const uint8_t*>(values), rows, num_rows, static_cast<uint8_t*>(out));
    case 2: return take_values(static_cast<const uint16_t*>(values), rows, num_rows, static_cast<uint16_t*>(out));
    case 4: return take_values(static_cast<const uint32_t*>(values), rows, num_rows, static_cast<uint32_t*>(out));
    default: return take_values(static_cast<const u64*>(values), rows, num_rows, static_cast<u64*>(out));
  }
}

// Writes the offsets of the lists of `rows`; returns the number of their values.
i64 presage_take_offsets(const i64* offsets, const i64* rows, i64 num_rows, i64* out) {
  out[0] = 0;
  for (i64 i = 0; i < num_rows; i++) out[i + 1] = out[i] + offsets[rows[i] + 1] - offsets[rows[i]];
  return out[num_rows];
}

void presage_take_lists(const uint8_t* values, i64 width, const i64* offsets, const i64* rows, i64 num_rows,
                        const i64* out_offsets, uint8_t* out) {
  for (i64 i = 0; i < num_rows; i++) {
    const i64 size = (out_offsets[i + 1] - out_offsets[i]) * width;
    if (size) std::memcpy(out + out_offsets[i] * width, values + offsets[rows[i]] * width, size);
  }
}

// Lists of one source; every source of a call has the same number of lists.
struct Lists {
  const i64* values;
  const i64* offsets;
};

// Writes the ascending distinct values of list l of all sources together, list after list, and their offsets. Returns
// their number.
i64 presage_distinct(const Lists* sources, i64 num_sources, i64 num_lists, i64* out, i64* out_offsets) {
  struct Slot {
    i64 value;
    i64 list;
  };
  i64 longest = 0, total = 0;
  for (i64 l = 0; l < num_lists; l++) {
    i64 length = 0;
    for (i64 s = 0; s < num_sources; s++) length += sources[s].offsets[l + 1] - sources[s].offsets[l];
    longest = std::max(longest, length);
  }
  u64 size = 64;
  while (size < 2 * static_cast<u64>(longest)) size *= 2;
  std::vector<Slot> table(size, Slot{0, -1});
  out_offsets[0] = 0;
  for (i64 l = 0; l < num_lists; l++) {
    const i64 start = total;
    for (i64 s = 0; s < num_sources; s++) {
      const i64* values = sources[s].values;
      for (i64 i = sources[s].offsets[l]; i < sources[s].offsets[l + 1]; i++) {
        u64 at = (static_cast<u64>(values[i]) * kOdd >> 20) & (size - 1);
        while (table[at].list == l && table[at].value != values[i]) at = (at + 1) & (size - 1);
        if (table[at].list == l) continue;
        table[at] = Slot{values[i], l};
        out[total++] = values[i];
      }
    }
    std::sort(out + start, out + total);
    out_offsets[l + 1] = total;
  }
  return total;
}

void presage_sort_lists(i64* values, const i64* offsets, i64 num_lists) {
  for (i64 l = 0; l < num_lists; l++) std::sort(values + offsets[l], values + offsets[l + 1]);
}

// For each list of `rows` but the first: the length of its start that is the end of the list before it, if that is at least
// half of the shorter one. The longest `max_candidates` possible overlaps are compared.
void presage_overlaps(const u64* values, const i64* offsets, const i64* rows, i64 num_rows, i64 max_candidates, i64* out) {
  for (i64 i = 1; i < num_rows; i++) {
    const u64* before = values + offsets[rows[i - 1]];
    const u64* after = values + offsets[rows[i]];
    const i64 length = offsets[rows[i - 1] + 1] - offsets[rows[i - 1]];
    const i64 shorter = std::min(length, offsets[rows[i] + 1] - offsets[rows[i]]);
    i64 candidates = 0;
    for (i64 overlap = shorter; 2 * overlap >= shorter && candidates < max_candidates; overlap--) {
      if (before[length - overlap] != after[0]) continue;
      candidates++;
      if (std::memcmp(before + length - overlap, after, overlap * sizeof(u64))) continue;
      out[i] = overlap;
      break;
    }
  }
}

void presage_splitmix64(const u64* values, i64 num_values, u64* out) {
  for (i64 i = 0; i < num_values; i++) out[i] = splitmix64(values[i]);
}

// Maps ids to rows of a hashed table.
void presage_hash_rows(const u64* ids, i64 num_ids, u64 salt, u64 num_rows, i64* out) {
  for (i64 i = 0; i < num_ids; i++) out[i] = static_cast<i64>((splitmix64(ids[i] ^ salt) & (~0ull >> 1)) % num_rows);
}

// Writes the hashes that are at most `bound`; returns their number.
i64 presage_hashes_up_to(const u64* values, i64 num_values, u64 bound, u64* out) {
  i64 count = 0;
  for (i64 i = 0; i < num_values; i++) {
    out[count] = splitmix64(values[i]);
    count += out[count] <= bound;
  }
  return count;
}

// Counts numbers by the upper bits of their float64.
void presage_count_buckets(const double* numbers, i64 num_numbers, i64 shift, i64* counts) {
  for (i64 i = 0; i < num_numbers; i++) {
    const double number = numbers[i] + 0.0;  // -0.0 becomes 0.0
    u64 bits;
    std::memcpy(&bits, &number, sizeof(bits));
    counts[bits >> shift]++;
  }
}

}  // extern "C"
