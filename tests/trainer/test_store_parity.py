"""Rows in memory, in mapped files, in a log and in store processes: the same bits."""

import os
import re
from pathlib import Path

import pytest

from schemas.errors import SchemaError
from schemas.run_log import SUMMARY, read_summary
from tests.trainer.make_dataset import write_job
from tests.trainer.processes import children_of
from tests.trainer.runs import final_rows, losses_of, plain_run, run_job
from tests.trainer.stores import TOKEN, running, start_store
from trainer.options import TrainOptions
from trainer.run_log import LogWriter

pytestmark = pytest.mark.nightly


def assert_same_run(one: Path, other: Path) -> None:
    assert losses_of(one).tobytes() == losses_of(other).tobytes()
    a, b = final_rows(one), final_rows(other)
    assert a.keys() == b.keys()
    assert len(a) == 3 * 3
    for name, array in a.items():
        assert array.tobytes() == b[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "policy", "optimizer"),
    [
        ("log", "ttl", "rowwise_adagrad"),
        ("log", "belady", "adagrad"),
        ("mmap", "ttl", "adam"),
        ("mmap", "belady", "sgd"),
    ],
)
def test_train_resumed_from_files_has_the_bits_of_a_run_that_never_stopped(
    files: str, policy: str, optimizer: str, dataset: Path, tmp_path: Path
) -> None:
    rows = "210" if policy == "belady" else "null"
    settings = {"dtype": "float32", "every_steps": "5", "policy": policy, "rows": rows}
    settings["optimizer"] = optimizer
    job = write_job(tmp_path / "job", files=files, lookahead="2", **settings)
    run_job(job, dataset, tmp_path / "cached", embedding="cached", steps=13)
    other = write_job(tmp_path / "other", files="log", lookahead="2", **settings)
    run_job(other, dataset, tmp_path / "cached", embedding="cached", resume=True)
    assert_same_run(plain_run(dtype="float32", optimizer=optimizer), tmp_path / "cached")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_train_has_the_bits_of_plain_in_a_log_in_mapped_files_and_in_store_processes(
    optimizer: str, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", dtype="float32", optimizer=optimizer, every_steps="12")
    plain = plain_run(dtype="float32", optimizer=optimizer)
    in_place = write_job(
        tmp_path / "mmap", dtype="float32", optimizer=optimizer, every_steps="12", files="mmap"
    )
    mapped = run_job(in_place, dataset, tmp_path / "mapped", embedding="cached")
    logged = run_job(job, dataset, tmp_path / "logged", embedding="cached")
    served = run_job(job, dataset, tmp_path / "served", embedding="cached", stores=2)
    direct = run_job(job, dataset, tmp_path / "direct", embedding="uncached", stores=1)
    for name in ("logged", "mapped", "served", "direct"):
        assert_same_run(plain, tmp_path / name)
    one = read_summary(plain / SUMMARY)
    for other in (mapped, logged, served, direct):
        assert (one.ne, one.auc, one.gauc) == (other.ne, other.auc, other.gauc)
    assert mapped.fetched_rows == served.fetched_rows == logged.fetched_rows


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_lru_has_the_bits_of_plain_over_store_processes_also_resumed(
    optimizer: str, dataset: Path, tmp_path: Path
) -> None:
    settings = {"dtype": "float32", "optimizer": optimizer, "every_steps": "12", "rows": "203"}
    job = write_job(tmp_path / "job", **settings)
    run_job(job, dataset, tmp_path / "lru", embedding="lru", stores=2, steps=17)
    found = run_job(job, dataset, tmp_path / "lru", embedding="lru", stores=2, resume=True)
    assert_same_run(plain_run(dtype="float32", optimizer=optimizer), tmp_path / "lru")
    assert found.cache_hit_rate is not None
    assert 0 < found.cache_hit_rate < 1


def stores_of_this_process() -> list[int]:
    """Return the ids of the store processes that this one has started."""
    children = children_of(os.getpid())
    return [pid for pid, command in children.items() if "--end-with-stdin" in command]


@pytest.mark.slow
def test_train_goes_on_with_the_same_bits_when_store_processes_are_killed(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path / "job", dtype="float32", every_steps="9")
    killed: list[int] = []
    write = LogWriter.write

    def write_and_kill(log: LogWriter) -> None:
        write(log)
        if len(losses_of(tmp_path / "served")) in (5, 14):
            pid = sorted(stores_of_this_process())[0]
            os.kill(pid, 9)
            killed.append(pid)

    monkeypatch.setattr(LogWriter, "write", write_and_kill)
    run_job(job, dataset, tmp_path / "served", embedding="cached", stores=2)
    assert len(set(killed)) == 2
    assert_same_run(plain_run(dtype="float32"), tmp_path / "served")
    assert stores_of_this_process() == []


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_train_resumed_over_store_processes_has_the_bits_of_a_run_that_never_stopped(
    optimizer: str, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", dtype="float32", every_steps="5", optimizer=optimizer)
    run_job(job, dataset, tmp_path / "served", embedding="cached", stores=2, steps=13)
    run_job(job, dataset, tmp_path / "served", embedding="cached", stores=3, resume=True)
    assert_same_run(plain_run(dtype="float32", optimizer=optimizer), tmp_path / "served")


@pytest.mark.slow
def test_train_over_the_stores_of_the_job_refuses_those_of_another_run(
    dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", dtype="float32")
    with running(start_store(tmp_path / "store")) as (process,):
        (tmp_path / "job" / "token").write_text(TOKEN)
        with job.open("a") as file:
            file.write(f"  stores: {{addresses: ['{process.address}'], token_file: token}}\n")
        run_job(job, dataset, tmp_path / "served", embedding="cached", steps=20)
        with pytest.raises(SchemaError, match=r"^store has rows of another run: "):
            run_job(job, dataset, tmp_path / "other", embedding="cached")
        run_job(job, dataset, tmp_path / "served", embedding="cached", resume=True)
    assert_same_run(plain_run(dtype="float32"), tmp_path / "served")


def test_train_plain_with_stores_is_refused() -> None:
    message = (
        "stores must hold the rows, got stores=2 and the embedding 'plain', which has all rows in "
        "memory; use --embedding cached"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TrainOptions(stores=2)
