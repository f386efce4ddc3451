"""Where the pooled vector of each bag lies, in a step's memory and in its gradients.

A place holds one vector. The first num_samples * num_features of them are the
output itself, one row of features per sample; features of the same dedup group
are neighbours there. Behind them each dedup group has one place per bag and
feature, a row of features per unique tuple, where its gradients are summed:

    output          place = sample * num_features + column
    group (u, m)    place = first of the group + tuple * m + member
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupPlaces:
    """The block of one dedup group.

    Attributes:
        column: of its first feature in the output.
        num_features: features of the group, neighbours in the output.
        first: its first place.
        num_tuples: unique tuples.
    """

    column: int
    num_features: int
    first: int
    num_tuples: int


@dataclass(frozen=True, slots=True)
class Places:
    """The places of one step.

    Attributes:
        keys: features in output order.
        num_samples: rows of the output.
        groups: by dedup group that some feature has.
        group_of: by feature, its dedup group or None.
        num_places: of the output and all groups.
    """

    keys: tuple[str, ...]
    num_samples: int
    groups: Mapping[str, GroupPlaces]
    group_of: Mapping[str, str | None]
    num_places: int

    @property
    def num_outputs(self) -> int:
        """Places of the output."""
        return self.num_samples * len(self.keys)

    def of(self, feature: str) -> tuple[int, int]:
        """Return the place of a feature's first bag, and how far apart its bags' places are."""
        group = self.group_of[feature]
        if group is None:
            return self.keys.index(feature), len(self.keys)
        block = self.groups[group]
        return block.first + self.keys.index(feature) - block.column, block.num_features


def places_of(
    group_of: Mapping[str, str | None], num_tuples: Mapping[str, int], num_samples: int
) -> Places:
    """Lay out the places of a step.

    Args:
        group_of: by feature, its dedup group or None.
        num_tuples: by dedup group, its unique tuples.
        num_samples: samples of the step.

    Example:
        >>> places = places_of({"a": "g", "b": None, "c": "g"}, {"g": 2}, 3)
        >>> places.keys, places.of("b"), places.of("a"), places.of("c")
        (('b', 'a', 'c'), (0, 3), (9, 2), (10, 2))
    """
    members: dict[str | None, list[str]] = {None: []}
    for feature, group in group_of.items():
        members.setdefault(group, []).append(feature)
    keys = tuple(feature for part in members.values() for feature in part)
    groups: dict[str, GroupPlaces] = {}
    column, first = len(members.pop(None)), num_samples * len(keys)
    for group, features in members.items():
        assert group is not None, "samples have no block of their own"
        groups[group] = GroupPlaces(column, len(features), first, num_tuples[group])
        column += len(features)
        first += num_tuples[group] * len(features)
    return Places(keys, num_samples, groups, group_of, first)
