"""The training loop of a run, in its only process or in each of its replicas.

One step:

1. Send `ReplicaStatus` to the peers, and compute the microbatches of this process meanwhile.
2. Agree with them: on the members of the step, on the part of the dataset that may be trained, and
   on who writes the files of the run.
3. Add the sums of all microbatches.
4. Update, bit for bit the same in every process: this commits the step. Its lines are written, and
   a checkpoint if one is due.

A process without peers (`Peers`) agrees with itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from presage.schemas.arrays import Array
from presage.schemas.config.train import SAVE, START, WAIT
from presage.schemas.run.records import StepMetric
from presage.trainer.agreement import (
    Agreement,
    CommittedStep,
    LeaveOutcome,
    Member,
    ReplicaStatus,
    leave_outcome,
)
from presage.trainer.data.collate import Microbatches
from presage.trainer.growing.frontier import DatasetRefusedError, Frontier
from presage.trainer.recovery import Drain, Watchdog
from presage.trainer.run.checkpoints import RunCheckpoints
from presage.trainer.run.folder import identity_of, write_dataset
from presage.trainer.run.ledger import LogWriter
from presage.trainer.run.output import RunOutput
from presage.trainer.run.run_context import RunContext
from presage.trainer.step import MicrobatchCompute, Tree, WholeBatchCompute, check_loss, metric_of
from presage.trainer.steps import NO_MICROBATCHES, Span, next_action

READ_AHEAD = 2
"""Steps that are read ahead of time."""
Agreeing = Callable[[], Agreement]
"""Waits for an agreement that is being formed, and returns it."""


@dataclass(frozen=True, slots=True)
class StepTotal:
    """The sum over all microbatches of a step.

    Attributes:
        agreement: of the step.
        total: for `update` of what computes the step.
        owners: by member, the microbatches that it has computed.
        message: the sum for members that are behind; None without peers.
    """

    agreement: Agreement
    total: Any
    owners: Mapping[str, range]
    message: torch.Tensor | None = None


class Peers:
    """The other processes that train a run: here none, so that a process agrees with itself.

    A context for connections to them.
    """

    is_alone = True
    name = "0"

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def join(self, loop: TrainingLoop) -> None:
        """Start the rows of a loop, at the step of the others if there are any."""
        self.loop = loop
        loop.context.rows.start(loop.step, loop.context.span)

    def own_range(self, train_step: int) -> range | None:
        """Return the microbatches of a step that this process computes, None if not yet known."""
        return range(self.loop.context.reader.num_microbatches(train_step))

    def agree(self, train_step: int, status: ReplicaStatus) -> Agreeing:
        """Start to form the agreement of a step."""
        member = Member(name=self.name, step=train_step, status=status)
        agreement = Agreement(0, {self.name: member})
        return lambda: agreement

    def add(self, own: range, sums: Tree[Any], agreeing: Agreeing) -> StepTotal | Agreement:
        """Add the sums of all members.

        Returns:
            The total; the agreement if it is of a later step.
        """
        agreement = agreeing()
        self.loop.apply_agreement(agreement)
        return StepTotal(agreement, sums.total(), {self.name: own})

    def on_commit(self, train_step: int, committed: CommittedStep) -> None:
        """Keep the sums of a committed step for members that are behind."""

    def on_write(self, agreement: Agreement) -> None:
        """Publish the members of an agreement; called by the writer."""

    def provide_state(self) -> None:
        """Send the state before the next step to processes that wait for it."""

    def catch_up(self, agreement: Agreement) -> None:
        """Continue with the step of an agreement that the others have reached."""


class TrainingLoop:
    """Trains the steps of a run, one after the other, and commits each."""

    def __init__(
        self,
        context: RunContext,
        frontier: Frontier,
        peers: Peers,
        compute: WholeBatchCompute | MicrobatchCompute,
        checkpoints: RunCheckpoints,
        output: RunOutput,
        drain: Drain,
        watchdog: Watchdog,
        on_step: Callable[[StepMetric, int], None] = lambda metric, num_steps: None,
    ) -> None:
        self.context = context
        self.checkpoints = checkpoints
        self.output = output
        self.step = context.first_step
        self.log = LogWriter(context.run)
        self.writes = False
        self._written_span: Span | None = None  # in the run folder
        self._frontier = frontier
        self.peers = peers
        self._compute = compute
        self.drain = drain
        self.watchdog = watchdog
        self._on_step = on_step
        self._timer = compute.timer

    def train(self) -> LeaveOutcome | None:
        """Train until the last step, or until this process is asked to leave.

        Returns:
            How it left; None if all steps are trained.

        Raises:
            SchemaError: a loss is not finite, the disk is full, or the lighthouse is gone.
            DrainInterrupt: it was asked to leave before its first step.
        """
        with self.watchdog(START), self.drain.at_once():
            self.peers.join(self)
        while self._decide() != "end":
            if self.peers.is_alone and self.drain.asked:  # with peers it announces its last step
                return LeaveOutcome(saves=True, others_continue=False)
            try:
                outcome = leave_outcome(self._train_step(), self.peers.name)
            except DatasetRefusedError as refused:
                return LeaveOutcome(
                    saves=self.writes, others_continue=False, error=refused.__cause__
                )
            if outcome is not None and self._decide() != "end":
                return outcome
        return None

    def save(self) -> bool:
        """Write the log and the state before the next step; return whether rows were flushed.

        Raises:
            SchemaError: the disk is full.
        """
        self.write_log()
        with self.watchdog(SAVE):
            return self.checkpoints.finish(self.step)

    def agree_on_end(self, *, done: bool) -> Agreement:
        """Return an agreement after the last step."""
        self.peers.provide_state()
        agreement = self.agree(done=done)()
        self.apply_agreement(agreement)
        if self.writes:
            self.peers.on_write(agreement)
        return agreement

    def agree(
        self, microbatches: range = NO_MICROBATCHES, *, leaving: bool = False, done: bool = False
    ) -> Agreeing:
        """Start to form the agreement of the next step."""
        visible = self._frontier.visible
        status = ReplicaStatus(
            speed=self._compute.speed,
            microbatches=(microbatches.start, microbatches.stop),
            written=self.context.rows.written,
            done=done,
            leaving=leaving,
            num_segments=visible.num_segments,
            sealed=visible.sealed,
            frontier=self._frontier.state if self.context.options.follow else (),
            fatal_error=self._frontier.fatal_error,
            logged=self.output.logged(self.log.written),
            saved=self.output.saved
            if self.writes and self.checkpoints.is_due(self.step + 1)
            else -1,
        )
        return self.peers.agree(self.step, status)

    def agree_on_step(self, microbatches: range = NO_MICROBATCHES) -> Agreeing:
        """Start to form the agreement of the current step."""
        return self.agree(microbatches, leaving=self.drain.asked)

    def prefetch(self) -> None:
        """Start to read the microbatches of the next steps that are known."""
        reader = self.context.reader
        for step in range(self.step + 1, self.step + 1 + READ_AHEAD):
            own = self.peers.own_range(step)
            if own is not None and step < reader.end_step:
                reader.prefetch(step, own)

    def next_batch(self, own: range) -> Microbatches:
        """Return microbatches of the current step, with the rows of the step."""
        with self._timer("read"):
            return self.context.reader.take(self.step, own)

    def apply_agreement(self, agreement: Agreement) -> None:
        """Take the writer and the durable steps from the agreement of the current step."""
        writer = agreement.writer
        if self.context.options.follow and self._decide() == "train":
            self._frontier.check(agreement.extent, agreement.ready[writer].status.frontier)
        self.log.forget(agreement.logged)
        self._set_writes(writes=writer == self.peers.name)
        self.context.rows.update_written(agreement.written, writes=self.writes)

    def yield_writer_role(self) -> None:
        """Let another process write, since the others have continued without this one."""
        self.checkpoints.release()
        self._set_writes(writes=False)

    def apply(self, committed: CommittedStep, total: Callable[[], Any]) -> None:
        """Update with the sums of a step that others have committed.

        Args:
            committed: the step.
            total: opens its rows, and returns the sum over all microbatches.
        """
        if self._decide() == "wait":
            with self._timer(WAIT):
                self._frontier.advance(committed.extent, self.step, self._extend)
        self._compute.update(total())
        self._timer.finish()
        self._advance(committed)
        self._commit_frontier(committed)

    def state_arrays(self) -> dict[str, Array]:
        """Return what a joining process needs beside model and rows."""
        return self._frontier.to_arrays() | self.log.to_arrays()

    def load(self, arrays: Mapping[str, Array], load_state: Callable[[], int]) -> None:
        """Continue with the state of another process.

        Args:
            arrays: its `state_arrays`, beside model and rows.
            load_state: loads model and rows with the new span, and returns their step.
        """
        with self.watchdog(WAIT):
            read_end = self._frontier.load(arrays)
        self.context.reader.set_span(self._frontier.span)
        self.step = load_state()
        self.log.load(arrays)
        if read_end is not None:
            self.context.rows.stop_reading_at(read_end)

    def write_log(self) -> None:
        """Write missing log lines of committed steps, also those of a previous writer.

        Called before a checkpoint, which requires the lines of all steps before it.

        Raises:
            SchemaError: the disk is full.
        """
        span, follows = self.context.reader.span, self.context.options.follow
        if follows and self._written_span is not span:
            identity = identity_of(span.dataset, self.context.job.train, follows=True)
            write_dataset(self.context.run, span.dataset, identity)
            self._written_span = span
        self.log.write()

    def _decide(self) -> Literal["train", "wait", "end"]:
        return next_action(self.step, self.context.reader.span.horizon)

    def _train_step(self) -> Agreement:
        self.watchdog.step = self.step
        if self.context.options.follow:
            with self._timer(WAIT):
                self._frontier.refresh()
        own = self.peers.own_range(self.step) or NO_MICROBATCHES
        if self._decide() == "train":
            agreeing = self.agree_on_step(own)
        else:
            agreeing = self._wait()
            if self._decide() != "train":
                return self._catch_up_if_behind(agreeing())
            own = self.peers.own_range(self.step) or NO_MICROBATCHES
        self.prefetch()
        sums = self._compute.compute(self.next_batch(own))  # forward and backward
        total = self.peers.add(own, sums, agreeing)
        if isinstance(total, Agreement):
            return self._catch_up_if_behind(total)
        loss = check_loss(self._compute.update(total.total), self.step)
        self._commit(total, loss)
        return total.agreement

    def _wait(self) -> Agreeing:
        """Wait for new segments, until others are ahead, or until this process is to leave."""
        # the watchdog ends a process that is alone; several agree on it, and save
        limit_sec = self.context.job.train.limits.wait.total_seconds()
        end = math.inf if self.peers.is_alone else time.monotonic() + limit_sec
        with self._timer(WAIT):
            self._frontier.refresh(at_once=True)
            while True:
                if time.monotonic() > end:
                    self._frontier.time_out(self.step, limit_sec)
                agreeing = self.agree_on_step()
                agreement = agreeing()
                if agreement.step > self.step:
                    return agreeing
                self.apply_agreement(agreement)
                advanced = self._frontier.advance(agreement.extent, self.step, self._extend)
                if advanced or self.peers.name in agreement.leaving:
                    return agreeing
                if self.writes:
                    self.save()
                    self._frontier.report_waiting(self.step)
                    self.peers.on_write(agreement)
                self.peers.provide_state()
                self._frontier.sleep()
                self._frontier.refresh()

    def _extend(self, span: Span, train_step: int) -> None:
        self.context.rows.extend(span, train_step)
        self.context.reader.set_span(span)

    def _set_writes(self, *, writes: bool) -> None:
        if writes:
            if self.output.must_begin:
                with self.watchdog(SAVE):
                    self.checkpoints.close()
                    self.output.begin(self._write_log_anew)
        elif self.writes:
            self.output.end()
        self.writes = writes

    def _write_log_anew(self) -> None:
        self._written_span = None
        self.write_log()

    def _commit(self, total: StepTotal, loss: float) -> None:
        """Write the lines of a step that was updated, and a checkpoint if one is due."""
        agreement, reader = total.agreement, self.context.reader
        entries = [
            reader.ledger_entry(self.step, name, own) for name, own in total.owners.items() if own
        ]
        num_samples = sum(entry.num_samples for entry in entries)
        metric = metric_of(self.step, loss, num_samples, len(agreement.ready), self._timer)
        committed = CommittedStep(agreement.extent, metric, tuple(entries), total.message)
        self.peers.on_commit(self.step, committed)
        self._advance(committed)
        if self.writes:
            self.write_log()
            self.peers.on_write(agreement)
        self._on_step(metric, reader.end_step)
        self._commit_frontier(committed)
        with self.watchdog(SAVE):
            self.checkpoints.save_if_due(self.step, agreement.saved, writes=self.writes)
        self.peers.provide_state()

    def _commit_frontier(self, committed: CommittedStep) -> None:
        if self.context.options.follow:
            stop_reading = self.context.rows.stop_reading_at
            with self._timer(WAIT):
                self._frontier.on_commit(committed.extent, self.step, stop_reading, self._extend)

    def _advance(self, committed: CommittedStep) -> None:
        self.log.remember(committed.metric, committed.entries)
        self.step += 1

    def _catch_up_if_behind(self, agreement: Agreement) -> Agreement:
        """Catch up with an agreement of a later step, unless this process leaves with it."""
        if agreement.step > self.step and self.peers.name not in agreement.leaving:
            self.peers.catch_up(agreement)
        return agreement
