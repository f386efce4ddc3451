"""The sum of all leaves of a step: each replica's share of it goes to all others."""

from __future__ import annotations

from dataclasses import replace

import torch

from trainer.leaf_work import Partial
from trainer.replicas.exchange import Shape, pack, unpack
from trainer.replicas.group import Group, Meeting
from trainer.replicas.membership import Agreement
from trainer.replicas.options import ReplicaOptions
from trainer.replicas.peer import Peer, PeerError
from trainer.tree import Tree

MEET_HEARTBEATS = 5
"""Heartbeats after which a member that was agreed on and does not come is asked about again."""
ANSWER_HEARTBEATS = 2
"""Heartbeats after which a member is asked whether it lives, and in which it has to say so."""


class Exchange:
    """The connections of one replica to the others; a context that closes them."""

    def __init__(self, options: ReplicaOptions) -> None:
        """Listen; connections are made when they are agreed on."""
        self._name = options.name
        self._look_sec = ANSWER_HEARTBEATS * options.heartbeat_sec
        self._asking = replace(options.access, timeout_sec=self._look_sec)
        self._meeting = Meeting(options.host, options.access.timeout_sec)
        meet_sec = min(options.access.timeout_sec, MEET_HEARTBEATS * options.heartbeat_sec)
        self._group = Group(options.host, options.access.timeout_sec, meet_sec)

    @property
    def meeting(self) -> str:
        """Address where others find each other."""
        return self._meeting.address

    def __enter__(self) -> Exchange:
        """Do nothing."""
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the others."""
        self._group.leave()

    def total(
        self, agreement: Agreement, tree: Tree[Partial], shape: Shape
    ) -> tuple[Partial, torch.Tensor]:
        """Return the sum of all leaves of a step, and that as a message.

        Args:
            agreement: of the step.
            tree: sums of the leaves that this replica has; those of others are added.
            shape: of the step.

        Raises:
            LostPeerError: a member did not answer.
        """
        names = list(agreement.ready)
        if self._group.key != agreement.key:
            meeting = agreement.ready[names[0]].told.meeting
            rank = names.index(self._name)
            self._group.join(agreement.key, meeting, rank, len(names))
        found = self._group.gather(
            pack(tree.held, shape), self._look_sec, lambda: self._others_live(agreement)
        )
        for name, message in zip(names, found, strict=True):
            if name != self._name:
                for node, value in unpack(message, shape).items():
                    tree.add(node, value)
        total = tree.total()
        [node] = tree.held
        return total, pack({node: total}, shape)

    def _others_live(self, agreement: Agreement) -> bool:
        """Tell whether all others answer: one that is held keeps its connections."""
        for name, member in agreement.ready.items():
            if name != self._name:
                try:
                    with Peer(member.told.state, self._asking) as peer:
                        peer.ask_if_it_lives()
                except PeerError:
                    return False
        return True
