// Kernels of the oracle: rows numbered by first use, ascending numbers as gaps, next uses. `oracle.pyi` says what each
// function returns.
#include <algorithm>
#include <memory>
#include <vector>

#include "common.h"

namespace {

// Sorts numbers below the set's size and drops repeated ones; returns how many remain.
i64 sort_distinct(BitSet& set, std::vector<i32>& numbers) {
  constexpr i64 kWordsPerValue = 16;  // sorting is faster than going through more words for each value
  if (static_cast<i64>(numbers.size()) * kWordsPerValue < set.num_used_words()) {
    std::sort(numbers.begin(), numbers.end());
    return std::unique(numbers.begin(), numbers.end()) - numbers.begin();
  }
  for (const i32 number : numbers) set.add(number);
  return set.write(numbers.data()) - numbers.data();
}

// Numbers rows in order of first use, as their lists arrive in training order. Rows are numbered by an array of their range,
// or by a hash table.
class FirstUseNumbering {
 public:
  FirstUseNumbering(i64 low, std::optional<i64> size)
      : low_(low), size_(size), array_(static_cast<i32*>(std::calloc(size.value_or(0) + 1, sizeof(i32))), std::free) {
    if (!array_) throw std::bad_alloc();
  }

  // Returns the number of each row; and the new rows in order of their numbers, and their offsets by list.
  std::tuple<Array<i32>, Array<i64>, Array<i64>> number(Flat<const i64> rows, Flat<const i64> offsets) {
    if (!size_) return number_by([&](i64 row) { return hashed_.number(row); }, rows, offsets);
    bool inside = true;
    for (i64 i = 0; i < rows.size; i++) inside &= static_cast<u64>(rows[i] - low_) < static_cast<u64>(*size_);
    require(inside, "rows must be in the range of the array");
    const auto find = [&](i64 row) {
      i32& next = array_.get()[row - low_];  // the number and 1, or 0
      if (!next) next = static_cast<i32>(count_) + 1;
      return next - 1;
    };
    return number_by(find, rows, offsets);
  }

  i64 count() const { return count_; }

 private:
  template <class Find>
  std::tuple<Array<i32>, Array<i64>, Array<i64>> number_by(Find find, Flat<const i64> rows, Flat<const i64> offsets) {
    require_offsets(offsets, rows.size);
    const i64 num_lists = offsets.size - 1;
    Array<i32> numbers(rows.size);
    Array<i64> new_rows(rows.size), new_offsets(num_lists + 1);
    i64 num_new = new_offsets[0] = 0;
    for (i64 l = 0; l < num_lists; l++) {
      for (i64 i = offsets[l]; i < offsets[l + 1]; i++) {
        const i32 number = numbers[i] = find(rows[i]);
        if (number == count_) {
          require(number < std::numeric_limits<i32>::max(), "rows must be fewer than 2**31");
          new_rows[num_new++] = rows[i];
          count_++;
        }
      }
      new_offsets[l + 1] = num_new;
    }
    new_rows.shrink(num_new);
    return {std::move(numbers), std::move(new_rows), std::move(new_offsets)};
  }

  const i64 low_;
  const std::optional<i64> size_;
  std::unique_ptr<i32, void (*)(void*)> array_;
  Numbering hashed_;
  i64 count_ = 0;
};

// Returns each list of distinct numbers below `size`, in any order, as the gaps of the ascending list.
Array<i64> sorted_gaps(Flat<const i32> numbers, Flat<const i64> offsets, i64 size) {
  require_offsets(offsets, numbers.size);
  require_rows(numbers, size);
  Array<i64> gaps(numbers.size);
  i64* to = gaps.data();
  BitSet set(size);
  std::vector<i32> sorted;
  for (i64 l = 0; l + 1 < offsets.size; l++) {
    sorted.assign(&numbers[offsets[l]], &numbers[offsets[l + 1]]);
    const i64 count = sort_distinct(set, sorted);
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

// Lowers the step of each number to the least one of the lists of gaps that have it.
void lower_steps(Flat<const i64> gaps, Flat<const i64> offsets, Flat<const i32> step_of_list, Flat<i32> steps) {
  require_offsets(offsets, gaps.size);
  require(step_of_list.size == offsets.size - 1, "lists must have a step each");
  for (i64 l = 0; l + 1 < offsets.size; l++) {
    i64 number = 0;
    for (i64 i = offsets[l]; i < offsets[l + 1]; i++) {
      number += gaps[i];
      require(0 <= number && number < steps.size, "numbers must be in range");
      steps[number] = std::min(steps[number], step_of_list[l]);
    }
  }
}

// Links the numbers in [low, low + size) of steps to their next uses, from the last step to the first. A step is some
// consecutive lists of gaps. `later` is the step of the next use of each number, or 0, and `last` that of its last one.
// Returns the distances of all steps, and how many each has.
std::tuple<Array<i32>, Array<i64>> link_steps(Flat<const i32> gaps, Flat<const i64> offsets, Flat<const i64> lists_of_steps,
                                            i64 first_step, i64 low, Flat<i32> later, Flat<i32> last) {
  require_offsets(offsets, gaps.size);
  require_offsets(lists_of_steps, offsets.size - 1);
  require(later.size == last.size, "first and last must be equally long");
  const i64 num_steps = lists_of_steps.size - 1, size = later.size;
  Array<i64> lengths(num_steps);
  BitSet set(size);
  std::vector<i32> numbers;
  i64 at = gaps.size;
  Array<i32> distances(at);
  for (i64 s = num_steps - 1; s >= 0; s--) {
    numbers.clear();
    for (i64 l = lists_of_steps[s]; l < lists_of_steps[s + 1]; l++) {
      i64 number = -low;
      for (i64 i = offsets[l]; i < offsets[l + 1]; i++) {
        number += gaps[i];
        if (number >= 0 && number < size) numbers.push_back(static_cast<i32>(number));
      }
    }
    lengths[s] = sort_distinct(set, numbers);
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
  nb::class_<FirstUseNumbering>(m, "FirstUseNumbering")
      .def(nb::init<i64, std::optional<i64>>(), nb::arg("low") = 0, nb::arg("size").none() = nb::none())
      .def("number", &FirstUseNumbering::number, nb::arg("rows"), nb::arg("offsets"), Unlocked())
      .def_prop_ro("count", &FirstUseNumbering::count);
  m.def("sorted_gaps", sorted_gaps, nb::arg("numbers"), nb::arg("offsets"), nb::arg("size"), Unlocked());
  m.def("lower_steps", lower_steps, nb::arg("gaps"), nb::arg("offsets"), nb::arg("step_of_list"), nb::arg("steps"),
        Unlocked());
  m.def("link_steps", link_steps, nb::arg("gaps"), nb::arg("offsets"), nb::arg("lists_of_steps"), nb::arg("first_step"),
        nb::arg("low"), nb::arg("first"), nb::arg("last"), Unlocked());
}
