"""Every command on tables of four times the memory that it may use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from benchmarks.common.control_groups import GROUPS, group
from presage.pipelines.cli import main as pipelines
from presage.schemas.machine import SHARED_MEMORY
from presage.schemas.run.records import CHECKPOINTS
from presage.trainer.checkpoint.files import complete_checkpoints, read_checkpoint_manifest
from tests.conftest import REPOSITORY
from tests.shared import make_once

pytestmark = pytest.mark.nightly

NEEDS_CGROUPS = pytest.mark.skipif(
    not os.access(GROUPS / "memory", os.W_OK)
    or not (GROUPS / "memory" / "memory.limit_in_bytes").is_file(),
    reason="needs memory cgroups of version 1 that it may create",
)
NUM_TABLES, TABLE_ROWS, DIM = 4, 56_000, 640
BATCH, LIST_LENGTH = 16, 8
DAYS = {"2026-01-01": TABLE_ROWS // LIST_LENGTH, "2026-01-02": TABLE_ROWS // LIST_LENGTH // 4}
"""Samples of each day: the first one looks up every row."""
TABLE_BYTES = NUM_TABLES * TABLE_ROWS * 4 * (DIM + 1)
BASE_BYTES = 160 << 20
"""What the commands need on rows of 8 numbers, beyond the modules that the fork server imported."""
LIMIT_BYTES = BASE_BYTES + TABLE_BYTES // 4
FEATURE = 'feature {{ name: "{}" type: {} {} annotation {{ tag: "{}" }} }}\n'
ALWAYS = "presence { min_fraction: 1 }"


def write_job(folder: Path, keep: int, copy_to: Path | None = None) -> Path:
    """Write a job and its schema."""
    tables = {
        f"t{k}": {"features": [f"id_{k}"], "rows": "identity", "num_rows": TABLE_ROWS}
        for k in range(NUM_TABLES)
    }
    job = {
        "name": "large",
        "data": {
            "sources": {"log": {"files": "*.parquet", "format": "parquet"}},
            "samples": {"map": "SELECT * FROM log"},
            "session": {"key": "session", "time": "time"},
            "split": {"evaluation_last": "1h"},
            "tables": tables,
            "block_samples": BATCH,
            "oracle": {"batch_samples": BATCH, "order": {"shuffle": "none"}},
        },
        "train": {
            "model": {"bottom_layers": [16], "top_layers": [16]},
            "embedding_dim": DIM,
            "batch_samples": BATCH,
            "num_threads": 1,
            "cache": {"policy": "belady", "prefetch_steps": 2, "rows": 1600},
            "checkpoint": {
                "every_steps": 150 // keep,
                "keep": keep,
                "late": "wait",
                "copy_to": str(copy_to or folder),
            },
        },
    }
    folder.mkdir(parents=True)
    time = f"{ALWAYS} time_domain {{ integer_format: UNIX_MICROSECONDS }}"
    features = [("session", "INT", ALWAYS, "kept"), ("time", "INT", time, "kept")]
    features += [("label", "INT", ALWAYS, "label"), ("price", "FLOAT", "", "dense")]
    features += [(f"id_{k}", "INT", "value_count { min: 0 }", "sparse") for k in range(NUM_TABLES)]
    text = "".join(FEATURE.format(*feature) for feature in features)
    (folder / "schema.pbtxt").write_text(text, encoding="utf-8")
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return folder / "job.yaml"


def make_large(folder: Path) -> None:
    """Write two jobs, and a dataset of two days."""
    for keep in (1, 2):
        write_job(folder / f"keep-{keep}", keep)
    dataset = ["--output", str(folder / "dataset")]
    for number, (day, num_samples) in enumerate(DAYS.items()):
        rng, log = np.random.default_rng(number), folder / day
        times = np.datetime64(day, "us") + np.arange(num_samples) * (86_400_000_000 // num_samples)
        columns: dict[str, Any] = {
            "session": np.arange(num_samples) + number * TABLE_ROWS,
            "time": times,
            "label": rng.integers(0, 2, num_samples),
            "price": rng.random(num_samples, np.float32),
        }
        offsets = np.arange(num_samples + 1, dtype=np.int32) * LIST_LENGTH
        for k in range(NUM_TABLES):
            ids = rng.permutation(TABLE_ROWS)[: offsets[-1]]
            columns[f"id_{k}"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
        log.mkdir()
        pq.write_table(pa.table(columns), log / "log.parquet")
        command = ["append" if number else "build", str(folder / "keep-1" / "job.yaml")]
        assert pipelines([*command, "--input", str(log), "--day", day, *dataset]) == 0
        dataset[0] = "--dataset"


def run_limited(*arguments: object) -> dict[str, Any]:
    """Run a command of a package under the limit; return the object that it prints."""
    child, peak = run(*arguments)
    assert child.returncode == 0, f"{arguments[1]} with a peak of {peak}: {child.stderr}"
    return json.loads(child.stdout.splitlines()[-1])


def run(*arguments: object) -> tuple[subprocess.CompletedProcess[str], int]:
    """Run a command of a package under the limit; return it, and the bytes that it used at most."""
    with group("limited") as limits:
        limits.limit_memory(LIMIT_BYTES)
        words = [
            sys.executable,
            "-m",
            "tests.trainer.limited",
            str(limits.memory),
            *map(str, arguments),
        ]
        child = subprocess.run(
            [*words, "--json"], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        return child, limits.peak_bytes


def num_rows(run: Path) -> int:
    """Return the number of rows in the newest checkpoint of a run, a row once per part."""
    parts = read_checkpoint_manifest(complete_checkpoints(run / CHECKPOINTS)[-1]).parts
    files = [run / CHECKPOINTS / part / "rows.npy" for table in parts.values() for part in table]
    return sum(len(np.load(file, mmap_mode="r")) for file in files)


@NEEDS_CGROUPS
def test_copies_that_the_control_group_does_not_allow_are_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", 1, SHARED_MEMORY)
    dataset = make_once(make_large) / "dataset"
    train = ["train", job, "--dataset", dataset, "--output", tmp_path / "run"]
    child, _ = run("trainer", *train, "--embedding", "cached")
    assert child.returncode == 1
    assert "set train.checkpoint.copy_to to a directory of a disk" in child.stderr


@NEEDS_CGROUPS
def test_commands_need_a_quarter_of_the_tables(tmp_path: Path) -> None:
    """On tables of 570 MB, beyond what they need on rows of 8 numbers."""
    folder = make_once(make_large)
    one, two, model = tmp_path / "one", tmp_path / "two", tmp_path / "model"
    common = ["--dataset", folder / "dataset"]
    train = ["--embedding", "cached", *common]
    jobs = [folder / f"keep-{keep}" / "job.yaml" for keep in (1, 2)]
    first = next(iter(DAYS))

    summary = run_limited("trainer", "train", jobs[0], *train, "--output", one, "--segments", first)
    assert num_rows(one) * 4 * (DIM + 1) > 0.9 * TABLE_BYTES
    evaluation = run_limited("trainer", "evaluate", jobs[0], *common, "--run", one)
    assert [evaluation[n] for n in ("ne", "auc")] == [summary[n] for n in ("ne", "auc")]
    shutil.rmtree(one / "store")

    retrain = [*train, "--output", two, "--steps", 70]
    started = run_limited("trainer", "train", jobs[1], *retrain, "--start-from", one)
    kept = sum(table["kept"] for table in started["start"]["tables"].values())
    assert kept == num_rows(one)
    shutil.rmtree(one)
    resumed = run_limited("trainer", "train", jobs[1], *train, "--output", two, "--resume")
    assert resumed["num_steps"] > 70
    (tmp_path / "ids").write_text("1\n2\n77\n")
    erased = run_limited("trainer", "erase", two, "--ids", tmp_path / "ids", "--table", "t1")
    assert sum(erased["checkpoints"].values()) >= 6

    since = int(complete_checkpoints(two / CHECKPOINTS)[0].name)
    old = run_limited("trainer", "export", two, "--checkpoint", since, "--output", model)
    assert sum(old["num_rows"].values()) >= kept - 3
    scores = ["--output", tmp_path / "scores", "--split", "evaluation"]
    assert run_limited("pipelines", "score", model, *common, *scores)["num_samples"] > 300
    changes = tmp_path / "changes"
    published = run_limited("trainer", "publish", two, "--since", since, "--output", changes)
    assert published["train_step"] == resumed["num_steps"]
    applied = run_limited(
        "trainer", "apply", model, "--changes", changes, "--output", tmp_path / "new"
    )
    assert applied["num_changed"] == published["num_changed"]
