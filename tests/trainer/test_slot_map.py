"""Who serves what, concluded from what stores say of themselves."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import SchemaError
from tests.trainer.stores import ACCESS
from trainer.stores.remote.members import StoreMembers, next_fill
from trainer.stores.remote.ownership import (
    Ownership,
    Ranges,
    SlotMap,
    StoreDescription,
    covers_all_slots,
    empty_ownership,
    format_ranges,
    initial_ownership,
    mask_of,
    ownership_from_json,
    parse_ranges,
    ranges_of,
    resolve_slot_map,
)

ALL, LOW, HIGH = ((0, 4096),), ((0, 2048),), ((2048, 4096),)
SESSION = "process"


def store(
    ranges: Ranges, version: int = 1, tag: int = 7, *, home: Ranges | None = None
) -> StoreDescription:
    ownership = empty_ownership().with_slots(mask_of(ranges), version, tag)
    return StoreDescription(
        incarnation="process",
        session=SESSION,
        owner="run",
        sequence=10,
        version=version,
        ownership=ownership,
        maybe_owned_slots=mask_of([]),
        keeps_copy=False,
        home=mask_of(ranges if home is None else home),
        addresses=(),
        message_bytes=4096,
    )


def mapped(**stores: StoreDescription) -> SlotMap:
    found = resolve_slot_map(None, stores, SESSION, {}).slot_map
    assert found is not None
    return found


def test_newest_claim_is_in_force_whoever_still_says_that_it_serves() -> None:
    found = mapped(a=store(ALL, 1), b=store(LOW, 2))
    assert found.versions == (1, 2)
    assert found.addresses == ("a", "b")
    assert found.readers.tolist() == [1] * 2048 + [0] * 2048
    assert (found.num_copies == 1).all()


def test_copies_share_what_is_read() -> None:
    found = mapped(a=store(ALL), b=store(ALL))
    assert (found.num_copies == 2).all()
    assert np.bincount(found.readers).tolist() == [2048, 2048]


TWO = {"a": store(LOW), "b": store(HIGH)}
COPIED = {"a": store(ALL), "b": store(ALL)}
WITHOUT = {
    "a store that is gone is waited for": (TWO, {"b": None}, ("b",), ()),
    "one that began empty has lost its rows": (
        TWO,
        {"b": replace(store(()), session="")},
        (),
        HIGH,
    ),
    "one that acknowledged more than it has lost some": (
        TWO,
        {"b": replace(store(HIGH), sequence=9)},
        (),
        HIGH,
    ),
    "one of an older version was overtaken": (TWO, {"b": store(HIGH, 0)}, (), HIGH),
    "one that knows of another claim in the same version": (
        TWO,
        {"b": store(HIGH, 1, 8)},
        (),
        HIGH,
    ),
    "a move in doubt is waited for": (
        TWO,
        {"b": replace(store(()), maybe_owned_slots=mask_of(HIGH))},
        ("b",),
        (),
    ),
    "a copy that was made is taken, and its giver does not know yet": (
        {"a": store(ALL), "b": store((), home=ALL)},
        {"a": replace(store(()), maybe_owned_slots=mask_of(ALL), keeps_copy=True), "b": store(ALL)},
        ("a",),
        (),
    ),
    "both copies are gone": (COPIED, {"a": None, "b": None}, ("a", "b"), ()),
    "both copies have lost their rows": (
        COPIED,
        {"a": replace(store(()), session=""), "b": replace(store(ALL), sequence=0)},
        (),
        ALL,
    ),
    "copies that went on without each other": (
        COPIED,
        {"a": store(ALL, 2, 8), "b": store(ALL, 2, 9)},
        (),
        ALL,
    ),
}


@pytest.mark.parametrize("case", WITHOUT)
def test_map_is_not_known_when(case: str) -> None:
    before, change, waiting, lost = WITHOUT[case]
    acknowledged = dict.fromkeys(before, 10)
    result = resolve_slot_map(mapped(**before), {**before, **change}, SESSION, acknowledged)
    assert result.slot_map is None
    assert (result.waiting, result.lost) == (waiting, lost)


@pytest.mark.parametrize("other", [None, replace(store(()), session=""), store(ALL, 0)])
def test_copy_that_is_left_is_fenced_before_it_goes_on_alone(
    other: StoreDescription | None,
) -> None:
    known = mapped(**COPIED)
    result = resolve_slot_map(known, {"a": store(ALL), "b": other}, SESSION, {})
    assert result.slot_map is None
    assert result.fence == {"a": ALL}
    alone = resolve_slot_map(known, {"a": store(ALL, 2, 9), "b": other}, SESSION, {}).slot_map
    assert alone is not None
    assert (alone.num_copies == 1).all()
    # the other one comes back as it was: it is not believed
    later = resolve_slot_map(alone, {"a": store(ALL, 2, 9), "b": store(ALL)}, SESSION, {}).slot_map
    assert later is not None
    assert (later.readers == later.addresses.index("a")).all()
    filled = resolve_slot_map(
        alone, {"a": store(ALL, 2, 9), "b": store(ALL, 2, 9)}, SESSION, {}
    ).slot_map
    assert filled is not None
    assert (filled.num_copies == 2).all()


def test_copy_is_made_where_a_store_was_started_with_the_slots() -> None:
    alone = {"a": store(ALL, 2), "b": store((), 0, home=ALL), "c": store((), 0, home=())}
    chosen = next_fill(mapped(**alone), alone, 2)
    assert chosen is not None
    giver, taker, slots = chosen
    assert (giver, taker, ranges_of(slots)) == ("a", "b", ALL)
    assert next_fill(mapped(**COPIED), COPIED, 2) is None
    assert next_fill(mapped(**alone), {k: alone[k] for k in "ac"}, 2) is None


def test_new_session_takes_slots_as_they_are_or_as_stores_were_started() -> None:
    moved = {"a": store(LOW, 3, home=ALL), "b": store(HIGH, 3, home=())}
    version, ownership = initial_ownership(moved, 1, "other")
    assert version == 4
    assert {a: ranges_of(c.served) for a, c in ownership.items()} == {"a": LOW, "b": HIGH}
    torn = {"a": store(LOW, 3, home=ALL), "b": store((), 0, home=())}
    version, ownership = initial_ownership(torn, 1, "other")
    assert {a: ranges_of(c.served) for a, c in ownership.items()} == {"a": ALL, "b": ()}
    assert len({int(t) for c in ownership.values() for t in c.tags[c.served]}) == 1
    # the store that was started with the rest has left, and that which had it has lost it
    left = {"a": store(((0, 3000),), 3, home=LOW), "c": store((), 0, home=())}
    _, ownership = initial_ownership(left, 1, "other", elastic=True)
    assert {a: ranges_of(c.served) for a, c in ownership.items()} == {
        "a": ((0, 3000),),
        "c": ((3000, 4096),),
    }
    forgotten = "stores must serve each of 4096 slots once, got slot 2048 served 0 times by a, c; "
    with pytest.raises(SchemaError, match=f"^{re.escape(forgotten)}"):
        initial_ownership(left, 1, "other")
    assert not covers_all_slots(left, 1)
    assert covers_all_slots(moved, 1)
    message = (
        "stores must serve each of 4096 slots twice, got slot 0 served 1 times by a, b; "
        "start them with other --slots"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        initial_ownership(torn, 2, "other")


RANGES = st.lists(st.tuples(st.integers(0, 4095), st.integers(1, 4096)), max_size=5).map(
    lambda pairs: [(min(p), max(p) + (p[0] == p[1])) for p in pairs]
)


@settings(max_examples=50)
@given(RANGES, RANGES)
def test_claims_and_ranges_are_read_as_they_were_written(one: Ranges, other: Ranges) -> None:
    mask = mask_of(one)
    assert mask_of(ranges_of(mask)).tolist() == mask.tolist()
    assert parse_ranges(format_ranges(ranges_of(mask))) == ranges_of(mask)
    ownership = empty_ownership().with_slots(mask, 1, 5).with_slots(mask_of(other), 2, 6)
    read: Ownership = ownership_from_json(ownership.to_json())
    assert read.versions.tolist() == ownership.versions.tolist()
    assert read.tags.tolist() == ownership.tags.tolist()
    assert (ownership.without_slots(mask).served == (ownership.served & ~mask)).all()


@pytest.mark.parametrize("text", ["", "1", "3:2", "0:4097", "a:b", "1:2:3"])
def test_slots_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^slots must "):
        parse_ranges(text)


def test_what_stores_said_at_different_moments_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    giver, taker = store(ALL, 2, 7), store((), 0, home=ALL)
    filled = {"a": replace(giver, version=3), "b": replace(store(ALL, 2, 7), version=3)}
    answers = iter([{"a": filled["a"], "b": taker}, filled, filled, filled])
    members = StoreMembers(("a", "b"), ACCESS, SESSION, replicas=2)
    monkeypatch.setattr(members, "_describe", lambda wanted: next(answers))
    members._resolve(None)  # pyright: ignore[reportPrivateUsage]
    # a map with the giver alone would bring writes that the taker never hears of
    assert (members.slot_map.num_copies == 2).all()
    members.close()
