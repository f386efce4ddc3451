"""The training loop of one replica."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Generic, Literal, TypeVar

import torch

from schemas.arrays import Array
from schemas.config.limits import SAVE, START, WAIT
from trainer.data.microbatches import Microbatches
from trainer.elastic.checkpoints import LogWriter, ReplicaCheckpoints
from trainer.elastic.context import DatasetRefusedError, Frontier, ReplicaContext
from trainer.elastic.exchange import NO_MICROBATCHES, Exchange, SplitPlanner, smooth_speed
from trainer.elastic.faults import FaultInjector
from trainer.elastic.group import LostPeerError, SumsShape, unpack_sums
from trainer.elastic.membership import Agreement, DepartedMembers, Membership, ReplicaStatus
from trainer.elastic.options import LeaveOutcome, ReplicaOptions, leave_outcome
from trainer.elastic.peer_state import (
    CommittedStep,
    PeerAddresses,
    PeerClient,
    PeerError,
    PeerServer,
)
from trainer.follow import Span
from trainer.horizon import decide
from trainer.recovery import Drain, Watchdog
from trainer.run import write_dataset
from trainer.step import LeafWork, Partial, PhaseTimer, Tree, check_loss, metric_of, update_by

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Calls a function of a step and a run of its leaves ahead of time; a context."""

    def __init__(self, function: Callable[[int, range], T]) -> None:
        """Remember what is called.

        Args:
            function: of step and leaves; one call at a time.
        """
        self._function = function
        self._pool = ThreadPoolExecutor(
            1, "reader", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._coming: dict[tuple[int, range], Future[T]] = {}

    def __enter__(self) -> ReadAhead[T]:
        """Do nothing: the thread starts with the first call."""
        return self

    def __exit__(self, *error: object) -> None:
        """Drop what nobody will take."""
        self._pool.shutdown(cancel_futures=True)

    def want(self, step: int, run: range) -> None:
        """Begin with a step, unless that is under way; drop other runs of that step."""
        for key in [key for key in self._coming if key[0] == step and key[1] != run]:
            self._coming.pop(key).cancel()
        if (step, run) not in self._coming:
            self._coming[step, run] = self._pool.submit(self._function, step, run)

    def take(self, step: int, run: range) -> T:
        """Return the result for a step; earlier ones are dropped."""
        self.want(step, run)
        result = self._coming.pop((step, run)).result()
        for key in [key for key in self._coming if key[0] <= step]:
            self._coming.pop(key).cancel()
        return result

    def also(self, step: int, run: range) -> T:
        """Return the result for more leaves of a step, at once."""
        return self._pool.submit(self._function, step, run).result()


class StepCompute:
    """Computes leaves, which are read ahead of time; a context that holds threads."""

    def __init__(self, setting: ReplicaContext, injector: FaultInjector, timer: PhaseTimer) -> None:
        """Keep the parts.

        Args:
            setting: of the run.
            injector: faults that happen meanwhile.
            timer: of the phases.
        """
        self.speed: float | None = None  # leaves per second; none before the first
        self._setting, self._injector, self._timer = setting, injector, timer
        self._open: Microbatches | None = None
        self._stack = ExitStack()

    def __enter__(self) -> StepCompute:
        """Start threads."""
        parts, enter = self._setting.parts, self._stack.enter_context
        self._work = enter(LeafWork(parts.model, parts.embedding, self._setting.kernels))
        self._ahead = enter(ReadAhead(self._setting.read))
        return self

    def __exit__(self, *error: object) -> None:
        """End them."""
        self._stack.close()

    @property
    def shape(self) -> SumsShape:
        """Return the shape of the sums of the step in flight."""
        assert self._open is not None, "rows of the step are open"
        return self._setting.shape(self._open)

    def want(self, train_step: int, run: range) -> None:
        """Begin to read leaves of a later step."""
        self._ahead.want(train_step, run)

    def compute(self, train_step: int, run: range) -> Tree[Partial]:
        """Open the rows of a step, compute some of its leaves, and return their sums."""
        clock = self._setting.clock
        self._injector.at("start", train_step)
        leaves = self._opened(train_step, run)
        start = clock()
        with self._timer("backward"):
            tree = self._work.compute(leaves)
            slower_sec = self._injector.slower_sec(train_step, len(run), clock() - start)
            if slower_sec > 0:
                time.sleep(slower_sec)
        if len(run):
            self.speed = smooth_speed(self.speed, len(run) / (clock() - start))
        self._injector.at("computed", train_step)
        return tree

    def also(self, train_step: int, run: range, tree: Tree[Partial]) -> None:
        """Compute more leaves of the step in flight into its sums."""
        with self._timer("read"):
            leaves = self._ahead.also(train_step, run)
        with self._timer("backward"):
            self._setting.parts.embedding.add(leaves)
            self._work.compute(leaves, tree)

    def anew(self, train_step: int) -> Tree[Partial]:
        """Return sums of a step without a leaf yet."""
        return self._work.tree(self._setting.num_leaves(train_step))

    def open(self, train_step: int) -> None:
        """Open the rows of a step that others have computed, unless they are."""
        if not self._is_open(train_step):
            self._opened(train_step, NO_MICROBATCHES)

    def update(self, total: Partial) -> None:
        """Update all that is trained by the sum of all leaves of the step in flight."""
        parts = self._setting.parts
        with self._timer("update"):
            update_by(total, self._work, parts.embedding, parts.optimizer)
        self.forget()

    def forget(self) -> None:
        """Have no step in flight."""
        self._open = None

    def _opened(self, train_step: int, run: range) -> Microbatches:
        with self._timer("read"):
            leaves = self._ahead.take(train_step, run)
        embedding = self._setting.parts.embedding
        with self._timer("fetch"):
            if self._is_open(train_step):  # begun before, and others could not be followed
                embedding.add(leaves)
            else:
                embedding.open(leaves)
        self._open = leaves
        return leaves

    def _is_open(self, train_step: int) -> bool:
        return self._open is not None and self._open.step.train_step == train_step


# One replica: step after step with the others, until all steps are committed.
#
# tell the others which leaves I compute, and meanwhile compute them who is there?     leaves of
# the dead are shared out; who is behind catches up exchange          sums of leaves; who is lost
# here is left out of the next agreement update            the same on every replica, bit for bit:
# this commits the step


class Replica:
    """Trains with the others; a context that holds threads, servers and connections."""

    def __init__(
        self,
        setting: ReplicaContext,
        frontier: Frontier,
        options: ReplicaOptions,
        injector: FaultInjector,
        drain: Drain,
        watchdog: Watchdog,
        saves: ReplicaCheckpoints,
    ) -> None:
        """Take part from the first step that is not trained yet.

        Args:
            setting: of the run, at the state of `setting.first`.
            frontier: how far it may train.
            options: of this replica.
            injector: faults that happen to it.
            drain: asks it to leave.
            watchdog: limits each phase.
            saves: the run, beside training.
        """
        self.setting = setting
        self.options = options
        self.step = setting.first
        self._since = setting.first
        self.followed = False
        """Whether another replica has ever been ahead of it."""
        self._failures = 0
        self._writes = False
        self._written: Span | None = None  # what the run's folder says that there is to train
        self._frontier = frontier
        self._injector = injector
        self._drain = drain
        self._watchdog = watchdog
        self._saves = saves
        self._pause_sec = min(setting.job.train.follow.poll.total_seconds(), options.heartbeat_sec)
        self._stand_ins = DepartedMembers(options.lighthouse, options.heartbeat_sec)
        self._shares = SplitPlanner(options.name)
        self._writer = LogWriter(setting.run)
        self._timer = PhaseTimer(setting.clock, watchdog)
        self._computing = StepCompute(setting, injector, self._timer)
        self._addresses = PeerAddresses(setting.run, options.access)
        self._stack = ExitStack()

    def __enter__(self) -> Replica:
        """Listen and start threads."""
        options, enter = self.options, self._stack.enter_context
        self._server = PeerServer(options.host, options.access, options.certificate)
        self._stack.callback(self._server.shutdown)
        self._exchange = enter(Exchange(options))
        self._asking = enter(ThreadPoolExecutor(1, "agree"))
        enter(self._computing)
        self._membership = Membership(
            options.lighthouse,
            options.name,
            options.heartbeat_sec,
            options.access.timeout_sec,
        )
        return self

    def __exit__(self, *error: object) -> None:
        """End all of it."""
        self._stack.close()

    def train(self) -> LeaveOutcome | None:
        """Train all steps, or as many as there are until this replica is asked to leave.

        Returns:
            How it left; None where all steps are trained.

        Raises:
            SchemaError: a loss is not finite, the disk is full, or the lighthouse is gone.
            DrainInterrupt: it was asked to leave before its first step.
        """
        with self._watchdog(START), self._drain.at_once():
            found = self._find_state()
            self._stack.enter_context(self._membership)  # not before: who counts is waited for
            if not found and self.options.expected > 1:
                self._wait_for_others()
        while self._comes() != "end":
            try:
                left = leave_outcome(self._train_step(), self.options.name)
            except DatasetRefusedError as refused:
                return LeaveOutcome(saves=self._writes, alone=False, trouble=str(refused))
            if left is not None and self._comes() != "end":
                return left
        return None

    def _comes(self) -> Literal["train", "wait", "end"]:
        return decide(self.step, self.setting.span.horizon)

    def agree_on_end(self, *, done: bool) -> Agreement:
        """Return who is there after the last step.

        Args:
            done: nothing is left to do here.
        """
        self._server.offer(self._state_arrays)
        agreement = self._agree(self._told((), done=done)).result()
        self._heed(agreement)
        self._stand_in(agreement)
        return agreement

    def _agree(self, told: ReplicaStatus) -> Future[Agreement]:
        """Ask in a thread: the main one has signals to take."""
        return self._asking.submit(self._membership.agree, self.step, told)

    def _told(
        self, leaves: tuple[int, ...], *, done: bool = False, leaving: bool = False
    ) -> ReplicaStatus:
        return ReplicaStatus(
            since=self._since,
            state=self._server.address,
            meeting=self._exchange.meeting,
            speed=self._computing.speed,
            leaves=leaves,
            failures=self._failures,
            written=self.setting.rows.written,
            done=done,
            leaving=leaving,
            num_segments=self._frontier.seen.num_segments,
            finished=self._frontier.seen.finished,
            frontier=self._frontier.told,
            trouble=self._frontier.trouble,
        )

    def _told_in_step(self, leaves: Iterable[int]) -> ReplicaStatus:
        return self._told(tuple(leaves), leaving=self._drain.asked)

    def _wait_for_others(self) -> None:
        """Begin together where all are to begin; what is computed does not depend on it."""
        end = time.monotonic() + self.options.access.timeout_sec
        while self.step == self.setting.first and time.monotonic() < end:
            agreement = self._agree(self._told(())).result()
            if agreement.step > self.step or len(agreement.members) >= self.options.expected:
                return
            time.sleep(0.02)

    def _train_step(self) -> Agreement:
        self._watchdog.step = self.step
        self._frontier.look()
        own = self._shares.mine(self.step)
        computed = list(own)
        if self._comes() == "train":
            asked = self._agree(self._told_in_step(own))
        else:
            asked = self._wait()
            if self._comes() != "train":
                return self._followed(asked.result())
        tree = self._computing.compute(self.step, own)
        while True:
            with self._timer("sync"):
                agreement = asked.result()
            if agreement.step > self.step:
                return self._followed(agreement)
            self._heed(agreement)
            more = self._shares.heed(agreement, self.setting.num_leaves)
            self._writer.remember_splits(self._shares.fixed())
            if self._writes:
                self._writer.write_splits()
            if more.dropped:
                tree, computed = self._computing.anew(self.step), []
            for run in more.runs:
                self._computing.also(self.step, run, tree)
                computed += run
            for step in (self.step + 1, self.step + 2):
                if step < self.setting.last:
                    self._computing.want(step, self._shares.mine(step))
            try:
                with self._timer("sync"):
                    shape = self._computing.shape
                    total, message = self._exchange.total(agreement, tree, shape)
                break
            except LostPeerError:
                self._failures += 1
                self._server.let_go()
                asked = self._agree(self._told_in_step(computed))
        self._commit(agreement, total, message, more.owners)
        return agreement

    def _wait(self) -> Future[Agreement]:
        """Ask until more is to be trained, others are ahead, or this replica is to leave."""
        limit_sec = self.setting.job.train.limits.wait.total_seconds()
        end = time.monotonic() + limit_sec
        with self._timer(WAIT):
            while True:
                if time.monotonic() > end:
                    self._frontier.give_up(self.step, limit_sec)
                asked = self._agree(self._told_in_step(()))
                agreement = asked.result()
                if agreement.step > self.step:
                    return asked
                self._heed(agreement)
                reached = self._frontier.reach(agreement.known, self.step, self._extend)
                if reached or self.options.name in agreement.leaving:
                    return asked
                if self._writes:
                    self._write_while_waiting(agreement)
                self._server.offer(self._state_arrays)
                self._drain.sleep(self._pause_sec)
                self._frontier.look()

    def write_lines(self) -> None:
        """Write the lines of committed steps that are not there, of a writer that died before.

        A checkpoint counts on the lines of all steps before it: they are written first.

        Raises:
            SchemaError: the disk is full.
        """
        self._write_dataset()
        self._writer.write()

    def _write_while_waiting(self, agreement: Agreement) -> None:
        self.write_lines()
        with self._watchdog(SAVE):
            self._saves.finish(self.step)
        self._frontier.say(self.step)
        self._tell_newcomers(agreement)
        self._stand_in(agreement)

    def _extend(self, span: Span, train_step: int) -> None:
        self.setting.rows.extend(span, train_step)
        self.setting.know(span)

    def _heed(self, agreement: Agreement) -> None:
        writer = agreement.writer
        if self._comes() == "train":
            self._frontier.check(agreement.known, agreement.ready[writer].told.frontier)
        self._writes = writer == self.options.name
        self.setting.rows.heed(agreement.written, writes=self._writes)

    def _stand_in(self, agreement: Agreement) -> None:
        """Answer for those that have left, from the next agreement on."""
        if self._writes and agreement.staying:
            self._stand_ins.answer(agreement.leaving)

    def _commit(
        self,
        agreement: Agreement,
        total: Partial,
        message: torch.Tensor,
        owners: Mapping[str, list[int]],
    ) -> None:
        self._injector.at("exchanged", self.step)
        loss = check_loss(total.loss / total.divisor, self.step)
        self._computing.update(total)
        entries = [self.setting.entry(self.step, n, own) for n, own in owners.items() if own]
        num_samples = self.setting.num_samples(self.step)
        metric = metric_of(self.step, loss, num_samples, len(agreement.ready), self._timer)
        committed = CommittedStep(agreement.known, metric, tuple(entries), message)
        self._server.keep(self.step, committed)
        self._remember(committed)
        self._injector.at("committed", self.step - 1)
        if self._writes:
            self.write_lines()
            self._tell_newcomers(agreement)
            self._stand_in(agreement)
        self._know(committed)
        with self._watchdog(SAVE):
            self._saves.after(self.step, writes=self._writes)
        self._server.offer(self._state_arrays)

    def _write_dataset(self) -> None:
        """Let the run's folder say what there is to train, before it says what is trained."""
        span, follows = self.setting.span, self.setting.options.follow
        if follows and self._written is not span:
            write_dataset(self.setting.run, span.dataset, self.setting.job.train, follows=True)
            self._written = span

    def _know(self, committed: CommittedStep) -> None:
        settle = self.setting.rows.settle
        with self._timer(WAIT):
            self._frontier.committed(committed.known, self.step, settle, self._extend)

    def _remember(self, committed: CommittedStep) -> None:
        self._writer.remember(committed.metric, committed.entries)
        self.step += 1

    def _followed(self, agreement: Agreement) -> Agreement:
        """Come to the step of an agreement, where others have gone on without this replica."""
        if agreement.step > self.step and self.options.name not in agreement.leaving:
            self._catch_up(agreement)
        return agreement

    def _catch_up(self, agreement: Agreement) -> None:
        self.followed = True
        self._shares.forget()
        self._saves.let_go()
        self._writes = False
        ahead = [member.told.state for member in agreement.ready.values()]
        follow = partial(self._follow, target=agreement.step)
        self._addresses.reached(self._addresses.first(ahead, follow))

    def _follow(self, peer: PeerClient, target: int) -> None:
        while self.step < target:
            try:
                data = peer.sums(self.step)
            except PeerError:
                data = None
            if data is None:
                with self._membership.silent():  # or the peer would wait for this replica
                    self._load(peer.state())
            else:
                self._apply(CommittedStep.from_bytes(data))
        # they commit the target without this replica, and wait for it when they agree on the next
        if self.step < self.setting.last:
            data = peer.sums(self.step, self.options.access.timeout_sec / 2)
            if data is not None:
                self._apply(CommittedStep.from_bytes(data))
        self._since = self.step

    def _apply(self, committed: CommittedStep) -> None:
        """Update by the sums of a step that others have committed."""
        if self._comes() == "wait":
            with self._timer(WAIT):
                self._frontier.reach(committed.known, self.step, self._extend)
        self._computing.open(self.step)
        [total] = unpack_sums(committed.sums, self._computing.shape).values()
        self._computing.update(total)
        self._timer.finish()
        self._server.keep(self.step, committed)
        self._remember(committed)
        self._know(committed)

    def _find_state(self) -> bool:
        """Load the state of a replica that trains already and follow it; tell if there is one."""
        addresses = self._addresses.told()
        found = bool(addresses) and not self._addresses.first(addresses, self._join)
        if not found:
            self.setting.rows.begin(self.step, self.setting.span)
        return found

    def _join(self, peer: PeerClient) -> None:
        self._load(peer.state())
        self.followed = True
        with suppress(PeerError):  # the next agreement says where the others are
            self._injector.at("joining", self.step)
            while (data := peer.sums(self.step)) is not None:
                self._apply(CommittedStep.from_bytes(data))
        self._since = self.step

    def _tell_newcomers(self, agreement: Agreement) -> None:
        self._addresses.tell([member.told.state for member in agreement.staying.values()])

    def _state_arrays(self) -> dict[str, Array] | None:
        found = self.setting.state_before(self.step)
        return None if found is None else found | self._frontier.arrays()

    def _load(self, arrays: Mapping[str, Array]) -> None:
        with self._watchdog(WAIT):
            settled = self._frontier.load(arrays)
        self.setting.know(self._frontier.span)
        self.step = self._since = self.setting.load(arrays)
        if settled is not None:
            self.setting.rows.settle(settled)
        self._computing.forget()
