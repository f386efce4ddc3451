"""A dataset of format 1 becomes one of format 2, without a change of samples, order or next uses.

`data/format-1.tar.gz` was written by the code of commit f63c31f: a dataset of two segments, the
second of a day, with the job and the logs of `test_forget.py` (60 rows each), two epochs of
shuffled blocks, a second index, and tombstones. `samples.parquet` is what `expand` gave, and
`expected.json` has the blocks of each step, and each row of each step with its next use.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipelines.build import build
from pipelines.cli import main
from pipelines.table import migrate as module
from pipelines.table.migrate import migrate
from pipelines.table.rows import expand
from pipelines.table.verify import verify
from schemas.accesses import TableAccesses, indexed_steps
from schemas.dataset import Dataset, open_dataset
from schemas.errors import SchemaError
from schemas.layout import JOB, MANIFEST, SCHEMA, SEGMENTS
from schemas.manifest import read_dataset
from schemas.storage import Location
from tests.pipelines.appending import addition
from tests.pipelines.logs import bytes_of, copy_of, unnamed_places
from tests.pipelines.test_erase import ID, log_with, sessions

SETTINGS = {"blocks": (32, 2, "blocks", 7), "none": (32, 1, "none", 7)}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the dataset of format 1 and what is expected of it, not to be changed."""
    folder = tmp_path_factory.mktemp("old")
    shutil.unpack_archive(Path(__file__).parent / "data" / "format-1.tar.gz", folder)
    return folder


@pytest.fixture
def dataset(old: Path, tmp_path: Path) -> Path:
    """A copy of the dataset of format 1."""
    return copy_of(old / "format-1", tmp_path / "dataset")


@pytest.fixture(scope="module")
def expected(old: Path) -> dict[str, Any]:
    """The order and the next uses of the dataset of format 1."""
    return json.loads((old / "expected.json").read_text())


def segment_files(dataset: Path) -> dict[str, bytes]:
    return bytes_of(dataset / SEGMENTS)


def next_uses(dataset: Dataset, settings: tuple[int, int, str, int], table: str) -> Iterator[Any]:
    """Yield each step's rows, ascending, with their next uses."""
    order = dataset.order(*settings)
    rows = TableAccesses(dataset, table, order).rows
    for numbers, distances in indexed_steps(dataset, dataset.index_for(order), table):
        pairs = zip(rows[numbers].tolist(), distances.tolist(), strict=True)
        yield sorted([row, distance] for row, distance in pairs)


def test_migrated_dataset_has_the_same_samples_order_and_next_uses(
    old: Path,
    dataset: Path,
    expected: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = segment_files(dataset)
    assert main(["migrate", str(dataset), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"migrated": True, "num_segments": 2}
    assert verify(dataset)["problems"] == []
    assert segment_files(dataset) == files
    expand(Location.parse(dataset), Location.parse(tmp_path / "samples.parquet"))
    samples = pq.read_table(tmp_path / "samples.parquet")
    assert samples.equals(pq.read_table(old / "samples.parquet"))
    assert ID not in sessions(dataset)
    opened = open_dataset(dataset)
    order = opened.order(*SETTINGS["blocks"])
    steps = map(order.step, range(order.num_steps))
    assert [[step.segment, step.positions.tolist()] for step in steps] == expected["steps"]
    for name, steps in expected["next_uses"].items():
        table, _, shuffle = name.partition(" ")
        assert list(next_uses(opened, SETTINGS[shuffle], table)) == steps
    root = opened.manifest
    assert {index.settings for index in root.indexes} == set(SETTINGS.values())
    assert root.indexes[0].settings == SETTINGS["blocks"]
    assert [segment.shuffle_key for segment in root.segments] == [0, 1]
    assert [segment.day for segment in root.segments] == [None, "2026-01-02"]
    assert root.lineage == {"day:2026-01-02": root.segments[1].id}
    assert not (dataset / MANIFEST).exists()
    assert unnamed_places(dataset) == []
    assert {path.name for path in dataset.glob("index-*")} == {index.id for index in root.indexes}
    before = bytes_of(dataset)
    assert migrate(Location.parse(dataset)) == {"migrated": False, "num_segments": 2}
    assert bytes_of(dataset) == before


def test_dataset_of_format_1_is_refused_with_the_command_that_migrates_it(dataset: Path) -> None:
    with pytest.raises(SchemaError, match=r"^dataset has format 1 in ") as error:
        open_dataset(dataset)
    words = str(error.value).partition("run python -m pipelines ")[2].partition(",")[0].split()
    assert main(words) == 0
    assert len(open_dataset(dataset).segments) == 2


@pytest.mark.slow
def test_migrated_dataset_grows_and_keeps_the_order_of_its_blocks(
    dataset: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    migrate(Location.parse(dataset))
    before = read_dataset(dataset).segments
    (tmp_path / "job").mkdir()
    for name in (JOB, SCHEMA):
        (tmp_path / "job" / name).write_bytes((dataset / name).read_bytes())
    log = log_with(tmp_path / "log", 2, drop=(ID,))
    build(replace(addition(tmp_path / "job" / JOB, log, dataset), day="2026-01-03"))
    opened = open_dataset(dataset)
    assert opened.manifest.segments[:2] == before
    assert verify(dataset)["problems"] == []
    assert len(opened.complete_indexes()) == 2
    order, num_steps = opened.order(*SETTINGS["blocks"]), len(expected["steps"]) // 2
    steps = map(order.step, range(num_steps))
    assert [[s.segment, s.positions.tolist()] for s in steps] == expected["steps"][:num_steps]


@pytest.mark.parametrize("function", ["write_version", "commit_root", "write_copies"])
def test_migration_that_is_interrupted_can_be_run_again(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, function, interrupt)
        with pytest.raises(KeyboardInterrupt):
            migrate(Location.parse(dataset))
    is_migrated = function == "write_copies"
    assert migrate(Location.parse(dataset))["migrated"] != is_migrated
    assert main(["vacuum", str(dataset), "--older-than", "0s"]) == 0
    assert unnamed_places(dataset) == []
    assert not (dataset / MANIFEST).exists()
    assert verify(dataset)["problems"] == []


def test_damaged_root_of_format_1_is_refused(dataset: Path) -> None:
    path = dataset / MANIFEST
    for data in (path.read_bytes().replace(b'"shop"', b'"ship"'), b"{", b"[]"):
        path.unlink()
        path.write_bytes(data)
        before = bytes_of(dataset)
        with pytest.raises(SchemaError, match=r"^manifest (is damaged|must be intact) .*; restore"):
            migrate(Location.parse(dataset))
        assert bytes_of(dataset) == before


def test_directory_without_a_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"^there is no dataset in .*; correct the path$"):
        migrate(Location.parse(tmp_path))
