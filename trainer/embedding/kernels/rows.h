// Sums of rows, and loops split into parts of equal work. See
// docs/decisions/0054-embedding-kernels.md.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace presage {

constexpr int64_t kLine = 64;         // bytes of a cache line
constexpr int64_t kLinesAhead = 32;   // prefetched, about the outstanding loads of a core
constexpr int64_t kRowsAhead = 4;     // prefetched rows, at least
constexpr int64_t kParts = 8;         // per thread, for load balance
constexpr int64_t kSmall = 1 << 14;   // numbers below which one thread does all work

template <typename T>
struct Vector;
template <>
struct Vector<float> {
  typedef float type __attribute__((vector_size(64), aligned(4)));
};
template <>
struct Vector<double> {
  typedef double type __attribute__((vector_size(64), aligned(8)));
};
template <typename T>
constexpr int kLanes = 64 / sizeof(T);

// Run `body(dim)`; common widths are compile-time constants.
template <typename Body>
void with_width(int64_t dim, const Body& body) {
  switch (dim) {
    case 16: return body(std::integral_constant<int64_t, 16>());
    case 32: return body(std::integral_constant<int64_t, 32>());
    case 64: return body(std::integral_constant<int64_t, 64>());
    case 128: return body(std::integral_constant<int64_t, 128>());
    default: return body(dim);
  }
}

// Number of rows of `dim` numbers to prefetch.
template <typename T>
inline int64_t rows_ahead(int64_t dim) {
  return std::max(kRowsAhead, kLinesAhead * kLine / std::max<int64_t>(dim * sizeof(T), kLine));
}

// All lines that a row lies in: rows with their state begin anywhere in a line.
template <typename T>
inline void fetch(const T* row, int64_t count) {
  asm volatile("");  // GCC 12 drops calls of a function that only prefetches, as pure
  const uintptr_t end = reinterpret_cast<uintptr_t>(row + count);
  for (uintptr_t at = reinterpret_cast<uintptr_t>(row) & ~uintptr_t(kLine - 1); at < end; at += kLine)
    __builtin_prefetch(reinterpret_cast<const void*>(at));
}

// Request large pages for a new block, which saves page faults on first touch.
inline void large_pages(void* block, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t page = uintptr_t(1) << 21;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(block) + page - 1) & ~(page - 1);
  const uintptr_t last = (reinterpret_cast<uintptr_t>(block) + bytes) & ~(page - 1);
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// The weight of an unweighted look-up: no product is computed.
struct One {};

// out[0 : N * lanes] = sum of weight(k) * row(k)[0 : N * lanes], k ascending, in registers.
template <typename T, int N, typename Row, typename Weight>
inline void sum_block(const Row& row, const Weight& weight, int64_t first, int64_t last,
                      int64_t column, T* out) {
  using V = typename Vector<T>::type;
  V sums[N] = {};
  for (int64_t k = first; k < last; k++) {
    const T* from = row(k) + column;
    for (int i = 0; i < N; i++) {
      V lanes = *reinterpret_cast<const V*>(from + i * kLanes<T>);
      if constexpr (!std::is_same_v<Weight, One>) lanes *= weight(k);
      sums[i] += lanes;
    }
  }
  for (int i = 0; i < N; i++) *reinterpret_cast<V*>(out + i * kLanes<T>) = sums[i];
}

// out[0 : dim] = sum of weight(k) * row(k), k ascending. `ahead(k)` prefetches rows of a later k.
template <typename T, typename Row, typename Weight, typename Ahead, typename Dim>
__attribute__((always_inline)) inline void sum_rows(const Row& row, const Weight& weight,
                                                    const Ahead& ahead, int64_t first,
                                                    int64_t last, Dim dim, T* out) {
  constexpr int64_t lanes = kLanes<T>;
  const auto prefetching = [&](int64_t k) {
    ahead(k);
    return row(k);
  };
  int64_t column = 0;
  const auto blocks = [&](const auto& rows) {
    switch (std::min<int64_t>((dim - column) / lanes, 8)) {
      case 8: sum_block<T, 8>(rows, weight, first, last, column, out + column); return 8 * lanes;
      case 7: case 6: case 5:
      case 4: sum_block<T, 4>(rows, weight, first, last, column, out + column); return 4 * lanes;
      case 3:
      case 2: sum_block<T, 2>(rows, weight, first, last, column, out + column); return 2 * lanes;
      default: sum_block<T, 1>(rows, weight, first, last, column, out + column); return lanes;
    }
  };
  if (dim >= lanes) column += blocks(prefetching);
  while (dim - column >= lanes) column += blocks(row);
  for (; column < dim; column++) {
    T sum = 0;
    for (int64_t k = first; k < last; k++) {
      if constexpr (std::is_same_v<Weight, One>)
        sum += row(k)[column];
      else
        sum += weight(k) * row(k)[column];
    }
    out[column] = sum;
  }
}

// The first of `count` items with `work(i) >= target`; `work` ascends.
template <typename Work>
inline int64_t item_at(const Work& work, int64_t count, int64_t target) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (work(middle) < target)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Split segments of items into parts of equal work and run `body(segment, first, last)` on threads.
// Each item is in one part and independent of the others, so bits do not depend on the split.
template <typename Count, typename Work, typename Body>
void for_parts(int64_t num_segments, const Count& count, const Work& work, int64_t width,
               int threads, const Body& body) {
  std::vector<int64_t> before(num_segments + 1, 0);
  for (int64_t s = 0; s < num_segments; s++) before[s + 1] = before[s] + work(s, count(s));
  const int64_t total = before[num_segments];
  if (total * width < kSmall) threads = 1;
  const int64_t parts = threads == 1 ? 1 : threads * kParts;
  const auto run = [&](int64_t part) {
    const int64_t begin = total * part / parts, end = total * (part + 1) / parts;
    for (int64_t s = 0; s < num_segments; s++) {
      const bool final_part = part == parts - 1;
      if (before[s] >= end && !final_part) break;
      if (before[s + 1] < begin) continue;
      const auto inside = [&](int64_t i) { return before[s] + work(s, i); };
      const int64_t first = part == 0 ? 0 : item_at(inside, count(s), begin);
      const int64_t last = final_part ? count(s) : item_at(inside, count(s), end);
      if (first < last) body(s, first, last);
    }
  };
  if (threads == 1) {
    run(0);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t part = 0; part < parts; part++) run(part);
}

}  // namespace presage
