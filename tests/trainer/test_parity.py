"""Cached equals plain, resumed equals never stopped; test_equality.py has the deduplication."""

import re
from pathlib import Path

import numpy as np
import pytest

from schemas.config.job import load_job
from schemas.errors import PlanError, SchemaError
from schemas.run_log import SUMMARY, read_summary
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import (
    checkpoint_at,
    final_rows,
    losses_of,
    plain_run,
    reader_of,
    run_job,
)
from trainer.checkpoint.format import to_buffers
from trainer.checkpoint.load import read_cached
from trainer.checkpoint.manifest import PLAN_FILE

pytestmark = pytest.mark.nightly

ATTENTION = "{name: attention, history: clicked, target: item, top_layers: [16], num_heads: 2}"


PLANS = {
    "ttl of 2 steps": {"lookahead": "2"},
    "ttl of 3 steps": {"lookahead": "3"},
    "ttl of 50 steps": {"lookahead": "50"},
    "belady in a small cache": {"policy": "belady", "rows": "205", "every_steps": "7"},
    "belady without a limit": {"policy": "belady"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        ("ttl of 2 steps", "adam"),
        ("ttl of 3 steps", "rowwise_adagrad"),
        ("ttl of 50 steps", "sgd"),
        ("belady in a small cache", "rowwise_adagrad"),
        ("belady in a small cache", "adam"),
        ("belady without a limit", "adagrad"),
    ],
)
def test_train_cached_has_the_bits_of_plain(
    plan: str, optimizer: str, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", dtype="float32", optimizer=optimizer, **PLANS[plan])
    run = plain_run(dtype="float32", optimizer=optimizer)
    cached = run_job(job, dataset, tmp_path / "cached", embedding="cached")
    assert losses_of(run).tobytes() == losses_of(tmp_path / "cached").tobytes()
    assert_same_rows(run, tmp_path / "cached")
    plain = read_summary(run / SUMMARY)
    assert (plain.ne, plain.auc, plain.gauc) == (cached.ne, cached.auc, cached.gauc)
    assert cached.cache_hit_rate is not None
    assert 0 < cached.cache_hit_rate < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("embedding", "optimizer"),
    [("lru", "rowwise_adagrad"), ("lru", "sgd"), ("uncached", "adagrad"), ("uncached", "adam")],
)
def test_baselines_have_the_bits_of_plain(
    embedding: str, optimizer: str, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", dtype="float32", rows="203", optimizer=optimizer)
    plain = plain_run(dtype="float32", optimizer=optimizer)
    found = run_job(job, dataset, tmp_path / "found", embedding=embedding)
    assert losses_of(plain).tobytes() == losses_of(tmp_path / "found").tobytes()
    assert_same_rows(plain, tmp_path / "found")
    assert found.cache_hit_rate is not None
    assert (found.cache_hit_rate > 0) == (embedding == "lru")
    assert found.fetched_rows > num_rows(plain)


def test_lru_without_a_size_is_refused_by_name(dataset: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job")
    with pytest.raises(SchemaError, match=r"--embedding lru has no train\.cache\.rows"):
        run_job(job, dataset, tmp_path / "run", embedding="lru")


@pytest.mark.slow
def test_train_cached_with_a_short_lookahead_fetches_more(dataset: Path, tmp_path: Path) -> None:
    fetched = []
    for lookahead in ("2", "50"):
        job = write_job(tmp_path / lookahead, lookahead=lookahead)
        summary = run_job(job, dataset, tmp_path / f"run{lookahead}", embedding="cached")
        fetched.append(summary.fetched_rows)
    assert fetched[0] > fetched[1] == num_rows(tmp_path / "run50")


@pytest.mark.slow
def test_train_with_beladys_plan_fetches_less_the_more_room_it_has(
    dataset: Path, tmp_path: Path
) -> None:
    fetched = []
    for rows in ("205", "null"):  # items are 206, and 205 of them in one window
        job = write_job(tmp_path / rows, policy="belady", rows=rows)
        summary = run_job(job, dataset, tmp_path / f"run-{rows}", embedding="cached")
        fetched.append(summary.fetched_rows)
    assert fetched[0] > fetched[1] == num_rows(tmp_path / "run-null")


@pytest.mark.parametrize("policy", ["ttl", "belady"])
def test_train_with_a_cache_that_is_too_small_is_refused_before_the_first_step(
    policy: str, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", policy=policy, rows="20")
    with pytest.raises(PlanError, match=r"cache of table 'items' must .* cache_rows=20; ") as found:
        run_job(job, dataset, tmp_path / "run", embedding="cached")
    assert losses_of(tmp_path / "run").tolist() == []
    needed = found.value.required_rows
    assert needed is not None
    job = write_job(tmp_path / "enough", policy=policy, rows=str(needed))
    run_job(job, dataset, tmp_path / "again", embedding="cached", steps=3)


def num_rows(run: Path) -> int:
    return sum(len(v) for name, v in final_rows(run).items() if name.endswith("rows.npy"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "embedding", "policy"),
    [
        (1, "cached", "belady"),
        (13, "plain", "ttl"),
        (13, "cached", "ttl"),
        (13, "cached", "belady"),
        (13, "lru", "ttl"),
        (31, "cached", "ttl"),
    ],
)
def test_train_resumed_has_the_bits_of_a_run_that_never_stopped(
    embedding: str, policy: str, stop: int, dataset: Path, tmp_path: Path
) -> None:
    rows = "null" if (embedding, policy) == ("cached", "ttl") else "205"
    job = write_job(tmp_path / "job", dtype="float32", every_steps="5", policy=policy, rows=rows)
    straight, resumed = plain_run(dtype="float32"), tmp_path / "resumed"
    run_job(job, dataset, resumed, embedding=embedding, steps=stop)
    assert len(losses_of(resumed)) == stop
    run_job(job, dataset, resumed, embedding=embedding, resume=True)
    assert losses_of(straight).tobytes() == losses_of(resumed).tobytes()
    assert_same_rows(straight, resumed)


@pytest.mark.slow
@pytest.mark.parametrize(("files", "policy"), [("log", "ttl"), ("log", "belady"), ("mmap", "ttl")])
def test_train_resumed_reads_what_a_run_that_never_stopped_reads(
    files: str, policy: str, dataset: Path, tmp_path: Path
) -> None:
    rows = {"ttl": "null", "belady": "205"}[policy]
    job = write_job(
        tmp_path / "job",
        dtype="float32",
        every_steps="5",
        lookahead="3",
        files=files,
        policy=policy,
        rows=rows,
    )
    straight = run_job(job, dataset, tmp_path / "straight", embedding="cached")
    fetched = 0
    for stop in (3, 10, 11, 24, None):
        found = run_job(
            job, dataset, tmp_path / "run", embedding="cached", steps=stop, resume=stop != 3
        )
        fetched += found.fetched_rows
    assert fetched == straight.fetched_rows
    assert_same_rows(tmp_path / "straight", tmp_path / "run")


@pytest.mark.slow
def test_train_resumed_with_another_embedding_needs_no_keyframe(
    dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", dtype="float32", rows="205", policy="belady")
    plain = plain_run(dtype="float32")
    for embedding, stop in (("cached", 7), ("lru", 12), ("cached", 20), ("uncached", None)):
        run_job(job, dataset, tmp_path / "run", embedding=embedding, steps=stop, resume=stop != 7)
    assert losses_of(plain).tobytes() == losses_of(tmp_path / "run").tobytes()
    assert_same_rows(plain, tmp_path / "run")


def test_torn_keyframe_is_refused_by_name(dataset: Path, tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_train_resumed_in_the_middle_drops_the_lines_after_its_checkpoint(
    dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", every_steps="5")
    run_job(job, dataset, tmp_path / "run")
    whole = losses_of(plain_run())
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        if int(folder.name) > 10:
            (folder / "MANIFEST.json").unlink()
    run_job(job, dataset, tmp_path / "run", resume=True)
    assert losses_of(tmp_path / "run").tobytes() == whole.tobytes()


def assert_same_rows(one: Path, other: Path) -> None:
    a, b = final_rows(one), final_rows(other)
    assert a.keys() == b.keys()
    assert len(a) == 3 * 3
    for name, array in a.items():
        assert array.tobytes() == b[name].tobytes(), name


def test_small_job_looks_up_lists_nulls_and_shared_tables(dataset: Path, tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path / "job"))
    assert job.data.tables["items"].features == ("clicked", "item", "viewed")
    batch = reader_of(tmp_path / "job" / "job.yaml", dataset).read(0)
    for feature in ("user", "viewed"):
        assert (batch.sparse[feature].lengths() == 0).any()
