"""The dense state of training as named arrays: parameters, buffers, and the optimizer's numbers.

`arrays.py` makes bytes of them and back. A checkpoint holds these bytes, and a replica that joins
gets them from a peer. Names are the model's own: a state that does not fit is told by name.

    model/<parameter or buffer>
    optimizer/<parameter>/<number>     such as optimizer/top.0.weight/exp_avg

Learning rates are not among them: they are the job's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from schemas.errors import SchemaError, nearest
from schemas.jagged import Array
from trainer.arrays import Spec, spec_of_array

MODEL, OPTIMIZER = "model/", "optimizer/"
"""What names begin with."""
_NUMBERS: dict[type[torch.optim.Optimizer], frozenset[str]] = {
    torch.optim.Adam: frozenset({"step", "exp_avg", "exp_avg_sq"}),
    torch.optim.SGD: frozenset(),
}
"""What optimizers keep for a parameter; others are taken as they are."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Array]:
    """Return the state by name; on the processor the arrays are views of what is trained.

    Args:
        model: dense parameters and buffers.
        optimizer: of its parameters; None to leave it out.

    Raises:
        ValueError: the optimizer holds a parameter that is not the model's.
    """
    found = {f"{MODEL}{name}": _array(value) for name, value in model.state_dict().items()}
    if optimizer is not None:
        names = _parameter_names(model, optimizer)
        for index, numbers in optimizer.state_dict()["state"].items():
            for key, value in numbers.items():
                if value is not None:
                    found[f"{OPTIMIZER}{names[index]}/{key}"] = _array(value)
    return found


def load_state(
    arrays: Mapping[str, Array],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    file: str | None = None,
) -> None:
    """Load a state into a model and its optimizer, all of it or nothing.

    Args:
        arrays: what `state_of` returned; copied.
        model: of the same parameters.
        optimizer: of the same kind; None to leave it out.
        file: where the arrays came from, for errors.

    Raises:
        SchemaError: the state is of another model or optimizer; the message prints both sides.
    """
    held = {f"{MODEL}{name}": _array(value) for name, value in model.state_dict().items()}
    given = {name: array for name, array in arrays.items() if name.startswith(MODEL)}
    _check_names(held.keys(), given.keys(), "model", file)
    for name, array in given.items():
        _check_spec(name, spec_of_array(held[name]), spec_of_array(array), file)
    state = None if optimizer is None else _optimizer_state(arrays, model, optimizer, file)
    model.load_state_dict({n.removeprefix(MODEL): _tensor(array) for n, array in given.items()})
    if optimizer is not None and state is not None:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _optimizer_state(
    arrays: Mapping[str, Array],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    file: str | None,
) -> dict[int, dict[str, Any]]:
    """Return the state of an optimizer as its own `load_state_dict` takes it."""
    names = _parameter_names(model, optimizer)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    index_of = {name: index for index, name in enumerate(names)}
    found: dict[int, dict[str, Any]] = {}
    for name, array in arrays.items():
        if not name.startswith(OPTIMIZER):
            continue
        parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
        if parameter not in index_of:
            raise SchemaError(
                f"state must be of the optimizer's parameters, got {name!r}; "
                f"{nearest(parameter, index_of)}",
                file=file,
            )
        if array.ndim:
            wanted = Spec(array.dtype, shapes[parameter])
            _check_spec(name, wanted, spec_of_array(array), file)
        found.setdefault(index_of[parameter], {})[key] = _tensor(array)
    wanted_keys = _NUMBERS.get(type(optimizer))
    for index, numbers in found.items():
        if wanted_keys is not None and numbers.keys() != wanted_keys:
            kind = type(optimizer).__name__
            raise SchemaError(
                f"optimizer state of {names[index]!r} must be {_listed(wanted_keys)} for {kind}, "
                f"got {_listed(numbers)}; use the optimizer that it was trained with",
                file=file,
            )
    return found


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the name of each of the optimizer's parameters, in its own order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [tuple(p.shape) for p in held if id(p) not in names]
    if strangers:
        raise ValueError(
            f"optimizer must hold parameters of the model, got others of shapes {strangers[:3]}; "
            "build it from model.parameters()"
        )
    return [names[id(parameter)] for parameter in held]


def _check_names(wanted: Any, got: Any, what: str, file: str | None) -> None:
    missing, others = sorted(wanted - got), sorted(got - wanted)
    if missing or others:
        raise SchemaError(
            f"state must be of the {what}, got {len(others)} unknown arrays ({_listed(others)}) "
            f"and {len(missing)} missing ({_listed(missing)}); "
            f"use the {what} that it was trained with",
            file=file,
        )


def _check_spec(name: str, wanted: Spec, got: Spec, file: str | None) -> None:
    if wanted != got:
        raise SchemaError(
            f"array {name!r} must be {wanted}, got {got}; use the job that it was trained with",
            file=file,
        )


def _listed(names: Any) -> str:
    found = sorted(names)
    return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "") if found else "none"


def _array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    return np.asarray(value)


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(array))
