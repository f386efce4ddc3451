"""A device that computes as the processor does and refuses what a GPU would refuse or wait for.

Stands in for a GPU where there is none: its tensors claim to be on `meta`, hold numbers all
the same, and an operator that is given one of them beside a tensor of the processor raises, as
CUDA's would. An operator whose result has a size that only the device knows raises as well: CUDA
would wait for all work so far. Copies to and from the device, and numbers read from it, are
counted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")


class MixedDevicesError(RuntimeError):
    """Tensors of both devices met in one operator."""


class SynchronizationError(RuntimeError):
    """An operator would wait until the device has done all its work."""


class DeviceTensor(torch.Tensor):
    """A tensor on the device."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> DeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        tensor.wrapped = inner
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class DeviceMode(TorchDispatchMode):
    """Lets `device=` create tensors on the device; counts its operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        """Operators of tensors of the device; `upload` and `download` are copies of blocks, `read`
        waits for a number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in tree_flatten((args, kwargs or {}))[0] if isinstance(t, torch.Tensor)]
        result = _run(func, args, kwargs or {})
        was_on_device = any(isinstance(t, DeviceTensor) for t in tensors)
        if was_on_device or isinstance(result, DeviceTensor):
            self.calls[_name_of(func, was_on_device, isinstance(result, DeviceTensor))] += 1
        return result


def _name_of(func: Any, was_on_device: bool, is_on_device: bool) -> str:
    if func is torch.ops.aten._to_copy.default and was_on_device != is_on_device:
        return "download" if was_on_device else "upload"
    return "read" if func is torch.ops.aten._local_scalar_dense.default else func._opname


def to_fake_device(value: torch.Tensor) -> torch.Tensor:
    """Return a copy on the device."""
    return value if isinstance(value, DeviceTensor) else DeviceTensor(value.detach().clone())


_WAITS = {
    "nonzero",
    "masked_select",
    "bincount",
    "equal",
    "unique_consecutive",
    "_unique2",
    "is_nonzero",
}
"""Operators that ask the device for a size or a truth value."""
_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    mine = [t for t in tensors if isinstance(t, DeviceTensor)]
    others = [t for t in tensors if not isinstance(t, DeviceTensor) and t.dim() > 0]
    if mine and others and func not in _COPIES:
        raise MixedDevicesError(f"{func} of both devices, got {[tuple(t.shape) for t in others]}")
    if mine:
        _check_that_nothing_waits(func, args, kwargs)
    device = kwargs.get("device")
    stays = bool(mine) if device is None else torch.device(device) == DEVICE
    kwargs = {**kwargs, "device": torch.device("cpu")} if device is not None else kwargs
    inner = tree_map(lambda t: t.wrapped if isinstance(t, DeviceTensor) else t, (args, kwargs))
    result = func(*inner[0], **inner[1])
    if func._schema.is_mutable and isinstance(result, torch.Tensor):
        return args[0] if "out" not in kwargs else kwargs["out"]
    if func is torch.ops.aten._to_copy.default and result is inner[0][0]:
        result = result.clone()
    return tree_map(
        lambda t: DeviceTensor(t) if isinstance(t, torch.Tensor) and stays else t, result
    )


def _check_that_nothing_waits(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    name = func._opname
    masks = name in ("index", "index_put", "index_put_") and any(
        t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
    )
    repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
    if name in _WAITS or masks or repeats:
        raise SynchronizationError(f"{func} would wait for the device")
