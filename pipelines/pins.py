"""What all parts of a segment have in common, learned from the sessions of one of them.

Looking at a few whole sessions once is much cheaper than in every part, and
parts are equal ranges of a hash: what suits one suits all. The samples are
chosen by the hash of their session, so that workers, files and retries do not
change the choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipelines.cluster import cluster, hash_session_keys
from pipelines.encodings import TRIAL_ROWS, Encodings, choose
from pipelines.star import Star, to_star
from pipelines.stored import directory_of, stored_tables
from pipelines.tuples import Tuples, join
from pipelines.windows import Layouts, choose_windows
from schemas.job import DataConfig
from schemas.layout import samples_path

PINNED_SAMPLES = TRIAL_ROWS
"""Samples that are looked at, about."""


@dataclass(frozen=True, slots=True)
class Pins:
    """What is the same in all parts of a segment.

    Attributes:
        layouts: group to what its tuples share.
        encodings: directory of the segment (`samples`, `groups/user`) to how its files are written.
    """

    layouts: Layouts
    encodings: Mapping[str, Encodings]


def pin(parts: Sequence[Tuples], data: DataConfig) -> Pins:
    """Learn from the samples of one part, in any order.

    Args:
        parts: all samples of the part's sessions; at least one.
        data: the job's data section.
    """
    star = to_star(cluster(join(few_sessions(parts, data)), data), 0, data)
    layouts = choose_windows(star, data.storage)
    return Pins(layouts, {name: choose(table) for name, table in tables_of(star, layouts)})


def tables_of(star: Star, layouts: Layouts) -> Iterator[tuple[str, pa.Table]]:
    """Yield the tables of a part by directory as they are stored, samples first."""
    yield directory_of(samples_path(0)), star.samples
    for group, layout in layouts.items():
        for file in stored_tables(group, star, layout, [star.groups[group].num_rows], 0):
            yield directory_of(file.path), file.table


def few_sessions(
    parts: Sequence[Tuples], data: DataConfig, limit: int = PINNED_SAMPLES
) -> list[Tuples]:
    """Return whole sessions, the ones with the smallest hashes, of about `limit` samples or more.

    Args:
        parts: samples in any order.
        data: names the session key.
        limit: samples.
    """
    hashes = [hash_session_keys(p.column(data.session.key)) for p in parts]
    joined = np.sort(np.concatenate(hashes))
    largest = joined[min(limit, len(joined)) - 1]
    chosen = [p.take(np.flatnonzero(h <= largest)) for p, h in zip(parts, hashes, strict=True)]
    return [p for p in chosen if p.num_samples]
