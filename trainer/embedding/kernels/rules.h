// Update rules of rows, as in `update_rows` of torch_ops.py.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace presage {

enum Kind { kSum, kSgd, kAdagrad, kRowwiseAdagrad, kAdam };

inline Kind kind_of(const std::string& name) {
  if (name == "sum") return kSum;
  if (name == "sgd") return kSgd;
  if (name == "adagrad") return kAdagrad;
  if (name == "rowwise_adagrad") return kRowwiseAdagrad;
  if (name == "adam") return kAdam;
  throw std::invalid_argument("rule must be sum, sgd, adagrad, rowwise_adagrad or adam, got " + name);
}

// `RowRule` of interface.py.
struct Rule {
  Kind kind;
  double learning_rate;  // including Adam's bias corrections
  double eps;
  double beta1;
  double beta2;
};

inline int64_t state_width(const Rule& rule, int64_t dim) {
  switch (rule.kind) {
    case kAdagrad: return dim;
    case kRowwiseAdagrad: return 1;
    case kAdam: return 2 * dim;
    default: return 0;
  }
}

// The sum of N lanes, a power of two: the upper half is added to the lower, repeatedly.
template <typename T, int N>
inline T sum_of_lanes(const T* lanes) {
  typedef T Half __attribute__((vector_size(N / 2 * sizeof(T)), aligned(alignof(T)), may_alias));
  const Half* halves = reinterpret_cast<const Half*>(lanes);
  const Half sum = halves[0] + halves[1];
  if constexpr (N == 4) {
    return sum[0] + sum[1];
  } else {
    T half[N / 2];
    std::memcpy(half, &sum, sizeof(half));
    return sum_of_lanes<T, N / 2>(half);
  }
}

// Sixteen partial sums: the bits do not depend on the register width.
template <typename T, typename Dim>
inline T mean_of_squares(const T* g, Dim dim) {
  constexpr int lanes = 64 / sizeof(T), blocks = 16 / lanes;
  typedef T Lanes __attribute__((vector_size(64), aligned(alignof(T)), may_alias));
  Lanes sums[blocks] = {};
  int64_t d = 0;
  for (; d + 16 <= dim; d += 16)
    for (int b = 0; b < blocks; b++) {
      const Lanes block = *reinterpret_cast<const Lanes*>(g + d + b * lanes);
      sums[b] += block * block;
    }
  T all[16];
  std::memcpy(all, sums, sizeof(all));
  for (int i = 0; i < 16 && d < dim; d++, i++) all[i] += g[d] * g[d];
  return sum_of_lanes<T, 16>(all) / T(dim);
}

template <typename T, typename Dim>
__attribute__((always_inline)) inline void apply(const Rule& rule, T* __restrict w,
                                                 T* __restrict s, const T* __restrict g, Dim dim) {
  const T rate = T(rule.learning_rate), eps = T(rule.eps);
  switch (rule.kind) {
    case kSgd:
      for (int64_t d = 0; d < dim; d++) w[d] -= rate * g[d];
      return;
    case kAdagrad:
      for (int64_t d = 0; d < dim; d++) {
        s[d] += g[d] * g[d];
        w[d] -= rate * g[d] / (std::sqrt(s[d]) + eps);
      }
      return;
    case kRowwiseAdagrad: {
      s[0] += mean_of_squares(g, dim);
      const T step = rate / (std::sqrt(s[0]) + eps);
      for (int64_t d = 0; d < dim; d++) w[d] -= step * g[d];
      return;
    }
    case kAdam: {
      const T beta1 = T(1 - rule.beta1), beta2 = T(1 - rule.beta2);
      T* __restrict v = s + dim;
      for (int64_t d = 0; d < dim; d++) {
        s[d] += beta1 * (g[d] - s[d]);
        v[d] += beta2 * (g[d] * g[d] - v[d]);
        w[d] -= rate * s[d] / (std::sqrt(v[d]) + eps);
      }
      return;
    }
    default:
      for (int64_t d = 0; d < dim; d++) w[d] = g[d];
  }
}

}  // namespace presage
