"""Replicas that are asked to leave: one, and the others continue at once; all, and the run can."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from presage.schemas.run.records import LEDGER, SUMMARY
from presage.trainer.agreement import LeaveOutcome, leave_outcome
from presage.trainer.elastic.launcher import LocalReplicas
from presage.trainer.elastic.membership import Lighthouse, Member
from presage.trainer.elastic.sums import SplitPlanner
from presage.trainer.recovery import Drain, DrainInterrupt
from presage.trainer.run.folder import read_ledger
from tests.trainer.faults import Faults
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.processes import num_steps, run_until, start_training, train_to_end, wait_for_end
from tests.trainer.replica_runs import run_replicas
from tests.trainer.runs import assert_equal, steps_of
from tests.trainer.stores import member_of
from tests.trainer.test_draining import SEGMENT
from tests.trainer.test_replicas import agreed, status

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

EPOCHS = {"epochs": "8"}
NEVER_SEC = 1000.0
"""A heartbeat's time that no test waits for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dataset, its job of 256 steps, and a run of one process."""
    folder = tmp_path_factory.mktemp("leaving")
    job = write_job(folder, **EPOCHS)
    make_dataset(folder / "dataset", job, SEGMENT)
    train_to_end(job, folder / "dataset", folder / "alone")
    return folder


def train(
    folder: Path, run: Path, leave: Callable[[LocalReplicas, int], None], **launch: Any
) -> None:
    """Train on two replicas, none of which is restarted; `leave` is called after each step."""
    replicas: list[LocalReplicas] = []
    run_replicas(
        folder / "job.yaml",
        run,
        dataset=folder / "dataset",
        on_step=lambda metric, _: leave(replicas[0], metric.step),
        on_start=replicas.append,
        launch={"restarts": 0} | launch,
    )


@pytest.mark.parametrize("number", [0, 1])
def test_others_do_not_wait_for_a_replica_that_leaves(
    number: int, folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def leave(replicas: LocalReplicas, step: int) -> None:
        if step == 5:
            os.kill(replicas.pids[number], signal.SIGTERM)

    train(folder, run, leave, heartbeat_sec=NEVER_SEC)
    assert_equal(run, folder / "alone")
    steps: dict[str, list[int]] = {}
    for entry in read_ledger(run / LEDGER):
        steps.setdefault(entry.replica[:3], []).append(entry.step)
    left, stayed = steps[f"{number:03d}"], steps[f"{1 - number:03d}"]
    assert 5 <= left[-1] < stayed[-1] == 255


def test_run_whose_replicas_all_leave_one_by_one_continues(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def leave(replicas: LocalReplicas, step: int) -> None:
        if step in (5, 30):
            os.kill(replicas.pids[step == 5], signal.SIGTERM)

    with pytest.raises(DrainInterrupt) as interrupt:
        train(folder, run, leave)
    assert interrupt.value.message == (
        f"stopped at step {num_steps(run)}; continue {run} with --resume"
    )
    train_to_end(folder / "job.yaml", folder / "dataset", run, "--resume", "--replicas", "2")
    assert_equal(run, folder / "alone")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_replicas_that_are_asked_to_end_agree_on_their_last_step_and_save_it(
    number: signal.Signals, folder: Path, tmp_path: Path
) -> None:
    run, job = tmp_path / "run", folder / "job.yaml"
    slow = Faults().pause(0, 0.02).pause(1, 0.02).pause(2, 0.02)  # 256 steps take seconds
    more = ("--replicas", "3")
    process = start_training(job, folder / "dataset", run, *more, own_group=True, faults=slow)
    run_until(process, lambda: num_steps(run) >= 3)
    os.killpg(process.pid, number)
    status, messages = wait_for_end(process)
    step = num_steps(run)
    assert status == 0, messages
    message = f"{number.name}: stopped at step {step}; continue {run} with --resume"
    assert messages.splitlines()[-1] == message
    assert all(f"replica {n} stopped at step" in messages for n in range(3))
    assert steps_of(run)[-1] == step < num_steps(folder / "alone")
    assert not (run / SUMMARY).exists()
    train_to_end(job, folder / "dataset", run, "--resume")
    assert_equal(run, folder / "alone")


def test_replicas_that_are_asked_to_end_before_their_first_step_leave_a_run_that_continues(
    folder: Path, tmp_path: Path
) -> None:
    run, job, drain = tmp_path / "run", folder / "job.yaml", Drain()
    dataset = folder / "dataset"
    with pytest.raises(DrainInterrupt, match=r"^SIGTERM$") as interrupt:
        run_replicas(
            job, run, dataset=dataset, drain=drain, on_start=lambda _: drain.ask("SIGTERM")
        )
    assert interrupt.value.message.startswith("stopped at step 0; ")
    train_to_end(job, folder / "dataset", run, "--resume", "--replicas", "2")
    assert_equal(run, folder / "alone")


def test_replica_leaves_after_the_step_in_whose_agreement_its_status_says_so() -> None:
    going = agreed(4, a=status(), b=status(since=1, leaving=True))
    assert leave_outcome(going, "a") is None
    assert leave_outcome(going, "b") == LeaveOutcome(saves=False, others_continue=True)
    assert going.writer == "a"
    assert list(going.ready) == ["a", "b"]
    first = replace(going.members["a"], status=status(leaving=True))
    all_go = replace(going, members={**going.members, "a": first})
    assert leave_outcome(all_go, "a") == LeaveOutcome(saves=True, others_continue=False)
    assert leave_outcome(all_go, "b") == LeaveOutcome(saves=False, others_continue=False)
    behind = Member(name="c", step=3, status=status(leaving=True))
    with_c = replace(all_go, members={**all_go.members, "c": behind})
    assert leave_outcome(with_c, "c") == LeaveOutcome(saves=False, others_continue=True)


def test_replica_that_leaves_computes_its_microbatches_and_none_of_the_next_steps() -> None:
    shares = {name: SplitPlanner(name) for name in "ab"}
    both = agreed(0, a=status(), b=status())
    last = agreed(1, a=status(microbatches=(0, 2)), b=status(microbatches=(2, 4), leaving=True))
    for found in shares.values():
        found.assign(both, lambda _: [1] * 4)
        assert found.assign(last, lambda _: [1] * 4) == {"a": range(2), "b": range(2, 4)}
    for step in (2, 3):
        assert [len(shares[name].own_range(step) or ()) for name in "ab"] == [4, 0]


def test_lighthouse_does_not_wait_for_a_member_that_left_while_another_answers_for_it() -> None:
    with (
        Lighthouse("127.0.0.1", 0, NEVER_SEC) as lighthouse,
        member_of(lighthouse.address, "a", "token", NEVER_SEC, NEVER_SEC) as one,
        member_of(lighthouse.address, "b", "token", NEVER_SEC, NEVER_SEC) as other,
        ThreadPoolExecutor(1) as pool,
    ):

        def leave() -> None:
            while len(other.agree(0, status()).members) < 2:  # who asks first may be alone
                pass
            other.agree(1, status(leaving=True))

        left = pool.submit(leave)
        while len(one.agree(0, status()).members) < 2:
            pass
        agreement = one.agree(1, status())
        left.result()
        for step in range(2, 5):
            assert (agreement.writer, agreement.leaving) == ("a", ["b"])
            one.unblock_quorum(agreement.leaving)
            agreement = one.agree(step, status())
            assert list(agreement.ready) == ["a"]
