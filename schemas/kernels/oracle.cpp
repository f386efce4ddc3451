// Kernels of the oracle: rows numbered by first use, ascending numbers as gaps, next uses. `oracle.pyi` says what each
// function returns.
#include <algorithm>
#include <vector>

#include "border.h"

namespace {

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

// Returns the number of each row, the new rows, and how many are new in each list. Sets for each number the position of
// the last list with it; `count` rows have numbers.
template <class Slots>
std::tuple<Made<i32>, Made<i64>, Made<i32>> number_rows(Slots find, Flat<const i64> rows, Flat<const i64> offsets, i64 count,
                                                        i64 position, Flat<i32> last) {
  require_offsets(offsets, rows.size);
  require(0 <= count && count + rows.size <= last.size, "last must have room for the numbers of all rows");
  const i64 num_lists = offsets.size - 1, before = count;
  Made<i32> numbers(rows.size), num_new(num_lists);
  Made<i64> new_rows(rows.size);
  for (i64 l = 0; l < num_lists; l++) {
    const i64 first = count;
    for (i64 i = offsets[l]; i < offsets[l + 1]; i++) {
      auto& number = find(rows[i]);
      if (!number) {
        new_rows[count - before] = rows[i];
        number = ++count;
      }
      numbers[i] = static_cast<i32>(number) - 1;
      last[number - 1] = static_cast<i32>(position + l);
    }
    num_new[l] = static_cast<i32>(count - first);
  }
  new_rows.shrink(count - before);
  return {std::move(numbers), std::move(new_rows), std::move(num_new)};
}

auto number_in_range(Flat<const i64> rows, Flat<const i64> offsets, i64 low, Flat<i32> slots, i64 count, i64 position,
                     Flat<i32> last) {
  bool inside = true;
  for (i64 i = 0; i < rows.size; i++) inside &= static_cast<u64>(rows[i] - low) < static_cast<u64>(slots.size);
  require(inside, "rows must be in the range of the slots");
  return number_rows(DirectSlots{slots.data, low}, rows, offsets, count, position, last);
}

HashedSlots hashed(Flat<i64> slots) {
  require(slots.size > 1 && !(slots.size & (slots.size - 1)), "slots must be a power of two of pairs");
  return {reinterpret_cast<HashedSlots::Slot*>(slots.data), static_cast<u64>(slots.size / 2 - 1)};
}

auto number_hashed(Flat<const i64> rows, Flat<const i64> offsets, Flat<i64> slots, i64 count, i64 position, Flat<i32> last) {
  require(count + rows.size < slots.size / 2, "slots must have room for all rows");
  return number_rows(hashed(slots), rows, offsets, count, position, last);
}

// Moves the pairs of a hash table to a larger one.
void rehash(Flat<const i64> slots, Flat<i64> larger) {
  require(slots.size <= larger.size, "the new table must not be smaller");
  HashedSlots find = hashed(larger);
  for (i64 i = 0; i + 1 < slots.size; i += 2)
    if (slots[i + 1]) find(slots[i]) = slots[i + 1];
}

// Returns each list of distinct numbers below `size`, in any order, as the gaps of the ascending list.
Made<i64> sorted_gaps(Flat<const i32> numbers, Flat<const i64> offsets, i64 size) {
  require_offsets(offsets, numbers.size);
  require_rows(numbers, size);
  Made<i64> gaps(numbers.size);
  i64* to = gaps.data();
  NumberSet set(size);
  std::vector<i32> sorted;
  for (i64 l = 0; l + 1 < offsets.size; l++) {
    sorted.assign(&numbers[offsets[l]], &numbers[offsets[l + 1]]);
    const i64 count = set.sort_distinct(sorted.data(), static_cast<i64>(sorted.size()));
    require(count == static_cast<i64>(sorted.size()), "numbers of a list must be distinct");
    i32 before = 0;
    for (const i32 number : sorted) {
      *to++ = number - before;
      before = number;
    }
  }
  gaps.shrink(to - gaps.data());
  return gaps;
}

// Links the numbers in [low, low + size) of steps to their next uses, from the last step to the first. A step is some
// consecutive lists of gaps. `later` is the step of the next use of each number, or 0, and `last` that of its last one.
// Returns the distances of all steps, and how many each has.
std::tuple<Made<i32>, Made<i64>> link_steps(Flat<const i32> gaps, Flat<const i64> offsets, Flat<const i64> lists_of_steps,
                                            i64 first_step, i64 low, Flat<i32> later, Flat<i32> last) {
  require_offsets(offsets, gaps.size);
  require_offsets(lists_of_steps, offsets.size - 1);
  require(later.size == last.size, "first and last must be equally long");
  const i64 num_steps = lists_of_steps.size - 1, size = later.size;
  Made<i64> lengths(num_steps);
  NumberSet set(size);
  std::vector<i32> numbers;
  i64 at = gaps.size;
  Made<i32> distances(at);
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
  std::copy(&distances[at], &distances[gaps.size], distances.data());
  distances.shrink(gaps.size - at);
  return {std::move(distances), std::move(lengths)};
}

}  // namespace

NB_MODULE(oracle, m) {
  m.def("number_in_range", number_in_range, nb::arg("rows"), nb::arg("offsets"), nb::arg("low"), nb::arg("slots"),
        nb::arg("count"), nb::arg("position"), nb::arg("last"), Unlocked());
  m.def("number_hashed", number_hashed, nb::arg("rows"), nb::arg("offsets"), nb::arg("slots"), nb::arg("count"),
        nb::arg("position"), nb::arg("last"), Unlocked());
  m.def("rehash", rehash, nb::arg("slots"), nb::arg("larger"), Unlocked());
  m.def("sorted_gaps", sorted_gaps, nb::arg("numbers"), nb::arg("offsets"), nb::arg("size"), Unlocked());
  m.def("link_steps", link_steps, nb::arg("gaps"), nb::arg("offsets"), nb::arg("lists_of_steps"), nb::arg("first_step"),
        nb::arg("low"), nb::arg("first"), nb::arg("last"), Unlocked());
}
