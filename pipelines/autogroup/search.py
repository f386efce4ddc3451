"""Search of `groups: auto`: which features to deduplicate together.

Features of a group share one tuple: one inverse column, one file, one look-up of all of them per
distinct tuple. The search starts with every feature alone and merges the pair that saves most until
none saves any more. A feature that hardly repeats costs more in a group than with the samples, so
it stays there. Of many features, those with about as many distinct values are merged first, part by
part, and each that is left is tried with every group, so that the time is linear in their number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import inf

import numpy as np
from numpy.typing import NDArray

from presage.pipelines.autogroup.costs import Costs
from presage.schemas.config.job import MAX_GROUPS, SAMPLES
from presage.schemas.layout import inverse_column

Set = frozenset[int]
MIN_SAVING = 0.002
"""Least saving of a group, as a share of the cost of all features per sample: the precision of the
estimates."""
MAX_SETS = 64
"""Sets of which all pairs are compared."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """How often a feature, or the tuple of a group, repeats.

    Attributes:
        change_rate: share of samples whose value differs from the previous one in the session.
        dedup_factor: samples per stored value, if each block stores a value once.
    """

    change_rate: float
    dedup_factor: float


@dataclass(frozen=True, slots=True)
class ChosenGroup:
    """One group.

    `saved` is the cost of its features with the samples minus their cost as a group, per sample.
    """

    name: str
    features: tuple[str, ...]
    repetition: Repetition
    saved: float


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """Result of `groups: auto`.

    Groups are in the order of their first feature; `features` has the repetition of every
    candidate.
    """

    groups: tuple[ChosenGroup, ...]
    features: Mapping[str, Repetition]
    num_samples: int
    num_sessions: int

    def mapping(self) -> dict[str, tuple[str, ...]]:
        """Return the groups in the form of the job file."""
        return {g.name: g.features for g in self.groups}


def repetition_of(costs: Costs, members: Set, starts_session: NDArray[np.bool_]) -> Repetition:
    """Return the repetition of the tuple of some features.

    `starts_session` is (num_samples,) bool, first sample of a session; at least one sample.
    """
    follows = ~starts_session
    follows[0] = False
    changed = np.zeros(costs.num_samples, bool)
    for member in members:
        changed |= np.diff(costs.features[member].codes, prepend=-1) != 0
    rate = float(changed[follows].mean()) if follows.any() else 1.0
    factor = costs.num_samples / costs.num_unique(members)
    return Repetition(rate, factor)


def choose_groups(
    costs: Costs,
    starts_session: NDArray[np.bool_],
    together: Iterable[frozenset[str]] = (),
) -> GroupChoice:
    """Choose at most 8 groups.

    Args:
        costs: of the features of clustered samples of whole sessions, at least one sample.
        starts_session: (num_samples,) bool, first sample of a session.
        together: disjoint sets of columns that one transform reads; each is in one group or with
            the samples.
    """
    sets = search(costs)
    for columns in together:
        sets = _keep_together(costs, sets, columns)
    names: list[str] = []
    groups: list[ChosenGroup] = []
    for members in sorted(sets, key=min):
        features = tuple(costs.features[m].name for m in sorted(members))
        names.append(group_name(features[0], names, [f.name for f in costs.features]))
        groups.append(
            ChosenGroup(
                names[-1],
                features,
                repetition_of(costs, members, starts_session),
                _saved(costs, members) / costs.num_samples,
            )
        )
    features = {
        f.name: repetition_of(costs, frozenset([i]), starts_session)
        for i, f in enumerate(costs.features)
    }
    return GroupChoice(tuple(groups), features, costs.num_samples, int(starts_session.sum()))


def group_name(feature: str, used_names: Sequence[str], columns: Sequence[str]) -> str:
    """Return a unique name for a group, after its first feature, that is valid as a directory.

    Example:
        >>> group_name("user id", [], []), group_name("a", ["a"], []), group_name("samples", [], [])
        ('user_id', 'a_2', 'samples_2')
    """
    base = re.sub(r"[^A-Za-z0-9_-]", "_", feature).lstrip("-") or "group"
    number, name = 1, base
    while name in (SAMPLES, *used_names) or inverse_column(name) in columns:
        number += 1
        name = f"{base}_{number}"
    return name


def search(costs: Costs) -> list[Set]:
    """Return the cheapest groups that greedy merges find."""
    useful = [i for i in range(len(costs.features)) if _may_save(costs, i)]
    min_saving = MIN_SAVING * sum(costs.in_samples(m) for m in range(len(costs.features)))
    sets = [frozenset([i]) for i in useful]
    if len(sets) > MAX_SETS:
        sets.sort(key=costs.num_unique)
    while len(sets) > MAX_SETS:
        parts = (sets[start : start + MAX_SETS] for start in range(0, len(sets), MAX_SETS))
        sets = [s for part in parts for s in _merged(costs, part) if _saved(costs, s) > 0]
    sets = _merged(costs, sets)
    if len(useful) > MAX_SETS and sets:
        for member in sorted(set(useful).difference(*sets)):
            alone = frozenset([member])
            nearest = max(sets, key=partial(_gain, costs, alone))
            if _gain(costs, alone, nearest) > 0:
                sets = [s | alone if s == nearest else s for s in sets]
    return [s for s in sets if _saved(costs, s) > min_saving]


def _saved(costs: Costs, members: Set) -> float:
    return sum(costs.in_samples(m) for m in members) - costs.as_group(members)


def _may_save(costs: Costs, member: int) -> bool:
    """Tell whether a feature repeats or shifts; a group has at least as many tuples as a member."""
    alone = frozenset([member])
    return costs.num_unique(alone) < costs.num_samples or costs.as_group(alone) < inf


def _merged(costs: Costs, sets: list[Set]) -> list[Set]:
    """Merge the pair that saves most, as long as one saves or there are too many groups."""
    gains = {frozenset(pair): _gain(costs, *pair) for pair in combinations(sets, 2)}
    while gains:
        pair = max(gains, key=lambda p: (gains[p], sorted(map(sorted, p))))
        if gains[pair] <= 0 and sum(_saved(costs, s) > 0 for s in sets) <= MAX_GROUPS:
            break
        left, right = sorted(pair, key=sorted)
        merged = left | right
        sets = [s for s in sets if s not in pair]
        gains = {p: g for p, g in gains.items() if not p & pair}
        gains |= {frozenset([merged, s]): _gain(costs, merged, s) for s in sets}
        sets.append(merged)
    return sets


def _gain(costs: Costs, left: Set, right: Set) -> float:
    return costs.best(left) + costs.best(right) - costs.best(left | right)


def _total(costs: Costs, sets: Sequence[Set]) -> float:
    grouped = frozenset[int]().union(*sets)
    ungrouped = sum(costs.in_samples(m) for m in range(len(costs.features)) if m not in grouped)
    return ungrouped + sum(costs.as_group(s) for s in sets)


def _keep_together(costs: Costs, sets: list[Set], names: frozenset[str]) -> list[Set]:
    """Return the cheapest groups with some columns all in one group or all with the samples."""
    members = frozenset(i for i, f in enumerate(costs.features) if f.name in names)
    rest = [s - members for s in sets if s - members]
    options = [rest]
    if len(members) == len(names):  # else one column is no candidate and stays with the samples
        options += [[s | members if s == target else s for s in rest] for target in rest]
        options += [[*rest, members]] if len(rest) < MAX_GROUPS else []
        options += [sets] if any(members <= s for s in sets) else []
    return min(options, key=lambda o: _total(costs, o))
