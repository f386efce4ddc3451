"""Changed rows on the export of one checkpoint give the export of the next, bit for bit."""

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from presage.schemas.dataset.manifest import canonical_json, hash_of
from presage.schemas.errors import SchemaError
from presage.schemas.layout import MANIFEST
from presage.schemas.run.model_file import changed_path, open_changes
from presage.trainer.__main__ import main
from presage.trainer.checkpoint.files import (
    checksum_of,
    folder_name,
    read_checkpoint_manifest,
    write_checkpoint_manifest,
)
from presage.trainer.checkpoint.format import RowPart, read_parts, write_part
from presage.trainer.serve.export import export_run
from presage.trainer.serve.publish import Published, apply_changes, publish
from presage.trainer.stores.store import concat_records
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import checkpoint_at, rows_in, run_job

STEPS = (4, 8, 12, 16, 20)
TABLES = ("users", "items", "pages")


@pytest.fixture(scope="module")
def run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("publish")
    run_job(write_job(folder / "job", every_steps="4"), dataset, folder / "run", steps=20)
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run: Path) -> Callable[[int], Path]:
    """Return a function that exports a checkpoint of the run, each once."""

    @cache
    def export(step: int) -> Path:
        export_run(run, run.parent / f"model-{step}", step)
        return run.parent / f"model-{step}"

    return export


def by_row(checkpoint: Path, table: str) -> dict[int, bytes]:
    """Return the bits of each row of a checkpoint, read without the code under test."""
    held = rows_in(checkpoint)
    rows, values = held[f"{table}/rows.npy"], held[f"{table}/values.npy"]
    return {row: value.tobytes() for row, value in zip(rows.tolist(), values, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize(("since", "to"), [(4, 8), (4, 20), (12, 12)])
def test_published_rows_are_those_that_differ_and_give_the_newer_export_bit_for_bit(
    since: int, to: int, run: Path, exported: Callable[[int], Path], tmp_path: Path
) -> None:
    old, new = exported(since), exported(to)
    published = publish(run, tmp_path / "changes", since, to)
    assert (published.since_step, published.train_step) == (since, to)
    applied = apply_changes(old, tmp_path / "changes", tmp_path / "applied")
    assert applied.num_changed == published.num_changed
    assert (tmp_path / "applied").read_bytes() == new.read_bytes()
    assert (old.read_bytes() == new.read_bytes()) == (since == to)
    check_rows(run, published, tmp_path / "changes")


def check_rows(run: Path, published: Published, changes: Path) -> None:
    """Check that the published rows are those whose bits differ, and no others."""
    steps = published.since_step, published.train_step
    for table in TABLES:
        old, new = (by_row(checkpoint_at(run, step), table) for step in steps)
        expected = {row: value for row, value in new.items() if old.get(row) != value}
        rows = pq.read_table(changes / changed_path(table))
        vectors = np.array(rows["vector"].to_pylist())
        read = {r: v.tobytes() for r, v in zip(rows["row"].to_pylist(), vectors, strict=True)}
        assert read == expected
        assert list(read) == sorted(read)
        assert published.num_changed[table] == len(expected)
        assert published.num_dropped[table] == 0
    num_rows = {table: len(by_row(checkpoint_at(run, steps[1]), table)) for table in TABLES}
    some = any(0 < published.num_changed[table] < num_rows[table] for table in TABLES)
    assert some == (steps[0] != steps[1])


def drop_rows(run: Path, train_step: int, table: str) -> list[int]:
    """Write a table of a checkpoint anew, every third row left out; return these."""
    checkpoint = checkpoint_at(run, train_step)
    manifest = read_checkpoint_manifest(checkpoint)
    part = f"{folder_name(train_step)}/{table}-less"
    folders = [checkpoint.parent / each for each in manifest.parts[table]]
    held = [*read_parts(folders)]
    rows = np.concatenate([each for each, _ in held])
    keep = np.arange(len(rows)) % 3 > 0
    records = concat_records([each for _, each in held]).take(keep)
    write_part(checkpoint.parent / part, RowPart(folders[0]).dtype, [(rows[keep], records)])
    files = dict(manifest.files)
    for path in (checkpoint.parent / part).iterdir():
        files[f"{part}/{path.name}"] = checksum_of(path)
    fields = {n: getattr(manifest, n) for n in manifest.__dataclass_fields__}
    parts = {**manifest.parts, table: (part,)}
    changed = type(manifest)(**{**fields, "parts": parts, "files": files})
    write_checkpoint_manifest(checkpoint, changed)
    return rows[~keep].tolist()


@pytest.mark.slow
def test_dropped_rows_are_published_and_dropped(
    run: Path, exported: Callable[[int], Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    dropped = drop_rows(copy, 12, "items")
    export_run(copy, tmp_path / "new", 12)
    publish(copy, tmp_path / "changes", 8, 12)
    held = by_row(checkpoint_at(run, 8), "items")
    expected = sorted(set(dropped) & set(held))
    read = pq.read_table(tmp_path / "changes" / "dropped" / "items.parquet")["row"].to_pylist()
    assert read == expected
    assert expected, "some of the dropped rows were there before"
    apply_changes(exported(8), tmp_path / "changes", tmp_path / "applied")
    assert (tmp_path / "applied").read_bytes() == (tmp_path / "new").read_bytes()


@pytest.mark.slow
def test_commands_print_what_they_published_and_applied(
    run: Path, exported: Callable[[int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, changes, new = (
        str(path) for path in (exported(8), tmp_path / "changes", tmp_path / "new")
    )
    assert main(["publish", str(run), "--since", "8", "--output", changes, "--json"]) == 0
    assert main(["apply", old, "--changes", changes, "--output", new, "--json"]) == 0
    published, applied = map(json.loads, capsys.readouterr().out.splitlines())
    assert published["since_step"] == 8
    assert published["num_changed"] == applied["num_changed"]
    assert applied["train_step"] == 20


@pytest.fixture(scope="module")
def changes(run: Path) -> Path:
    """The rows that changed since step 8; no test changes the files."""
    publish(run, run.parent / "changes", 8)
    return run.parent / "changes"


@pytest.mark.slow
def test_rows_of_another_model_are_refused(
    changes: Path, exported: Callable[[int], Path], tmp_path: Path
) -> None:
    message = "changes are relative to another model: to step 8, checkpoint"
    with pytest.raises(SchemaError, match=message):
        apply_changes(exported(4), changes, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_folder_that_is_changed_or_not_one_is_refused(changes: Path, tmp_path: Path) -> None:
    shutil.copytree(changes, tmp_path / "changes")
    path = tmp_path / "changes" / changed_path("items")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(SchemaError, match="file must have sha256"):
        open_changes(tmp_path / "changes")
    manifest = tmp_path / "changes" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"since_step":8', '"since_step":9'))
    with pytest.raises(SchemaError, match="manifest does not match its checksum"):
        open_changes(tmp_path / "changes")
    body = json.loads(manifest.read_text())
    del body["checksum"]
    body["model"]["newer"] = 1
    manifest.write_text(canonical_json({**body, "checksum": hash_of(body)}))
    message = r"^unknown key: model.newer in .*MANIFEST.json"
    with pytest.raises(SchemaError, match=message):
        open_changes(tmp_path / "changes")
    message = "folder holds no published rows"
    with pytest.raises(SchemaError, match=re.escape(message)):
        open_changes(tmp_path)


def test_publish_since_a_later_step_or_into_files_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="--since is after the newer checkpoint: 8 > 4"):
        publish(run, tmp_path / "changes", 8, 4)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SchemaError, match="output folder is not empty"):
        publish(run, tmp_path, 4, 8)
    message = f"run has no checkpoint of step 5: it has {list(STEPS)} in {run}; use one of these"
    with pytest.raises(SchemaError, match=re.escape(message)):
        publish(run, tmp_path / "changes", 5)
