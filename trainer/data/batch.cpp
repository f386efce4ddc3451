// Kernels that make a batch: lists of decoded row groups, look-ups of all tables, features that samples share.
//
// Called through ctypes without the lock of Python; `kernels.py` checks types, `collate.py`, `lookup.py` and `shared.py` have
// a slower reference of each in numpy.
#include <algorithm>
#include <numeric>

#include "../../schemas/kernels/common.h"

namespace {

// Lists that are ranges of one array: `first` to `last`, or those that `rows[first]` to `rows[last - 1]` name.
struct Lists {
  const uint8_t* values;
  const i64* starts;
  const i64* ends;
  const i64* rows;
  i64 first, last;

  i64 at(i64 i) const { return rows ? rows[i] : i; }
  bool is_one_range() const { return !rows && ends == starts + 1; }  // offsets
};

inline void copy_bytes(uint8_t* to, const uint8_t* from, i64 size) {
  if (size == 8)  // one id, most often
    std::memcpy(to, from, 8);
  else
    std::memcpy(to, from, size);
}

// The bags of one feature among all bags, and the vectors that they read rows for.
struct Bags {
  i64 first, count, first_vector, stride;
};

// The distinct values of some arrays in ascending order, and the position of each value in them.
class Distinct {
 public:
  // Writes positions; `distinct` has room for `count` values. Returns how many they are.
  i64 find(const i64* values, i64 count, i64* distinct, i32* positions) {
    const i64 largest = count ? *std::max_element(values, values + count) : 0;
    return largest < kMaxBits ? by_bits(values, count, largest, distinct, positions)
                              : by_hashes(values, count, distinct, positions);
  }

 private:
  static constexpr i64 kMaxBits = 1 << 24;

  // A bit for each value, and a bit for each word of these; all are 0 between calls.
  i64 by_bits(const i64* values, i64 count, i64 largest, i64* distinct, i32* positions) {
    const size_t num_words = (largest >> 6) + 1;
    if (words_.size() < num_words) {
      words_.resize(num_words, 0);
      before_.resize(num_words);
      used_.resize((num_words >> 6) + 1, 0);
    }
    for (i64 i = 0; i < count; i++) {
      words_[values[i] >> 6] |= 1ull << (values[i] & 63);
      used_[values[i] >> 12] |= 1ull << (values[i] >> 6 & 63);
    }
    i64 found = 0;
    for (i64 u = 0; u <= largest >> 12; u++)
      for (u64 words = used_[u]; words; words &= words - 1) {
        const i64 w = u * 64 + __builtin_ctzll(words);
        before_[w] = static_cast<i32>(found);
        for (u64 bits = words_[w]; bits; bits &= bits - 1) distinct[found++] = w * 64 + __builtin_ctzll(bits);
      }
    for (i64 i = 0; i < count; i++) {
      const i64 w = values[i] >> 6;
      const u64 lower = words_[w] & ((1ull << (values[i] & 63)) - 1);
      positions[i] = before_[w] + static_cast<i32>(__builtin_popcountll(lower));
    }
    for (i64 i = 0; i < found; i++) words_[distinct[i] >> 6] = used_[distinct[i] >> 12] = 0;
    return found;
  }

  i64 by_hashes(const i64* values, i64 count, i64* distinct, i32* positions) {
    Numbering numbering;
    std::vector<std::pair<i64, i32>> found;
    for (i64 i = 0; i < count; i++) {
      positions[i] = numbering.number(static_cast<u64>(values[i]));
      if (positions[i] == static_cast<i32>(found.size())) found.emplace_back(values[i], positions[i]);
    }
    std::sort(found.begin(), found.end());
    std::vector<i32> rank(found.size());
    for (size_t i = 0; i < found.size(); i++) {
      distinct[i] = found[i].first;
      rank[found[i].second] = static_cast<i32>(i);
    }
    for (i64 i = 0; i < count; i++) positions[i] = rank[positions[i]];
    return found.size();
  }

  std::vector<u64> words_, used_;
  std::vector<i32> before_;
};

thread_local Distinct distinct_values;

// Writes the offsets of each of `num_rows` rows in the stable order of `rows`, which are in range.
template <class T>
void count_rows(const T* rows, i64 count, i64 num_rows, i32* offsets) {
  std::fill(offsets, offsets + num_rows + 1, 0);
  for (i64 i = 0; i < count; i++) offsets[rows[i] + 1]++;
  std::partial_sum(offsets, offsets + num_rows + 1, offsets);
}

// Samples sorted by their row, and the offsets of each row.
struct Rows {
  i64 count;
  std::vector<i32> order, offsets;
};

struct Group {
  const i64* tuples;  // of each sample
  const i32* order;
  const i32* offsets;
  i64 num_tuples;
  i64 num_features;
};

// The pairs of a row and a tuple of a group. Keeps the last row of each tuple, and the first sample of that pair.
class Pairs {
 public:
  Pairs(const Rows& rows, const Group& group)
      : rows_(rows), group_(group), row_(group.num_tuples, -1), first_(group.num_tuples) {}

  // Returns their number; `is_equal(a, b)` is asked for samples of one pair until it is false.
  template <class Equal>
  i64 count(Equal is_equal, bool& all_equal) {
    i64 found = 0;
    all_equal = true;
    for (i32 row = 0; row < rows_.count; row++)
      for (i32 i = rows_.offsets[row]; i < rows_.offsets[row + 1]; i++) {
        const i32 sample = rows_.order[i];
        const i64 tuple = group_.tuples[sample];
        if (row_[tuple] != row) {
          row_[tuple] = row;
          first_[tuple] = sample;
          found++;
        } else if (all_equal) {
          all_equal = is_equal(first_[tuple], sample);
        }
      }
    return found;
  }

 private:
  const Rows& rows_;
  const Group& group_;
  std::vector<i32> row_, first_;
};

// Sorts samples by row and tuple; writes the pair of each sample.
Rows paired(const Rows& rows, const Group& group, i64* pair_of) {
  const i64 num_samples = rows.order.size();
  std::vector<i32> row_of(num_samples), next(rows.offsets.begin(), rows.offsets.end());
  for (i32 row = 0; row < rows.count; row++)
    for (i32 i = rows.offsets[row]; i < rows.offsets[row + 1]; i++) row_of[rows.order[i]] = row;
  Rows pairs{0, std::vector<i32>(num_samples), {}};
  for (i64 i = 0; i < num_samples; i++) {
    const i32 sample = group.order[i];
    pairs.order[next[row_of[sample]]++] = sample;
  }
  for (i64 i = 0; i < num_samples; i++) {
    const i32 sample = pairs.order[i], before = i ? pairs.order[i - 1] : 0;
    if (i == 0 || row_of[sample] != row_of[before] || group.tuples[sample] != group.tuples[before]) {
      pairs.offsets.push_back(static_cast<i32>(i));
      pairs.count++;
    }
    pair_of[sample] = pairs.count - 1;
  }
  pairs.offsets.push_back(static_cast<i32>(num_samples));
  return pairs;
}

// Dot products of all vectors, shared ones computed once per row, as in `shared.py`.
i64 num_products(i64 num_shared, i64 num_own, i64 num_rows, i64 num_samples) {
  const i64 own_pairs = num_shared * num_own + num_own * (num_own - 1) / 2;
  return num_rows * (num_shared * (num_shared - 1) / 2) + num_samples * own_pairs;
}

template <class T>
auto equal_dense(const T* dense, i64 width) {
  return [=](i64 a, i64 b) { return std::equal(dense + a * width, dense + (a + 1) * width, dense + b * width); };
}

// See `presage_shared_rows`.
template <class Equal>
i64 shared_rows(const Group* groups, i64 num_groups, i64 num_features, i64 num_samples, Equal is_equal, i64* members,
                i64* shares_dense, i64* row_of, i32* order, i32* offsets) {
  Rows rows{1, std::vector<i32>(num_samples), {0, static_cast<i32>(num_samples)}};
  std::iota(rows.order.begin(), rows.order.end(), 0);
  i64 cost = num_products(0, num_features + 1, 0, num_samples), num_members = 0, shared_features = 0;
  std::vector<i64> remaining(num_groups);
  std::iota(remaining.begin(), remaining.end(), 0);
  while (!remaining.empty()) {
    i64 best = -1;
    for (i64 g : remaining) {
      bool is_dense_shared;
      const i64 pairs = Pairs(rows, groups[g]).count(is_equal, is_dense_shared);
      const i64 num_rows = num_members ? pairs : groups[g].num_tuples;
      const i64 num_shared = shared_features + groups[g].num_features + is_dense_shared;
      const i64 candidate = num_products(num_shared, num_features + 1 - num_shared, num_rows, num_samples);
      if (candidate >= cost) continue;
      cost = candidate;
      best = g;
      *shares_dense = is_dense_shared;
    }
    if (best < 0) break;
    rows = paired(rows, groups[best], row_of);
    members[num_members++] = best;
    shared_features += groups[best].num_features;
    remaining.erase(std::find(remaining.begin(), remaining.end(), best));
  }
  std::copy(rows.order.begin(), rows.order.end(), order);
  std::copy(rows.offsets.begin(), rows.offsets.end(), offsets);
  return num_members;
}

}  // namespace

extern "C" {

// Writes the lengths and the offsets of all lists, one after the other; returns the number of their values.
i64 presage_list_offsets(const Lists* parts, i64 num_parts, i64* lengths, i64* offsets) {
  i64 total = 0;
  *offsets++ = 0;
  for (i64 p = 0; p < num_parts; p++) {
    const Lists& lists = parts[p];
    for (i64 i = lists.first; i < lists.last; i++) {
      const i64 at = lists.at(i), length = lists.ends[at] - lists.starts[at];
      *lengths++ = length;
      *offsets++ = total += length;
    }
  }
  return total;
}

// Writes the values of all lists; those of a part without values are left unchanged.
void presage_list_values(const Lists* parts, i64 num_parts, i64 width, uint8_t* out) {
  for (i64 p = 0; p < num_parts; p++) {
    const Lists& lists = parts[p];
    const auto append = [&](i64 start, i64 end) {
      const i64 size = (end - start) * width;
      if (lists.values) copy_bytes(out, lists.values + start * width, size);
      out += size;
    };
    if (lists.is_one_range() && lists.first < lists.last) {
      append(lists.starts[lists.first], lists.ends[lists.last - 1]);
      continue;
    }
    for (i64 i = lists.first; i < lists.last; i++) append(lists.starts[lists.at(i)], lists.ends[lists.at(i)]);
  }
}

// Writes the stable order of some rows, and the offsets of each row in it; returns -1 if a row is out of range.
i64 presage_invert(const i64* rows, i64 count, i64 num_rows, i32* order, i32* offsets) {
  for (i64 i = 0; i < count; i++)
    if (rows[i] < 0 || rows[i] >= num_rows) return -1;
  count_rows(rows, count, num_rows, offsets);
  std::vector<i32> next(offsets, offsets + num_rows);
  for (i64 i = 0; i < count; i++) order[next[rows[i]]++] = static_cast<i32>(i);
  return 0;
}

// Writes the ascending distinct values and the position of each value in them; returns how many they are.
i64 presage_distinct_positions(const i64* values, i64 count, i64* distinct, i32* positions) {
  return distinct_values.find(values, count, distinct, positions);
}

// Makes the look-ups of all tables of a step: `TableLookup` of lookup.py, table after table in each array. `bags` has the
// features of each table in turn; `sizes` gets the number of rows and the longest bag of each table. Weights of `width` bytes
// are copied in the order of the look-ups, and of the readers; there are none if `width` is 0.
void presage_table_lookups(const i64* values, const i64* offsets, const Bags* bags, const i64* features_per_table,
                           i64 num_tables, i64* rows, i32* positions, i32* bag_offsets, i32* readers, i32* reader_offsets,
                           i64* sizes, i64 width, const uint8_t* weights, uint8_t* own_weights, uint8_t* reader_weights) {
  std::vector<i64> of_table;
  std::vector<i32> next;
  for (i64 t = 0; t < num_tables; bags += features_per_table[t++]) {
    const Bags* end_of_table = bags + features_per_table[t];
    of_table.clear();
    i64 longest = 0;
    *bag_offsets++ = 0;
    for (const Bags* b = bags; b < end_of_table; b++) {
      const i64* own = offsets + b->first;
      const i64 before = static_cast<i64>(of_table.size()) - own[0];
      of_table.insert(of_table.end(), values + own[0], values + own[b->count]);
      for (i64 i = 0; i < b->count; i++) {
        longest = std::max(longest, own[i + 1] - own[i]);
        *bag_offsets++ = static_cast<i32>(before + own[i + 1]);
      }
    }
    const i64 count = of_table.size(), num_rows = distinct_values.find(of_table.data(), count, rows, positions);
    count_rows(positions, count, num_rows, reader_offsets);
    next.assign(reader_offsets, reader_offsets + num_rows);
    for (const Bags* b = bags; b < end_of_table; b++) {
      const i64* own = offsets + b->first;
      const uint8_t* weight = weights + own[0] * width;
      i32 vector = static_cast<i32>(b->first_vector);
      for (i64 i = 0; i < b->count; i++, vector += static_cast<i32>(b->stride))
        for (i64 length = own[i + 1] - own[i]; length > 0; length--) {
          const i32 place = next[*positions++]++;
          readers[place] = vector;
          if (!width) continue;
          std::memcpy(own_weights, weight, width);
          std::memcpy(reader_weights + place * width, weight, width);
          own_weights += width;
          weight += width;
        }
    }
    sizes[2 * t] = num_rows;
    sizes[2 * t + 1] = longest;
    rows += num_rows;
    readers += count;
    reader_offsets += num_rows + 1;
    reader_weights += count * width;
  }
}

// Chooses the groups whose tuples together are the shared rows of a batch, in the order of choice; writes the row of each
// sample, the samples sorted by row, and the offsets of each row; returns the number of groups. `width` is of one number in
// `dense`, which has `num_dense` for each sample.
i64 presage_shared_rows(const Group* groups, i64 num_groups, i64 num_features, i64 num_samples, const void* dense,
                        i64 num_dense, i64 width, i64* members, i64* shares_dense, i64* row_of, i32* order, i32* offsets) {
  const auto search = [&](auto is_equal) {
    return shared_rows(groups, num_groups, num_features, num_samples, is_equal, members, shares_dense, row_of, order,
                       offsets);
  };
  return width == 4 ? search(equal_dense(static_cast<const float*>(dense), num_dense))
                    : search(equal_dense(static_cast<const double*>(dense), num_dense));
}

}  // extern "C"
