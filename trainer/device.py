"""Where a run computes, and how a batch gets there."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from schemas.errors import SchemaError

T = TypeVar("T")


def device_of(name: str) -> torch.device:
    """Return the device of `train.device`.

    Args:
        name: `cpu` or `cuda`.

    Raises:
        SchemaError: there is no such device here.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise SchemaError(
            "train.device must be there, got 'cuda' on a machine where torch finds no CUDA device; "
            "write cpu, or install requirements-gpu.lock where there is one"
        )
    return torch.device(name)


def to_device(value: T, device: torch.device) -> T:
    """Return a batch, or any part of one, with its tensors on a device.

    To a GPU they go from pinned memory, without waiting; arrays stay where they are.

    Args:
        value: tensor, KeyedJaggedTensor, or dataclasses and mappings of such.
        device: where to.
    """
    if device.type == "cpu":
        return value
    return _to_device(value, device)


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return _pin(value, device).to(device, non_blocking=True)
    if isinstance(value, KeyedJaggedTensor):
        return _kjt_to_device(value, device)
    if is_dataclass(value) and not isinstance(value, type):
        found = {f.name: _to_device(getattr(value, f.name), device) for f in fields(value)}
        return replace(value, **found)
    if isinstance(value, dict):
        return {name: _to_device(part, device) for name, part in value.items()}
    return value


def _kjt_to_device(value: KeyedJaggedTensor, device: torch.device) -> KeyedJaggedTensor:
    """Return TorchRec's own class: what the reader found is beside it in the batch."""
    inverse = value.inverse_indices_or_none()
    weights = value.weights_or_none()
    variable = value.variable_stride_per_key()
    return KeyedJaggedTensor(
        value.keys(),
        _to_device(value.values(), device),
        None if weights is None else _to_device(weights, device),
        lengths=_to_device(value.lengths(), device),
        offsets=_to_device(value.offsets(), device),
        stride=None if variable else value.stride(),
        stride_per_key_per_rank=value.stride_per_key_per_rank() if variable else None,
        inverse_indices=None if inverse is None else (inverse[0], _to_device(inverse[1], device)),
    )


def updates_in_place(device: torch.device) -> bool:
    """Tell whether kernels of a device change rows where they lie, or copies of them."""
    return device.type == "cpu"


def _pin(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return value.pin_memory() if device.type == "cuda" else value
