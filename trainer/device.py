"""The device of a run, and the transfer of batches to it."""

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
        SchemaError: the device is not available.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise SchemaError(
            "train.device is cuda, but torch finds no CUDA device; use cpu, or install "
            "requirements-gpu.lock on a machine with a GPU"
        )
    return torch.device(name)


def to_device(value: T, device: torch.device) -> T:
    """Return a batch, or any part of one, with its tensors on a device.

    Copies to a GPU are asynchronous, from pinned memory. NumPy arrays are not copied.

    Args:
        value: tensor, KeyedJaggedTensor, or dataclasses and mappings of these.
        device: target.
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
        parts = {f.name: _to_device(getattr(value, f.name), device) for f in fields(value)}
        return replace(value, **parts)
    if isinstance(value, dict):
        return {name: _to_device(part, device) for name, part in value.items()}
    return value


def _kjt_to_device(value: KeyedJaggedTensor, device: torch.device) -> KeyedJaggedTensor:
    """Return TorchRec's own class: the look-ups of the reader are in the batch as well."""
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
    """Return whether kernels of a device update rows in place, or copies of them."""
    return device.type == "cpu"


def _pin(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return value.pin_memory() if device.type == "cuda" else value
