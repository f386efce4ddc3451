"""One replica: step after step with the others, until all steps are committed.

tell the others which leaves I compute, and meanwhile compute them
who is there?     leaves of the dead are shared out; who is behind catches up
exchange          sums of leaves; who is lost here is left out of the next agreement
update            the same on every replica, bit for bit: this commits the step
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress

import torch

from schemas.jagged import Array
from schemas.job_limits import SAVE, START
from schemas.manifest import replace_bytes
from trainer.draining import Drain
from trainer.leaf_work import LeafWork, Partial
from trainer.leaves import Leaves
from trainer.replicas.ahead import Ahead
from trainer.replicas.committed import Committed
from trainer.replicas.exchange import pack, unpack
from trainer.replicas.faults import Injector
from trainer.replicas.group import Group, LostPeerError, Meeting
from trainer.replicas.leaving import Left, left_by
from trainer.replicas.membership import Agreement, Membership, Told
from trainer.replicas.options import ReplicaOptions
from trainer.replicas.peer import Peer, PeerError, PeerServer
from trainer.replicas.saves import Saves
from trainer.replicas.setting import Setting
from trainer.replicas.share import Shares
from trainer.replicas.splits import smoothed
from trainer.replicas.stand_in import StandIns
from trainer.replicas.writer import Writer
from trainer.step import PhaseTimer, check_loss, metric_of, update_by
from trainer.tree import Tree
from trainer.watchdog import Watchdog

REPLICAS = "replicas.json"
"""File of the run with the addresses where living replicas give their state."""
MEET_HEARTBEATS = 5
"""Heartbeats after which a member that was agreed on and does not come is asked about again."""


class Replica:
    """Trains with the others; a context that holds threads, servers and connections."""

    def __init__(
        self,
        setting: Setting,
        options: ReplicaOptions,
        injector: Injector,
        drain: Drain,
        watchdog: Watchdog,
        saves: Saves,
    ) -> None:
        """Take part from the first step that is not trained yet.

        Args:
            setting: of the run, at the state of `setting.first`.
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
        self._failures = 0
        self._speed: float | None = None
        self._injector = injector
        self._drain = drain
        self._watchdog = watchdog
        self._saves = saves
        self._stand_ins = StandIns(options.lighthouse, options.heartbeat_sec)
        self._shares = Shares(options.name)
        self._writer = Writer(setting.run)
        self._timer = PhaseTimer(setting.clock, watchdog)
        self._open: Leaves | None = None
        self._told_addresses: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> Replica:
        """Listen and start threads."""
        options, enter = self.options, self._stack.enter_context
        self._server = PeerServer(options.host, options.access, options.certificate)
        self._stack.callback(self._server.shutdown)
        timeout_sec = options.access.timeout_sec
        self._meeting = Meeting(options.host, timeout_sec)
        meet_sec = min(timeout_sec, MEET_HEARTBEATS * options.heartbeat_sec)
        self._group = Group(options.host, timeout_sec, meet_sec)
        self._stack.callback(self._group.leave)
        self._asking = enter(ThreadPoolExecutor(1, "agree"))
        parts = self.setting.parts
        self._work = enter(LeafWork(parts.model, parts.embedding, self.setting.kernels))
        self._ahead = enter(Ahead(self.setting.read))
        self._membership = Membership(
            options.lighthouse, options.name, options.heartbeat_sec, timeout_sec
        )
        return self

    def __exit__(self, *error: object) -> None:
        """End all of it."""
        self._stack.close()

    def train(self) -> Left | None:
        """Train all steps, or as many as there are until this replica is asked to leave.

        Returns:
            How it left; None where all steps are trained.

        Raises:
            SchemaError: a loss is not finite, the disk is full, or the lighthouse is gone.
            DrainInterrupt: it was asked to leave before its first step.
        """
        with self._watchdog(START), self._drain.at_once():
            self._find_state()
            self._stack.enter_context(self._membership)  # not before: who counts is waited for
            self._wait_for_others()
        while self.step < self.setting.last:
            left = left_by(self._train_step(), self.options.name)
            if left is not None and self.step < self.setting.last:
                return left
        return None

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

    def _agree(self, told: Told) -> Future[Agreement]:
        """Ask in a thread: the main one has signals to take."""
        return self._asking.submit(self._membership.agree, self.step, told)

    def _told(self, leaves: tuple[int, ...], *, done: bool = False, leaving: bool = False) -> Told:
        return Told(
            since=self._since,
            state=self._server.address,
            meeting=self._meeting.address,
            speed=self._speed,
            leaves=leaves,
            failures=self._failures,
            written=self.setting.rows.written,
            done=done,
            leaving=leaving,
        )

    def _told_in_step(self, leaves: Iterable[int]) -> Told:
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
        own = self._shares.mine(self.step)
        computed = list(own)
        asked = self._agree(self._told_in_step(own))
        tree = self._compute(own)
        while True:
            with self._timer("sync"):
                agreement = asked.result()
            if agreement.step > self.step:
                if self.options.name not in agreement.leaving:
                    self._catch_up(agreement)
                return agreement
            self._heed(agreement)
            more = self._shares.heed(agreement, self.setting.num_leaves)
            self._writer.remember_splits(self._shares.fixed())
            if agreement.writer == self.options.name:
                self._writer.write_splits()
            if more.dropped:
                tree, computed = self._work.tree(self.setting.num_leaves(self.step)), []
            for run in more.runs:
                self._compute_more(run, tree)
                computed += run
            for step in (self.step + 1, self.step + 2):
                if step < self.setting.last:
                    self._ahead.want(step, self._shares.mine(step))
            try:
                with self._timer("sync"):
                    total, message = self._exchange(agreement, tree)
                break
            except LostPeerError:
                self._failures += 1
                self._server.let_go()
                asked = self._agree(self._told_in_step(computed))
        self._commit(agreement, total, message, more.owners)
        return agreement

    def _heed(self, agreement: Agreement) -> None:
        writes = agreement.writer == self.options.name
        self.setting.rows.heed(agreement.written, writes=writes)

    def _stand_in(self, agreement: Agreement) -> None:
        """Answer for those that have left, from the next agreement on."""
        if agreement.writer == self.options.name and agreement.staying:
            self._stand_ins.answer(agreement.leaving)

    def _compute(self, run: range) -> Tree[Partial]:
        self._injector.at("start", self.step)
        with self._timer("read"):
            leaves = self._ahead.take(self.step, run)
        with self._timer("fetch"):
            self._open_rows(leaves)
        start = self.setting.clock()
        with self._timer("backward"):
            tree = self._work.compute(leaves)
            slower = self._injector.factor(self.step) - 1
            if slower > 0:
                time.sleep(slower * (self.setting.clock() - start))
        if len(run):
            self._speed = smoothed(self._speed, len(run) / (self.setting.clock() - start))
        self._injector.at("computed", self.step)
        return tree

    def _open_rows(self, leaves: Leaves) -> None:
        self.setting.parts.embedding.open(leaves)
        self._open = leaves

    def _compute_more(self, run: range, tree: Tree[Partial]) -> None:
        with self._timer("read"):
            leaves = self._ahead.also(self.step, run)
        with self._timer("backward"):
            self.setting.parts.embedding.more(leaves)
            self._work.compute(leaves, tree)

    def _exchange(self, agreement: Agreement, tree: Tree[Partial]) -> tuple[Partial, torch.Tensor]:
        """Return the sum of all leaves of the step, and that as a message."""
        assert self._open is not None, "rows of the step are open"
        names = list(agreement.ready)
        if self._group.key != agreement.key:
            meeting = agreement.ready[names[0]].told.meeting
            rank = names.index(self.options.name)
            self._group.join(agreement.key, meeting, rank, len(names))
        shape = self.setting.shape(self._open)
        found = self._group.gather(pack(tree.held, shape))
        for name, message in zip(names, found, strict=True):
            if name != self.options.name:
                for node, value in unpack(message, shape).items():
                    tree.add(node, value)
        total = tree.total()
        [node] = tree.held
        return total, pack({node: total}, shape)

    def _commit(
        self,
        agreement: Agreement,
        total: Partial,
        message: torch.Tensor,
        owners: Mapping[str, list[int]],
    ) -> None:
        self._injector.at("exchanged", self.step)
        loss = check_loss(total.loss / total.weight, self.step)
        with self._timer("update"):
            self._update(total)
        entries = [self.setting.entry(self.step, n, own) for n, own in owners.items() if own]
        num_samples = self.setting.num_samples(self.step)
        metric = metric_of(self.step, loss, num_samples, len(agreement.ready), self._timer)
        committed = Committed(metric, tuple(entries), message)
        self._server.keep(self.step, committed)
        self._remember(committed)
        self._injector.at("committed", self.step - 1)
        writes = agreement.writer == self.options.name
        if writes:
            self._writer.write()
            self._tell_newcomers(agreement)
            self._stand_in(agreement)
        with self._watchdog(SAVE):
            self._saves.after(self.step, writes=writes)
        self._server.offer(self._state_arrays)

    def _update(self, total: Partial) -> None:
        parts = self.setting.parts
        update_by(total, self._work, parts.embedding, parts.optimizer)
        self._open = None

    def _remember(self, committed: Committed) -> None:
        self._writer.remember(committed.metric, committed.entries)
        self.step += 1

    def _catch_up(self, agreement: Agreement) -> None:
        """Come to the step of the others, which have gone on without this replica."""
        self._shares.forget()
        for member in agreement.ready.values():
            with suppress(PeerError), self._peer(member.told.state) as peer:
                self._follow(peer, agreement.step)
                return

    def _follow(self, peer: Peer, target: int) -> None:
        while self.step < target:
            try:
                data = peer.sums(self.step)
            except PeerError:
                data = None
            if data is None:
                self._load(peer.state())
            else:
                self._apply(Committed.from_bytes(data))
        # they commit the target without this replica, and wait for it when they agree on the next
        if self.step < self.setting.last:
            data = peer.sums(self.step, self.options.access.timeout_sec / 2)
            if data is not None:
                self._apply(Committed.from_bytes(data))
        self._since = self.step

    def _apply(self, committed: Committed) -> None:
        """Update by the sums of a step that others have committed."""
        if self._open is None or self._open.step.train_step != self.step:
            with self._timer("read"):
                leaves = self._ahead.take(self.step, range(0))
            with self._timer("fetch"):
                self._open_rows(leaves)
        assert self._open is not None, "rows of the step are open"
        [total] = unpack(committed.sums, self.setting.shape(self._open)).values()
        with self._timer("update"):
            self._update(total)
        self._timer.finish()
        self._server.keep(self.step, committed)
        self._remember(committed)

    def _find_state(self) -> None:
        """Load the state of a replica that trains already, if there is one, and follow it."""
        path = self.setting.run / REPLICAS
        addresses = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        for address in addresses:
            with suppress(PeerError), self._peer(address) as peer:
                self._load(peer.state())
                with suppress(PeerError):  # the next agreement says where the others are
                    self._injector.at("joining", self.step)
                    while (data := peer.sums(self.step)) is not None:
                        self._apply(Committed.from_bytes(data))
                self._since = self.step
                return
        self.setting.rows.begin(self.step)

    def _peer(self, address: str) -> Peer:
        return Peer(address, self.options.access)

    def _tell_newcomers(self, agreement: Agreement) -> None:
        addresses = [member.told.state for member in agreement.staying.values()]
        if addresses != self._told_addresses:
            replace_bytes(self.setting.run / REPLICAS, json.dumps(addresses).encode())
            self._told_addresses = addresses

    def _state_arrays(self) -> dict[str, Array] | None:
        return self.setting.state_before(self.step)

    def _load(self, arrays: Mapping[str, Array]) -> None:
        self.step = self._since = self.setting.load(arrays)
        self._open = None
