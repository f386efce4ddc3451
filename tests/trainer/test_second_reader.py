"""A checkpoint of a run, read by `schemas/formats/runs.md` alone: JSON, zlib, hashlib and numpy.

What it finds is compared with what the trainer's own reader finds.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from presage.trainer.checkpoint.format import from_bytes
from presage.trainer.checkpoint.load import newest_checkpoint
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import rows_in, run_job

KINDS = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?"}


@pytest.fixture(scope="module")
def run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a planned cache and several checkpoints."""
    folder = tmp_path_factory.mktemp("second")
    job = write_job(folder / "job", lookahead="2", every_steps="5")
    run_job(job, dataset, folder / "run", embedding="cached")
    return folder / "run"


def newest_of(run: Path) -> Path:
    """Return the newest folder of eight digits with a manifest."""
    folders = sorted((run / "checkpoints").glob("[0-9]" * 8))
    return [folder for folder in folders if (folder / "MANIFEST.json").is_file()][-1]


def canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def manifest_of(folder: Path) -> dict[str, Any]:
    """Read a manifest and prove its checksum, and size and sha256 of every file."""
    body = json.loads((folder / "MANIFEST.json").read_bytes())
    assert (folder / "MANIFEST.json").read_bytes() == canonical(body)
    checksum = body.pop("checksum")
    assert hashlib.sha256(canonical(body)).hexdigest() == checksum
    for path, wanted in body["files"].items():
        data = (folder.parent / path).read_bytes()
        assert len(data) == wanted["num_bytes"]
        assert hashlib.sha256(data).hexdigest() == wanted["sha256"]
    return body


def arrays_of(data: bytes) -> dict[str, np.ndarray]:
    """Read a safetensors file with our checksums."""
    size = int.from_bytes(data[:8], "little")
    assert (8 + size) % 64 == 0
    text, values = data[8 : 8 + size].rstrip(b" "), data[8 + size :]
    header = json.loads(text)
    metadata = header.pop("__metadata__")
    bare = re.sub(rb',"header_crc32":"\d+"', b"", text, count=1)
    assert zlib.crc32(bare) == int(metadata["header_crc32"])
    crcs = json.loads(metadata["crc32"])
    found: dict[str, np.ndarray] = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        assert zlib.crc32(values[start:end]) == crcs[name]
        found[name] = np.frombuffer(values[start:end], KINDS[entry["dtype"]]).reshape(
            entry["shape"]
        )
    return found


def rows_of(folder: Path, parts: list[str]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return each row of a table with values and state: of several parts the first holds."""
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for part in parts:
        rows, records = (
            np.load(folder.parent / part / f"{name}.npy") for name in ("rows", "records")
        )
        values, state = records["values"], records["state"]
        assert rows.dtype == np.int64
        assert (np.diff(rows) > 0).all()
        for place, row in enumerate(rows.tolist()):
            found.setdefault(row, (values[place], state[place]))
    return found


@pytest.mark.slow
def test_rows_of_a_checkpoint_are_those_that_the_trainer_reads(run: Path) -> None:
    folder = newest_of(run)
    assert folder == newest_checkpoint(run)
    manifest = manifest_of(folder)
    assert manifest["train_step"] == int(folder.name)
    assert any(len(parts) > 1 for parts in manifest["parts"].values())
    known = rows_in(folder)
    for table, parts in manifest["parts"].items():
        layout = manifest["fingerprint"]["tables"][table]
        found = rows_of(folder, parts)
        rows = sorted(found)
        np.testing.assert_array_equal(rows, known[f"{table}/rows.npy"])
        for place, (name, width) in enumerate((("values", "dim"), ("state", "state_width"))):
            mine = np.array([found[row][place] for row in rows])
            assert mine.shape == (len(rows), layout[width])
            np.testing.assert_array_equal(mine, known[f"{table}/{name}.npy"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "plan"])
def test_named_arrays_of_a_checkpoint_are_those_that_the_trainer_reads(
    name: str, run: Path
) -> None:
    data = (newest_of(run) / f"{name}.safetensors").read_bytes()
    found, known = arrays_of(data), from_bytes(data)
    assert list(found) == list(known)
    for key, array in found.items():
        assert array.dtype == known[key].dtype
        np.testing.assert_array_equal(array, known[key])
    if name == "dense":
        assert {key.partition("/")[0] for key in found} == {"model", "optimizer"}
