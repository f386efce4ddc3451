"""The `data.storage` section of the job file: what is kept once beyond single blocks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from schemas.errors import nearest

Choice = Literal["auto", "none"] | tuple[str, ...]
"""By measured bytes, never, or these groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """Which groups are stored in parts that their tuples share."""

    windows: Choice = "auto"
    """Groups whose lists are windows over shared buffers: `auto` (each list by measured bytes),
    `none`, or a list of groups."""
    shared_tuples: Choice = "auto"
    """Groups whose tuples are kept once per row group instead of once per block: `auto`, `none`,
    or a list of groups."""

    def check_groups(self, groups: Collection[str]) -> None:
        """Refuse names that are no groups.

        Raises:
            ValueError: naming the key and the nearest group.
        """
        for key in ("windows", "shared_tuples"):
            choice = getattr(self, key)
            for name in () if isinstance(choice, str) else choice:
                if name not in groups:
                    raise ValueError(
                        f"storage.{key} must name groups, got {name!r}; {nearest(name, groups)}"
                    )


def named(choice: Choice, group: str) -> bool | None:
    """Return whether a group is to have it, None when that is to be measured.

    Example:
        >>> named("auto", "user"), named("none", "user"), named(("user",), "user")
        (None, False, True)
    """
    if isinstance(choice, str):
        return None if choice == "auto" else False
    return group in choice
