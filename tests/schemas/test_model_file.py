"""A model file is read back equal; an incomplete or unsafe one is refused."""

import hashlib
import io
import json
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from presage.schemas.config.job import TableConfig
from presage.schemas.dataset.manifest import canonical_json, hash_of
from presage.schemas.errors import SchemaError
from presage.schemas.layout import MANIFEST
from presage.schemas.rows import initial_rows
from presage.schemas.run.model_file import (
    PROGRAM,
    Lineage,
    ModelManifest,
    open_model,
    rows_paths,
    write_model,
)
from presage.schemas.run.model_inputs import MIN_SAMPLES, PADDING, ModelInputs, build_inputs
from presage.schemas.storage.location import Location

INPUTS = ModelInputs(
    dense=("price",),
    sparse={"clicked": "items", "item": "items", "user": "users"},
    weighted=("clicked",),
    tables={
        "items": TableConfig(features=("clicked", "item"), num_rows=50),
        "users": TableConfig(features=("user",), num_rows=100, rows="identity"),
    },
    history="clicked",
    max_history=2,
    dtype="float32",
)
ROWS = {"items": np.arange(0, 50, 2), "users": np.array([3, 5])}
SAMPLES = pa.table(
    {
        "price": pa.array([1, None, 3], pa.float32()),
        "clicked": pa.array([[1, 2, 3], [], None], pa.list_(pa.int64())),
        "clicked_weights": pa.array([[0.5, 1, 2], [], None], pa.list_(pa.float32())),
        "item": [7, 8, 9],
        "user": [3, None, 5],
    }
)
"""Samples as a dataset has them: a null number, a null id, an empty list and a null one."""


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def archive(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


SIZE = "Add(Symbol('s7', positive=True, integer=True), Integer(1))"
GRAPH = {"target": "torch.ops.aten.add.Tensor", "size": {"expr_str": SIZE}}
HARMLESS = {
    "made/archive_format": b"pt2",
    "made/models/model.json": json.dumps([GRAPH]).encode(),
    "made/data/weights/model_weights_config.json": b'{"config": {"w": {"use_pickle": false}}}',
    "made/data/sample_inputs/model.pt": b"",
}


def values_of(table: str) -> np.ndarray:
    return np.arange(len(ROWS[table]) * 4, dtype=np.float32).reshape(-1, 4)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose program nobody runs."""
    manifest = ModelManifest(
        name="small",
        model="dlrm",
        inputs=INPUTS,
        label="clicked_flag",
        dim=4,
        seed=1,
        batch_samples=64,
        lineage=Lineage(run="run", train_step=3, checkpoint_sha256="ab", segments_sha256=("cd",)),
        parts={},
    )
    members: dict[str, Path | bytes] = {PROGRAM: archive(HARMLESS), "job.yaml": b"name: small"}
    for table, rows in ROWS.items():
        contents = (npy(rows), npy(values_of(table)))
        members |= dict(zip(rows_paths(table), contents, strict=True))
    write_model(Location.parse(tmp_path / "written"), manifest, members)
    return tmp_path / "written"


def test_written_model_is_read_back(model: Path) -> None:
    found = open_model(model)
    assert found.manifest.inputs == INPUTS
    assert found.manifest.lineage.segments_sha256 == ("cd",)
    assert found.read("job.yaml") == b"name: small"
    for table, rows in ROWS.items():
        assert [a.tolist() for a in found.stored_rows(table)] == [
            rows.tolist(),
            values_of(table).tolist(),
        ]
    assert not list(model.parent.glob(".*")), "nothing is left half-written"


def test_rows_that_are_not_stored_have_their_first_values(model: Path) -> None:
    found = open_model(model).rows_of("users", np.array([3, 4, 5, 99]))
    first = initial_rows(np.array([4, 99]), table="users", seed=1, dim=4, dtype="float32")
    assert np.array_equal(found[[0, 2]], values_of("users"))
    assert np.array_equal(found[[1, 3]], first)
    assert open_model(model).rows_of("users", np.array([], np.int64)).shape == (0, 4)


def test_inputs_look_up_what_the_samples_say() -> None:
    found = build_inputs(INPUTS, SAMPLES, lambda _, rows: rows[:, None].astype(np.float32))
    assert found["dense"].shape == (MIN_SAMPLES, 1)
    assert found["dense"][:3, 0].tolist() == [1, 0, 3]
    assert found["lengths/clicked"].tolist() == [3] + [0] * (MIN_SAMPLES - 1)
    assert found["lengths/user"][:3].tolist() == [1, 0, 1]
    users = found["rows/users"][found["positions/user"][:-PADDING], 0]
    assert users.tolist() == [3, 5]
    assert found["factors/clicked"].tolist() == [0.5, 1, 2] + [0] * PADDING
    clicked = found["positions/clicked"][:3]
    assert found["history"].shape == (MIN_SAMPLES, 2)
    assert found["history"][0].tolist() == [clicked[2], clicked[1]], "the newest first"
    assert not found["history"][1:].any()
    assert list(found) == sorted(found)


def test_inputs_of_a_slice_are_those_of_its_samples() -> None:
    def rows_of(_: str, rows: np.ndarray) -> np.ndarray:
        return rows[:, None]

    cut = build_inputs(INPUTS, SAMPLES.slice(1, 2), rows_of)
    copied = build_inputs(INPUTS, SAMPLES.take([1, 2]), rows_of)
    assert {n: a.tolist() for n, a in cut.items()} == {n: a.tolist() for n, a in copied.items()}


@pytest.mark.slow
def test_model_with_a_changed_byte_is_refused_or_means_the_same(
    model: Path, tmp_path: Path
) -> None:
    data, found = model.read_bytes(), open_model(model)
    members = {name: found.read(name) for name in found.manifest.parts}
    messages, places = list[str](), range(0, len(data), 7)
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        (tmp_path / "model").write_bytes(changed)
        try:
            opened = open_model(tmp_path / "model")
        except SchemaError as error:
            messages.append(str(error))
            continue
        assert opened.manifest == found.manifest
        assert {name: opened.read(name) for name in opened.manifest.parts} == members
    assert all("export the run again" in message for message in messages)
    assert len(messages) > 0.7 * len(places), "only headers of the archive may change unseen"


def test_model_that_is_cut_or_missing_is_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    message = f"model is missing in {path}; create it with python -m presage.trainer export"
    with pytest.raises(SchemaError) as error:
        open_model(path)
    assert str(error.value) == message
    path.write_bytes(model.read_bytes()[:-100])
    with pytest.raises(SchemaError, match="model is not a complete archive"):
        open_model(path)


def rewritten(source: Path, to: Path, **members: bytes) -> Path:
    """Write a model with other members, whose manifest is right about them."""
    with zipfile.ZipFile(source) as old:
        old_members = {name: old.read(name) for name in old.namelist()} | members
    body = json.loads(old_members.pop(MANIFEST))
    del body["checksum"]
    body |= json.loads(members.get("changes", b"{}"))
    old_members.pop("changes", None)
    sums = {n: hashlib.sha256(data).hexdigest() for n, data in old_members.items()}
    body["parts"] = {n: {"num_bytes": len(old_members[n]), "sha256": s} for n, s in sums.items()}
    old_members[MANIFEST] = canonical_json({**body, "checksum": hash_of(body)}).encode()
    with zipfile.ZipFile(to, "w") as new:
        for name, data in old_members.items():
            new.writestr(name, data)
    return to


def test_model_of_another_format_is_refused(model: Path, tmp_path: Path) -> None:
    path = rewritten(model, tmp_path / "model", changes=b'{"format": 2}')
    with pytest.raises(SchemaError, match=r"^format must be 1, got 2 in "):
        open_model(path)


def with_member(program: bytes, name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(program)) as old, zipfile.ZipFile(out, "w") as new:
        root = old.namelist()[0].split("/")[0]
        for each in old.namelist():
            if each != f"{root}/{name}":
                new.writestr(each, old.read(each))
        new.writestr(f"{root}/{name}", data)
    return out.getvalue()


class Harm:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("it was unpickled",))


HARM = pickle.dumps(Harm())
UNSAFE = {
    "example inputs": ("data/sample_inputs/model.pt", HARM),
    "a custom object": ("data/constants/custom_obj_0", HARM),
    "a pickled weight": (
        "data/weights/model_weights_config.json",
        b'{"config": {"w": {"path_name": "weight_0", "use_pickle": true}}}',
    ),
    "code in a size": ("models/model.json", b'{"expr_str": "exec(chr(49))"}'),
    "code in a symbol": (
        "models/model.json",
        b'{"expr_str": "Symbol(exec(chr(49)), integer=True)"}',
    ),
    "another operator": ("models/model.json", b'{"target": "os.system"}'),
    "a graph of nothing": ("models/model.json", b"["),
}


@pytest.mark.parametrize(("name", "data"), UNSAFE.values(), ids=UNSAFE.keys())
def test_program_that_would_be_unpickled_is_refused(
    name: str, data: bytes, model: Path, tmp_path: Path
) -> None:
    program = open_model(model).program
    harmful = with_member(program, name, data)
    path = rewritten(model, tmp_path / "model", **{PROGRAM: harmful})
    with pytest.raises(SchemaError, match=r"program holds more than plain tensors and torch's own"):
        open_model(path)


def test_samples_without_a_column_are_refused_by_name(model: Path) -> None:
    renamed = SAMPLES.rename_columns(["itm" if n == "item" else n for n in SAMPLES.column_names])
    message = "samples lack column 'item'; did you mean 'itm'?"
    with pytest.raises(SchemaError, match=re.escape(message)):
        open_model(model).inputs(renamed)
