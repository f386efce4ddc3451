// Torch's tensors as arguments. Their type, shape and place are asked of torch's own methods, 0.4 us each; DLPack takes ten times
// as long, and a step passes a hundred tensors or two.
#pragma once
#include "../../../schemas/kernels/border.h"

// A contiguous tensor in host memory.
template <class T, int N>
struct Tensor {
  T* data = nullptr;
  i64 shape[N] = {};

  i64 size() const { return shape[0]; }
};

namespace nanobind::detail {

template <class T>
constexpr auto dtype_name_of_torch = const_name("torch.float32");
template <>
inline constexpr auto dtype_name_of_torch<double> = const_name("torch.float64");
template <>
inline constexpr auto dtype_name_of_torch<i32> = const_name("torch.int32");

// Objects of torch and names of its methods; alive until the process ends.
template <class T>
PyObject* torch_dtype() {
  static PyObject* const dtype = object(module_::import_("torch").attr(dtype_name_of_torch<T>.text + 6)).release().ptr();
  return dtype;
}

template <class T, int N>
struct type_caster<Tensor<T, N>> {
  using Checked = Tensor<T, N>;
  NB_TYPE_CASTER(Checked, const_name("torch.Tensor[") + dtype_name_of_torch<T> + const_name(", ndim=") + const_name<N>() +
                            const_name(", contiguous, device='cpu']"))

  bool from_python(handle src, uint32_t, cleanup_list*) noexcept {
    try {
      static PyObject* const contiguous = name("is_contiguous"), *const on_cpu = name("is_cpu"), *const shape = name("shape"),
                           *const pointer = name("data_ptr"), *const dtype = name("dtype");
      if (get(src, dtype).ptr() != torch_dtype<T>()) return false;
      if (get(src, on_cpu).ptr() != Py_True || call(src, contiguous).ptr() != Py_True) return false;
      const nanobind::tuple sizes = borrow<nanobind::tuple>(get(src, shape));
      if (sizes.size() != N) return false;
      for (int i = 0; i < N; i++) value.shape[i] = cast<i64>(sizes[i]);
      value.data = reinterpret_cast<T*>(cast<uintptr_t>(call(src, pointer)));
      return true;
    } catch (...) {
      PyErr_Clear();
      return false;
    }
  }

 private:
  static PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }
  static object checked(PyObject* found) {
    if (!found) raise_python_error();
    return steal(found);
  }
  static object get(handle src, PyObject* name) { return checked(PyObject_GetAttr(src.ptr(), name)); }
  static object call(handle src, PyObject* name) { return checked(PyObject_CallMethodObjArgs(src.ptr(), name, nullptr)); }
};

}  // namespace nanobind::detail
