"""Replicas agree on shares, exchange sums without ids, and hand the pen over."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from presage.schemas.errors import SchemaError
from presage.schemas.run.records import LEDGER, METRICS, LedgerEntry, StepMetric, read_metrics
from presage.trainer.agreement import Agreement, Member, ReplicaStatus
from presage.trainer.elastic.membership import Lighthouse
from presage.trainer.elastic.peer_state import PeerClient, PeerError
from presage.trainer.elastic.sums import (
    GlooGroup,
    LostPeerError,
    MeetingStore,
    SplitPlanner,
    SumsShape,
    pack_sums,
    split_microbatches,
    unpack_sums,
)
from presage.trainer.embedding.kernels.interface import RowSums
from presage.trainer.run.ledger import LogWriter
from presage.trainer.step import Node, PartialSums, smooth_speed
from presage.trainer.stores.remote.connection import Access
from tests.trainer.faults import FaultInjector, Faults
from tests.trainer.processes import suspend
from tests.trainer.stores import member_of

speeds = st.dictionaries(st.text("abcdef", min_size=1), st.floats(0.1, 10), min_size=1, max_size=5)


def least_time(work: list[int], speeds: list[float]) -> float:
    """Return the time of the best cut into runs, by dynamic programming."""
    best = [0.0, *[math.inf] * len(work)]
    for speed in speeds:
        best = [
            min(max(best[i], sum(work[i:j]) / speed) for i in range(j + 1))
            for j in range(len(work) + 1)
        ]
    return best[-1]


@given(st.lists(st.integers(1, 9), max_size=12), speeds)
def test_split_is_a_cut_into_runs_that_takes_the_least_time(
    work: list[int], by_name: dict[str, float]
) -> None:
    runs = split_microbatches(work, by_name)
    assert list(runs) == sorted(by_name)
    assert [leaf for run in runs.values() for leaf in run] == list(range(len(work)))
    time = max(sum(work[i] for i in run) / by_name[name] for name, run in runs.items())
    assert time <= least_time(work, [by_name[name] for name in sorted(by_name)]) * (1 + 1e-6)


def status(**changes: object) -> ReplicaStatus:
    return replace(ReplicaStatus(since=0, state="s", meeting="m"), **changes)  # type: ignore[arg-type]


def agreed(step: int, number: int = 1, **members: ReplicaStatus) -> Agreement:
    return Agreement(
        number, {name: Member(name=name, step=step, status=t) for name, t in members.items()}
    )


def test_all_replicas_split_alike_and_again_without_a_lost_one() -> None:
    shares = {name: SplitPlanner(name) for name in "abc"}
    first = agreed(0, a=status(speed=1.0), b=status(speed=1.0), c=status(speed=2.0))
    split = {"a": range(2), "b": range(2, 4), "c": range(4, 8)}
    assert all(share.assign(first, lambda _: [1] * 8) == split for share in shares.values())
    assert {n: share.own_range(1) for n, share in shares.items()} == split
    computed = {n: status(speed=1.0, microbatches=(r.start, r.stop)) for n, r in split.items()}
    joined = agreed(1, 2, **computed, d=status())
    assert shares["a"].assign(joined, lambda _: [1] * 8) == {**split, "d": range(0)}
    lost = agreed(1, 3, a=computed["a"], b=computed["b"])
    for share in (shares["a"], shares["b"]):
        assert share.assign(lost, lambda _: [1] * 8) == {"a": range(4), "b": range(4, 8)}
    assert shares["a"].own_range(2) == range(4)
    assert shares["b"].own_range(3) == range(4, 8)


def test_replica_slowed_by_half_has_half_within_ten_steps() -> None:
    shares = {name: SplitPlanner(name) for name in "ab"}
    speeds: dict[str, float | None] = {"a": None, "b": None}
    done: list[dict[str, range]] = []
    for step in range(16):
        agreement = agreed(step, 1, **{name: status(speed=speed) for name, speed in speeds.items()})
        done.append({name: share.own_range(step) or range(0) for name, share in shares.items()})
        for name, share in shares.items():
            share.assign(agreement, lambda _: [1] * 24)
            speeds[name] = smooth_speed(speeds[name], 5.0 if name == "b" and step >= 6 else 10.0)
    assert [len(runs["b"]) for runs in done[1:7]] == [12] * 6
    assert len(done[15]["b"]) == 8


def test_microbatches_that_two_replicas_computed_are_split_anew() -> None:
    both = agreed(0, a=status(microbatches=(0, 2)), b=status(microbatches=(1, 4), since=1))
    for name in "ab":
        assert SplitPlanner(name).assign(both, lambda _: [1] * 4) == {
            "a": range(2),
            "b": range(2, 4),
        }


def test_oldest_member_writes_unless_it_is_behind() -> None:
    members = {
        "a": Member(name="a", step=4, status=status(since=3)),
        "b": Member(name="b", step=4, status=status(since=1)),
        "c": Member(name="c", step=3, status=status(since=0)),
    }
    agreement = Agreement(7, members)
    assert agreement.step == 4
    assert list(agreement.ready) == ["a", "b"]
    assert agreement.writer == "b"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(10))
def test_sums_come_over_the_wire_as_they_are(seed: int, dtype: torch.dtype) -> None:
    chance = np.random.default_rng(seed)
    shape = SumsShape(num_parameters=5, num_rows=int(chance.integers(1, 70)), dim=3, dtype=dtype)
    held: dict[Node, PartialSums] = {}
    for number in range(int(chance.integers(0, 4))):
        rows = np.flatnonzero(chance.random(shape.num_rows) < 0.4).astype(np.int32)
        held[Node(number, 1)] = PartialSums(
            loss=chance.normal(),
            weight=chance.random(),
            dense=torch.from_numpy(chance.normal(size=5)).to(dtype),
            rows=RowSums(
                torch.from_numpy(rows),
                torch.from_numpy(chance.normal(size=(len(rows), 3))).to(dtype),
            ),
        )
    message = pack_sums(held, shape)
    found = unpack_sums(message, shape)
    assert list(found) == list(held)
    for node, value in held.items():
        other = found[node]
        assert (value.loss, value.weight) == (other.loss, other.weight)
        for one, two in [
            (value.dense, other.dense),
            (value.rows.rows, other.rows.rows),
            (value.rows.sums, other.rows.sums),
        ]:
            assert torch.equal(one, two)
    with pytest.raises(ValueError, match="message must have"):
        unpack_sums(message[:-1], shape)


def lines_of(step: int) -> tuple[StepMetric, list[LedgerEntry]]:
    metric = StepMetric(
        step=step, loss=0.5, num_samples=4, num_replicas=2, samples_per_sec=1.0, phases={}
    )
    entries = [
        LedgerEntry(step=step, epoch=0, segment="s", replica=r, blocks=(step,), num_samples=2)
        for r in "ab"
    ]
    return metric, entries


@pytest.mark.parametrize("written", [0, 1, 3])
@pytest.mark.parametrize("torn", ["", "ledger", "half a line", "metrics"])
def test_the_next_writer_adds_what_the_last_one_left_out(
    written: int, torn: str, tmp_path: Path
) -> None:
    for name in (METRICS, LEDGER):
        (tmp_path / name).touch()
    first, second = LogWriter(tmp_path), LogWriter(tmp_path)
    for step in range(5):
        second.remember(*lines_of(step))
        if step < written:
            first.remember(*lines_of(step))
            first.write()
    metric, entries = (json.dumps(x) for x in ({"step": written}, {"step": written}))
    if torn != "":
        whole = torn != "half a line"
        with (tmp_path / LEDGER).open("a") as file:
            file.write(entries + "\n" if whole else entries[:5])
    if torn == "metrics":
        with (tmp_path / METRICS).open("a") as file:
            file.write(metric[:6])
    second.write()
    assert [m.step for m in read_metrics(tmp_path / METRICS)] == list(range(5))
    ledger = [json.loads(line) for line in (tmp_path / LEDGER).read_text().splitlines()]
    assert [(e["step"], e["replica"]) for e in ledger] == [(s, r) for s in range(5) for r in "ab"]


def test_a_replica_that_joins_remembers_the_lines_that_are_not_durable(tmp_path: Path) -> None:
    for name in (METRICS, LEDGER):
        (tmp_path / name).touch()
    first, second = LogWriter(tmp_path), LogWriter(tmp_path)
    for step in range(2):
        first.remember(*lines_of(step))
    first.write()
    first.forget(first.written)
    for step in range(2, 5):
        first.remember(*lines_of(step))
    second.load(first.to_arrays())
    second.write()
    assert [m.step for m in read_metrics(tmp_path / METRICS)] == list(range(5))


def test_writer_that_does_not_know_the_next_step_is_refused(tmp_path: Path) -> None:
    for name in (METRICS, LEDGER):
        (tmp_path / name).touch()
    writer = LogWriter(tmp_path)
    for step in range(2):
        writer.remember(*lines_of(step))
    writer.forget(0)
    with pytest.raises(SchemaError, match="lines between step -1 and 1 are missing"):
        writer.write()


def test_faults_are_data() -> None:
    faults = Faults().kill(1, 5, "exchanged").slow(0, 2.0, until=7).stop(2, 3, 0.5).fail(0, 1)
    faults = faults.partition(1, 2, 0.5).fill_disk(0, 3, 1.0).pause(1, 0.25, until=4)
    assert Faults.from_json(faults.to_json()) == faults


def test_microbatches_take_longer_by_a_factor_and_by_seconds_until_a_step(tmp_path: Path) -> None:
    faults = Faults().slow(0, 3.0, step=2).pause(0, 0.25, until=4).pause(1, 9.0)
    injector = FaultInjector(faults, 0, tmp_path)
    found = [injector.delay_sec(step, 4, 0.5) for step in (0, 1, 2, 3, 4, 5)]
    assert found == [1.0, 1.0, 2.0, 2.0, 1.0, 1.0]
    assert FaultInjector(faults, 2, tmp_path).delay_sec(0, 4, 0.5) == 0.0


def test_one_member_agrees_with_itself_and_is_not_waited_for_later() -> None:
    with (
        Lighthouse("127.0.0.1", 0, 0.5) as lighthouse,
        member_of(lighthouse.address, "a", "token", 0.5, 10.0) as member,
    ):
        agreement = member.agree(3, status(microbatches=(1, 2)))
        assert (agreement.step, agreement.writer) == (3, "a")
        assert agreement.ready["a"].status.microbatches == (1, 2)


@pytest.mark.slow
def test_missing_peer_is_reported_within_the_time() -> None:
    meeting = MeetingStore("127.0.0.1", 1.0)
    group = GlooGroup("127.0.0.1", 1.0, 1.0)
    with pytest.raises(LostPeerError, match="members could not connect"):
        group.join("1/0/a,b", meeting.address, 0, 2)
    group.join("2/0/a", meeting.address, 0, 1)
    alone = torch.arange(3, dtype=torch.uint8)
    assert [message.tolist() for message in group.all_gather(alone, 1.0, nobody)] == [[0, 1, 2]]


def nobody() -> bool:
    raise AssertionError("there is nobody to ask")


def two_groups(timeout_sec: float) -> tuple[GlooGroup, GlooGroup]:
    """Return two members that are connected."""
    meeting = MeetingStore("127.0.0.1", 10.0)
    groups = GlooGroup("127.0.0.1", timeout_sec, 10.0), GlooGroup("127.0.0.1", timeout_sec, 10.0)
    with ThreadPoolExecutor(2) as pool:
        joined = [
            pool.submit(group.join, "1/0/a,b", meeting.address, rank, 2)
            for rank, group in enumerate(groups)
        ]
        for each in joined:
            each.result()
    return groups


def test_member_that_answers_pings_is_waited_for_and_another_is_not() -> None:
    late, waiting = two_groups(timeout_sec=20.0)
    asked, mine = list[None](), torch.arange(3, dtype=torch.uint8)
    with ThreadPoolExecutor(2) as pool:

        def lives() -> bool:  # asked on and on until the late one's message is there
            asked.append(None)
            if len(asked) == 2:
                pool.submit(late.all_gather, mine + 1, 60.0, nobody)
            return True

        found = pool.submit(waiting.all_gather, mine, 0.05, lives).result()
        assert [message.tolist() for message in found] == [[1, 2, 3], [0, 1, 2]]
        assert len(asked) >= 2
    with pytest.raises(LostPeerError, match="does not answer pings"):
        waiting.all_gather(mine, 0.05, lambda: False)
    assert waiting.key is None
    late.leave()


@pytest.mark.slow
def test_stopped_process_does_not_answer_pings() -> None:
    code = (
        "import sys; from presage.trainer.elastic.peer_state import PeerServer; "
        "from presage.trainer.stores.remote.connection import Access; "
        "server = PeerServer('127.0.0.1', Access(token='t'), None); "
        "print(server.address, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as held:
        assert held.stdout is not None
        address = held.stdout.readline().strip()
        with PeerClient(address, Access(token="t", timeout_sec=60.0)) as peer:
            peer.ping()
        suspend(held.pid)
        try:
            with (
                PeerClient(address, Access(token="t", timeout_sec=1.0)) as peer,
                pytest.raises(PeerError, match="no ping of grpc"),
            ):
                peer.ping()
        finally:
            held.kill()
