// Kernels over flat arrays: distinct tuples, gathers of lists, distinct values of lists.
//
// Called through ctypes without the lock of Python; they allocate nothing that outlives a call. `arrays.py` checks
// shapes and types, and has a slower reference of each in numpy.
#include <algorithm>

#include "common.h"

namespace {

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

inline u64 hash_row(u64 id, u64 salt, u64 num_rows) {
  const u64 hash = splitmix64(id ^ salt) & (~0ull >> 1);
  return num_rows & (num_rows - 1) ? hash % num_rows : hash & (num_rows - 1);
}

// A set of rows of a table that is written in ascending order and emptied. Small tables have a bit for each row, and a bit
// for each word of these; rows of larger ones are sorted.
class RowSet {
 public:
  explicit RowSet(u64 num_rows) : is_small_(num_rows <= kMaxBits) {
    if (!is_small_) return;
    words_.resize((num_rows + 63) / 64, 0);
    used_.resize((words_.size() + 63) / 64, 0);
  }

  void add(u64 row) {
    if (is_small_) {
      words_[row >> 6] |= 1ull << (row & 63);
      used_[row >> 12] |= 1ull << (row >> 6 & 63);
    } else if (static_cast<size_t>(numbering_.number(row)) == rows_.size()) {
      rows_.push_back(static_cast<i64>(row));
    }
  }

  // Writes the rows and empties the set; returns the end of what is written.
  i64* write(i64* out) {
    for (size_t u = 0; u < used_.size(); u++) {
      for (u64 words = used_[u]; words; words &= words - 1) {
        const size_t w = u * 64 + __builtin_ctzll(words);
        for (u64 bits = words_[w]; bits; bits &= bits - 1) *out++ = w * 64 + __builtin_ctzll(bits);
        words_[w] = 0;
      }
      used_[u] = 0;
    }
    if (is_small_) return out;
    std::sort(rows_.begin(), rows_.end());
    out = std::copy(rows_.begin(), rows_.end(), out);
    rows_.clear();
    numbering_ = Numbering();
    return out;
  }

 private:
  static constexpr u64 kMaxBits = 1 << 24;
  const bool is_small_;
  std::vector<u64> words_, used_;
  Numbering numbering_;
  std::vector<i64> rows_;
};

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

// Finds the first of equal references within each range, of which there are ascending ones; numbers them in order.
// References are below `num_references`. Returns how many are found.
i64 presage_unique_in_ranges(const i64* ranges, const i64* references, i64 count, i64 num_references, i64* first,
                             i64* inverse) {
  std::vector<i64> numbers(num_references, -1);
  i64 found = 0, range_start = 0;
  for (i64 i = 0; i < count; i++) {
    if (i && ranges[i] != ranges[i - 1]) range_start = found;
    i64& number = numbers[references[i]];
    if (number < range_start) {
      first[found] = i;
      number = found++;
    }
    inverse[i] = number;
  }
  return found;
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

// Ids of one column, and `num_blocks + 1` offsets of the ids of each block.
struct Ids {
  const void* values;
  i64 type;
  const i64* offsets;
};

// Writes the ascending distinct rows of a table that the ids of all columns stand for, block after block, and their
// offsets. Ids are hashed, or are the rows themselves. Returns their number, or -1 if an id is not a row.
i64 presage_distinct_rows(const Ids* columns, i64 num_columns, i64 num_blocks, i64 is_hashed, u64 salt, u64 num_rows,
                          i64* out, i64* out_offsets) {
  RowSet set(num_rows);
  i64* end = out;
  out_offsets[0] = 0;
  for (i64 b = 0; b < num_blocks; b++) {
    for (i64 c = 0; c < num_columns; c++) {
      const Ids& ids = columns[c];
      const bool is_valid = typed(ids.values, ids.type, [&](auto* values) {
        u64 largest = 0;
        for (i64 i = ids.offsets[b]; i < ids.offsets[b + 1]; i++) {
          const u64 id = static_cast<u64>(static_cast<i64>(values[i]));
          largest = std::max(largest, id);
          if (is_hashed)
            set.add(hash_row(id, salt, num_rows));
          else if (id < num_rows)
            set.add(id);
        }
        return is_hashed || largest < num_rows || ids.offsets[b] == ids.offsets[b + 1];
      });
      if (!is_valid) return -1;
    }
    end = set.write(end);
    out_offsets[b + 1] = end - out;
  }
  return end - out;
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
  for (i64 i = 0; i < num_ids; i++) out[i] = static_cast<i64>(hash_row(ids[i], salt, num_rows));
}

// Inserts the rows at some positions into a hash map, each into the first free bucket from its hash on. A bucket has
// 1 + position, 0 if it is free; at least one is.
void presage_insert_rows(uint32_t* buckets, i64 num_buckets, const i64* rows, i64 start, i64 end) {
  const u64 mask = num_buckets - 1;
  constexpr i64 kAhead = 16;  // buckets that are being loaded from memory
  for (i64 i = start; i < end; i++) {
    if (i + kAhead < end) __builtin_prefetch(&buckets[splitmix64(rows[i + kAhead]) & mask], 1);
    u64 at = splitmix64(rows[i]) & mask;
    while (buckets[at]) at = (at + 1) & mask;
    buckets[at] = static_cast<uint32_t>(i + 1);
  }
}

}  // extern "C"
