"""The command that compares runs: equal ones are, and the first difference is named."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from presage.schemas.run.records import METRICS
from presage.trainer.__main__ import main
from presage.trainer.checkpoint.files import (
    DENSE_FILE,
    read_checkpoint_manifest,
    write_checkpoint_manifest,
)
from presage.trainer.checkpoint.format import from_bytes, to_buffers
from presage.trainer.checkpoint.load import newest_checkpoint
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import run_job


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    job = write_job(folder / "job", dtype="float32", epochs="1", optimizer="adam")
    dataset = make_dataset(folder / "dataset", job, [[(256, 20)]])
    for embedding in ("plain", "cached"):
        run_job(job, dataset, folder / embedding, embedding=embedding)
    return folder


@pytest.mark.slow
def test_cached_and_plain_run_are_equal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(runs / "plain"), str(runs / "cached"), "--json"]) == 0
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert found["difference"] is None
    assert output.err == f"equal: yes, 4 steps, {found['num_rows']} rows\n"
    assert main(["diff", str(runs / "plain"), str(runs / "cached")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == output.err.strip()
    assert found["num_steps"] == 4
    assert found["num_tensors"] > 8
    assert found["num_rows"] > 100


def last_line(run: Path) -> None:
    lines = (run / METRICS).read_text().splitlines()
    (run / METRICS).write_text("".join(f"{line}\n" for line in lines[:-1]))


def loss(run: Path) -> None:
    text = (run / METRICS).read_text()
    first = json.loads(text.splitlines()[0])["loss"]
    (run / METRICS).write_text(text.replace(str(first), str(np.nextafter(first, 1)), 1))


def newest(run: Path) -> Path:
    found = newest_checkpoint(run)
    assert found is not None
    return found


def state(run: Path) -> None:
    path = newest(run) / "items" / "records.npy"
    records = np.load(path)
    array = records["state"]
    array[7, 1] = -array[7, 1] if array[7, 1] else -0.0  # zeros of two signs differ, too
    np.save(path, records)


def dense(run: Path) -> None:
    path = newest(run) / DENSE_FILE
    arrays = {name: array.copy() for name, array in from_bytes(path.read_bytes()).items()}
    name = next(name for name in sorted(arrays) if name.startswith("model/"))
    arrays[name].reshape(-1)[0] += 1e-3
    path.write_bytes(b"".join(to_buffers(arrays)))


def table(run: Path) -> None:
    checkpoint = newest(run)
    manifest = read_checkpoint_manifest(checkpoint)
    parts = {name: each for name, each in manifest.parts.items() if name != "items"}
    write_checkpoint_manifest(checkpoint, replace(manifest, parts=parts))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a step less": (last_line, r"steps: 4 and 3"),
    "the last bit of a loss": (loss, r"loss of step 0: \S+ and \S+"),
    "the state of a row": (state, r"state of table items, row \d+, column 1: \S+ and \S+"),
    "a dense parameter": (dense, r"dense model/\S+: other bits"),
    "a table": (table, r"tables: .*items.* and .*"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_difference_is_named(
    change: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, expected = CHANGES[change]
    other = Path(shutil.copytree(runs / "cached", tmp_path / "other"))
    damage(other)
    assert main(["diff", str(runs / "plain"), str(other), "--json"]) == 1
    found = capsys.readouterr()
    assert re.fullmatch(expected, json.loads(found.out)["difference"], re.DOTALL)
    assert found.err.startswith("runs differ: ")
    assert found.err.splitlines()[-1] == "equal: no"
