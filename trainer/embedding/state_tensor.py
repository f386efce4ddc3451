"""The state of a collection as one tensor, which every format of checkpoints can hold.

    int64, the size of the header; JSON header; arrays, each from a multiple of 8 bytes

safetensors and Accelerate take tensors only, and `torch.distributed.checkpoint` resolves the name
of every key in the module, where only extra state may be of any shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from presage.schemas.arrays import Array


def pack(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> torch.Tensor:
    """Return a header, which JSON can hold, and arrays as one uint8 tensor."""
    shapes = {name: [array.dtype.str, array.shape] for name, array in arrays.items()}
    text = json.dumps({"header": header, "arrays": shapes}).encode()
    text += b" " * (-len(text) % 8)
    parts = [np.array([len(text)]), np.frombuffer(text, np.uint8), *arrays.values()]
    packed = np.zeros(sum(_padded(part.nbytes) for part in parts), np.uint8)
    first = 0
    for part in parts:
        packed[first : first + part.nbytes] = part.reshape(-1).view(np.uint8)
        first += _padded(part.nbytes)
    return torch.from_numpy(packed)


def unpack(packed: Any) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the inverse of `pack`; arrays are views.

    Raises:
        ValueError: the tensor is not that of `pack`, or a part of it.
    """
    try:
        data = packed.detach().cpu().contiguous().numpy()
        size = int(data[:8].view(np.int64)[0])
        text = json.loads(data[8 : 8 + size].tobytes())
        arrays: dict[str, Array] = {}
        first = 8 + size
        for name, (dtype, shape) in text["arrays"].items():
            count = int(np.prod(shape))
            num_bytes = count * np.dtype(dtype).itemsize
            arrays[name] = data[first : first + num_bytes].view(dtype).reshape(shape)
            first += _padded(num_bytes)
        return text["header"], arrays
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "extra state of a collection of Presage is not one uint8 tensor, but "
            f"{type(packed).__name__}; load what state_dict() returned"
        ) from error


def _padded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % 8
