"""Values of each type that a state has are the same after they were JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.scheduler.controller.log import decode, encode
from presage.scheduler.controller.state import State
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


@given(value=TREES)
def test_value_is_the_same_after_it_was_json(value: Tree) -> None:
    assert decode(Tree, through_json(encode(Tree, value))) == value


def test_fields_with_their_default_are_left_out() -> None:
    assert encode(Tree, Tree(items=(1,))) == {"items": [1]}


def test_job_is_that_of_its_file_and_of_the_sizes_of_the_machine() -> None:
    state = Bench(BUDGET, submitted("first", 3, "  priority: 2")).state
    body = through_json(encode(State, state))
    assert decode(State, body) == state
    job = body["jobs"]["first"]
    job["document"] = job["document"].replace("priority: 2", "priority: 5")
    after = decode(State, body).jobs["first"]
    assert after.snapshot.job.schedule.priority == 5
    assert after.snapshot.facts == state.jobs["first"].snapshot.facts


@pytest.mark.parametrize("body", [{"size": 1, "other": 2}, {}, {"size": 1, "pairs": 3}])
def test_json_of_another_type_is_refused(body: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        decode(Leaf, body)
