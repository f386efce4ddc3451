"""Every mode of `--embedding` trains the bits of plain, resumed in the same mode and in any other.

`test_equality.py` compares plain runs with those of the expanded dataset.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from presage.schemas.config.job import load_job
from presage.schemas.errors import PlanError, SchemaError
from presage.schemas.layout import MANIFEST
from presage.schemas.run.records import SUMMARY, read_summary
from presage.trainer.checkpoint.files import PLAN_FILE, read_checkpoint_manifest
from presage.trainer.checkpoint.format import to_buffers
from presage.trainer.checkpoint.load import read_cached
from presage.trainer.options import TrainOptions
from tests.trainer.embedding_modes import MODES
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import (
    assert_same_bits,
    bits_of,
    checkpoint_at,
    final_rows,
    losses_of,
    plain_run,
    reader_of,
    run_job,
)
from tests.trainer.stores import TOKEN, running, start_store

OPTIMIZERS = ("rowwise_adagrad", "adam", "sgd", "adagrad")


@pytest.mark.slow
def test_run_that_changes_its_mode_with_each_resume_has_the_bits_of_plain(
    dataset: Path, tmp_path: Path
) -> None:
    plain, run = plain_run(dtype="float32", every_steps="2"), tmp_path / "run"
    num_parts: list[int] = []
    for number, (mode, (changes, options)) in enumerate(MODES.items()):
        job = write_job(tmp_path / mode, dtype="float32", every_steps="1", **changes)
        end = 2 * (number + 1)
        run_job(job, dataset, run, steps=end, resume=number > 0, **options)
        checkpoint = checkpoint_at(run, end)
        assert bits_of(checkpoint) == bits_of(checkpoint_at(plain, end)), mode
        num_parts += map(len, read_checkpoint_manifest(checkpoint).parts.values())
        assert "stores" not in (checkpoint / MANIFEST).read_text()
    assert max(num_parts) > 1, "deltas are loaded, too"
    run_job(write_job(tmp_path / "job", dtype="float32"), dataset, run, resume=True)
    assert_same_bits(run, plain)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mode", "optimizer", "stop"),
    [
        (mode, OPTIMIZERS[n % 4], {"log, TTL": 31, "log, small Belady cache": 1}.get(mode, 13))
        for n, mode in enumerate(MODES)
    ],
)
def test_run_resumed_in_its_mode_has_the_bits_and_metrics_of_plain(
    mode: str, optimizer: str, stop: int, dataset: Path, tmp_path: Path
) -> None:
    changes, options = MODES[mode]
    settings = {"dtype": "float32", "optimizer": optimizer}
    job = write_job(tmp_path / "job", every_steps="5", **settings, **changes)
    run, plain = tmp_path / "run", plain_run(**settings)
    run_job(job, dataset, run, steps=stop, **options)
    assert len(losses_of(run)) == stop
    summary = run_job(job, dataset, run, resume=True, **options)
    assert_same_bits(run, plain)
    expected = read_summary(plain / SUMMARY)
    assert (summary.ne, summary.auc) == (expected.ne, expected.auc)
    assert summary.gauc == expected.gauc
    if mode != "plain":
        assert summary.cache_hit_rate is not None
        assert (0 < summary.cache_hit_rate < 1) == (options["embedding"] != "uncached")


@pytest.mark.nightly
@pytest.mark.parametrize("changes", [{"lookahead": "2"}, {"policy": "belady", "rows": "250"}])
def test_smaller_plan_fetches_rows_more_often(
    changes: dict[str, str], dataset: Path, tmp_path: Path
) -> None:
    fetched = []
    for name, each in (
        ("small", changes),
        ("large", {**changes, "lookahead": "50", "rows": "null"}),
    ):
        job = write_job(tmp_path / f"job-{name}", **each)
        summary = run_job(job, dataset, tmp_path / name, embedding="cached")
        fetched.append(summary.fetched_rows)
    rows = final_rows(tmp_path / "large")
    num_rows = sum(len(array) for name, array in rows.items() if name.endswith("rows.npy"))
    assert fetched[0] > fetched[1] == num_rows


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["ttl", "belady"])
def test_cache_that_is_too_small_is_refused_before_the_first_step(
    policy: str, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", policy=policy, rows="20")
    with pytest.raises(PlanError, match=r"cache is too small .* cache_rows=20; ") as error:
        run_job(job, dataset, tmp_path / "run", embedding="cached")
    assert losses_of(tmp_path / "run").tolist() == []
    assert error.value.required_rows is not None
    job = write_job(tmp_path / "enough", policy=policy, rows=str(error.value.required_rows))
    run_job(job, dataset, tmp_path / "again", embedding="cached", steps=3)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("policy", "files", "stores"),
    [("ttl", "log", 0), ("ttl", "mmap", 0), ("ttl", "log", 2), ("belady", "log", 0)],
)
def test_resumed_run_fetches_the_rows_of_one_that_never_stopped(
    policy: str, files: str, stores: int, dataset: Path, tmp_path: Path
) -> None:
    settings = {"policy": policy, "rows": {"ttl": "null", "belady": "250"}[policy]}
    settings |= {"dtype": "float32", "every_steps": "5"}
    job = write_job(tmp_path / "whole", **settings)
    expected = run_job(job, dataset, tmp_path / "plain", embedding="cached").fetched_rows
    job = write_job(tmp_path / "job", files=files, **settings)
    fetched = 0
    for stop in (3, 10, 11, 24, None):
        resume = stop != 3
        options = {"embedding": "cached", "stores": stores, "steps": stop, "resume": resume}
        fetched += run_job(job, dataset, tmp_path / "run", **options).fetched_rows
    assert fetched == expected
    assert_same_bits(tmp_path / "run", tmp_path / "plain")


@pytest.mark.nightly
def test_run_resumed_from_an_older_checkpoint_drops_the_lines_after_it(
    dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", every_steps="5")
    run_job(job, dataset, tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        if int(folder.name) > 10:
            (folder / MANIFEST).unlink()
    run_job(job, dataset, tmp_path / "run", resume=True)
    assert losses_of(tmp_path / "run").tobytes() == losses_of(plain_run()).tobytes()


@pytest.mark.nightly
def test_stores_of_the_job_refuse_another_run(
    reference: Path, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", dtype="float32")
    with running(start_store(tmp_path / "store")) as (process,):
        (tmp_path / "job" / "token").write_text(TOKEN)
        with job.open("a") as file:
            file.write(f"  stores: {{addresses: ['{process.address}'], token_file: token}}\n")
        run_job(job, dataset, tmp_path / "run", embedding="cached", steps=20)
        with pytest.raises(SchemaError, match=r"^store has rows of another run: "):
            run_job(job, dataset, tmp_path / "other", embedding="cached")
        run_job(job, dataset, tmp_path / "run", embedding="cached", resume=True)
    assert_same_bits(tmp_path / "run", reference)


def test_lru_without_a_size_and_plain_with_stores_are_refused(
    dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job")
    with pytest.raises(SchemaError, match=r"--embedding lru has no train\.cache\.rows"):
        run_job(job, dataset, tmp_path / "run", embedding="lru")
    message = (
        "--stores 2 has no effect with --embedding plain, which has all rows in memory; "
        "use --embedding cached"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TrainOptions(stores=2)


def test_damaged_state_of_a_plan_is_refused_by_name(dataset: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job")
    run_job(job, dataset, tmp_path / "run", embedding="cached", steps=3)
    path = checkpoint_at(tmp_path / "run", 3) / PLAN_FILE
    path.write_bytes(b"".join(to_buffers({"items/rows": np.arange(3)})))
    message = (
        f"file with the cache plan's state has other content in {path}; "
        "remove this checkpoint to use the one before it"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        read_cached(path, ["items"])


def test_small_job_has_lists_nulls_and_shared_tables(dataset: Path, tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path / "job"))
    assert job.data.tables["items"].features == ("clicked", "item", "viewed")
    batch = reader_of(tmp_path / "job" / "job.yaml", dataset).read(0)
    for feature in ("user", "viewed"):
        assert (batch.sparse[feature].lengths() == 0).any()
