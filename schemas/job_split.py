"""Which samples are held back for evaluation: from a time on, or at the end of each day."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """Which samples are held back for evaluation."""

    evaluation_from: datetime | None = None
    """Samples at or after this time (UTC) are for evaluation; none when null."""
    evaluation_last: timedelta | None = None
    """Length of the range at the end of each segment's day that is for evaluation, in the place of
    one time for all; segments are built with their days then."""

    def __post_init__(self) -> None:
        """Refuse a range that leaves nothing, or nothing to train."""
        last = self.evaluation_last
        if last is not None and not timedelta() < last < timedelta(days=1):
            raise ValueError(
                f"evaluation_last must be longer than nothing and shorter than a day, got {last}; "
                "write 2h, or null"
            )

    def on(self, day: date) -> SplitConfig:
        """Return the split of the segment of a day: from midnight (UTC) to midnight.

        Example:
            >>> SplitConfig(evaluation_last=timedelta(hours=2)).on(date(2026, 4, 9)).evaluation_from
            datetime.datetime(2026, 4, 9, 22, 0)
        """
        if self.evaluation_last is None:
            return self
        end = datetime.combine(day, time()) + timedelta(days=1)
        return replace(self, evaluation_from=end - self.evaluation_last)
