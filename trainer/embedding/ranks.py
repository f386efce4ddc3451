"""Gradients of rows over the ranks of torch.distributed, where every rank has all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowGradients:
    """Gradients of rows of one table.

    Attributes:
        rows: (n,) distinct.
        sums: (n, dim), gradient of each.
    """

    rows: NDArray[np.int64]
    sums: torch.Tensor


def has_ranks() -> bool:
    """Return whether torch.distributed is initialized, also with one rank."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Return the number of ranks, 1 where torch.distributed is not initialized."""
    return dist.get_world_size() if has_ranks() else 1


def gather(value: T) -> list[T]:
    """Return the value of each rank; all ranks call it."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def sum_gradients(parts: Sequence[RowGradients]) -> RowGradients:
    """Return the sum of gradients of one table, rows ascending; parts are added in order."""
    rows = [torch.from_numpy(part.rows) for part in parts]
    union = torch.cat(rows).unique()
    total = parts[0].sums.new_zeros(len(union), parts[0].sums.shape[1])
    for own, part in zip(rows, parts, strict=True):
        total[torch.searchsorted(union, own)] += part.sums
    return RowGradients(union.numpy(), total)


def average_over_ranks(
    gradients: Mapping[str, RowGradients], group: dist.ProcessGroup | None
) -> dict[str, RowGradients]:
    """Return the mean over all ranks, rows ascending, bit for bit equal in every rank.

    All ranks call it; a rank may have no rows of a table.

    Args:
        gradients: by table, tables in the same order in every rank.
        group: of CPU tensors.
    """
    counts = torch.tensor([len(each.rows) for each in gradients.values()])
    counts_of_ranks = _all_gather(counts, [len(counts)] * world_size(), group)
    lengths = [int(c.sum()) for c in counts_of_ranks]
    rows = torch.cat([torch.from_numpy(each.rows) for each in gradients.values()])
    rows_of_ranks = _all_gather(rows, lengths, group)
    sums_of_ranks = _all_gather(torch.cat([g.sums for g in gradients.values()]), lengths, group)
    parts = [
        zip(rows.split(n.tolist()), sums.split(n.tolist()), strict=True)
        for n, rows, sums in zip(counts_of_ranks, rows_of_ranks, sums_of_ranks, strict=True)
    ]
    means: dict[str, RowGradients] = {}
    for table, of_ranks in zip(gradients, zip(*parts, strict=True), strict=True):
        total = sum_gradients([RowGradients(rows.numpy(), sums) for rows, sums in of_ranks])
        means[table] = RowGradients(total.rows, total.sums / world_size())
    return means


def _all_gather(
    tensor: torch.Tensor, lengths: list[int], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Return the tensors of all ranks, which have these lengths."""
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=group)
    return [each[:length] for each, length in zip(gathered, lengths, strict=True)]
