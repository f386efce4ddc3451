"""Layout of target attention: histories in a padded block, and their queries in buckets."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class QueryBuckets:
    """Queries of all samples, grouped by history and padded by bucket.

    A row is a history, its slots are queries. Rows are in buckets of equal width, the next power of
    two, so that a history with hundreds of queries does not widen all others. Fewer than half of
    the slots are empty:

        inverse_indices = [0 1 1 1 2 0]     width 1: row 2 | 4
                                            width 2: row 0 | 0 5
                                            width 4: row 1 | 1 2 3 -

    Attributes:
        rows: (num_used_rows,) int64, the rows with a query, bucket by bucket.
        row_counts: (num_buckets,), rows of each bucket.
        widths: (num_buckets,), slots of each row in a bucket: ascending powers of two.
        slots: (num_samples,) int64, slot of each sample's query among those of all buckets.
    """

    rows: torch.Tensor
    row_counts: tuple[int, ...]
    widths: tuple[int, ...]
    slots: torch.Tensor

    @property
    def slot_counts(self) -> tuple[int, ...]:
        """Slots of each bucket."""
        return tuple(n * w for n, w in zip(self.row_counts, self.widths, strict=True))


@dataclass(frozen=True, slots=True)
class HistoryLayout:
    """The newest entries of the histories of a batch in a padded block, and their queries.

    Its sizes depend on the batch: it is made of tensors in host memory, and may then be moved.

    Attributes:
        buckets: queries; the histories of the block are its rows.
        entries: (num_entries,) int64, the look-up of each entry.
        places: (num_entries,) int64, the place of each in the flattened block, newest first.
        lengths: (n,) int64, entries of each history of the block.
        width: of the block: entries of the longest history, at least 1.
        is_empty: (num_samples,) bool, samples with an empty history.
    """

    buckets: QueryBuckets
    entries: torch.Tensor
    places: torch.Tensor
    lengths: torch.Tensor
    width: int
    is_empty: torch.Tensor

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Return the block, (n, width, dim), zeros after the end of a history.

        Args:
            values: (sum_len, dim), rows of all look-ups, lists end to end, newest last.
        """
        flat = values.new_zeros(len(self.lengths) * self.width, values.shape[1])
        flat = flat.index_copy(0, self.places, values.index_select(0, self.entries))
        return flat.view(len(self.lengths), self.width, values.shape[1])


def lay_out_histories(
    offsets: torch.Tensor, inverse_indices: torch.Tensor, max_history: int
) -> HistoryLayout:
    """Lay out the histories that samples read.

    Args:
        offsets: (U + 1,) int64, of unique lists, from 0.
        inverse_indices: (num_samples,) int64 in [0, U), the list of each sample.
        max_history: maximum entries of a list.
    """
    all_lengths = offsets.diff()
    buckets = bucket_queries(inverse_indices, len(all_lengths))
    lengths = all_lengths[buckets.rows].clamp(max=max_history)
    width = max(int(lengths.max()), 1) if len(lengths) else 1
    columns = torch.arange(width)
    filled = columns < lengths[:, None]
    newest_first = (offsets[1:][buckets.rows] - 1)[:, None] - columns
    return HistoryLayout(
        buckets,
        newest_first[filled],
        filled.flatten().nonzero().squeeze(1),
        lengths,
        width,
        (all_lengths == 0)[inverse_indices],
    )


def bucket_queries(inverse_indices: torch.Tensor, num_rows: int) -> QueryBuckets:
    """Group samples by their row.

    Args:
        inverse_indices: (num_samples,) int64 in [0, num_rows), the row of each sample.
        num_rows: number of rows; one without a sample gets no slot.

    Example:
        >>> buckets = bucket_queries(torch.tensor([0, 1, 1, 1, 2, 0]), 3)
        >>> buckets.rows.tolist(), buckets.widths, buckets.slots.tolist()
        ([2, 0, 1], (1, 2, 4), [1, 3, 4, 5, 0, 2])
    """
    counts = torch.bincount(inverse_indices, minlength=num_rows)
    powers = 1 << torch.arange(63)
    exponents = torch.searchsorted(powers, counts)  # of the smallest power >= the count
    used = counts.nonzero().squeeze(1)
    rows = used[torch.argsort(exponents[used], stable=True)]
    widths = powers[exponents[rows]]
    first_slot = torch.empty_like(counts)
    first_slot[rows] = widths.cumsum(0) - widths
    bucket_widths, row_counts = torch.unique_consecutive(widths, return_counts=True)
    return QueryBuckets(
        rows,
        tuple(row_counts.tolist()),
        tuple(bucket_widths.tolist()),
        first_slot[inverse_indices] + _rank_within(inverse_indices, counts),
    )


def _rank_within(inverse_indices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return how many earlier samples have the same row, (num_samples,) int64."""
    order = torch.argsort(inverse_indices, stable=True)
    starts = counts.cumsum(0) - counts
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order)) - starts[inverse_indices[order]]
    return ranks
