"""The total order of samples, with sessions side by side, and its cuts into blocks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.partition import hash_session_keys, microseconds
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import Tuples
from pipelines.sources.read import ORIGIN
from schemas.arrays import one_chunk
from schemas.config.job import DataConfig

# Sessions side by side: the total order of samples, and its cuts into blocks.
#
# The order inside a part is (split, window, hash of the session key, session key, time, file,
# position in the file, list index); parts are ranges of the hash. So the bytes do not depend on
# how many workers there were, nor on which of them saw a row first.


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The final order of samples and its cuts; every array is in that order.

    Attributes:
        rows: (num_samples,) int64, where each sample was before.
        starts_session: (num_samples,) bool, first sample of a session within its split.
        session_samples: (num_samples,) int64, there the session's samples in the split, else 0.
        opens_session: (num_samples,) bool, first sample of a session.
        is_evaluation: (num_samples,) bool, ascending.
        window: (num_samples,) int32, windows since the epoch, 0 without windows.
        block: (num_samples,) int64, index of the block in the part, ascending from 0.
    """

    rows: NDArray[np.int64]
    starts_session: NDArray[np.bool_]
    session_samples: NDArray[np.int64]
    opens_session: NDArray[np.bool_]
    is_evaluation: NDArray[np.bool_]
    window: NDArray[np.int32]
    block: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Clustered:
    """Consecutive samples of one part in their final order, with their cuts.

    Attributes:
        samples: in order.
        starts_session: (num_samples,) bool, first sample of a session within its split.
        session_samples: (num_samples,) int64, there the session's samples in the split, wherever
            they are, else 0.
        is_evaluation: (num_samples,) bool, ascending.
        window: (num_samples,) int32, windows since the epoch, 0 without windows.
        block: (num_samples,) int64, ascending from 0; the first sample starts a block.
        num_sessions: sessions whose first sample is here; one that the split cuts counts once.
        first_block: index of the first block in the part.
    """

    samples: Tuples
    starts_session: NDArray[np.bool_]
    session_samples: NDArray[np.int64]
    is_evaluation: NDArray[np.bool_]
    window: NDArray[np.int32]
    block: NDArray[np.int64]
    num_sessions: int
    first_block: int = 0


def cluster(samples: Tuples, data: DataConfig) -> Clustered:
    """Put the samples of one part into their final order and cut them into blocks.

    Args:
        samples: all samples of some session keys, in any order, with origins and list indices.
        data: session, window, split and block size.
    """
    order = sort_samples(sort_keys(samples, data), data)
    return slice_clustered(samples.take(order.rows), order, slice(0, samples.num_samples))


def slice_clustered(samples: Tuples, order: SampleOrder, place: slice) -> Clustered:
    """Return some consecutive samples, whole blocks, with their part of the order.

    Args:
        samples: in their final order.
        order: of all samples of the part.
        place: where these lie in it.
    """
    block = order.block[place]
    first = int(block[0]) if len(block) else 0
    return Clustered(
        samples,
        order.starts_session[place],
        order.session_samples[place],
        order.is_evaluation[place],
        order.window[place],
        block - first,
        int(order.opens_session[place].sum()),
        first,
    )


def sort_keys(samples: Tuples, data: DataConfig) -> pa.Table:
    """Return what decides the order of samples, one row each: `key, time, origin, index`."""
    time = samples.column(data.session.time).cast(pa.int64())
    return pa.table(
        {
            "key": samples.column(data.session.key),
            "time": time,
            "origin": samples.column(ORIGIN),
            "index": samples.column(LIST_INDEX),
        }
    )


def sort_samples(samples: pa.Table, data: DataConfig) -> SampleOrder:
    """Return the final order of samples.

    Args:
        samples: all samples of some session keys, in any order, from `keys_of`.
        data: session, window, split and block size.
    """
    keys = one_chunk(samples["key"])
    time, origins, indices = (samples[c].to_numpy() for c in ("time", "origin", "index"))
    codes = pc.rank(keys, tiebreaker="dense").to_numpy().astype(np.int64)
    by_time = np.lexsort((indices, origins, time, codes, hash_session_keys(keys)))
    starts = _session_starts(codes[by_time], time[by_time], data.session.gap)
    window = np.empty(len(time), np.int32)
    window[by_time] = _windows(time[by_time], starts, data.window.span)
    session = np.empty(len(time), np.int64)
    session[by_time] = np.cumsum(starts)
    evaluation = np.zeros(len(time), bool)
    if data.split.evaluation_from is not None:
        evaluation = time >= microseconds(data.split.evaluation_from)
    rank = np.empty(len(time), np.int64)
    rank[by_time] = np.arange(len(time))
    rows = np.lexsort((rank, window, evaluation))
    session, window, evaluation = session[rows], window[rows], evaluation[rows]
    in_split = _changes(session, evaluation)
    lengths = np.zeros(len(time), np.int64)
    lengths[in_split] = np.diff(np.flatnonzero(in_split), append=len(time))
    opens = np.zeros(len(time), bool)
    opens[np.unique(session, return_index=True)[1]] = True
    return SampleOrder(
        rows,
        in_split,
        lengths,
        opens,
        evaluation,
        window,
        cut_blocks(_changes(window, evaluation), data.block_samples),
    )


def _session_starts(
    codes: NDArray[np.int64], time: NDArray[np.int64], gap: timedelta | None
) -> NDArray[np.bool_]:
    starts = _changes(codes)
    if gap is not None and len(time):
        starts[1:] |= np.diff(time) > microseconds(gap)
    return starts


def _windows(
    time: NDArray[np.int64], starts: NDArray[np.bool_], span: timedelta | None
) -> NDArray[np.int32]:
    if span is None:
        return np.zeros(len(time), np.int32)
    first = time[starts][np.cumsum(starts) - 1]  # time of the session's first sample
    return (first // microseconds(span)).astype(np.int32)


def _changes(*columns: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Return where any of the columns differs from the row before; the first row does."""
    new = np.zeros(len(columns[0]), bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return new


def cut_blocks(starts_range: NDArray[np.bool_], block_samples: int) -> NDArray[np.int64]:
    """Return the block of each sample: `block_samples` each, cut anew where a range starts.

    Args:
        starts_range: (num_samples,) bool, first sample of a (split, window).
        block_samples: samples of a full block.

    Example:
        >>> cut_blocks(np.array([True, False, False, True, False]), 2).tolist()
        [0, 0, 1, 2, 2]
    """
    starts = np.flatnonzero(starts_range)
    lengths = np.diff(np.append(starts, len(starts_range)))
    within = np.arange(len(starts_range)) - np.repeat(starts, lengths)
    return np.cumsum(within % block_samples == 0) - 1
