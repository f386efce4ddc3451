"""Numpy files in mapped memory, opened by threads."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

_OPENING = Lock()


def open_array(path: Path, mode: Literal["r", "r+"] = "r") -> NDArray[Any]:
    """Map a numpy file.

    Numpy reads the header with `ast.literal_eval`, which ends in "AST constructor recursion depth
    mismatch" now and then where threads of Python 3.11 do so at once; hence one after the other.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no numpy file.
    """
    with _OPENING:
        return np.load(path, mmap_mode=mode, allow_pickle=False)
