"""The other replicas, as one replica sees them.

1. A replica sends its status, with the microbatches that it computes, and computes them meanwhile.
2. It receives the agreement: the step is computed again if a replica with a part of it is lost;
   replicas that are behind catch up.
3. Sums of microbatches are exchanged; if a replica is lost here, the agreement is formed again
   without it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

import numpy as np

from presage.schemas.arrays import Array
from presage.trainer.agreement import Agreement, CommittedStep, ReplicaStatus
from presage.trainer.checkpoint.dense_state import load_state, state_of
from presage.trainer.data.collate import Microbatches
from presage.trainer.elastic.membership import Membership, ReplicaOptions
from presage.trainer.elastic.peer_state import (
    MemoryRows,
    PeerAddresses,
    PeerClient,
    PeerError,
    PeerServer,
)
from presage.trainer.elastic.shared_rows import SharedRows
from presage.trainer.elastic.sums import (
    LostPeerError,
    SplitPlanner,
    SumsExchange,
    SumsShape,
    unpack_sums,
)
from presage.trainer.loop import Agreeing, Peers, StepTotal, TrainingLoop
from presage.trainer.run.output import RunOutput
from presage.trainer.run.run_context import RunContext
from presage.trainer.step import MicrobatchCompute, PartialSums, Tree
from presage.trainer.steps import NO_MICROBATCHES


class ReplicaPeers(Peers):
    """The other replicas of a run; a context for threads, servers and connections."""

    is_alone = False

    def __init__(
        self,
        options: ReplicaOptions,
        rows: MemoryRows | SharedRows,
        compute: MicrobatchCompute,
        output: RunOutput,
    ) -> None:
        """Create no thread or connection yet."""
        self.name = options.name
        self.followed = False
        """Whether another replica has ever been ahead of this one."""
        self._options = options
        self._rows = rows
        self._compute = compute
        self._output = output
        self._timer = compute.timer
        self._since, self._failures = 0, 0
        self._splits = SplitPlanner(options.name)
        self._addresses = PeerAddresses(output.location, output.attempt, options.access)
        self._stack = ExitStack()

    def __enter__(self) -> ReplicaPeers:
        options, enter = self._options, self._stack.enter_context
        self._server = PeerServer(options.host, options.access, options.certificate)
        self._stack.callback(self._server.shutdown)
        self._exchange = enter(SumsExchange(options))
        self._agreeing = enter(ThreadPoolExecutor(1, "agree"))
        self._membership = Membership(options, self._output.check_attempt)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def join(self, loop: TrainingLoop) -> None:
        """Load the state of a replica that trains, or wait for the others before the first step."""
        self.loop, self._since = loop, loop.step
        addresses = self._addresses.read()
        reader = loop.context.reader
        if addresses and loop.step < reader.end_step:
            whole = range(reader.num_microbatches(loop.step))
            self._compute.warm_up(reader.take(loop.step, whole))
        has_peer = bool(addresses) and not self._addresses.use_first(addresses, self._load_from)
        if not has_peer:
            self._rows.start(loop.step, loop.context.span)
        # heartbeats start here: others wait for a replica that sends them
        self._stack.enter_context(self._membership)
        if not has_peer and self._options.expected > 1:
            self._wait_for_others()

    def own_range(self, train_step: int) -> range | None:
        """Return the microbatches of a step that this replica computes, None if not yet known."""
        return self._splits.own_range(train_step)

    def agree(self, train_step: int, status: ReplicaStatus) -> Agreeing:
        """Form an agreement in a thread, because the main thread handles signals."""
        whole = replace(
            status,
            since=self._since,
            state=self._server.address,
            meeting=self._exchange.meeting,
            failures=self._failures,
        )
        return self._agreeing.submit(self._membership.agree, train_step, whole).result

    def add(self, own: range, sums: Tree[PartialSums], agreeing: Agreeing) -> StepTotal | Agreement:
        """Add the sums of all members; without one that is lost, the step is split anew."""
        loop = self.loop
        while True:
            with self._timer("sync"):
                agreement = agreeing()
            if agreement.step > loop.step:
                return agreement
            loop.apply_agreement(agreement)
            owners = self._splits.assign(agreement, loop.context.reader.work)
            if owners[self.name] != own:
                own = owners[self.name]
                sums = self._compute.compute(loop.next_batch(own))
            loop.prefetch()
            try:
                with self._timer("sync"):
                    shape = _shape_of(loop.context, self._compute.opened)
                    total, message = self._exchange.total(agreement, sums, shape)
                break
            except LostPeerError:
                self._failures += 1
                self._server.cancel_waiters()
                agreeing = loop.agree_on_step(own)
        return StepTotal(agreement, total, owners, message)

    def on_commit(self, train_step: int, committed: CommittedStep) -> None:
        """Keep the sums of a committed step for replicas that are behind."""
        self._server.add_committed(train_step, committed)

    def on_write(self, agreement: Agreement) -> None:
        """Publish the addresses of staying members, and answer quorums for departed ones."""
        self._addresses.publish([member.status.state for member in agreement.staying.values()])
        if agreement.staying:
            self._membership.unblock_quorum(agreement.leaving)

    def provide_state(self) -> None:
        """Send the state before the next step to replicas that wait for it."""
        self._server.provide_state(self._state_arrays)

    def catch_up(self, agreement: Agreement) -> None:
        """Apply the steps that the others have committed."""
        self.followed = True
        self._splits.reset()
        self.loop.yield_writer_role()
        ahead = [member.status.state for member in agreement.ready.values()]
        apply_steps = partial(self._catch_up_from, target=agreement.step)
        self._addresses.check_reachable(self._addresses.use_first(ahead, apply_steps))

    def _wait_for_others(self) -> None:
        """Wait for the expected replicas before the first step; does not affect the result."""
        loop, end = self.loop, time.monotonic() + self._options.access.timeout_sec
        while time.monotonic() < end:
            agreement = loop.agree()()
            if agreement.step > loop.step or len(agreement.members) >= self._options.expected:
                return
            time.sleep(0.02)

    def _catch_up_from(self, peer: PeerClient, target: int) -> None:
        loop = self.loop
        while loop.step < target:
            try:
                data = peer.fetch_sums(loop.step)
            except PeerError:
                data = None
            if data is None:
                # without heartbeats: otherwise the peer would wait for this replica
                with self._membership.paused():
                    self._load(peer.fetch_state())
            else:
                self._apply(CommittedStep.from_bytes(data))
        # the others commit the target without this replica, and wait for it in the next agreement
        if loop.step < loop.context.reader.end_step:
            data = peer.fetch_sums(loop.step, self._options.access.timeout_sec / 2)
            if data is not None:
                self._apply(CommittedStep.from_bytes(data))
        self._since = loop.step

    def _load_from(self, peer: PeerClient) -> None:
        self._load(peer.fetch_state())
        self.followed = True
        with suppress(PeerError):  # the next agreement has the step of the others
            while (data := peer.fetch_sums(self.loop.step)) is not None:
                self._apply(CommittedStep.from_bytes(data))
        self._since = self.loop.step

    def _apply(self, committed: CommittedStep) -> None:
        """Update with the sums of a step that others have committed."""

        def total() -> PartialSums:
            if not self._compute.is_open(loop.step):
                self._compute.open(loop.next_batch(NO_MICROBATCHES))
            shape = _shape_of(loop.context, self._compute.opened)
            [sums] = unpack_sums(committed.message, shape).values()
            return sums

        loop = self.loop
        self._server.add_committed(loop.step, committed)
        loop.apply(committed, total)

    def _state_arrays(self) -> Mapping[str, Array] | None:
        """Return the state before the next step as copied arrays; None: retry with a later one."""
        loop, components = self.loop, self.loop.context.components
        rows = self._rows.state_before(loop.step)
        if rows is None:
            return None
        dense = state_of(components.model, components.optimizer)
        copies = {name: array.copy() for name, array in dense.items()}
        return {"step": np.array([loop.step]), **copies, **rows, **loop.state_arrays()}

    def _load(self, arrays: Mapping[str, Array]) -> None:
        def load() -> int:
            components, [step] = loop.context.components, arrays["step"].tolist()
            dense = {n: a for n, a in arrays.items() if n.startswith(("model/", "optimizer/"))}
            load_state(dense, components.model, components.optimizer)
            self._rows.load(arrays, step, loop.context.span)
            return step

        loop = self.loop
        loop.load(arrays, load)
        self._since = loop.step
        self._compute.reset()


def _shape_of(context: RunContext, microbatches: Microbatches) -> SumsShape:
    """Return the shape of a step's sums."""
    parameters = [p for p in context.components.model.parameters() if p.requires_grad]
    return SumsShape(
        num_parameters=sum(p.numel() for p in parameters),
        num_rows=sum(len(rows) for rows in microbatches.rows.values()),
        dim=context.job.train.embedding_dim,
        dtype=parameters[0].dtype,
    )
