"""Functions of a compiled library, called by ctypes on numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORD, UNSIGNED, POINTER = ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p


class Functions:
    """The functions of one library; the lock of Python is free while they run."""

    def __init__(self, path: Path, arguments: Mapping[str, Sequence[Any]]) -> None:
        """Load the library.

        Args:
            path: of the library.
            arguments: types of the arguments of each function, by name without `presage_`.
        """
        loaded = ctypes.CDLL(str(path))
        self._functions = {name: loaded[f"presage_{name}"] for name in arguments}
        for name, function in self._functions.items():
            function.argtypes, function.restype = arguments[name], WORD

    def call(self, name: str, *arguments: NDArray[Any] | int) -> int:
        """Call a function with numbers and the addresses of flat arrays."""
        for array in arguments:
            assert isinstance(array, int) or array.flags.c_contiguous, f"{name} reads flat arrays"
        return self._functions[name](
            *(a if isinstance(a, int) else a.ctypes.data for a in arguments)
        )


def typed_values(values: NDArray[Any]) -> tuple[NDArray[Any], int, int]:
    """Return flat numbers, the code of their type, and how many they are; float16 as float32."""
    values = np.ascontiguousarray(values, np.float32 if values.dtype == np.float16 else None)
    return values, ord(values.dtype.kind) * 16 + values.dtype.itemsize, len(values)
