"""The training loop of one replica.

One step:

1. Send this replica's status, with the microbatches that it computes, and compute them meanwhile.
2. Receive the agreement: microbatches of dead replicas are reassigned; replicas that are behind
   catch up.
3. Exchange sums of microbatches; if a replica is lost here, form the agreement again without it.
4. Update, bit for bit the same on every replica: this commits the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Generic, Literal, TypeVar

import torch

from schemas.arrays import Array
from schemas.config.train import SAVE, START, WAIT
from trainer.data.collate import Microbatches
from trainer.elastic.checkpoints import LogWriter, ReplicaCheckpoints
from trainer.elastic.context import DatasetRefusedError, Frontier, ReplicaContext
from trainer.elastic.exchange import (
    NO_MICROBATCHES,
    Exchange,
    LostPeerError,
    SplitPlanner,
    SumsShape,
    smooth_speed,
    unpack_sums,
)
from trainer.elastic.faults import FaultInjector
from trainer.elastic.membership import (
    Agreement,
    DepartedMembers,
    LeaveOutcome,
    Membership,
    ReplicaOptions,
    ReplicaStatus,
    leave_outcome,
)
from trainer.elastic.output import RunOutput
from trainer.elastic.peer_state import (
    CommittedStep,
    PeerAddresses,
    PeerClient,
    PeerError,
    PeerServer,
)
from trainer.embedding.kernels.compiled import kernels_of
from trainer.follow import Span, next_action
from trainer.recovery import Drain, Watchdog
from trainer.run import write_dataset
from trainer.step import (
    MicrobatchWorker,
    PartialSums,
    PhaseTimer,
    Tree,
    check_loss,
    metric_of,
    update_from_sums,
)

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Calls a function of a step and its microbatches ahead of time, in one thread."""

    def __init__(self, function: Callable[[int, range], T]) -> None:
        """Start no thread yet.

        Args:
            function: of step and microbatches; never called concurrently.
        """
        self._function = function
        self._pool = ThreadPoolExecutor(
            1, "reader", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._pending: dict[tuple[int, range], Future[T]] = {}

    def __enter__(self) -> ReadAhead[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def prefetch(self, step: int, microbatches: range) -> None:
        """Start the call for a step unless it is pending; cancel other ranges of that step."""
        for key in [key for key in self._pending if key[0] == step and key[1] != microbatches]:
            self._pending.pop(key).cancel()
        if (step, microbatches) not in self._pending:
            self._pending[step, microbatches] = self._pool.submit(
                self._function, step, microbatches
            )

    def take(self, step: int, microbatches: range) -> T:
        """Return the result for a step, and cancel calls for earlier ones."""
        self.prefetch(step, microbatches)
        result = self._pending.pop((step, microbatches)).result()
        for key in [key for key in self._pending if key[0] <= step]:
            self._pending.pop(key).cancel()
        return result

    def call(self, step: int, microbatches: range) -> T:
        """Return the result for more microbatches of a step."""
        return self._pool.submit(self._function, step, microbatches).result()


class StepCompute:
    """Computes microbatches, which are read ahead of time; a context for its threads."""

    def __init__(self, context: ReplicaContext, injector: FaultInjector, timer: PhaseTimer) -> None:
        """Start no thread yet.

        Args:
            context: of the replica.
            injector: of faults.
            timer: of the phases.
        """
        self.speed: float | None = None  # microbatches per second; None before the first
        self._context, self._injector, self._timer = context, injector, timer
        self._open: Microbatches | None = None
        self._stack = ExitStack()

    def __enter__(self) -> StepCompute:
        components, enter = self._context.components, self._stack.enter_context
        kernels = kernels_of(self._context.job.train.kernels)
        self._work = enter(MicrobatchWorker(components.model, components.embedding, kernels))
        self._reader = enter(ReadAhead(self._context.read))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def shape(self) -> SumsShape:
        """Shape of the sums of the step in flight."""
        assert self._open is not None, "rows of the step are open"
        return self._context.sums_shape(self._open)

    def prefetch(self, train_step: int, microbatches: range) -> None:
        """Start to read microbatches of a later step."""
        self._reader.prefetch(train_step, microbatches)

    def compute(self, train_step: int, microbatches: range) -> Tree[PartialSums]:
        """Open the rows of a step, compute microbatches, and return their sums."""
        clock = self._context.clock
        self._injector.trigger("start", train_step)
        opened = self._open_rows(train_step, microbatches)
        start = clock()
        with self._timer("backward"):
            tree = self._work.compute(opened)
            delay_sec = self._injector.delay_sec(train_step, len(microbatches), clock() - start)
            if delay_sec > 0:
                time.sleep(delay_sec)
        if len(microbatches):
            self.speed = smooth_speed(self.speed, len(microbatches) / (clock() - start))
        self._injector.trigger("computed", train_step)
        return tree

    def compute_more(self, train_step: int, microbatches: range, tree: Tree[PartialSums]) -> None:
        """Add the sums of more microbatches of the step in flight to a tree."""
        with self._timer("read"):
            opened = self._reader.call(train_step, microbatches)
        with self._timer("backward"):
            self._context.components.embedding.add(opened)
            self._work.compute(opened, tree)

    def empty_tree(self, train_step: int) -> Tree[PartialSums]:
        """Return sums of a step without any microbatch."""
        return self._work.tree(self._context.num_microbatches(train_step))

    def open(self, train_step: int) -> None:
        """Open the rows of a step that others have computed, unless they are open."""
        if not self._is_open(train_step):
            self._open_rows(train_step, NO_MICROBATCHES)

    def warm_up(self, train_step: int) -> None:
        """Compute a step for nothing, with initial rows: the first is slow, and others would wait.

        Reading it decodes the row groups that later steps use, too.
        """
        components, whole = self._context.components, self._context.num_microbatches(train_step)
        opened = self._reader.call(train_step, range(whole))
        components.embedding.open_initial(opened, components.store.layouts)
        self._work.compute(opened)

    def update(self, total: PartialSums) -> None:
        """Update model and rows with the sum over all microbatches of the step in flight."""
        with self._timer("update"):
            update_from_sums(total, self._work, self._context.components)
        self.reset()

    def reset(self) -> None:
        """Drop the step in flight."""
        self._open = None

    def _open_rows(self, train_step: int, microbatches: range) -> Microbatches:
        with self._timer("read"):
            opened = self._reader.take(train_step, microbatches)
        embedding = self._context.components.embedding
        with self._timer("fetch"):
            if self._is_open(train_step):  # opened before a failed attempt to catch up
                embedding.add(opened)
            else:
                embedding.open(opened)
        self._open = opened
        return opened

    def _is_open(self, train_step: int) -> bool:
        return self._open is not None and self._open.step.train_step == train_step


class Replica:
    """Trains with the other replicas; a context for threads, servers and connections."""

    def __init__(
        self,
        context: ReplicaContext,
        frontier: Frontier,
        options: ReplicaOptions,
        injector: FaultInjector,
        drain: Drain,
        watchdog: Watchdog,
        checkpoints: ReplicaCheckpoints,
        output: RunOutput,
    ) -> None:
        """Start at `context.first_step`, without threads or connections.

        Args:
            context: with the state of its first step.
            frontier: the part of the dataset that may be trained.
            options: of this replica.
            injector: of faults.
            drain: asks this replica to leave.
            watchdog: limits the time of each phase.
            checkpoints: of the run.
            output: files of the run.
        """
        self.context = context
        self.options = options
        self.step = context.first_step
        self._since = context.first_step
        self.followed = False
        """Whether another replica has ever been ahead of this one."""
        self._failures = 0
        self._writes = False
        self._written_span: Span | None = None  # in the run folder
        self._frontier = frontier
        self._injector = injector
        self._drain = drain
        self._watchdog = watchdog
        self._checkpoints = checkpoints
        self._output = output
        poll_sec = context.job.train.follow.poll.total_seconds()
        self._pause_sec = min(poll_sec, options.heartbeat_sec)
        self._departed = DepartedMembers(
            options.lighthouse, options.access.token, options.heartbeat_sec
        )
        self._splits = SplitPlanner(options.name)
        self._log_writer = LogWriter(context.run)
        self._timer = PhaseTimer(context.clock, watchdog)
        self._compute = StepCompute(context, injector, self._timer)
        self._addresses = PeerAddresses(output.location, output.attempt, options.access)
        self._stack = ExitStack()

    def __enter__(self) -> Replica:
        options, enter = self.options, self._stack.enter_context
        self._server = PeerServer(options.host, options.access, options.certificate)
        self._stack.callback(self._server.shutdown)
        self._exchange = enter(Exchange(options))
        self._agreeing = enter(ThreadPoolExecutor(1, "agree"))
        enter(self._compute)
        self._membership = Membership(
            options.lighthouse,
            options.name,
            options.access.token,
            options.heartbeat_sec,
            options.access.timeout_sec,
            self._output.check_attempt,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def train(self) -> LeaveOutcome | None:
        """Train until the last step, or until this replica is asked to leave.

        Returns:
            How it left; None if all steps are trained.

        Raises:
            SchemaError: a loss is not finite, the disk is full, or the lighthouse is gone.
            DrainInterrupt: it was asked to leave before its first step.
        """
        with self._watchdog(START), self._drain.at_once():
            has_peer = self._load_from_peers()
            # heartbeats start here: others wait for a replica that sends them
            self._stack.enter_context(self._membership)
            if not has_peer and self.options.expected > 1:
                self._wait_for_others()
        while self._decide() != "end":
            try:
                outcome = leave_outcome(self._train_step(), self.options.name)
            except DatasetRefusedError as refused:
                return LeaveOutcome(saves=self._writes, others_continue=False, trouble=str(refused))
            if outcome is not None and self._decide() != "end":
                return outcome
        return None

    def _decide(self) -> Literal["train", "wait", "end"]:
        return next_action(self.step, self.context.span.horizon)

    def agree_on_end(self, *, done: bool) -> Agreement:
        """Return an agreement after the last step.

        Args:
            done: whether this replica has nothing left to do.
        """
        self._server.provide_state(self._state_arrays)
        agreement = self._agree(self._status((), done=done)).result()
        self._process(agreement)
        self._answer_for_departed(agreement)
        return agreement

    def _agree(self, status: ReplicaStatus) -> Future[Agreement]:
        """Form an agreement in a thread, because the main thread handles signals."""
        return self._agreeing.submit(self._membership.agree, self.step, status)

    def _status(
        self, microbatches: Iterable[int], *, done: bool = False, leaving: bool = False
    ) -> ReplicaStatus:
        return ReplicaStatus(
            since=self._since,
            state=self._server.address,
            meeting=self._exchange.meeting,
            speed=self._compute.speed,
            leaves=tuple(microbatches),
            failures=self._failures,
            written=self.context.rows.written,
            done=done,
            leaving=leaving,
            num_segments=self._frontier.visible.num_segments,
            finished=self._frontier.visible.finished,
            frontier=self._frontier.state,
            trouble=self._frontier.trouble,
            logged=self._output.logged(self._log_writer.written),
            saved=self._output.saved if self._writes else -1,
        )

    def _agree_on_step(self, microbatches: Iterable[int]) -> Future[Agreement]:
        return self._agree(self._status(microbatches, leaving=self._drain.asked))

    def _wait_for_others(self) -> None:
        """Wait for the expected replicas before the first step; does not affect the result."""
        end = time.monotonic() + self.options.access.timeout_sec
        while self.step == self.context.first_step and time.monotonic() < end:
            agreement = self._agree(self._status(())).result()
            if agreement.step > self.step or len(agreement.members) >= self.options.expected:
                return
            time.sleep(0.02)

    def _train_step(self) -> Agreement:
        self._watchdog.step = self.step
        self._frontier.refresh()
        own = self._splits.own_range(self.step)
        computed = list(own)
        if self._decide() == "train":
            agreeing = self._agree_on_step(own)
        else:
            agreeing = self._wait()
            if self._decide() != "train":
                return self._follow_if_behind(agreeing.result())
        tree = self._compute.compute(self.step, own)
        while True:
            with self._timer("sync"):
                agreement = agreeing.result()
            if agreement.step > self.step:
                return self._follow_if_behind(agreement)
            self._process(agreement)
            assignment = self._splits.assign(agreement, self.context.num_microbatches)
            self._log_writer.remember_splits(self._splits.take_new_splits())
            if assignment.dropped:
                tree, computed = self._compute.empty_tree(self.step), []
            for microbatches in assignment.ranges:
                self._compute.compute_more(self.step, microbatches, tree)
                computed += microbatches
            for step in (self.step + 1, self.step + 2):
                if step < self.context.end_step:
                    self._compute.prefetch(step, self._splits.own_range(step))
            try:
                with self._timer("sync"):
                    shape = self._compute.shape
                    total, message = self._exchange.total(agreement, tree, shape)
                break
            except LostPeerError:
                self._failures += 1
                self._server.cancel_waiters()
                agreeing = self._agree_on_step(computed)
        self._commit(agreement, total, message, assignment.owners)
        return agreement

    def _wait(self) -> Future[Agreement]:
        """Wait for new segments, until others are ahead, or until this replica is to leave."""
        limit_sec = self.context.job.train.limits.wait.total_seconds()
        end = time.monotonic() + limit_sec
        with self._timer(WAIT):
            while True:
                if time.monotonic() > end:
                    self._frontier.time_out(self.step, limit_sec)
                agreeing = self._agree_on_step(())
                agreement = agreeing.result()
                if agreement.step > self.step:
                    return agreeing
                self._process(agreement)
                advanced = self._frontier.advance(agreement.extent, self.step, self._extend)
                if advanced or self.options.name in agreement.leaving:
                    return agreeing
                if self._writes:
                    self._write_while_waiting(agreement)
                self._server.provide_state(self._state_arrays)
                self._drain.sleep(self._pause_sec)
                self._frontier.refresh()

    def write_log(self) -> None:
        """Write missing log lines of committed steps, also those of a previous writer.

        Called before a checkpoint, which requires the lines of all steps before it.

        Raises:
            SchemaError: the disk is full.
        """
        self._write_dataset()
        self._log_writer.write()

    def _write_while_waiting(self, agreement: Agreement) -> None:
        self.write_log()
        with self._watchdog(SAVE):
            self._checkpoints.finish(self.step)
        self._frontier.report_waiting(self.step)
        self._publish_addresses(agreement)
        self._answer_for_departed(agreement)

    def _extend(self, span: Span, train_step: int) -> None:
        self.context.rows.extend(span, train_step)
        self.context.set_span(span)

    def _process(self, agreement: Agreement) -> None:
        writer = agreement.writer
        if self._decide() == "train":
            self._frontier.check(agreement.extent, agreement.ready[writer].status.frontier)
        self._log_writer.forget(agreement.logged)
        self._set_writes(writes=writer == self.options.name)
        self.context.rows.update_written(agreement.written, writes=self._writes)

    def _set_writes(self, *, writes: bool) -> None:
        if writes:
            if self._output.must_begin:
                with self._watchdog(SAVE):
                    self._checkpoints.close()
                    self._output.begin(self._write_log_anew)
        elif self._writes:
            self._output.end()
        self._writes = writes

    def _write_log_anew(self) -> None:
        self._written_span = None
        self.write_log()

    def _answer_for_departed(self, agreement: Agreement) -> None:
        if self._writes and agreement.staying:
            self._departed.join_next_quorum(agreement.leaving)

    def _commit(
        self,
        agreement: Agreement,
        total: PartialSums,
        message: torch.Tensor,
        owners: Mapping[str, list[int]],
    ) -> None:
        self._injector.trigger("exchanged", self.step)
        loss = check_loss(total.loss / total.divisor, self.step)
        self._compute.update(total)
        entries = [
            self.context.ledger_entry(self.step, name, own) for name, own in owners.items() if own
        ]
        num_samples = self.context.num_samples(self.step)
        metric = metric_of(self.step, loss, num_samples, len(agreement.ready), self._timer)
        committed = CommittedStep(agreement.extent, metric, tuple(entries), message)
        self._server.add_committed(self.step, committed)
        self._advance(committed)
        self._injector.trigger("committed", self.step - 1)
        if self._writes:
            self.write_log()
            self._publish_addresses(agreement)
            self._answer_for_departed(agreement)
        self._commit_frontier(committed)
        with self._watchdog(SAVE):
            self._checkpoints.after(self.step, agreement.saved, writes=self._writes)
        self._server.provide_state(self._state_arrays)

    def _write_dataset(self) -> None:
        """Write the identity of the dataset before the lines of its steps."""
        span, follows = self.context.span, self.context.options.follow
        if follows and self._written_span is not span:
            write_dataset(self.context.run, span.dataset, self.context.job.train, follows=True)
            self._written_span = span

    def _commit_frontier(self, committed: CommittedStep) -> None:
        settle = self.context.rows.settle
        with self._timer(WAIT):
            self._frontier.on_commit(committed.extent, self.step, settle, self._extend)

    def _advance(self, committed: CommittedStep) -> None:
        self._log_writer.remember(committed.metric, committed.entries)
        self.step += 1

    def _follow_if_behind(self, agreement: Agreement) -> Agreement:
        """Catch up with an agreement of a later step, unless this replica leaves with it."""
        if agreement.step > self.step and self.options.name not in agreement.leaving:
            self._catch_up(agreement)
        return agreement

    def _catch_up(self, agreement: Agreement) -> None:
        self.followed = True
        self._splits.reset()
        self._checkpoints.release()
        self._set_writes(writes=False)
        ahead = [member.status.state for member in agreement.ready.values()]
        follow = partial(self._follow, target=agreement.step)
        self._addresses.check_reachable(self._addresses.use_first(ahead, follow))

    def _follow(self, peer: PeerClient, target: int) -> None:
        while self.step < target:
            try:
                data = peer.fetch_sums(self.step)
            except PeerError:
                data = None
            if data is None:
                # without heartbeats: otherwise the peer would wait for this replica
                with self._membership.paused():
                    self._load(peer.fetch_state())
            else:
                self._apply(CommittedStep.from_bytes(data))
        # the others commit the target without this replica, and wait for it in the next agreement
        if self.step < self.context.end_step:
            data = peer.fetch_sums(self.step, self.options.access.timeout_sec / 2)
            if data is not None:
                self._apply(CommittedStep.from_bytes(data))
        self._since = self.step

    def _apply(self, committed: CommittedStep) -> None:
        """Update with the sums of a step that others have committed."""
        if self._decide() == "wait":
            with self._timer(WAIT):
                self._frontier.advance(committed.extent, self.step, self._extend)
        self._compute.open(self.step)
        [total] = unpack_sums(committed.sums, self._compute.shape).values()
        self._compute.update(total)
        self._timer.finish()
        self._server.add_committed(self.step, committed)
        self._advance(committed)
        self._commit_frontier(committed)

    def _load_from_peers(self) -> bool:
        """Load the state of a replica that trains; return whether there is one."""
        addresses = self._addresses.read()
        if addresses and self.step < self.context.end_step:
            self._compute.warm_up(self.step)
        loaded = bool(addresses) and not self._addresses.use_first(addresses, self._join)
        if not loaded:
            self.context.rows.start(self.step, self.context.span)
        return loaded

    def _join(self, peer: PeerClient) -> None:
        self._load(peer.fetch_state())
        self.followed = True
        with suppress(PeerError):  # the next agreement has the step of the others
            self._injector.trigger("joining", self.step)
            while (data := peer.fetch_sums(self.step)) is not None:
                self._apply(CommittedStep.from_bytes(data))
        self._since = self.step

    def _publish_addresses(self, agreement: Agreement) -> None:
        """Publish the addresses of staying members for replicas that join."""
        self._addresses.publish([member.status.state for member in agreement.staying.values()])

    def _state_arrays(self) -> dict[str, Array] | None:
        arrays = self.context.state_before(self.step)
        if arrays is None:
            return None
        return arrays | self._frontier.to_arrays() | self._log_writer.to_arrays()

    def _load(self, arrays: Mapping[str, Array]) -> None:
        with self._watchdog(WAIT):
            settled = self._frontier.load(arrays)
        self.context.set_span(self._frontier.span)
        self.step = self._since = self.context.load(arrays)
        self._log_writer.load(arrays)
        if settled is not None:
            self.context.rows.settle(settled)
        self._compute.reset()
