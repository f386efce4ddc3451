// Pooled look-ups of all tables, and their backward with the row update in the same pass.
//
// A place is where a bag's vector lies: places below num_outputs in the output, (num_samples *
// num_features, dim) with one row of features per sample, the others in a second block, one
// place per bag of a deduplicated feature. See README.md.

#include "rows.h"
#include "rules.h"
#include "transpose.h"

namespace presage {

// Mirrors `_FEATURE` of compiled.py.
template <typename T>
struct Feature {
  const T* weight;            // rows of its table, with others between them
  const int32_t* rows;        // where each distinct row lies in `weight`, or null: in order
  const int32_t* positions;   // the row of each look-up
  const int32_t* offsets;     // (num_bags + 1,) where each bag's look-ups lie in `positions`
  const T* factors;           // of each look-up, or null
  const int32_t* order;       // samples sorted by their bag, or null: one bag per sample
  const int32_t* samples;     // (num_bags + 1,) where each bag's samples lie in `order`
  T* scales;                  // (num_bags * step) of each bag, written; null: sums, not means
  int64_t step;               // places from a bag to the next
  int64_t num_bags;
  int64_t column;             // of the output
};

// Mirrors `_TABLE` of compiled.py.
template <typename T>
struct Table {
  T* values;
  T* state;
  const int32_t* rows;            // the row of each distinct one in `values`, or null: its own
  const int32_t* readers;         // places that read each distinct row
  const int32_t* reader_offsets;  // (num_rows + 1,)
  const T* factors;               // of each reader, or null
  const T* more;                  // (num_rows, dim) added to the gradient, or null
  int64_t num_rows;
};

// Mirrors `_GROUP` of compiled.py.
struct Group {
  const int32_t* order;
  const int32_t* samples;
  int64_t num_bags;
  int64_t column;  // first of its features in the output
  int64_t width;   // its features
  int64_t place;   // first of its places in the second block
};

constexpr int64_t kBlock = 16;  // bags of all features of a group that are pooled together

template <typename T, typename Dim>
void pool_bags(const Feature<T>& f, int64_t first, int64_t last, Dim dim, int64_t stride, T* out) {
  const int64_t end = f.offsets[f.num_bags], distance = rows_ahead<T>(dim);
  const auto row = [&](int64_t k) {
    const int64_t position = f.positions[k];
    return f.weight + (f.rows ? int64_t(f.rows[position]) : position) * dim;
  };
  const auto ahead = [&](int64_t k) {
    if (k + distance < end) fetch(row(k + distance), dim);
  };
  const auto factor = [&](int64_t k) { return f.factors[k]; };
  for (int64_t bag = first; bag < last; bag++) {
    const int64_t low = f.offsets[bag], high = f.offsets[bag + 1];
    const int64_t s = f.order ? f.samples[bag] : bag;
    const int64_t s_end = f.order ? f.samples[bag + 1] : bag + 1;
    const auto vector = [&](int64_t i) {
      return out + ((f.order ? f.order[i] : i) * stride + f.column) * dim;
    };
    const T scale = T(1) / T(std::max<int64_t>(high - low, 1));
    if (f.scales) f.scales[bag * f.step] = scale;
    if (s == s_end) continue;
    T* mine = vector(s);
    if (f.factors)
      sum_rows<T>(row, factor, ahead, low, high, dim, mine);
    else
      sum_rows<T>(row, One{}, ahead, low, high, dim, mine);
    if (f.scales && high - low > 1)
      for (int64_t d = 0; d < dim; d++) mine[d] *= scale;
    for (int64_t i = s + 1; i < s_end; i++) std::memcpy(vector(i), mine, dim * sizeof(T));
  }
}

// Features of a group lie side by side in the output and are pooled block by block, so that what
// is written together lies together.
template <typename T, typename Dim>
void pool(const Feature<T>* features, int64_t num_features, Dim dim, int64_t num_samples,
          int64_t stride, T* out, int threads) {
  std::vector<int64_t> begin;  // first feature of each group, and the end
  for (int64_t f = 0; f < num_features; f++)
    if (f == 0 || features[f].order != features[f - 1].order) begin.push_back(f);
  begin.push_back(num_features);
  const auto count = [&](int64_t g) { return features[begin[g]].num_bags; };
  const auto work = [&](int64_t g, int64_t bag) {
    int64_t sum = 0;
    for (int64_t f = begin[g]; f < begin[g + 1]; f++) {
      const Feature<T>& feature = features[f];
      const int64_t written = feature.order ? feature.samples[bag] : bag;
      sum += int64_t(feature.offsets[bag] - feature.offsets[0]) + bag + written;
    }
    return sum;
  };
  const int64_t num_groups = int64_t(begin.size()) - 1;
  large_pages(out, num_samples * stride * dim * int64_t(sizeof(T)));
  for_parts(num_groups, count, work, dim, threads, [&](int64_t g, int64_t first, int64_t last) {
    for (int64_t bag = first; bag < last; bag += kBlock)
      for (int64_t f = begin[g]; f < begin[g + 1]; f++)
        pool_bags(features[f], bag, std::min(bag + kBlock, last), dim, stride, out);
  });
}

// The gradient of each bag of a group: the sum over its samples, in sample order.
template <typename T>
void segment_sum(const Group* groups, int64_t num_groups, int64_t dim, int64_t stride,
              const T* gradient, T* out, int threads) {
  const auto count = [&](int64_t g) { return groups[g].num_bags; };
  const auto work = [&](int64_t g, int64_t bag) {
    return (groups[g].samples[bag] + bag) * groups[g].width;
  };
  for_parts(num_groups, count, work, dim, threads, [&](int64_t s, int64_t first, int64_t last) {
    const Group& g = groups[s];
    const int64_t width = g.width * dim, end = g.samples[g.num_bags];
    const int64_t distance = rows_ahead<T>(width);
    const auto row = [&](int64_t k) {
      return gradient + (g.order[k] * stride + g.column) * dim;
    };
    const auto ahead = [&](int64_t k) {
      if (k + distance < end) fetch(row(k + distance), width);
    };
    for (int64_t bag = first; bag < last; bag++) {
      T* mine = out + g.place * dim + bag * width;
      sum_rows<T>(row, One{}, ahead, g.samples[bag], g.samples[bag + 1], width, mine);
    }
  });
}

// Where the gradients of places lie.
template <typename T>
struct Gradients {
  const T* outputs;  // places below num_outputs: num_features of each sample
  const T* bags;     // the others
  int64_t num_outputs;
  int64_t num_features;
  int64_t stride;   // vectors from a sample to the next in `outputs`
  const T* scales;  // of each place, or null
  int64_t dim;

  template <typename Dim>
  const T* of(int64_t place, Dim dim) const {
    if (place >= num_outputs) return bags + (place - num_outputs) * dim;
    if (stride == num_features) return outputs + place * dim;
    const uint32_t at = uint32_t(place), count = uint32_t(num_features);  // places have 32 bits
    return outputs + (int64_t(at / count) * stride + at % count) * dim;
  }
};

template <typename T, typename Dim>
__attribute__((always_inline)) inline void sum_readers(const Table<T>& t,
                                                       const Gradients<T>& gradients,
                                                       int64_t first, int64_t last, Dim dim,
                                                       T* sum) {
  const int64_t end = t.reader_offsets[t.num_rows], distance = rows_ahead<T>(dim);
  const auto row = [&](int64_t k) { return gradients.of(t.readers[k], dim); };
  const auto ahead = [&](int64_t k) {
    if (k + distance < end) fetch(row(k + distance), dim);
  };
  const auto scale = [&](int64_t k) { return gradients.scales[t.readers[k]]; };
  const auto factor = [&](int64_t k) { return t.factors[k]; };
  const auto both = [&](int64_t k) { return t.factors[k] * gradients.scales[t.readers[k]]; };
  if (t.factors && gradients.scales)
    sum_rows<T>(row, both, ahead, first, last, dim, sum);
  else if (t.factors)
    sum_rows<T>(row, factor, ahead, first, last, dim, sum);
  else if (gradients.scales)
    sum_rows<T>(row, scale, ahead, first, last, dim, sum);
  else
    sum_rows<T>(row, One{}, ahead, first, last, dim, sum);
}

constexpr int64_t kPiece = 4096;  // readers of one row that one thread sums

// Rows that very many places read: their sums are made of pieces, so that threads share them.
// Pieces are cut by number alone and added in order: bits do not depend on threads.
template <typename T>
struct Hot {
  struct Piece {
    int64_t table, first, last;
  };
  std::vector<Piece> pieces;
  std::vector<T> sums;
  std::vector<std::vector<std::pair<int64_t, int64_t>>> rows;  // of a table: row, its first piece

  Hot(const Table<T>* tables, int64_t num_tables, const Gradients<T>& gradients, int threads)
      : rows(num_tables) {
    for (int64_t s = 0; s < num_tables; s++) {
      const int32_t* offsets = tables[s].reader_offsets;
      for (int64_t u = 0; u < tables[s].num_rows; u++) {
        if (offsets[u + 1] - offsets[u] <= kPiece) continue;
        rows[s].emplace_back(u, pieces.size());
        for (int64_t k = offsets[u]; k < offsets[u + 1]; k += kPiece)
          pieces.push_back({s, k, std::min<int64_t>(k + kPiece, offsets[u + 1])});
      }
    }
    sums.resize(pieces.size() * gradients.dim);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (pieces.size() > 1)
    for (size_t p = 0; p < pieces.size(); p++)
      sum_readers(tables[pieces[p].table], gradients, pieces[p].first, pieces[p].last,
                  gradients.dim, sums.data() + p * gradients.dim);
  }

  void total(int64_t table, int64_t row, int64_t num_readers, int64_t dim, T* sum) const {
    const auto& found = rows[table];
    const auto at = std::lower_bound(found.begin(), found.end(), std::pair(row, int64_t(0)));
    const T* piece = sums.data() + at->second * dim;
    std::memcpy(sum, piece, dim * sizeof(T));
    for (int64_t p = 1; p * kPiece < num_readers; p++)
      for (int64_t d = 0; d < dim; d++) sum[d] += piece[p * dim + d];
  }
};

template <typename T, typename Dim>
void update(const Table<T>* tables, int64_t num_tables, const Gradients<T>& gradients, Dim dim,
            const Rule& rule, int threads) {
  const int64_t width = state_width(rule, dim), distance = rows_ahead<T>(dim);
  const Hot<T> hot(tables, num_tables, gradients, threads);
  const auto count = [&](int64_t s) { return tables[s].num_rows; };
  const auto work = [&](int64_t s, int64_t u) {
    return int64_t(tables[s].reader_offsets[u]) + 2 * u;
  };
  for_parts(num_tables, count, work, dim, threads, [&](int64_t s, int64_t first, int64_t last) {
    const Table<T>& t = tables[s];
    std::vector<T> sum(dim);
    const auto place = [&](int64_t u) { return t.rows ? int64_t(t.rows[u]) : u; };
    for (int64_t u = first; u < last; u++) {
      if (t.rows && u + distance < last) {
        const int64_t next = place(u + distance);
        fetch(t.values + next * dim, dim);
        fetch(t.state + next * width, width);
      }
      const int64_t low = t.reader_offsets[u], high = t.reader_offsets[u + 1];
      if (high - low > kPiece)
        hot.total(s, u, high - low, dim, sum.data());
      else
        sum_readers(t, gradients, low, high, dim, sum.data());
      if (t.more)
        for (int64_t d = 0; d < dim; d++) sum[d] += t.more[u * dim + d];
      apply(rule, t.values + place(u) * dim, t.state + place(u) * width, sum.data(), dim);
    }
  });
}

// The sums of the rows of either of two lists, both ascending; left plus right where both have one.
template <typename T>
int64_t merge(const int32_t* left, const T* left_sums, int64_t num_left, const int32_t* right,
              const T* right_sums, int64_t num_right, int64_t dim, int32_t* rows, T* sums) {
  int64_t l = 0, r = 0, n = 0;
  for (; l < num_left && r < num_right; n++) {
    const int32_t row = std::min(left[l], right[r]);
    T* __restrict out = sums + n * dim;
    rows[n] = row;
    if (left[l] != row) {
      std::memcpy(out, right_sums + r++ * dim, dim * sizeof(T));
    } else if (right[r] != row) {
      std::memcpy(out, left_sums + l++ * dim, dim * sizeof(T));
    } else {
      const T *a = left_sums + l++ * dim, *b = right_sums + r++ * dim;
      for (int64_t d = 0; d < dim; d++) out[d] = a[d] + b[d];
    }
  }
  const auto rest = [&](const int32_t* from, const T* from_sums, int64_t first, int64_t count) {
    std::memcpy(rows + n, from + first, (count - first) * sizeof(int32_t));
    std::memcpy(sums + n * dim, from_sums + first * dim, (count - first) * dim * sizeof(T));
    n += count - first;
  };
  rest(left, left_sums, l, num_left);
  rest(right, right_sums, r, num_right);
  return n;
}

}  // namespace presage

using namespace presage;

#define PRESAGE_ENTRIES(T, suffix)                                                              \
  extern "C" void presage_pool_##suffix(const void* features, int64_t num_features, int64_t dim, \
                                        int64_t num_samples, int64_t stride, void* out,          \
                                        int64_t threads) {                                       \
    with_width(dim, [&](auto width) {                                                           \
      pool(static_cast<const Feature<T>*>(features), num_features, width, num_samples, stride,  \
           static_cast<T*>(out), int(threads));                                                 \
    });                                                                                         \
  }                                                                                             \
  extern "C" void presage_segment_sum_##suffix(const void* groups, int64_t num_groups, int64_t dim, \
                                            int64_t stride, const void* gradient, void* out,     \
                                            int64_t threads) {                                   \
    segment_sum(static_cast<const Group*>(groups), num_groups, dim, stride,                        \
             static_cast<const T*>(gradient), static_cast<T*>(out), int(threads));              \
  }                                                                                             \
  extern "C" void presage_update_##suffix(const void* tables, int64_t num_tables,               \
                                          const void* outputs, const void* bags,                \
                                          int64_t num_outputs, int64_t num_features,            \
                                          int64_t stride, const void* scales, int64_t dim,      \
                                          const void* rule, int64_t threads) {                  \
    const Gradients<T> gradients{static_cast<const T*>(outputs), static_cast<const T*>(bags),   \
                                 num_outputs,  num_features, stride,                            \
                                 static_cast<const T*>(scales),  dim};                          \
    with_width(dim, [&](auto width) {                                                           \
      update(static_cast<const Table<T>*>(tables), num_tables, gradients, width,                \
             *static_cast<const Rule*>(rule), int(threads));                                    \
    });                                                                                         \
  }                                                                                             \
  extern "C" int64_t presage_merge_##suffix(const int32_t* left, const void* left_sums,         \
                                            int64_t num_left, const int32_t* right,             \
                                            const void* right_sums, int64_t num_right,          \
                                            int64_t dim, int32_t* rows, void* sums) {           \
    return merge(left, static_cast<const T*>(left_sums), num_left, right,                       \
                 static_cast<const T*>(right_sums), num_right, dim, rows,                       \
                 static_cast<T*>(sums));                                                        \
  }

PRESAGE_ENTRIES(float, float32)
PRESAGE_ENTRIES(double, float64)

extern "C" int64_t presage_transpose(const int64_t* values, int64_t count, int64_t value_bits,
                                     int64_t place_bits, int64_t* distinct, int32_t* positions,
                                     int32_t* order, int32_t* offsets, uint64_t* words) {
  return transpose(values, count, value_bits, place_bits, distinct, positions, order, offsets,
                   words);
}
