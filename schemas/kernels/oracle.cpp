// Kernels of the oracle: rows numbered by first use, ascending numbers as gaps, next uses.
//
// Called through ctypes without the lock of Python; they allocate nothing that outlives a call. `oracle.py` checks
// shapes and types; the references in numpy are in `schemas/oracle.py`.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

using u64 = uint64_t;
using i64 = int64_t;
using i32 = int32_t;

// A set of numbers in [0, size), which is read and emptied in ascending order. A second level of bits marks the words
// that are not empty.
class NumberSet {
 public:
  explicit NumberSet(i64 size) : words_(size / 64 + 1), used_(size / 4096 + 1) {}

  // Sorts values and drops repeated ones; returns how many remain.
  i64 sort_distinct(i32* values, i64 count) {
    if (count * kWordsPerValue < static_cast<i64>(used_.size())) {
      std::sort(values, values + count);
      return std::unique(values, values + count) - values;
    }
    for (i64 i = 0; i < count; i++) {
      words_[values[i] >> 6] |= 1ull << (values[i] & 63);
      used_[values[i] >> 12] |= 1ull << (values[i] >> 6 & 63);
    }
    i64 distinct = 0;
    for (size_t u = 0; u < used_.size(); u++) {
      for (; used_[u]; used_[u] &= used_[u] - 1) {
        const i64 w = static_cast<i64>(u) * 64 + __builtin_ctzll(used_[u]);
        for (; words_[w]; words_[w] &= words_[w] - 1)
          values[distinct++] = static_cast<i32>(w * 64 + __builtin_ctzll(words_[w]));
      }
    }
    return distinct;
  }

 private:
  // Sorting is faster than going through more words of the second level for each value.
  static constexpr i64 kWordsPerValue = 16;

  std::vector<u64> words_, used_;
};

// Slots of a table of rows in [low, low + size): the number of each row and 1, or 0.
struct DirectSlots {
  i32* slots;
  i64 low;

  i32& operator()(i64 row) { return slots[row - low]; }
};

// A hash table of any rows, with a power of two of slots, at least one of which is free.
struct HashedSlots {
  struct Slot {
    i64 row;
    i64 number;
  };
  Slot* slots;
  u64 mask;

  i64& operator()(i64 row) {
    u64 at = (static_cast<u64>(row) * 0x9E3779B97F4A7C15ull >> 20) & mask;
    while (slots[at].number && slots[at].row != row) at = (at + 1) & mask;
    slots[at].row = row;
    return slots[at].number;
  }
};

template <class Slots>
i64 number_rows(Slots find, const i64* rows, const i64* offsets, i64 num_lists, i64 count, i64 position, i32* last,
                i32* numbers, i64* new_rows, i32* num_new) {
  for (i64 l = 0; l < num_lists; l++) {
    const i64 before = count;
    for (i64 i = offsets[l]; i < offsets[l + 1]; i++) {
      auto& number = find(rows[i]);
      if (!number) {
        *new_rows++ = rows[i];
        number = ++count;
      }
      numbers[i] = static_cast<i32>(number) - 1;
      last[number - 1] = static_cast<i32>(position + l);
    }
    num_new[l] = static_cast<i32>(count - before);
  }
  return count;
}

}  // namespace

extern "C" {

// Numbers rows in [low, low + slots) by first use; `count` rows have numbers. Writes the number of each, the new rows,
// how many are new in each list, and for each number the position of the last list with it. Returns the new count.
i64 presage_number_rows(const i64* rows, const i64* offsets, i64 num_lists, i64 low, i32* slots, i64 count,
                        i64 position, i32* last, i32* numbers, i64* new_rows, i32* num_new) {
  return number_rows(DirectSlots{slots, low}, rows, offsets, num_lists, count, position, last, numbers, new_rows,
                     num_new);
}

// The same for any rows, by a hash table of `capacity` pairs (row, number and 1).
i64 presage_number_hashed(const i64* rows, const i64* offsets, i64 num_lists, i64 capacity, i64* slots, i64 count,
                          i64 position, i32* last, i32* numbers, i64* new_rows, i32* num_new) {
  return number_rows(HashedSlots{reinterpret_cast<HashedSlots::Slot*>(slots), static_cast<u64>(capacity - 1)}, rows,
                     offsets, num_lists, count, position, last, numbers, new_rows, num_new);
}

// Moves the pairs of a hash table to a larger one.
void presage_rehash(const i64* slots, i64 capacity, i64* larger, i64 larger_capacity) {
  HashedSlots find{reinterpret_cast<HashedSlots::Slot*>(larger), static_cast<u64>(larger_capacity - 1)};
  for (i64 i = 0; i < capacity; i++)
    if (slots[2 * i + 1]) find(slots[2 * i]) = slots[2 * i + 1];
}

// Writes each list of distinct numbers below `size`, in any order, as the gaps of the ascending list.
void presage_sorted_gaps(const i32* numbers, const i64* offsets, i64 num_lists, i64 size, i64* gaps) {
  NumberSet set(size);
  std::vector<i32> sorted;
  for (i64 l = 0; l < num_lists; l++) {
    sorted.assign(numbers + offsets[l], numbers + offsets[l + 1]);
    set.sort_distinct(sorted.data(), static_cast<i64>(sorted.size()));
    i32 before = 0;
    for (const i32 number : sorted) {
      *gaps++ = number - before;
      before = number;
    }
  }
}

// Links the numbers in [low, low + size) of steps to their next uses, from the last step to the first. A step is some
// consecutive lists of gaps. `later` is the step of the next use of each number, or 0, and `last` that of its last one.
// Writes the distances at the end of `distances`, and how many each step has; returns how many all have.
i64 presage_link_steps(const i32* gaps, const i64* offsets, const i64* lists_of_steps, i64 num_steps, i64 first_step,
                       i64 low, i64 size, i32* later, i32* last, i32* distances, i64* lengths) {
  NumberSet set(size);
  std::vector<i32> numbers;
  i64 at = offsets[lists_of_steps[num_steps]];
  const i64 end = at;
  for (i64 s = num_steps - 1; s >= 0; s--) {
    numbers.clear();
    for (i64 l = lists_of_steps[s]; l < lists_of_steps[s + 1]; l++) {
      i64 number = -low;
      for (i64 i = offsets[l]; i < offsets[l + 1]; i++) {
        number += gaps[i];
        if (number >= 0 && number < size) numbers.push_back(static_cast<i32>(number));
      }
    }
    lengths[s] = set.sort_distinct(numbers.data(), static_cast<i64>(numbers.size()));
    const i32 step = static_cast<i32>(first_step + s);
    at -= lengths[s];
    for (i64 i = 0; i < lengths[s]; i++) {
      const i32 number = numbers[i];
      if (!later[number]) last[number] = step;
      distances[at + i] = later[number] ? later[number] - step : 0;
      later[number] = step;
    }
  }
  return end - at;
}

}  // extern "C"
