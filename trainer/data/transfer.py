"""The device of a run, and the transfer of batches and rows to it.

A step transfers few large blocks: every copy of pageable memory, and every question that the
processor asks about a tensor of a GPU, waits until the GPU has done all work so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from presage.schemas.errors import SchemaError

T = TypeVar("T")
_ALIGNMENT = 64
_Move = Callable[[torch.Tensor], torch.Tensor]


def device_of(name: str) -> torch.device:
    """Return the device of `train.device`.

    Raises:
        SchemaError: the device is not available.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise SchemaError(
            "train.device is cuda, but torch finds no CUDA device; use cpu, or install "
            "requirements-gpu.lock on a machine with a GPU"
        )
    return torch.device(name)


def select_device(name: str, number: int) -> None:
    """Make one of several GPUs the device `cuda` of this thread; replicas take them in turn.

    Raises:
        SchemaError: the device is not available.
    """
    if device_of(name).type == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())


def to_device(value: T, device: torch.device) -> T:
    """Return a batch, or any part of one, with its tensors on a device.

    All tensors are copied in one block; the copy to a GPU is asynchronous, from pinned memory.
    NumPy arrays are not copied.

    Args:
        value: tensor, or dataclasses and mappings of tensors.
        device: target.
    """
    if device.type == "cpu":
        return value
    tensors: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    _map_tensors(value, collect)
    moved = iter(_copy_in_one_block(tensors, device))
    return _map_tensors(value, lambda _: next(moved))


def upload(block: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a block of `host_block` on a device; the copy to a GPU is asynchronous."""
    return block.to(device, non_blocking=True)


def host_block(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialized memory of the host, pinned for copies to a GPU."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def _copy_in_one_block(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return copies on a device, in order; views of one block."""
    starts: list[int] = []
    end = 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

    def views_of(block: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(starts, tensors, strict=True)
        return [block[i : i + t.nbytes].view(t.dtype).view(t.shape) for i, t in parts]

    block = host_block((end,), torch.uint8, device)
    for view, tensor in zip(views_of(block), tensors, strict=True):
        view.copy_(tensor)
    return views_of(upload(block, device))


def _map_tensors(value: Any, move: _Move) -> Any:
    """Return a value with `move` applied to each of its tensors, in a fixed order."""
    if isinstance(value, torch.Tensor):
        return move(value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _map_tensors(getattr(value, f.name), move) for f in fields(value)}
        return replace(value, **parts)
    if isinstance(value, dict):
        return {name: _map_tensors(part, move) for name, part in value.items()}
    return value
