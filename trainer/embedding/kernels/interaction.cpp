// Dot products of the vectors of samples and of shared rows, and their backward.
//
// A row (what many samples share, say a user) has vectors x_0 .. x_{m-1}, a sample v_0 .. v_{k-1}.
// Outputs, of each row and of each sample:
//
//   row_out = [x_0 if the rows have a first vector, x_a . x_b for a < b]
//   own_out = [v_0 if the samples have a first vector, v_a . v_b for a < b, v_a . x_b for all a, b]
//
// All samples of a row are computed while its vectors are in the L1 cache. See
// docs/decisions/0051-shared-computation.md.

#include "rows.h"
#include "tensors.h"

namespace presage {

// The vectors of a row or of a sample: an optional first one, then a block.
template <typename T>
struct Vectors {
  T* first;       // (n, dim) or null
  T* rest;        // (n, num_rest, dim)
  T* out;         // (n, width), or its gradient
  int64_t num_rest;
  int64_t width;

  int64_t count() const { return num_rest + (first ? 1 : 0); }
  T* of(int64_t n, int64_t i, int64_t dim) const {
    if (!first) return rest + (n * num_rest + i) * dim;
    return i == 0 ? first + n * dim : rest + (n * num_rest + i - 1) * dim;
  }
};

// Samples `begin` to `end` of the order, all of one row: the unit of work of a thread.
struct Chunk {
  int64_t row, begin, end;
  int64_t partial;  // index of its partial sum of the row's gradient; -1 if the row has one chunk
};

constexpr int64_t kSamples = 256;  // of one chunk; fixed, so that bits do not depend on threads

struct Chunks {
  std::vector<Chunk> all;
  int64_t num_partial = 0;

  Chunks(const int32_t* offsets, int64_t num_rows) {
    for (int64_t r = 0; r < num_rows; r++) {
      const int64_t low = offsets[r], high = offsets[r + 1];
      const bool several = high - low > kSamples;
      for (int64_t b = low; b == low || b < high; b += kSamples)
        all.push_back({r, b, std::min(b + kSamples, high), several ? num_partial++ : -1});
    }
  }

  template <typename Body>
  void run(int threads, const Body& body) const {
    const int64_t count = int64_t(all.size());
    const int64_t total = all.empty() ? 0 : all.back().end + count;
    if (total < 64) threads = 1;
    const int64_t parts = std::min(count, threads == 1 ? 1 : threads * kParts);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (int64_t part = 0; part < parts; part++) {
      const auto work = [&](int64_t p) { return p == 0 ? 0 : all[p - 1].end + p; };
      const int64_t first = item_at(work, count, total * part / parts);
      const int64_t last = part == parts - 1 ? count : item_at(work, count, total * (part + 1) / parts);
      body(first, last);
    }
  }
};

template <typename T>
inline int64_t round_up(int64_t count) {
  return (count + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

template <typename T>
using Lanes = typename Vector<T>::type;

template <typename T>
inline Lanes<T> load(const T* from) {
  return *reinterpret_cast<const Lanes<T>*>(from);
}

template <typename T>
inline void store(T* to, Lanes<T> lanes) {
  *reinterpret_cast<Lanes<T>*>(to) = lanes;
}

// Transpose a square block: swap halves, then quarters, and so on.
template <typename T, int kHalf = kLanes<T> / 2>
inline void transpose_block(Lanes<T>* block) {
  constexpr int N = kLanes<T>;
  typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> Index;
  typedef Index Mask __attribute__((vector_size(64)));
  Mask low, high;
  for (int j = 0; j < N; j++) {
    low[j] = j & kHalf ? N + j - kHalf : j;
    high[j] = j & kHalf ? N + j : j + kHalf;
  }
  for (int i = 0; i < N; i++) {
    if (i & kHalf) continue;
    const Lanes<T> a = block[i], b = block[i + kHalf];
    block[i] = __builtin_shuffle(a, b, low);
    block[i + kHalf] = __builtin_shuffle(a, b, high);
  }
  if constexpr (kHalf > 1) transpose_block<T, kHalf / 2>(block);
}

// to[d * stride + i] = from[i][d], for whole blocks of vectors.
template <typename T, typename Dim>
inline void transpose(const T* const* from, int64_t count, Dim dim, int64_t stride, T* to) {
  constexpr int64_t N = kLanes<T>;
  for (int64_t i = 0; i < count; i += N) {
    int64_t d = 0;
    for (; d + N <= dim; d += N) {
      Lanes<T> block[N];
      for (int64_t r = 0; r < N; r++) block[r] = load(from[i + r] + d);
      transpose_block<T>(block);
      for (int64_t r = 0; r < N; r++) store(to + (d + r) * stride + i, block[r]);
    }
    for (; d < dim; d++)
      for (int64_t r = 0; r < N; r++) to[d * stride + i + r] = from[i + r][d];
  }
}

template <int kMost, typename Body>
inline void with_size(int64_t size, const Body& body) {
  if constexpr (kMost > 0) {
    if (size == kMost) return body(std::integral_constant<int, kMost>());
    with_size<kMost - 1>(size, body);
  }
}

// Run `body(first, size)` on ranges of 0..count of nearly equal compile-time size, at most kMost.
template <int kMost, typename Body>
inline void in_ranges(int64_t count, const Body& body) {
  const int64_t chunks = (count + kMost - 1) / kMost;
  for (int64_t p = 0, first = 0; p < chunks; p++) {
    const int64_t size = (count - first) / (chunks - p);
    with_size<kMost>(size, [&](auto known) { body(first, known); });
    first += size;
  }
}

// Copy in whole registers if these end before `end`; the excess is overwritten later. Reads beyond
// `count` accordingly.
template <typename T>
inline T* copy_over(const T* from, int64_t count, T* to, const T* end) {
  if (to + round_up<T>(count) > end) return std::copy_n(from, count, to);
  for (int64_t i = 0; i < count; i += kLanes<T>) store(to + i, load(from + i));
  return to + count;
}

// products[i * stride + c] = a[i] . (column c of transposed), NV blocks of columns, NA vectors.
template <typename T, int NA, int NV, typename Dim>
inline void multiply_block(const T* const* a, const T* transposed, int64_t stride, Dim dim,
                           T* products) {
  Lanes<T> sums[NA][NV] = {};
  for (int64_t d = 0; d < dim; d++) {
    Lanes<T> columns[NV];
    for (int v = 0; v < NV; v++) columns[v] = load(transposed + d * stride + v * kLanes<T>);
    for (int i = 0; i < NA; i++) {
      const T x = a[i][d];
      for (int v = 0; v < NV; v++) sums[i][v] += x * columns[v];
    }
  }
  for (int i = 0; i < NA; i++)
    for (int v = 0; v < NV; v++) store(products + i * stride + v * kLanes<T>, sums[i][v]);
}

// products (count, width) of `count` vectors with `width` transposed ones, whole blocks of these.
template <typename T, typename Dim>
inline void multiply(const T* const* a, int64_t count, const T* transposed, int64_t width,
                     int64_t stride, Dim dim, T* products) {
  const auto block = [&](auto nv, int64_t c) {
    constexpr int NV = decltype(nv)::value;
    in_ranges<7>(count, [&](int64_t i, auto na) {
      constexpr int NA = decltype(na)::value;
      multiply_block<T, NA, NV>(a + i, transposed + c, stride, dim, products + i * stride + c);
    });
  };
  int64_t c = 0;
  for (; c + 2 * kLanes<T> <= width; c += 2 * kLanes<T>)
    block(std::integral_constant<int, 2>(), c);
  if (c < width) block(std::integral_constant<int, 1>(), c);
}

// out[i] (+)= sum over j of coefficients[i * row + j * column] * vectors[j], NA outputs at once.
template <typename T, bool kAdd, int NA, typename Dim>
inline void combine_block(const T* const* vectors, int64_t count, const T* coefficients, int64_t row,
                          int64_t column, Dim dim, T* const* out) {
  constexpr int64_t lanes = kLanes<T>;
  int64_t d = 0;
  const auto block = [&](auto nv) {
    constexpr int NV = decltype(nv)::value;
    Lanes<T> sums[NA][NV];
    for (int i = 0; i < NA; i++)
      for (int v = 0; v < NV; v++) sums[i][v] = kAdd ? load(out[i] + d + v * lanes) : Lanes<T>{};
    for (int64_t j = 0; j < count; j++) {
      Lanes<T> vector[NV];
      for (int v = 0; v < NV; v++) vector[v] = load(vectors[j] + d + v * lanes);
      for (int i = 0; i < NA; i++) {
        const T x = coefficients[i * row + j * column];
        for (int v = 0; v < NV; v++) sums[i][v] += x * vector[v];
      }
    }
    for (int i = 0; i < NA; i++)
      for (int v = 0; v < NV; v++) store(out[i] + d + v * lanes, sums[i][v]);
    d += NV * lanes;
  };
  while (d + 4 * lanes <= dim) block(std::integral_constant<int, 4>());
  while (d + lanes <= dim) block(std::integral_constant<int, 1>());
  for (; d < dim; d++) {
    for (int i = 0; i < NA; i++) {
      T sum = kAdd ? out[i][d] : T(0);
      for (int64_t j = 0; j < count; j++) sum += coefficients[i * row + j * column] * vectors[j][d];
      out[i][d] = sum;
    }
  }
}

template <typename T, bool kAdd, typename Dim>
inline void combine(const T* const* vectors, int64_t count, const T* coefficients, int64_t row,
                    int64_t column, Dim dim, T* const* out, int64_t num_out) {
  in_ranges<6>(num_out, [&](int64_t i, auto na) {
    constexpr int NA = decltype(na)::value;
    combine_block<T, kAdd, NA>(vectors, count, coefficients + i * row, row, column, dim, out + i);
  });
}

template <typename T, typename Dim>
void interact(const Vectors<T>& rows, const Vectors<T>& own, int64_t num_rows, const int32_t* order,
              const int32_t* offsets, Dim dim, int threads) {
  const Chunks chunks(offsets, num_rows);
  const int64_t m = rows.count(), k = own.count();
  // Columns of the transposed block: a sample's vectors if it has pairs, then its row's.
  const int64_t columns = k > 1 ? round_up<T>(k) : 0, stride = columns + round_up<T>(m);
  chunks.run(threads, [&](int64_t first, int64_t last) {
    std::vector<T> transposed(dim * stride), products(std::max(m, k) * stride + kLanes<T>);
    std::vector<const T*> x(round_up<T>(m)), v(std::max(columns, k));
    int64_t held = -1;
    for (int64_t p = first; p < last; p++) {
      const Chunk& chunk = chunks.all[p];
      if (chunk.row != held) {
        held = chunk.row;
        for (int64_t i = 0; i < int64_t(x.size()); i++)
          x[i] = rows.of(held, std::min(i, m - 1), dim);
        transpose(x.data(), m, dim, stride, transposed.data() + columns);
      }
      if (chunk.begin == offsets[held]) {
        multiply(x.data(), m, transposed.data() + columns, stride - columns, stride, dim,
                 products.data());
        T* out = rows.out + held * rows.width;
        if (rows.first) out = std::copy_n(x[0], dim, out);
        for (int64_t i = 0; i < m; i++)
          out = std::copy(&products[i * stride + i + 1], &products[i * stride + m], out);
      }
      for (int64_t s = chunk.begin; s < chunk.end; s++) {
        const int64_t sample = order[s];
        if (s + 1 < chunk.end) fetch(own.of(order[s + 1], k - 1, dim) - (k - 2) * dim, (k - 1) * dim);
        for (int64_t i = 0; i < int64_t(v.size()); i++) v[i] = own.of(sample, std::min(i, k - 1), dim);
        if (columns > 0) transpose(v.data(), k, dim, stride, transposed.data());
        multiply(v.data(), k, transposed.data(), stride, stride, dim, products.data());
        T* out = own.out + sample * own.width;
        if (own.first) out = std::copy_n(v[0], dim, out);
        const T* end = own.out + (sample + 1) * own.width;
        for (int64_t i = 0; i + 1 < k; i++)
          out = copy_over(&products[i * stride + i + 1], k - i - 1, out, end);
        for (int64_t i = 0; i < k; i++)
          out = copy_over(&products[i * stride + columns], m, out, end);
      }
    }
  });
}

// The symmetric matrix of the gradients of pairs a < b, with a diagonal of 0.
template <typename T>
inline const T* both_ways(const T* pairs, int64_t count, int64_t stride, T* coefficients) {
  for (int64_t a = 0; a < count; a++) {
    coefficients[a * stride + a] = 0;
    for (int64_t b = a + 1; b < count; b++)
      coefficients[a * stride + b] = coefficients[b * stride + a] = *pairs++;
  }
  return pairs;
}

// `rows` and `own` hold vectors and the gradients of their outputs; `to_rows` and `to_own` (first
// and rest) receive the gradients of the vectors.
template <typename T, typename Dim>
void interact_back(const Vectors<T>& rows, const Vectors<T>& own, const Vectors<T>& to_rows,
                   const Vectors<T>& to_own, int64_t num_rows, const int32_t* order,
                   const int32_t* offsets, Dim dim, int threads) {
  const Chunks chunks(offsets, num_rows);
  const int64_t m = rows.count(), k = own.count(), stride = m + k;
  std::vector<T> partials(chunks.num_partial * m * dim);
  large_pages(to_own.rest, offsets[num_rows] * to_own.num_rest * dim * int64_t(sizeof(T)));
  chunks.run(threads, [&](int64_t first, int64_t last) {
    std::vector<T> coefficients(std::max(m, k) * stride);
    std::vector<const T*> vectors(stride);  // of the row, then of the sample
    std::vector<T*> sums(m), to(k);
    for (int64_t p = first; p < last; p++) {
      const Chunk& chunk = chunks.all[p];
      for (int64_t i = 0; i < m; i++) {
        vectors[i] = rows.of(chunk.row, i, dim);
        sums[i] = chunk.partial < 0 ? to_rows.of(chunk.row, i, dim)
                                    : partials.data() + (chunk.partial * m + i) * dim;
      }
      if (chunk.begin == offsets[chunk.row]) {
        const T* out = rows.out + chunk.row * rows.width;
        both_ways(out + (rows.first ? dim : 0), m, stride, coefficients.data());
        combine<T, false>(vectors.data(), m, coefficients.data(), stride, 1, dim, sums.data(), m);
        if (rows.first)
          for (int64_t d = 0; d < dim; d++) sums[0][d] += out[d];
      } else {
        for (int64_t i = 0; i < m; i++) std::fill_n(sums[i], dim, T(0));
      }
      for (int64_t s = chunk.begin; s < chunk.end; s++) {
        const int64_t sample = order[s];
        if (s + 1 < chunk.end) fetch(own.of(order[s + 1], 1, dim), (k - 1) * dim);
        const T* out = own.out + sample * own.width;
        const T* pairs = out + (own.first ? dim : 0);
        const T* crossed = both_ways(pairs, k, stride, coefficients.data() + m);
        for (int64_t i = 0; i < k; i++) {
          vectors[m + i] = own.of(sample, i, dim);
          to[i] = to_own.of(sample, i, dim);
          std::copy_n(crossed + i * m, m, &coefficients[i * stride]);
        }
        combine<T, false>(vectors.data(), stride, coefficients.data(), stride, 1, dim, to.data(), k);
        if (own.first)
          for (int64_t d = 0; d < dim; d++) to[0][d] += out[d];
        combine<T, true>(vectors.data() + m, k, coefficients.data(), 1, stride, dim, sums.data(), m);
      }
    }
  });
  for (const Chunk& chunk : chunks.all) {
    if (chunk.partial < 0) continue;
    const bool begins = chunk.begin == offsets[chunk.row];
    for (int64_t i = 0; i < m; i++) {
      const T* sum = partials.data() + (chunk.partial * m + i) * dim;
      T* to = to_rows.of(chunk.row, i, dim);
      for (int64_t d = 0; d < dim; d++) to[d] = begins ? sum[d] : to[d] + sum[d];
    }
  }
}

// The first vectors, if any, the others, and the outputs or their gradients.
template <typename T>
using VectorArguments = std::tuple<std::optional<Tensor<T, 2>>, Tensor<T, 3>, Tensor<T, 2>>;

template <typename T>
Vectors<T> vectors_of(const VectorArguments<T>& arguments) {
  const auto& [first, rest, out] = arguments;
  require(!first || (first->size() == rest.size() && first->shape[1] == rest.shape[2]), "vectors must have one width");
  require(out.size() == rest.size(), "outputs must be of all rows or samples");
  const Vectors<T> vectors{first ? first->data : nullptr, rest.data, out.data, rest.shape[1], out.shape[1]};
  require(vectors.count() > 0, "rows and samples must have vectors");
  return vectors;
}

// Of the first vector and of pairs of vectors.
template <typename T>
int64_t own_width(const Vectors<T>& vectors, int64_t dim) {
  return (vectors.first ? dim : 0) + vectors.count() * (vectors.count() - 1) / 2;
}

// Checks sizes; returns the width of a vector.
template <typename T>
int64_t check(const VectorArguments<T>& rows, const VectorArguments<T>& own, Tensor<int32_t, 1> order, Tensor<int32_t, 1> offsets) {
  const int64_t dim = std::get<1>(rows).shape[2], num_samples = std::get<1>(own).size();
  const Vectors<T> x = vectors_of(rows), v = vectors_of(own);
  require(std::get<1>(own).shape[2] == dim, "vectors must have one width");
  require(x.width == own_width(x, dim), "outputs of rows must have the width of their products");
  require(v.width == own_width(v, dim) + v.count() * x.count(), "outputs of samples must have the width of their products");
  require(offsets.size() == std::get<1>(rows).size() + 1 && order.size() == num_samples, "samples must be sorted by row");
  require(offsets.data[offsets.size() - 1] == num_samples, "offsets must be of all samples");
  return dim;
}

template <typename T>
void interact_all(const VectorArguments<T>& rows, const VectorArguments<T>& own, Tensor<int32_t, 1> order, Tensor<int32_t, 1> offsets,
                  int threads) {
  with_width(check(rows, own, order, offsets), [&](auto width) {
    interact(vectors_of(rows), vectors_of(own), offsets.size() - 1, order.data, offsets.data, width, threads);
  });
}

template <typename T>
void interact_back_all(const VectorArguments<T>& rows, const VectorArguments<T>& own, const VectorArguments<T>& to_rows,
                       const VectorArguments<T>& to_own, Tensor<int32_t, 1> order, Tensor<int32_t, 1> offsets, int threads) {
  const auto same = [](const Vectors<T>& a, const Vectors<T>& b) { return a.num_rest == b.num_rest && !a.first == !b.first; };
  check(to_rows, to_own, order, offsets);
  require(same(vectors_of(rows), vectors_of(to_rows)) && same(vectors_of(own), vectors_of(to_own)), "gradients must be of all vectors");
  with_width(check(rows, own, order, offsets), [&](auto width) {
    interact_back(vectors_of(rows), vectors_of(own), vectors_of(to_rows), vectors_of(to_own), offsets.size() - 1, order.data,
                  offsets.data, width, threads);
  });
}

template <typename T>
void define(nb::module_& m) {
  m.def("interact", interact_all<T>, nb::arg("rows"), nb::arg("own"), nb::arg("order"), nb::arg("offsets"), nb::arg("threads"),
        Unlocked());
  m.def("interact_back", interact_back_all<T>, nb::arg("rows"), nb::arg("own"), nb::arg("to_rows"), nb::arg("to_own"),
        nb::arg("order"), nb::arg("offsets"), nb::arg("threads"), Unlocked());
}

}  // namespace presage

NB_MODULE(interaction, m) {
  presage::define<float>(m);
  presage::define<double>(m);
}
