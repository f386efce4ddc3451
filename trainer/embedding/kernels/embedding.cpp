// Pooled look-ups of all tables, and their backward with the row update in the same pass.
//
// Vectors are numbered as by VectorLayout of trainer/data/lookup.py: those below num_outputs are
// the output, (num_samples * num_features, dim) with one row of features per sample; the others
// are in a second block, one per bag of a deduplicated feature. See
// docs/decisions/0054-embedding-kernels.md.

#include "rows.h"
#include "rules.h"
#include "tensors.h"

#include <nanobind/stl/string.h>

namespace presage {

// The bags of one feature.
template <typename T>
struct Feature {
  const T* block;             // rows of its table with their state, among others
  int64_t width;              // of a row with its state
  const int32_t* rows;        // position of each distinct row in `block`, or null: in order
  const int32_t* positions;   // the distinct row of each look-up
  const int32_t* offsets;     // (num_bags + 1,) offsets of each bag in `positions`
  const T* weights;           // of each look-up, or null
  const int32_t* order;       // samples sorted by their bag, or null: one bag per sample
  const int32_t* samples;     // (num_bags + 1,) offsets of each bag's samples in `order`
  T* scales;                  // output, (num_bags * stride); null: sums instead of means
  int64_t stride;             // vectors from a bag to the next
  int64_t num_bags;
  int64_t column;             // of the output
};

// The rows of one table that a step reads, and their readers.
template <typename T>
struct Table {
  T* block;                       // rows with their state, among others
  int64_t width;                  // of a row with its state
  const int32_t* rows;            // position of each distinct row in `block`, or null: in order
  const int32_t* readers;         // vectors that read each distinct row
  const int32_t* reader_offsets;  // (num_rows + 1,)
  const T* weights;               // of each reader, or null
  const T* extra_gradient;        // (num_rows, dim), or null
  int64_t num_rows;
};

// The samples of each bag of one dedup group.
struct Group {
  const int32_t* order;
  const int32_t* samples;
  int64_t num_bags;
  int64_t column;        // of its first feature in the output
  int64_t num_features;
  int64_t first_vector;  // in the second block
};

constexpr int64_t kBlock = 16;  // bags that are pooled for all features of a group in turn

template <typename T, typename Dim>
void pool_bags(const Feature<T>& f, int64_t first, int64_t last, Dim dim, int64_t stride, T* out) {
  const int64_t end = f.offsets[f.num_bags], distance = rows_ahead<T>(dim);
  const auto row = [&](int64_t k) {
    const int64_t position = f.positions[k];
    return f.block + (f.rows ? int64_t(f.rows[position]) : position) * f.width;
  };
  const auto ahead = [&](int64_t k) {
    if (k + distance < end) fetch(row(k + distance), dim);
  };
  const auto weight = [&](int64_t k) { return f.weights[k]; };
  for (int64_t bag = first; bag < last; bag++) {
    const int64_t low = f.offsets[bag], high = f.offsets[bag + 1];
    const int64_t s = f.order ? f.samples[bag] : bag;
    const int64_t s_end = f.order ? f.samples[bag + 1] : bag + 1;
    const auto vector = [&](int64_t i) {
      return out + ((f.order ? f.order[i] : i) * stride + f.column) * dim;
    };
    const T scale = T(1) / T(std::max<int64_t>(high - low, 1));
    if (f.scales) f.scales[bag * f.stride] = scale;
    if (s == s_end) continue;
    T* sum = vector(s);
    if (f.weights)
      sum_rows<T>(row, weight, ahead, low, high, dim, sum);
    else
      sum_rows<T>(row, One{}, ahead, low, high, dim, sum);
    if (f.scales && high - low > 1)
      for (int64_t d = 0; d < dim; d++) sum[d] *= scale;
    for (int64_t i = s + 1; i < s_end; i++) std::memcpy(vector(i), sum, dim * sizeof(T));
  }
}

// Features of a group are side by side in the output and are pooled block by block, so that
// consecutive writes are close in memory.
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
    return (groups[g].samples[bag] + bag) * groups[g].num_features;
  };
  for_parts(num_groups, count, work, dim, threads, [&](int64_t s, int64_t first, int64_t last) {
    const Group& g = groups[s];
    const int64_t width = g.num_features * dim, end = g.samples[g.num_bags];
    const int64_t distance = rows_ahead<T>(width);
    const auto row = [&](int64_t k) {
      return gradient + (g.order[k] * stride + g.column) * dim;
    };
    const auto ahead = [&](int64_t k) {
      if (k + distance < end) fetch(row(k + distance), width);
    };
    for (int64_t bag = first; bag < last; bag++) {
      T* sum = out + g.first_vector * dim + bag * width;
      sum_rows<T>(row, One{}, ahead, g.samples[bag], g.samples[bag + 1], width, sum);
    }
  });
}

// The gradients of all vectors.
template <typename T>
struct Gradients {
  const T* outputs;  // vectors below num_outputs: num_features of each sample
  const T* bags;     // the others
  int64_t num_outputs;
  int64_t num_features;
  int64_t stride;   // vectors from a sample to the next in `outputs`
  const T* scales;  // of each vector, or null
  int64_t dim;

  template <typename Dim>
  const T* of(int64_t vector, Dim dim) const {
    if (vector >= num_outputs) return bags + (vector - num_outputs) * dim;
    if (stride == num_features) return outputs + vector * dim;
    const uint32_t at = uint32_t(vector), count = uint32_t(num_features);  // indices have 32 bits
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
  const auto weight = [&](int64_t k) { return t.weights[k]; };
  const auto both = [&](int64_t k) { return t.weights[k] * gradients.scales[t.readers[k]]; };
  if (t.weights && gradients.scales)
    sum_rows<T>(row, both, ahead, first, last, dim, sum);
  else if (t.weights)
    sum_rows<T>(row, weight, ahead, first, last, dim, sum);
  else if (gradients.scales)
    sum_rows<T>(row, scale, ahead, first, last, dim, sum);
  else
    sum_rows<T>(row, One{}, ahead, first, last, dim, sum);
}

constexpr int64_t kChunk = 4096;  // readers of one row that one thread sums

// Rows with very many readers are summed in chunks, by several threads. Chunks have a fixed size
// and are added in order, so that bits do not depend on the number of threads.
template <typename T>
struct HotRows {
  struct Chunk {
    int64_t table, first, last;
  };
  std::vector<Chunk> chunks;
  std::vector<T> sums;
  std::vector<std::vector<std::pair<int64_t, int64_t>>> rows;  // of a table: row, its first chunk

  HotRows(const Table<T>* tables, int64_t num_tables, const Gradients<T>& gradients, int threads)
      : rows(num_tables) {
    for (int64_t s = 0; s < num_tables; s++) {
      const int32_t* offsets = tables[s].reader_offsets;
      for (int64_t u = 0; u < tables[s].num_rows; u++) {
        if (offsets[u + 1] - offsets[u] <= kChunk) continue;
        rows[s].emplace_back(u, chunks.size());
        for (int64_t k = offsets[u]; k < offsets[u + 1]; k += kChunk)
          chunks.push_back({s, k, std::min<int64_t>(k + kChunk, offsets[u + 1])});
      }
    }
    sums.resize(chunks.size() * gradients.dim);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (chunks.size() > 1)
    for (size_t p = 0; p < chunks.size(); p++)
      sum_readers(tables[chunks[p].table], gradients, chunks[p].first, chunks[p].last,
                  gradients.dim, sums.data() + p * gradients.dim);
  }

  void total(int64_t table, int64_t row, int64_t num_readers, int64_t dim, T* sum) const {
    const auto& hot = rows[table];
    const auto at = std::lower_bound(hot.begin(), hot.end(), std::pair(row, int64_t(0)));
    const T* chunk = sums.data() + at->second * dim;
    std::memcpy(sum, chunk, dim * sizeof(T));
    for (int64_t p = 1; p * kChunk < num_readers; p++)
      for (int64_t d = 0; d < dim; d++) sum[d] += chunk[p * dim + d];
  }
};

template <typename T, typename Dim>
void update(const Table<T>* tables, int64_t num_tables, const Gradients<T>& gradients, Dim dim,
            const Rule& rule, int threads) {
  const int64_t distance = rows_ahead<T>(dim);
  const HotRows<T> hot(tables, num_tables, gradients, threads);
  const auto count = [&](int64_t s) { return tables[s].num_rows; };
  const auto work = [&](int64_t s, int64_t u) {
    return int64_t(tables[s].reader_offsets[u]) + 2 * u;
  };
  for_parts(num_tables, count, work, dim, threads, [&](int64_t s, int64_t first, int64_t last) {
    const Table<T>& t = tables[s];
    std::vector<T> sum(dim);
    const auto row = [&](int64_t u) { return t.block + (t.rows ? int64_t(t.rows[u]) : u) * t.width; };
    for (int64_t u = first; u < last; u++) {
      if (t.rows && u + distance < last) fetch(row(u + distance), t.width);
      const int64_t low = t.reader_offsets[u], high = t.reader_offsets[u + 1];
      if (high - low > kChunk)
        hot.total(s, u, high - low, dim, sum.data());
      else
        sum_readers(t, gradients, low, high, dim, sum.data());
      if (t.extra_gradient)
        for (int64_t d = 0; d < dim; d++) sum[d] += t.extra_gradient[u * dim + d];
      apply(rule, row(u), row(u) + dim, sum.data(), dim);
    }
  });
}

// The union of two ascending lists of rows; for a row of both, the sum left + right.
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

// Offsets of bags: their number is returned. No offset is beyond `size` values.
inline int64_t count_bags(const Tensor<int32_t, 1>& offsets, int64_t size) {
  require(offsets.size() > 0, "offsets must have one entry more than there are bags, got none");
  require(offsets.data[offsets.size() - 1] <= size, "offsets must be within the values");
  return offsets.size() - 1;
}

template <typename T>
const T* data_of(const std::optional<Tensor<T, 1>>& tensor, int64_t size, const char* rule) {
  if (tensor) require(tensor->size() == size, rule);
  return tensor ? tensor->data : nullptr;
}

// In the order of `Feature`: rows and where they are, positions, offsets, weights, order and offsets of samples; then the first
// vector, the stride of vectors and the column of the output.
template <typename T>
using FeatureArguments =
    std::tuple<Tensor<T, 2>, std::optional<Tensor<int32_t, 1>>, Tensor<int32_t, 1>, Tensor<int32_t, 1>, std::optional<Tensor<T, 1>>,
               std::optional<Tensor<int32_t, 1>>, std::optional<Tensor<int32_t, 1>>, int64_t, int64_t, int64_t>;

template <typename T>
void pool_features(const std::vector<FeatureArguments<T>>& arguments, Tensor<T, 3> out, std::optional<Tensor<T, 1>> scales,
                   int threads) {
  const int64_t num_samples = out.shape[0], stride = out.shape[1], dim = out.shape[2];
  std::vector<Feature<T>> features;
  for (const auto& [block, rows, positions, offsets, weights, order, samples, first_vector, vector_stride, column] : arguments) {
    const int64_t num_bags = count_bags(offsets, positions.size());
    require(block.shape[1] >= dim, "rows must have the width of the output");
    require(0 <= column && column < stride, "columns must be of the output");
    require(order.has_value() == samples.has_value(), "samples must have both an order and offsets, or neither");
    if (order)
      require(count_bags(*samples, order->size()) == num_bags, "samples must have offsets of all bags");
    else
      require(num_bags <= num_samples, "bags without an order must be of samples");
    T* scale = nullptr;
    if (scales) {
      const int64_t last = first_vector + (num_bags - 1) * vector_stride;
      require(!num_bags || (0 <= first_vector && 0 < vector_stride && last < scales->size()), "scales must be of all vectors");
      scale = scales->data + first_vector;
    }
    features.push_back({block.data, block.shape[1], rows ? rows->data : nullptr, positions.data, offsets.data,
                        data_of(weights, positions.size(), "weights must be of all look-ups"), order ? order->data : nullptr,
                        samples ? samples->data : nullptr, scale, vector_stride, num_bags, column});
  }
  with_width(dim, [&](auto width) {
    pool(features.data(), int64_t(features.size()), width, num_samples, stride, out.data, threads);
  });
}

// In the order of `Group`, without the number of bags.
using GroupArguments = std::tuple<Tensor<int32_t, 1>, Tensor<int32_t, 1>, int64_t, int64_t, int64_t>;

template <typename T>
void sum_groups(const std::vector<GroupArguments>& arguments, Tensor<T, 3> gradient, Tensor<T, 2> out, int threads) {
  const int64_t stride = gradient.shape[1], dim = gradient.shape[2];
  require(out.shape[1] == dim, "sums must have the width of the gradient");
  std::vector<Group> groups;
  for (const auto& [order, samples, column, num_features, first_vector] : arguments) {
    const int64_t num_bags = count_bags(samples, order.size());
    require(0 <= column && 0 < num_features && column + num_features <= stride, "columns must be of the gradient");
    require(0 <= first_vector && first_vector + num_bags * num_features <= out.size(), "vectors must be of the sums");
    groups.push_back({order.data, samples.data, num_bags, column, num_features, first_vector});
  }
  segment_sum(groups.data(), int64_t(groups.size()), dim, stride, gradient.data, out.data, threads);
}

// In the order of `Table`, without the number of rows.
template <typename T>
using TableArguments =
    std::tuple<Tensor<T, 2>, std::optional<Tensor<int32_t, 1>>, Tensor<int32_t, 1>, Tensor<int32_t, 1>, std::optional<Tensor<T, 1>>,
               std::optional<Tensor<T, 2>>>;
// The gradients of the output, how many vectors of a sample it has, those of bags, and the scales of all.
template <typename T>
using GradientArguments = std::tuple<Tensor<T, 3>, int64_t, Tensor<T, 2>, std::optional<Tensor<T, 1>>>;
// Its name, the learning rate, eps and both betas.
using RuleArguments = std::tuple<std::string, double, double, double, double>;

template <typename T>
void update_tables(const std::vector<TableArguments<T>>& arguments, const GradientArguments<T>& gradient_arguments,
                   const RuleArguments& rule_arguments, int threads) {
  const auto& [name, learning_rate, eps, beta1, beta2] = rule_arguments;
  const Rule rule{kind_of(name), learning_rate, eps, beta1, beta2};
  const auto& [outputs, num_features, bags, scales] = gradient_arguments;
  const int64_t num_samples = outputs.shape[0], stride = outputs.shape[1], dim = outputs.shape[2];
  require(bags.shape[1] == dim, "gradients must have one width");
  const int64_t num_outputs = num_samples * num_features, state = state_width(rule, dim);
  const T* scale = data_of(scales, num_outputs + bags.size(), "scales must be of all vectors");
  const Gradients<T> gradients{outputs.data, bags.data, num_outputs, num_features, stride, scale, dim};
  std::vector<Table<T>> tables;
  for (const auto& [block, rows, readers, offsets, weights, extra] : arguments) {
    const int64_t num_rows = count_bags(offsets, readers.size());
    require(block.shape[1] >= dim, "rows must have the width of the gradients");
    require(!state || block.shape[1] == dim + state, "rows must have the state of the rule");
    require(rows ? rows->size() == num_rows : num_rows <= block.size(), "positions must be of all rows");
    require(!extra || (extra->size() == num_rows && extra->shape[1] == dim), "extra gradients must be of all rows");
    tables.push_back({block.data, block.shape[1], rows ? rows->data : nullptr, readers.data, offsets.data,
                      data_of(weights, readers.size(), "weights must be of all readers"), extra ? extra->data : nullptr, num_rows});
  }
  with_width(dim, [&](auto width) {
    update(tables.data(), int64_t(tables.size()), gradients, width, rule, threads);
  });
}

template <typename T>
int64_t merge_sums(Tensor<int32_t, 1> left, Tensor<T, 2> left_sums, Tensor<int32_t, 1> right, Tensor<T, 2> right_sums,
                   Tensor<int32_t, 1> rows, Tensor<T, 2> sums) {
  const int64_t dim = sums.shape[1], most = left.size() + right.size();
  require(left.size() == left_sums.size() && right.size() == right_sums.size(), "rows must have sums");
  require(left_sums.shape[1] == dim && right_sums.shape[1] == dim, "sums must have one width");
  require(rows.size() == most && sums.size() == most, "the union must have room for all rows");
  return merge(left.data, left_sums.data, left.size(), right.data, right_sums.data, right.size(), dim, rows.data, sums.data);
}

template <typename T>
void define(nb::module_& m) {
  m.def("pool", pool_features<T>, nb::arg("features"), nb::arg("out"), nb::arg("scales").none(), nb::arg("threads"), Unlocked());
  m.def("segment_sum", sum_groups<T>, nb::arg("groups"), nb::arg("gradient"), nb::arg("out"), nb::arg("threads"), Unlocked());
  m.def("update", update_tables<T>, nb::arg("tables"), nb::arg("gradients"), nb::arg("rule"), nb::arg("threads"), Unlocked());
  m.def("merge", merge_sums<T>, nb::arg("left"), nb::arg("left_sums"), nb::arg("right"), nb::arg("right_sums"), nb::arg("rows"),
        nb::arg("sums"), Unlocked());
}

}  // namespace presage

NB_MODULE(embedding, m) {
  presage::define<float>(m);
  presage::define<double>(m);
}
