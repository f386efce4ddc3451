"""Which rows of a step belong to one replica, and which several replicas share.

A step's blocks are split into runs, one per replica, in order. A row that the
blocks of one replica alone touch is local to it; the others are shared, and the
replica of the first block that touches a row writes it back. Shared rows that
the next step needs are on the critical path, the others may be synchronised
beside it.

Source: BagPipe (SOSP 2023), the section on delayed synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.jagged import Jagged


@dataclass(frozen=True, slots=True)
class Split:
    """How the blocks of one step are dealt to replicas.

    Attributes:
        blocks: for each block of the step, in batch order, its distinct numbers.
        edges: (num_replicas + 1,) ascending; replica r has blocks edges[r] to edges[r + 1] - 1.
    """

    blocks: Jagged
    edges: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who needs the rows of one step.

    Attributes:
        touches: (num_replicas, entries) bool, rows that the blocks of each replica look up.
        owner: (entries,) int64, the replica of the first block: it writes the row back.
        local: (entries,) bool, rows of one replica.
        shared_next: (entries,) bool, rows of several replicas that the next step needs.
        shared_later: (entries,) bool, the other rows of several replicas.
    """

    touches: NDArray[np.bool_]
    owner: NDArray[np.int64]
    local: NDArray[np.bool_]
    shared_next: NDArray[np.bool_]
    shared_later: NDArray[np.bool_]


def share(numbers: NDArray[np.int64], distances: NDArray[np.integer], split: Split) -> Sharing:
    """Tell local rows from shared ones; linear in the rows of the blocks.

    Args:
        numbers: (entries,) ascending numbers of the step.
        distances: (entries,) steps until each is used again.
        split: how the step's blocks are dealt.

    Raises:
        ValueError: the edges do not cover the blocks in order, or blocks and step have other rows.

    Example:
        >>> blocks = Jagged(np.array([4, 7, 7, 9, 7, 9]), np.array([0, 2, 4, 6]))
        >>> split = Split(blocks, np.array([0, 1, 3]))
        >>> found = share(np.array([4, 7, 9]), np.array([1, 1, 3]), split)
        >>> found.owner.tolist(), found.local.tolist(), found.shared_next.tolist()
        ([0, 0, 1], [True, False, True], [False, True, False])
    """
    edges, blocks = split.edges, split.blocks
    if edges[0] != 0 or edges[-1] != blocks.num_rows or np.any(np.diff(edges) < 0):
        raise ValueError(
            f"edges must rise from 0 to the {blocks.num_rows} blocks of the step, got "
            f"{edges.tolist()}; split whole blocks"
        )
    num_replicas = len(edges) - 1
    replica_of_block = np.repeat(np.arange(num_replicas), np.diff(edges))
    replicas = np.repeat(replica_of_block, blocks.lengths)
    entries = np.searchsorted(numbers, blocks.values)
    touches = np.zeros((num_replicas, len(numbers)), bool)
    known = entries < len(numbers)
    known[known] = numbers[entries[known]] == blocks.values[known]
    touches[replicas[known], entries[known]] = True
    counts = touches.sum(axis=0)
    if not known.all() or (counts == 0).any():
        raise ValueError(
            f"blocks must hold the rows of their step, got others among {len(blocks.values)}; "
            "take the blocks of the same step"
        )
    local, soon = counts == 1, distances == 1
    return Sharing(touches, touches.argmax(axis=0), local, ~local & soon, ~local & ~soon)
