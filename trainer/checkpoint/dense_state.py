"""The dense state of training as named arrays: model and optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from presage.schemas.arrays import Array
from presage.schemas.errors import SchemaError, suggest_name
from presage.trainer.checkpoint.format import ArraySpec

# ---- The dense state as named arrays ----
#
#     model/<parameter or buffer>
#     optimizer/<parameter>/<key>     such as optimizer/top.0.weight/exp_avg
#
# `format.py` converts them to bytes, for a checkpoint or for a replica that joins. Learning rates
# are not part of the state: they are those of the job.

MODEL, OPTIMIZER = "model/", "optimizer/"

_STATE_KEYS: dict[type[torch.optim.Optimizer], frozenset[str]] = {
    torch.optim.Adam: frozenset({"step", "exp_avg", "exp_avg_sq"}),
    torch.optim.SGD: frozenset(),
}
"""Keys of the state of each parameter; not checked for other optimizers."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Array]:
    """Return the state by name; in CPU memory the arrays are views of it.

    Raises:
        ValueError: the optimizer has a parameter that is not the model's.
    """
    state = {f"{MODEL}{name}": _array(value) for name, value in model.state_dict().items()}
    if optimizer is not None:
        names = _parameter_names(model, optimizer)
        for index, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                if value is not None:
                    state[f"{OPTIMIZER}{names[index]}/{key}"] = _array(value)
    return state


def load_state(
    arrays: Mapping[str, Array],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    file: str | None = None,
) -> None:
    """Load a state into a model and its optimizer, completely or not at all.

    Args:
        arrays: what `state_of` returned; copied.
        model: with the same parameters.
        optimizer: of the same kind; None to leave it out.
        file: origin of the arrays, for errors.

    Raises:
        SchemaError: the state is of another model or optimizer; names the first difference.
    """
    expected = {f"{MODEL}{name}": _array(value) for name, value in model.state_dict().items()}
    given = {name: array for name, array in arrays.items() if name.startswith(MODEL)}
    missing, unknown = sorted(expected.keys() - given), sorted(given.keys() - expected)
    if missing or unknown:
        raise SchemaError(
            f"state is of another model: {len(unknown)} unknown arrays ({_shortened(unknown)}) and "
            f"{len(missing)} missing ({_shortened(missing)}); use the model that was trained",
            file=file,
        )
    for name, array in given.items():
        _check_spec(name, ArraySpec.of(expected[name]), array, file)
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
    """Return the state of an optimizer as its own `load_state_dict` expects it."""
    names = _parameter_names(model, optimizer)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    index_of = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    for name, array in arrays.items():
        if not name.startswith(OPTIMIZER):
            continue
        parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
        if parameter not in index_of:
            raise SchemaError(
                f"optimizer has no parameter of the state {name!r}; "
                f"{suggest_name(parameter, index_of)}",
                file=file,
            )
        if array.ndim:
            _check_spec(name, ArraySpec(array.dtype, shapes[parameter]), array, file)
        state.setdefault(index_of[parameter], {})[key] = _tensor(array)
    keys = _STATE_KEYS.get(type(optimizer))
    for index, values in state.items():
        if keys is not None and values.keys() != keys:
            raise SchemaError(
                f"optimizer state of {names[index]!r} does not fit {type(optimizer).__name__}: "
                f"{_shortened(values)} instead of {_shortened(keys)}; use the optimizer that it "
                "was trained with",
                file=file,
            )
    return state


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the name of each of the optimizer's parameters, in its own order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = [tuple(p.shape) for p in parameters if id(p) not in names]
    if others:
        raise ValueError(
            f"optimizer has parameters that are not the model's, of shapes {others[:3]}; build it "
            "from model.parameters()"
        )
    return [names[id(parameter)] for parameter in parameters]


def _check_spec(name: str, expected: ArraySpec, array: Array, file: str | None) -> None:
    if expected != ArraySpec.of(array):
        raise SchemaError(
            f"array {name!r} must be {expected}, got {ArraySpec.of(array)}; use the job that it "
            "was trained with",
            file=file,
        )


def _shortened(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (", ..." if len(ordered) > 3 else "") if ordered else "none"


def _array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    return np.asarray(value)


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(array))
