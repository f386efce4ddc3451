// Kernels that make a batch: lists of decoded row groups, look-ups of all tables, features that samples share.
// `batch.pyi` says what each function returns.
#include <algorithm>
#include <numeric>

#include "../../schemas/kernels/common.h"

namespace {

// Lists that are ranges of one array.
struct Lists {
  Numbers values;
  Flat<const i64> starts, ends;

  i64 length(i64 i) const { return ends[i] - starts[i]; }
  bool are_consecutive() const { return ends.data == starts.data + 1; }  // offsets
};

// The lists of all features in one row group, and the weights of their values. Holds the arrays.
class ListColumns {
 public:
  ListColumns(nb::list bags, nb::list weights) : arrays_(nb::make_tuple(bags, weights)) {
    require(bags.size() == weights.size(), "weights must be of all features, or None");
    for (size_t f = 0; f < bags.size(); f++) {
      const Lists of_bags = lists_of(bags[f]);
      of_values_.push_back(of_bags);
      typed(of_bags.values, [](const auto*) {});  // raises
      weights_.emplace_back();
      if (weights[f].is_none()) continue;
      weights_[f] = lists_of(weights[f]);
      require(weights_[f]->starts.size == of_bags.starts.size, "weights must be of all lists");
      for (i64 i = 0; i < of_bags.starts.size; i++)
        require(weights_[f]->length(i) == of_bags.length(i), "weights must be of all values");
    }
  }

  i64 num_features() const { return of_values_.size(); }
  const Lists& values(i64 feature) const { return of_values_[feature]; }
  const std::optional<Lists>& weights(i64 feature) const { return weights_[feature]; }

 private:
  static Lists lists_of(nb::handle arrays) {
    const auto [values, starts, ends] =
        nb::cast<std::tuple<Numbers, Flat<const i64>, Flat<const i64>>>(arrays, false);
    require(starts.size == ends.size, "starts and ends must be equally many");
    bool inside = true;
    for (i64 i = 0; i < starts.size; i++) inside &= 0 <= starts[i] && starts[i] <= ends[i] && ends[i] <= values.size;
    require(inside, "lists must be within the values");
    return {values, starts, ends};
  }

  nb::object arrays_;
  std::vector<Lists> of_values_;
  std::vector<std::optional<Lists>> weights_;
};

// The lists of a feature that a batch has of a row group: `first` to `last`, or those that `indices` name there.
struct Chosen {
  const ListColumns* columns;
  Flat<const i64> indices;  // empty: all in order
  i64 first, last;

  i64 at(i64 i) const { return indices.data ? indices[i] : i; }

  template <class Copy>
  void copy(const Lists& lists, Copy copy) const {
    if (!indices.data && lists.are_consecutive()) {
      if (first < last) copy(lists.starts[first], lists.ends[last - 1]);
      return;
    }
    for (i64 i = first; i < last; i++) copy(lists.starts[at(i)], lists.ends[at(i)]);
  }
};

inline uint8_t* copy_bytes(uint8_t* to, const uint8_t* from, i64 size) {
  if (size) std::memcpy(to, from, size);
  return to + size;
}

// Of a row group: its lists; by owner the indices of lists, or none; by owner the first and the last list, or index.
using RangeOfColumns = std::tuple<const ListColumns*, std::vector<std::optional<Flat<const i64>>>, Flat<const i64>>;

// Returns the lengths, offsets and values of the lists of all features, feature after feature, and their weights, of
// `weight_bits` each (0: none). A weight that a row group does not have is 1.
std::tuple<Array<i64>, Array<i64>, Array<i64>, NumberArray> concat_lists(const std::vector<RangeOfColumns>& ranges,
                                                                      Flat<const i64> owner_of, int weight_bits) {
  require(weight_bits == 0 || weight_bits == 32 || weight_bits == 64, "weights must have 0, 32 or 64 bits");
  std::vector<std::vector<Chosen>> features(owner_of.size);
  i64 num_lists = 0;
  for (i64 f = 0; f < owner_of.size; f++)
    for (const auto& [columns, indices_of, rows] : ranges) {
      const i64 owner = owner_of[f];
      require(f < columns->num_features(), "row groups must have all features");
      require(0 <= owner && owner < static_cast<i64>(indices_of.size()) && rows.size == 2 * static_cast<i64>(indices_of.size()),
              "owners must be in range");
      const Chosen chosen{columns, indices_of[owner].value_or(Flat<const i64>{}), rows[2 * owner], rows[2 * owner + 1]};
      const i64 size = columns->values(f).starts.size;
      require(0 <= chosen.first && chosen.first <= chosen.last &&
                  chosen.last <= (chosen.indices.data ? chosen.indices.size : size),
              "lists must be in range");
      if (chosen.indices.data)
        require_rows(Flat<const i64>{chosen.indices.data + chosen.first, chosen.last - chosen.first}, size);
      features[f].push_back(chosen);
      num_lists += chosen.last - chosen.first;
    }
  Array<i64> lengths(num_lists), offsets(num_lists + 1);
  i64 total = offsets[0] = 0, at = 0;
  for (i64 f = 0; f < owner_of.size; f++)
    for (const Chosen& chosen : features[f]) {
      const Lists& lists = chosen.columns->values(f);
      for (i64 i = chosen.first; i < chosen.last; i++) {
        lengths[at] = lists.length(chosen.at(i));
        total += lengths[at++];
        offsets[at] = total;
      }
    }
  const nb::dlpack::dtype dtype = weight_bits == 32 ? nb::dtype<float>() : nb::dtype<double>();
  const i64 width = weight_bits / 8;
  Array<i64> values(total);
  NumberArray weights(weight_bits ? total : 0, dtype);
  i64* value = values.data();
  uint8_t* weight = weights.bytes();
  for (i64 f = 0; f < owner_of.size; f++)
    for (const Chosen& chosen : features[f]) {
      const Lists& lists = chosen.columns->values(f);
      const i64* before = value;
      typed(lists.values, [&](const auto* from) {
        chosen.copy(lists, [&](i64 start, i64 end) { value = std::copy(from + start, from + end, value); });
      });
      if (!weight_bits) continue;
      const i64 count = value - before;
      const auto& of_lists = chosen.columns->weights(f);
      if (of_lists) {
        require(of_lists->values.dtype == dtype, "weights must have the type of the batch");
        uint8_t* to = weight;
        chosen.copy(*of_lists, [&](i64 start, i64 end) {
          to = copy_bytes(to, of_lists->values.bytes() + start * width, (end - start) * width);
        });
      } else if (weight_bits == 32) {
        std::fill_n(reinterpret_cast<float*>(weight), count, 1.0f);
      } else {
        std::fill_n(reinterpret_cast<double*>(weight), count, 1.0);
      }
      weight += count * width;
    }
  return {std::move(lengths), std::move(offsets), std::move(values), std::move(weights)};
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
    i64 largest = 0;
    u64 all = 0;
    for (i64 i = 0; i < count; i++) {
      largest = std::max(largest, values[i]);
      all |= static_cast<u64>(values[i]);
    }
    require(all >> 63 == 0, "rows must not be negative");
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
  Flat<const i64> tuples;  // of each sample
  Flat<const i32> order, offsets;
  i64 num_features;

  i64 num_tuples() const { return offsets.size - 1; }
};

// The pairs of a row and a tuple of a group. Keeps the last row of each tuple, and the first sample of that pair.
class Pairs {
 public:
  Pairs(const Rows& rows, const Group& group)
      : rows_(rows), group_(group), row_(group.num_tuples(), -1), first_(group.num_tuples()) {}

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

// Indices of the groups in the order of choice, whether dense features are equal within each shared row; the row of each
// sample, the samples sorted by row, and the offsets of each row.
using SharedRows = std::tuple<std::vector<i64>, bool, Array<i64>, Array<i32>, Array<i32>>;

template <class Equal>
SharedRows search_groups(const std::vector<Group>& groups, i64 num_features, i64 num_samples, Equal is_equal) {
  Rows rows{1, std::vector<i32>(num_samples), {0, static_cast<i32>(num_samples)}};
  std::iota(rows.order.begin(), rows.order.end(), 0);
  i64 cost = num_products(0, num_features + 1, 0, num_samples), shared_features = 0;
  std::vector<i64> remaining(groups.size()), members;
  std::iota(remaining.begin(), remaining.end(), 0);
  bool shares_dense = false;
  Array<i64> row_of(num_samples);
  while (!remaining.empty()) {
    i64 best = -1;
    for (i64 g : remaining) {
      bool is_dense_shared;
      const i64 pairs = Pairs(rows, groups[g]).count(is_equal, is_dense_shared);
      const i64 num_rows = members.empty() ? groups[g].num_tuples() : pairs;
      const i64 num_shared = shared_features + groups[g].num_features + is_dense_shared;
      const i64 candidate = num_products(num_shared, num_features + 1 - num_shared, num_rows, num_samples);
      if (candidate >= cost) continue;
      cost = candidate;
      best = g;
      shares_dense = is_dense_shared;
    }
    if (best < 0) break;
    rows = paired(rows, groups[best], row_of.data());
    members.push_back(best);
    shared_features += groups[best].num_features;
    remaining.erase(std::find(remaining.begin(), remaining.end(), best));
  }
  Array<i32> order(num_samples), offsets(rows.offsets.size());
  std::copy(rows.order.begin(), rows.order.end(), order.data());
  std::copy(rows.offsets.begin(), rows.offsets.end(), offsets.data());
  return {std::move(members), shares_dense, std::move(row_of), std::move(order), std::move(offsets)};
}

// Chooses the groups whose tuples together are the shared rows of a batch. `dense` has equally many numbers of each sample.
SharedRows shared_rows(const std::vector<std::tuple<Flat<const i64>, Flat<const i32>, Flat<const i32>, i64>>& arguments,
                       i64 num_features, i64 num_samples, Numbers dense) {
  require(0 <= num_samples && num_samples <= std::numeric_limits<i32>::max(), "samples must be fewer than 2**31");
  require(num_samples ? dense.size % num_samples == 0 : !dense.size, "dense must have equally many numbers of each sample");
  std::vector<Group> groups;
  for (const auto& [tuples, order, offsets, own_features] : arguments) {
    require(tuples.size == num_samples && order.size == num_samples, "groups must have all samples");
    require(offsets.size > 0, "groups must have offsets");
    require_rows(tuples, offsets.size - 1);
    require_rows(order, num_samples);
    groups.push_back({tuples, order, offsets, own_features});
  }
  const i64 width = num_samples ? dense.size / num_samples : 0;
  if (dense.dtype == nb::dtype<float>())
    return search_groups(groups, num_features, num_samples, equal_dense(static_cast<const float*>(dense.data), width));
  require(dense.dtype == nb::dtype<double>(), "dense must be float32 or float64");
  return search_groups(groups, num_features, num_samples, equal_dense(static_cast<const double*>(dense.data), width));
}

// Returns the stable order of some rows, and the offsets of each row in it; none if a row is out of range.
std::optional<std::tuple<Array<i32>, Array<i32>>> invert(Flat<const i64> rows, i64 num_rows) {
  require(num_rows >= 0 && std::max(rows.size, num_rows) < std::numeric_limits<i32>::max(), "rows must be fewer than 2**31");
  for (i64 row : rows)
    if (row < 0 || row >= num_rows) return std::nullopt;
  Array<i32> order(rows.size), offsets(num_rows + 1);
  count_rows(rows.data, rows.size, num_rows, offsets.data());
  std::vector<i32> next(offsets.data(), offsets.data() + num_rows);
  for (i64 i = 0; i < rows.size; i++) order[next[rows[i]]++] = static_cast<i32>(i);
  return std::tuple(std::move(order), std::move(offsets));
}

// Returns the ascending distinct values and the position of each value in them.
std::tuple<Array<i64>, Array<i32>> distinct_positions(Flat<const i64> values) {
  Array<i64> distinct(values.size);
  Array<i32> positions(values.size);
  distinct.shrink(distinct_values.find(values.data, values.size, distinct.data(), positions.data()));
  return {std::move(distinct), std::move(positions)};
}

// Makes the look-ups of all tables of a step: `TableLookup` of lookup.py, table after table in each array. `bags` has the
// features of each table in turn. Returns the number of rows and the longest bag of each table, then rows, positions,
// offsets of bags, readers, offsets of readers; and weights, if any, in the order of the look-ups and of the readers.
auto table_lookups(Flat<const i64> values, Flat<const i64> offsets, std::optional<Numbers> weights, Flat<const i64> bags_of_tables,
                   Flat<const i64> features_of_tables) {
  require_offsets(offsets, values.size);
  require(!weights || weights->size == values.size, "weights must be of all values");
  const i64 num_tables = features_of_tables.size, num_features = bags_of_tables.size / 4;
  const Bags* bags = reinterpret_cast<const Bags*>(bags_of_tables.data);
  i64 features = 0, total = 0, total_bags = 0;
  for (i64 t = 0; t < num_tables; t++) {
    i64 of_table = 0;
    require(features_of_tables[t] >= 0, "features must be of all tables");
    for (i64 f = 0; f < features_of_tables[t]; f++, features++) {
      require(features < num_features, "bags must be of all features");
      const Bags& b = bags[features];
      require(b.first >= 0 && b.count >= 0 && b.first <= offsets.size - 1 - b.count, "bags must be in range");
      of_table += offsets[b.first + b.count] - offsets[b.first];
      total_bags += b.count;
    }
    require(of_table <= std::numeric_limits<i32>::max(), "look-ups of a table must be fewer than 2**31");
    total += of_table;
  }
  const nb::dlpack::dtype dtype = weights ? weights->dtype : nb::dtype<float>();
  const i64 width = weights ? weights->width() : 0, num_weights = weights ? total : 0;
  Array<i64> sizes(2 * num_tables), rows(total);
  Array<i32> positions(total), bag_offsets(total_bags + num_tables), readers(total), reader_offsets(total + num_tables);
  NumberArray own_weights(num_weights, dtype), reader_weights(num_weights, dtype);
  i64* row = rows.data();
  i32 *position = positions.data(), *bag_offset = bag_offsets.data(), *reader = readers.data(), *reader_offset = reader_offsets.data();
  uint8_t *own_weight = own_weights.bytes(), *reader_weight = reader_weights.bytes();
  std::vector<i64> of_table;
  std::vector<i32> next;
  for (i64 t = 0; t < num_tables; bags += features_of_tables[t++]) {
    const Bags* end_of_table = bags + features_of_tables[t];
    of_table.clear();
    i64 longest = 0;
    *bag_offset++ = 0;
    for (const Bags* b = bags; b < end_of_table; b++) {
      const i64* own = &offsets[b->first];
      const i64 before = static_cast<i64>(of_table.size()) - own[0];
      of_table.insert(of_table.end(), &values[own[0]], &values[own[b->count]]);
      for (i64 i = 0; i < b->count; i++) {
        longest = std::max(longest, own[i + 1] - own[i]);
        *bag_offset++ = static_cast<i32>(before + own[i + 1]);
      }
    }
    const i64 count = of_table.size(), num_rows = distinct_values.find(of_table.data(), count, row, position);
    count_rows(position, count, num_rows, reader_offset);
    next.assign(reader_offset, reader_offset + num_rows);
    for (const Bags* b = bags; b < end_of_table; b++) {
      const i64* own = &offsets[b->first];
      const uint8_t* weight = weights ? weights->bytes() + own[0] * width : nullptr;
      i32 vector = static_cast<i32>(b->first_vector);
      for (i64 i = 0; i < b->count; i++, vector += static_cast<i32>(b->stride))
        for (i64 length = own[i + 1] - own[i]; length > 0; length--) {
          const i32 place = next[*position++]++;
          reader[place] = vector;
          if (!weights) continue;
          std::memcpy(own_weight, weight, width);
          std::memcpy(reader_weight + place * width, weight, width);
          own_weight += width;
          weight += width;
        }
    }
    sizes[2 * t] = num_rows;
    sizes[2 * t + 1] = longest;
    row += num_rows;
    reader += count;
    reader_offset += num_rows + 1;
    reader_weight += count * width;
  }
  rows.shrink(row - rows.data());
  reader_offsets.shrink(reader_offset - reader_offsets.data());
  return std::tuple(std::move(sizes), std::move(rows), std::move(positions), std::move(bag_offsets), std::move(readers),
                    std::move(reader_offsets), std::move(own_weights), std::move(reader_weights));
}

}  // namespace

NB_MODULE(batch, m) {
  nb::set_leak_warnings(false);  // a process may end while threads or caches hold row groups
  nb::class_<ListColumns>(m, "ListColumns").def(nb::init<nb::list, nb::list>(), nb::arg("bags"), nb::arg("weights"));
  m.def("concat_lists", concat_lists, nb::arg("ranges"), nb::arg("owner_of"), nb::arg("weight_bits"), Unlocked());
  m.def("invert", invert, nb::arg("rows"), nb::arg("num_rows"), Unlocked());
  m.def("distinct_positions", distinct_positions, nb::arg("values"), Unlocked());
  m.def("table_lookups", table_lookups, nb::arg("values"), nb::arg("offsets"), nb::arg("weights").none(), nb::arg("bags"),
        nb::arg("features_of_tables"), Unlocked());
  m.def("shared_rows", shared_rows, nb::arg("groups"), nb::arg("num_features"), nb::arg("num_samples"), nb::arg("dense"),
        Unlocked());
}
