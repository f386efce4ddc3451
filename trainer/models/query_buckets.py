"""Where the queries of a batch lie when those that share a history are batched against it.

Samples with one history (RecD: the items shown to one session) each bring a
query. A row of the table below is a history, its places are queries; rows lie
in buckets of the same width, the next power of two, so that one history with
hundreds of queries does not widen all others:

    inverse_indices = [0 1 1 1 2 0]     width 1: row 2 | 4
                                        width 2: row 0 | 0 5
                                        width 4: row 1 | 1 2 3 -

Fewer than half of the places are empty, whatever the counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class QueryBuckets:
    """Queries of all samples, grouped by row and padded by bucket.

    Attributes:
        rows: (num_used_rows,) int64, the rows that have a query, bucket by bucket.
        row_counts: (num_buckets,), rows of each bucket.
        widths: (num_buckets,), places of each row in a bucket: ascending powers of two.
        places: (num_samples,) int64, where each sample's query lies among the places of all
            buckets, row after row.
    """

    rows: torch.Tensor
    row_counts: tuple[int, ...]
    widths: tuple[int, ...]
    places: torch.Tensor

    @property
    def place_counts(self) -> tuple[int, ...]:
        """Places of each bucket."""
        return tuple(n * w for n, w in zip(self.row_counts, self.widths, strict=True))


def bucket_queries(inverse_indices: torch.Tensor, num_rows: int) -> QueryBuckets:
    """Group samples by their row.

    Args:
        inverse_indices: (num_samples,) int64 in [0, num_rows), the row of each sample.
        num_rows: number of rows; one without a sample gets no place.

    Example:
        >>> buckets = bucket_queries(torch.tensor([0, 1, 1, 1, 2, 0]), 3)
        >>> buckets.rows.tolist(), buckets.widths, buckets.places.tolist()
        ([2, 0, 1], (1, 2, 4), [1, 3, 4, 5, 0, 2])
    """
    counts = torch.bincount(inverse_indices, minlength=num_rows)
    powers = 1 << torch.arange(63, device=counts.device)
    exponents = torch.searchsorted(powers, counts)  # of the smallest power that is not below
    used = counts.nonzero().squeeze(1)
    rows = used[torch.argsort(exponents[used], stable=True)]
    widths = powers[exponents[rows]]
    first_place = torch.empty_like(counts)
    first_place[rows] = widths.cumsum(0) - widths
    bucket_widths, row_counts = torch.unique_consecutive(widths, return_counts=True)
    return QueryBuckets(
        rows,
        tuple(row_counts.tolist()),
        tuple(bucket_widths.tolist()),
        first_place[inverse_indices] + _rank_within(inverse_indices, counts),
    )


def _rank_within(inverse_indices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return how many earlier samples have the same row, (num_samples,) int64."""
    order = torch.argsort(inverse_indices, stable=True)
    starts = counts.cumsum(0) - counts
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device) - starts[inverse_indices[order]]
    return ranks
