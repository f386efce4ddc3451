// What crosses the border to Python. Arguments have one type, are contiguous, and are never converted; results are arrays that
// are made here. Kernels run without the lock of Python and see neither.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <utility>

namespace nb = nanobind;

using u64 = uint64_t;
using u32 = uint32_t;
using i64 = int64_t;
using i32 = int32_t;

// A flat numpy array; it is alive during the call, as its caller holds it.
template <class T>
struct Flat {
  T* data = nullptr;
  i64 size = 0;

  T& operator[](i64 i) const { return data[i]; }
  T* begin() const { return data; }
  T* end() const { return data + size; }
};

// A flat numpy array of any numbers.
struct Numbers {
  const void* data = nullptr;
  i64 size = 0;
  nb::dlpack::dtype dtype{};

  i64 width() const { return dtype.bits / 8; }
  const uint8_t* bytes() const { return static_cast<const uint8_t*>(data); }
};

// Memory of a numpy array to be returned; not initialized.
class Memory {
 public:
  explicit Memory(i64 bytes) : data_(std::malloc(bytes > 0 ? bytes : 1)) {
    if (!data_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t kPage = 4096, kLarge = 4 << 20;  // as numpy does
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data_) + kPage - 1) & ~(kPage - 1);
    if (bytes >= static_cast<i64>(kLarge)) madvise(reinterpret_cast<void*>(first), bytes - kPage, MADV_HUGEPAGE);
#endif
  }
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~Memory() { std::free(data_); }

  void* get() const { return data_; }

  void shrink(i64 bytes) {
    void* smaller = std::realloc(data_, bytes > 0 ? bytes : 1);
    if (smaller) data_ = smaller;
  }

  nb::object array(i64 size, nb::dlpack::dtype dtype) {
    nb::capsule owner(data_, [](void* data) noexcept { std::free(data); });
    const size_t shape[1] = {static_cast<size_t>(size)};
    void* data = std::exchange(data_, nullptr);
    nb::object array = nb::cast(nb::ndarray<nb::numpy>(data, 1, shape, owner, nullptr, dtype));
    // nanobind gives 64-bit integers numpy's type long long, which equals int64 but is another one to its loops.
    const bool is_int = dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int);
    return is_int && dtype.bits == 64 ? array.attr("view")("int64") : array;
  }

 private:
  void* data_;
};

// A flat array of numbers of one type, allocated by a kernel.
template <class T>
class Array {
 public:
  explicit Array(i64 size) : memory_(size * sizeof(T)), size_(size) {}

  T* data() const { return static_cast<T*>(memory_.get()); }
  T& operator[](i64 i) const { return data()[i]; }
  i64 size() const { return size_; }
  void shrink(i64 size) {
    if (size != size_) memory_.shrink((size_ = size) * sizeof(T));
  }
  nb::object array() { return memory_.array(size_, nb::dtype<T>()); }

 private:
  Memory memory_;
  i64 size_;
};

// The same of a type that is known at run time.
class NumberArray {
 public:
  NumberArray(i64 size, nb::dlpack::dtype dtype) : memory_(size * (dtype.bits / 8)), size_(size), dtype_(dtype) {}

  uint8_t* bytes() const { return static_cast<uint8_t*>(memory_.get()); }
  nb::object array() { return memory_.array(size_, dtype_); }

 private:
  Memory memory_;
  i64 size_;
  nb::dlpack::dtype dtype_;
};

// Raises ValueError.
inline void require(bool holds, const char* rule) {
  if (!holds) throw std::invalid_argument(rule);
}

// Offsets of lists: at least one, ascending, none outside of `size` values.
inline void require_offsets(Flat<const i64> offsets, i64 size) {
  require(offsets.size > 0, "offsets must have one entry more than there are lists, got none");
  bool ascend = offsets[0] >= 0 && offsets[offsets.size - 1] <= size;
  for (i64 i = 1; i < offsets.size; i++) ascend &= offsets[i - 1] <= offsets[i];
  require(ascend, "offsets must ascend within the values");
}

// Row numbers in [0, size).
template <class T>
void require_rows(Flat<const T> rows, i64 size) {
  bool inside = true;
  for (i64 i = 0; i < rows.size; i++) inside &= static_cast<u64>(static_cast<i64>(rows[i])) < static_cast<u64>(size);
  require(inside, "row numbers must be in range");
}

namespace nanobind::detail {

template <class T>
struct type_caster<Flat<T>> {
  using Array = ndarray<T, ndim<1>, c_contig, device::cpu>;
  NB_TYPE_CASTER(Flat<T>, make_caster<Array>::Name)

  bool from_python(handle src, uint32_t flags, cleanup_list* cleanup) noexcept {
    make_caster<Array> array;
    if (!array.from_python(src, flags & ~static_cast<uint32_t>(cast_flags::convert), cleanup)) return false;
    value = {array.value.data(), static_cast<i64>(array.value.size())};
    return true;
  }
};

template <>
struct type_caster<Numbers> {
  using Array = ndarray<ro, ndim<1>, c_contig, device::cpu>;
  NB_TYPE_CASTER(Numbers, make_caster<Array>::Name)

  bool from_python(handle src, uint32_t flags, cleanup_list* cleanup) noexcept {
    make_caster<Array> array;
    if (!array.from_python(src, flags & ~static_cast<uint32_t>(cast_flags::convert), cleanup)) return false;
    value = {array.value.data(), static_cast<i64>(array.value.size()), array.value.dtype()};
    return value.dtype.bits >= 8 && value.dtype.bits <= 64 && value.dtype.lanes == 1;
  }
};

template <class T>
struct made_caster {
  static constexpr auto Name = const_name("numpy.ndarray");

  static handle from_cpp(T&& made, rv_policy, cleanup_list*) noexcept {
    try {
      return made.array().release();
    } catch (...) {
      return handle();
    }
  }
};
template <class T>
struct type_caster<Array<T>> : made_caster<Array<T>> {};
template <>
struct type_caster<NumberArray> : made_caster<NumberArray> {};

}  // namespace nanobind::detail

using Unlocked = nb::call_guard<nb::gil_scoped_release>;
