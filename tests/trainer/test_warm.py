"""A run that begins with the checkpoint of another has the bits of one run over all days."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from presage.schemas.dataset.manifest import DatasetManifest, read_segment, write_manifest
from presage.schemas.dataset.opened import open_dataset, select_segments
from presage.schemas.errors import SchemaError
from presage.schemas.layout import JOB
from presage.schemas.storage.location import Location
from presage.trainer.__main__ import main
from presage.trainer.checkpoint.load import require_checkpoint
from presage.trainer.evaluation.evaluate import evaluate_run
from presage.trainer.run.folder import verify_run
from presage.trainer.run.warm_start import rows_used
from tests.trainer.daily import DATES, IN_ORDER, make_days, run_days
from tests.trainer.make_dataset import bytes_of, change_root, make_dataset, write_job
from tests.trainer.runs import SEGMENTS, bits_of, losses_of, parts_of, rows_in, run_job

KINDS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "lazy Adam, which counts steps": ({"optimizer": "adam"}, {}),
    "a log, saved beside training": ({"every_steps": "3"}, {"embedding": "cached"}),
    "two stores": ({}, {"embedding": "cached", "stores": 2}),
}
"""What may differ in a start; `test_embedding_modes.py` loads checkpoints in every mode."""


def final_bits(run: Path) -> dict[str, bytes]:
    return bits_of(require_checkpoint(run))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A job, its dataset and the folder of plain runs day by day."""
    folder = tmp_path_factory.mktemp("days")
    job, dataset = make_days(folder)
    run_days(job, dataset, folder)
    return job, dataset, folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_days_one_by_one_have_the_bits_of_all_at_once(kind: str, tmp_path: Path) -> None:
    changes, options = KINDS[kind]
    job, dataset = make_days(tmp_path, **changes)
    run_job(job, dataset, tmp_path / "whole", **options)
    run_days(job, dataset, tmp_path, **options)
    losses = [losses_of(tmp_path / day) for day in DATES]
    assert np.concatenate(losses).tobytes() == losses_of(tmp_path / "whole").tobytes()
    assert final_bits(tmp_path / DATES[-1]) == final_bits(tmp_path / "whole")
    for day in DATES:
        assert verify_run(tmp_path / day).problems == ()


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--embedding", "cached", "--stores", "2"]])
def test_replicas_start_with_the_same_bits(
    more: list[str], small: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    job, dataset, folder = small
    given = ["train", str(job), "--dataset", str(dataset), "--output", str(tmp_path / "run")]
    given += ["--start-from", str(folder / DATES[0]), "--segments", DATES[1], "--replicas", "2"]
    assert main([*given, *more]) == 0
    assert final_bits(tmp_path / "run") == final_bits(folder / DATES[1])
    assert verify_run(tmp_path / "run").problems == ()


def test_run_takes_the_segments_that_are_left(
    small: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    job, dataset, folder = small
    summary = run_job(job, dataset, tmp_path / "rest", start_from=folder / DATES[0])
    assert summary.start is not None
    assert summary.start["segments"] == ["000000000001-5a11", "000000000002-5a11"]
    assert final_bits(tmp_path / "rest") == final_bits(folder / DATES[-1])
    with pytest.raises(SchemaError, match="dataset has no segment that rest did not train"):
        run_job(job, dataset, tmp_path / "more", start_from=tmp_path / "rest")


def erased(dataset: Path, segment_id: str) -> Path:
    """Give a segment another name and another hash, as `pipelines erase --rewrite` does."""
    place, name = dataset / "segments", f"{segment_id.partition('-')[0]}-left"
    (place / segment_id).rename(place / name)
    manifest = read_segment(place / name)
    sha256 = write_manifest(place / name, replace(manifest, num_rejects=manifest.num_rejects + 1))

    def change(root: DatasetManifest) -> DatasetManifest:
        (old,) = [s for s in root.segments if s.id == segment_id]
        new = replace(old, id=name, manifest_sha256=sha256)
        now = {f"erased:{each}": name for each in (old.id, old.manifest_sha256)}
        segments = tuple(new if s == old else s for s in root.segments)
        return replace(root, segments=segments, lineage={**root.lineage, **now})

    change_root(dataset, change)
    return dataset


def test_run_does_not_train_again_what_is_left_of_a_segment_after_forgetting(
    small: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    job, dataset, folder = small
    left = erased(Path(shutil.copytree(dataset, tmp_path / "dataset")), "000000000000-5a11")
    run = tmp_path / "rest"
    summary = run_job(job, left, run, start_from=folder / DATES[0], expire_days=30)
    assert summary.start is not None
    assert summary.start["segments"] == ["000000000001-5a11", "000000000002-5a11"]
    assert final_bits(run) == final_bits(folder / DATES[-1])
    resumed = Path(shutil.copytree(folder / DATES[0], tmp_path / "resumed"))
    with pytest.raises(SchemaError, match="a new version has replaced it: train a new run"):
        run_job(job, left, resumed, resume=True)


def test_report_counts_rows_as_sets_do(small: tuple[Path, Path, Path]) -> None:
    job, dataset, folder = small
    opened = open_dataset(dataset)
    before: dict[str, set[int]] = {table: set() for table in opened.job.data.tables}
    for day in DATES:
        start = json.loads((folder / day / "summary.json").read_text())["start"]
        segments = select_segments(opened, (day,)).segments
        for table, known in before.items():
            used = set(rows_used(opened, segments, table).tolist())
            if start is not None:
                assert start["tables"][table] == {
                    "new": len(used - known),
                    "kept": len(known),
                    "dropped": 0,
                    "grown": 0,
                }
            known |= used
            assert known == set(
                rows_in(require_checkpoint(folder / day))[f"{table}/rows.npy"].tolist()
            )
    assert parts_of(job, dataset).store.layouts.keys() == before.keys()


@pytest.mark.parametrize(
    ("num_days", "alive"), [(1, DATES[2:]), (3, DATES[1:]), (4, DATES), (9, DATES)]
)
def test_rows_that_no_segment_of_the_last_days_uses_are_dropped(
    num_days: int, alive: list[str], small: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    job, dataset, folder = small
    old, run = folder / DATES[1], tmp_path / "run"
    summary = run_job(job, dataset, run, start_from=old, expire_days=num_days)
    opened = open_dataset(dataset)
    segments = select_segments(opened, alive).segments
    found, held = rows_in(run / "checkpoints" / "00000000"), rows_in(require_checkpoint(old))
    assert summary.start is not None
    for table, counts in summary.start["tables"].items():
        stay = np.isin(held[f"{table}/rows.npy"], rows_used(opened, segments, table))
        for name in ("rows", "values", "state"):
            wanted = held[f"{table}/{name}.npy"][stay]
            assert found[f"{table}/{name}.npy"].tobytes() == wanted.tobytes()
        assert (counts["kept"], counts["dropped"]) == (int(stay.sum()), int((~stay).sum()))


@pytest.mark.slow
def test_expiry_asks_for_days(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", **IN_ORDER)
    dataset = make_dataset(tmp_path / "dataset", job, SEGMENTS)
    run_job(job, dataset, tmp_path / "old", segments=("000000000000-5a11",))
    with pytest.raises(SchemaError, match="segment has no day, which --expire-days needs"):
        run_job(job, dataset, tmp_path / "new", start_from=tmp_path / "old", expire_days=2)
    assert not (tmp_path / "new" / "run.json").exists()
    with pytest.raises(ValueError, match=re.escape("--expire-days 2 needs --start-from")):
        run_job(job, dataset, tmp_path / "new", expire_days=2)


@pytest.mark.parametrize("moment", ["before it is a run", "in its steps"])
def test_run_that_was_killed_begins_once(
    moment: str, small: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, dataset, folder = small
    run, old = tmp_path / "run", folder / DATES[0]
    with monkeypatch.context() as patched:
        place = "run.setup.start_run" if moment == "before it is a run" else "loop.metric_of"

        def die(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patched.setattr(f"presage.trainer.{place}", die)
        with pytest.raises(KeyboardInterrupt):
            run_job(job, dataset, run, start_from=old, segments=(DATES[1],))
    checkpoint = run / "checkpoints" / "00000000"
    assert checkpoint.is_dir()
    run_job(job, dataset, run, start_from=old, segments=(DATES[1],), resume=True)
    assert final_bits(run) == final_bits(folder / DATES[1])
    again = run_job(job, dataset, run, resume=True)
    assert again.start is not None
    assert final_bits(run) == final_bits(folder / DATES[1])


def test_other_runs_are_refused(small: tuple[Path, Path, Path], tmp_path: Path) -> None:
    job, dataset, folder = small
    old = folder / DATES[0]
    other = write_job(tmp_path / "other", **IN_ORDER, optimizer="adam")
    with pytest.raises(
        SchemaError, match="sparse_optimizer differs from that of the checkpoint: 'adam'"
    ):
        run_job(other, dataset, tmp_path / "a", start_from=old)
    wider = write_job(
        tmp_path / "wider", **IN_ORDER, model="{bottom_layers: [32], top_layers: [16]}"
    )
    with pytest.raises(SchemaError, match="array 'model/"):
        run_job(wider, dataset, tmp_path / "b", start_from=old)
    assert not (tmp_path / "b").exists()
    run_job(job, dataset, tmp_path / "cut", segments=(DATES[0],), steps=5)
    with pytest.raises(SchemaError, match="not finished: its checkpoint is of step 5 of 12"):
        run_job(job, dataset, tmp_path / "c", start_from=tmp_path / "cut")
    with pytest.raises(SchemaError, match="dataset has no segment '2026-04-10'"):
        run_job(job, dataset, tmp_path / "d", start_from=old, segments=("2026-04-10",))
    with pytest.raises(SchemaError, match="run to continue trains other segments than"):
        run_job(job, dataset, old, segments=(DATES[1],), resume=True)
    with pytest.raises(SchemaError, match="output folder has a run already"):
        run_job(job, dataset, old, start_from=folder / DATES[1])
    with pytest.raises(ValueError, match="leave --follow out"):
        run_job(job, dataset, tmp_path / "e", start_from=old, follow=True)


def test_damaged_checkpoint_begins_nothing(small: tuple[Path, Path, Path], tmp_path: Path) -> None:
    job, dataset, folder = small
    old = Path(shutil.copytree(folder / DATES[0], tmp_path / "old"))
    path = require_checkpoint(old) / "items" / "records.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(SchemaError, match="file must have sha256"):
        run_job(job, dataset, tmp_path / "new", start_from=old)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_larger_identity_table_is_reported(small: tuple[Path, Path, Path], tmp_path: Path) -> None:
    job, _, folder = small
    grown = tmp_path / "job" / JOB
    shutil.copytree(job.parent, grown.parent)
    text = job.read_text().replace("num_rows: 12, rows: ident", "num_rows: 40, rows: ident")
    grown.write_text(text)
    days = [[(400, 50)], [(250, 40)]]
    dataset = make_dataset(tmp_path / "dataset", grown, days, days=DATES[:2])
    summary = run_job(grown, dataset, tmp_path / "run", start_from=folder / DATES[0])
    assert summary.start is not None
    assert {t: c["grown"] for t, c in summary.start["tables"].items()} == {
        "users": 0,
        "items": 0,
        "pages": 28,
    }


def test_evaluation_is_of_the_segments_that_are_named(
    small: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    job, dataset, folder = small
    run, old = folder / DATES[1], folder / DATES[0]
    place = Location.parse(dataset)
    own = evaluate_run(job, place, run)
    assert own.num_samples == 40
    assert own == evaluate_run(job, place, run, (DATES[1],))
    assert json.loads((run / "summary.json").read_text())["ne"] == own.ne
    later = evaluate_run(job, place, old, ("000000000002-5a11",))
    assert later.num_samples == 40
    assert later.ne != evaluate_run(job, place, run, (DATES[2],)).ne
    arguments = ["evaluate", str(job), "--dataset", str(dataset), "--run", str(old), "--json"]
    assert main([*arguments, "--segments", "2026-04-09,2026-04-11"]) == 0
    assert json.loads(capsys.readouterr().out)["num_samples"] == 80


def test_what_a_run_began_with_is_named(small: tuple[Path, Path, Path]) -> None:
    _, _, folder = small
    found = [json.loads((folder / day / "run.json").read_text()) for day in DATES]
    assert found[0]["origin"] is None
    second, third = (each["origin"] for each in found[1:])
    assert second["run"] == f"../{DATES[0]}"
    assert (second["train_step"], second["steps_before"]) == (12, 12)
    assert (third["train_step"], third["steps_before"]) == (4, 16)
    assert second["checkpoint_sha256"] == bytes_of(require_checkpoint(folder / DATES[0]))
    assert len(third["trained"]) == 2
