"""Ask the stores of all tables at once, together where they are behind one connection."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from trainer.stores.store import Grouped, Records, Store, StoreGroup, WriteBack


def fetch_rows(
    stores: Mapping[str, Store], train_step: int, rows: Mapping[str, NDArray[np.int64]]
) -> dict[str, Records]:
    """Return copies of the rows that a step uses.

    Args:
        stores: by table.
        train_step: the step that uses them.
        rows: table to distinct rows.
    """
    group = group_of(stores)
    if group is not None:
        return group.fetch(train_step, rows)
    return {table: stores[table].fetch(wanted) for table, wanted in rows.items()}


def write_rows(
    stores: Mapping[str, Store], train_step: int, leaving: Mapping[str, WriteBack]
) -> None:
    """Keep rows as they are after a step.

    Args:
        stores: by table.
        train_step: the step that made these values.
        leaving: table to rows.
    """
    group = group_of(stores)
    if group is not None:
        group.write(train_step, leaving)
        return
    for table, back in leaving.items():
        stores[table].write(back.rows, back.records)


def checkpointed(stores: Mapping[str, Store], train_step: int) -> None:
    """Tell the stores that a checkpoint before `train_step` is complete."""
    group = group_of(stores)
    if group is not None:
        group.checkpointed(train_step)


def close_stores(stores: Mapping[str, Store]) -> None:
    """Give back what the stores hold open; rows that are nowhere else may be lost."""
    group = group_of(stores)
    if group is not None:
        group.close()


def group_of(stores: Mapping[str, Store]) -> StoreGroup | None:
    """Return the group that all stores belong to, None where each stands alone."""
    first = next(iter(stores.values()), None)
    return first.group if isinstance(first, Grouped) else None
