// Update rules of rows: the ones that trainer/optimizer.py states.
#pragma once

#include <cmath>
#include <cstdint>

namespace presage {

enum Kind : int64_t { kSum = 0, kSgd = 1, kAdagrad = 2, kRowwiseAdagrad = 3, kAdam = 4 };

// Mirrors `Rule` of compiled.py.
struct Rule {
  int64_t kind;
  double learning_rate;  // of Adam with both bias corrections in it
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

// Sixteen partial sums, added in order: the same bits whatever the width of a register.
template <typename T>
inline T mean_of_squares(const T* g, int64_t dim) {
  T sums[16] = {};
  int64_t d = 0;
  for (; d + 16 <= dim; d += 16)
    for (int i = 0; i < 16; i++) sums[i] += g[d + i] * g[d + i];
  for (int i = 0; d < dim; d++, i++) sums[i] += g[d] * g[d];
  T sum = 0;
  for (int i = 0; i < 16; i++) sum += sums[i];
  return sum / T(dim);
}

template <typename T>
inline void apply(const Rule& rule, T* __restrict w, T* __restrict s, const T* __restrict g,
                  int64_t dim) {
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
