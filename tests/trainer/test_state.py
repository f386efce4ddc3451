"""The dense state as named arrays, and arrays as bytes: exact, and refused by name when damaged."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from presage.schemas.errors import SchemaError
from presage.trainer.checkpoint.dense_state import load_state, state_of
from presage.trainer.checkpoint.format import from_bytes, to_buffers

DTYPES = ["float64", "float32", "float16", "int64", "int32", "uint8", "bool"]
SMALL = {"a": np.arange(3), "b": np.full((1, 1), 1.5, np.float32)}
ARRAYS = st.dictionaries(
    st.text(max_size=8),
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
    ),
    max_size=5,
)


@pytest.mark.slow
@given(arrays=ARRAYS)
@settings(max_examples=200)
def test_arrays_come_back_from_their_bytes(arrays: dict[str, np.ndarray]) -> None:
    data = b"".join(to_buffers(arrays))
    assert int.from_bytes(data[:8], "little") % 64 == 56
    found = from_bytes(data)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
        assert not found[name].flags.writeable


def test_arrays_need_not_be_contiguous_and_are_not_changed() -> None:
    array = np.arange(12).reshape(3, 4)
    found = from_bytes(b"".join(to_buffers({"turned": array.T, "every second": array[:, ::2]})))
    assert np.array_equal(found["turned"], array.T)
    assert np.array_equal(found["every second"], array[:, ::2])
    assert array.flags.writeable


@pytest.mark.parametrize("dtype", ["complex64", "<U3", "datetime64[s]"])
def test_array_of_an_odd_type_is_refused_by_name(dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"got odd={re.escape(str(np.dtype(dtype)))} \(2,\); "):
        to_buffers({"odd": np.zeros(2, dtype)})


def test_every_changed_byte_and_every_cut_is_refused() -> None:
    data = b"".join(to_buffers(SMALL))
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(SchemaError):
            from_bytes(damaged)
        with pytest.raises(SchemaError):
            from_bytes(data[:place])
    with pytest.raises(
        SchemaError, match=f"arrays have {len(data) + 1} bytes instead of {len(data)}; "
    ):
        from_bytes(data + b"\0")


def test_changed_array_is_refused_by_name() -> None:
    data = bytearray(b"".join(to_buffers(SMALL)))
    data[-2] ^= 4
    message = r"^array 'b' is damaged: 4 bytes of crc32 \d+ instead of 4 of \d+ in state.bin; "
    with pytest.raises(SchemaError, match=message):
        from_bytes(data, file="state.bin")


def trained(width: int = 3, optimizer: str = "Adam", seed: int = 0) -> tuple[nn.Module, object]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    found = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    for _ in range(3):
        found.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        found.step()
    return model, found


@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "Adagrad"])
def test_loaded_state_trains_on_with_the_same_bits(optimizer: str) -> None:
    one, its = trained(optimizer=optimizer, seed=0)
    other, theirs = trained(optimizer=optimizer, seed=1)
    state = from_bytes(b"".join(to_buffers(state_of(one, its))))  # type: ignore[arg-type]
    load_state(state, other, theirs)  # type: ignore[arg-type]
    for seed in range(4):
        for model, found in ((one, its), (other, theirs)):
            torch.manual_seed(seed)
            found.zero_grad()  # type: ignore[attr-defined]
            model(torch.randn(8, 4)).square().sum().backward()
            found.step()  # type: ignore[attr-defined]
    a, b = state_of(one, its), state_of(other, theirs)  # type: ignore[arg-type]
    assert a.keys() == b.keys()
    assert {name: array.tobytes() for name, array in a.items()} == {
        name: array.tobytes() for name, array in b.items()
    }


def test_state_before_the_first_step_has_no_optimizer_numbers() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    found = state_of(model, optimizer)
    assert sorted(found) == ["model/bias", "model/weight"]
    other, theirs = nn.Linear(4, 2), torch.optim.Adam
    load_state(found, other, theirs(other.parameters()))
    assert torch.equal(model.weight, other.weight)


FAULTS = {
    "another width": (
        {"width": 5},
        "array 'model/0.weight' must be float32 (3, 4), got float32 (5, 4); "
        "use the job that it was trained with",
    ),
    "another optimizer": (
        {"optimizer": "Adagrad"},
        "optimizer state of '0.weight' does not fit Adam: step, sum instead of exp_avg, "
        "exp_avg_sq, step; use the optimizer that it was trained with",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_state_of_another_model_or_optimizer_is_refused_and_nothing_is_loaded(fault: str) -> None:
    changes, message = FAULTS[fault]
    source, its = trained(**changes)  # type: ignore[arg-type]
    model, optimizer = trained(seed=1)
    before = {n: a.tobytes() for n, a in state_of(model, optimizer).items()}  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        load_state(state_of(source, its), model, optimizer)  # type: ignore[arg-type]
    after = {n: a.tobytes() for n, a in state_of(model, optimizer).items()}  # type: ignore[arg-type]
    assert before == after


def test_state_with_other_names_prints_both_sides() -> None:
    model, optimizer = trained()
    arrays = state_of(model, optimizer)  # type: ignore[arg-type]
    arrays["model/3.weight"] = arrays.pop("model/2.weight")
    message = (
        "state is of another model: 1 unknown arrays (model/3.weight) and 1 missing "
        "(model/2.weight) in x; use the model that was trained"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        load_state(arrays, model, optimizer, file="x")  # type: ignore[arg-type]
