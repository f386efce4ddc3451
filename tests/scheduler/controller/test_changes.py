"""What differs between two states is applied as JSON, whatever differs."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.controller.changes import decode, diff, encode, patch
from scheduler.controller.state import JobState, State
from schemas.config.job import parse_job
from tests.scheduler.controller.bench import Bench
from tests.scheduler.controller.world import BUDGET, submitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A value inside another one."""

    size: int
    pairs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Every type that a state has."""

    name: str = ""
    number: float = -math.inf
    maybe: float | None = None
    kind: Literal["a", "b"] = "a"
    leaf: Leaf | None = None
    items: tuple[int, ...] = ()
    leaves: tuple[Leaf, ...] = ()
    fixed: tuple[int, str] = (0, "")
    members: frozenset[int] = frozenset()
    by_name: Mapping[str, Leaf] = field(default_factory=dict[str, Leaf])
    by_pair: Mapping[tuple[int, float], int] = field(default_factory=dict[tuple[int, float], int])


INTS = st.integers(0, 3)
FLOATS = st.floats(0.0, 4.0) | st.sampled_from([math.inf, -math.inf])
LEAVES = st.builds(
    Leaf, size=INTS, pairs=st.lists(st.tuples(INTS, st.floats(0.0, 1.0)), max_size=3).map(tuple)
)
TREES = st.builds(
    Tree,
    name=st.text(max_size=2),
    number=FLOATS,
    maybe=st.none() | FLOATS,
    kind=st.sampled_from(["a", "b"]),
    leaf=st.none() | LEAVES,
    items=st.lists(INTS, max_size=8).map(tuple),
    leaves=st.lists(LEAVES, max_size=3).map(tuple),
    fixed=st.tuples(INTS, st.text(max_size=1)),
    members=st.frozensets(INTS),
    by_name=st.dictionaries(st.sampled_from("abcd"), LEAVES),
    by_pair=st.dictionaries(st.tuples(INTS, st.sampled_from([0.5, 1.5])), INTS),
)


def through_json(value: Any) -> Any:
    """Return what is read of what is written."""
    return json.loads(json.dumps(value, allow_nan=False))


def check_patch(old: Tree, new: Tree) -> dict[str, Any]:
    """Check that the changes lead from one value to the other, and return them."""
    change = through_json(diff(Tree, old, new))
    assert patch(Tree, old, change) == new
    assert (change == {}) == (old == new)
    return change


@pytest.mark.slow
@given(old=TREES, new=TREES)
@settings(max_examples=100)
def test_changes_between_any_two_values_lead_from_one_to_the_other(old: Tree, new: Tree) -> None:
    check_patch(old, new)
    check_patch(old, old)
    assert decode(Tree, through_json(encode(Tree, new))) == new


LONG = Tree(items=tuple(range(100)), by_name={name: Leaf(size=1) for name in "abcdefgh"})
LAST = Leaf(size=9)
SHORT: dict[str, tuple[Tree, dict[str, Any]]] = {
    "more items": (replace(LONG, items=(*LONG.items, 7)), {"items": {"add": [7]}}),
    "the latest items": (
        replace(LONG, items=(*LONG.items, 7, 8)[-100:]),
        {"items": {"from": 2, "add": [7, 8]}},
    ),
    "every second item": (
        replace(LONG, items=(*LONG.items[::2], 7)),
        {"items": {"step": 2, "add": [7]}},
    ),
    "a field of a value": (
        replace(LONG, by_name={**LONG.by_name, "c": LAST}),
        {"by_name": {"set": {"c": {"size": 9}}}},
    ),
    "no value": (
        replace(LONG, by_name={n: v for n, v in LONG.by_name.items() if n != "c"}),
        {"by_name": {"remove": ["c"], "set": {}}},
    ),
}


@pytest.mark.parametrize("name", SHORT)
def test_small_changes_of_large_values_are_small(name: str) -> None:
    new, change = SHORT[name]
    assert check_patch(LONG, new) == change


def test_job_is_that_of_its_file_and_of_the_sizes_of_the_machine() -> None:
    state = Bench(BUDGET, submitted("first", 3, "  priority: 2")).state
    assert decode(State, through_json(encode(State, state))) == state
    job: JobState = state.jobs["first"]
    document = job.document.replace("priority: 2", "priority: 5")
    parsed = replace(job.snapshot.job, schedule=parse_job(document, "first").schedule)
    other = replace(job, document=document, snapshot=replace(job.snapshot, job=parsed))
    change = through_json(diff(State, state, state.with_job(other)))
    assert change["jobs"]["set"]["first"].keys() == {"document"}
    after = patch(State, state, change).jobs["first"]
    assert after.snapshot.job.schedule.priority == 5
    assert after.snapshot.facts == job.snapshot.facts


@pytest.mark.parametrize("body", [{"size": 1, "other": 2}, {}, {"size": 1, "pairs": 3}])
def test_json_of_another_type_is_refused(body: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        decode(Leaf, body)
