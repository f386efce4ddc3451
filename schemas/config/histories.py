"""Section `data.histories` of the job file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from presage.schemas.errors import check_positive, suggest_name
from presage.schemas.paths import check_names


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig:
    """Events of a session key, such as a user, stored once; a sample sees those before it.

    Example:
        data:
          tables:
            items: {features: [item], num_rows: 1000000}
          histories:
            plays:
              source: log
              columns: {item: item_id, seconds: playtime}
              tables: {item: items}
              available: time + to_seconds(playtime)
              where: playtime > 0
              before: order
              order: play_id
              tick: 5s
    """

    columns: Mapping[str, str]
    """Column of an event to a scalar SQL expression over the columns of the source."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Column of ids to the table of `data.tables` whose rows they look up."""
    source: str | None = None
    """Source of the events, with the column `session.key`; that of the samples when null."""
    where: str | None = None
    """SQL condition on the rows that are events; all are when null."""
    available: str | None = None
    """When an event may be known, a timestamp: a scalar SQL expression over the source;
    `session.time` when null."""
    before: Literal["time", "order"] = "time"
    """Which events a sample sees. `time`: those that are available before its time; `order`: also
    those that are available at its time, if their `order` is smaller than that of the sample."""
    order: str | None = None
    """Column of whole numbers that orders events of equal time, and with `before: order` samples
    among them; events are in the order of their rows when null."""
    tick: timedelta = timedelta(seconds=1)
    """Resolution of the stored times. Which events a sample sees depends on exact times."""

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError("columns is empty; name a column, such as {item: item_id}")
        check_names("columns", self.columns)
        for name in self.columns:
            if name.startswith("_"):
                raise ValueError(f"columns must not begin with '_', got {name!r}; rename it")
        check_positive(self, "tick")
        if self.before == "order" and self.order is None:
            raise ValueError("before is order without order; name a column that orders events")


def feature_of_history(history: str, column: str) -> str:
    """Return the name of the feature that a column of a history is."""
    return f"{history}.{column}"


def check_histories(
    histories: Mapping[str, HistoryConfig],
    sources: Mapping[str, object],
    tables: Mapping[str, object],
) -> None:
    """Raise ValueError if a history names an undeclared source or table."""
    check_names("histories", histories)
    for name, history in histories.items():
        if history.source is not None and history.source not in sources:
            raise ValueError(
                f"histories.{name}.source must be a source, got {history.source!r}; "
                f"{suggest_name(history.source, sources)}"
            )
        for column, table in history.tables.items():
            if column not in history.columns:
                raise ValueError(
                    f"histories.{name}.tables must name its columns, got {column!r}; "
                    f"{suggest_name(column, history.columns)}"
                )
            if table not in tables:
                raise ValueError(
                    f"histories.{name}.tables.{column} must be a table, got {table!r}; "
                    f"{suggest_name(table, tables)}"
                )
