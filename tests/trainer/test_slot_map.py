"""Which slot map follows, whatever stores say of themselves."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import SchemaError
from trainer.stores.remote.ownership import (
    Descriptions,
    Ranges,
    ShardControl,
    SlotMap,
    SlotMigration,
    StoreDescription,
    control_from_json,
    covers_all_slots,
    format_ranges,
    initial_slot_map,
    lost_slots,
    mask_of,
    newest_slot_map,
    next_fill,
    next_slot_map,
    parse_ranges,
    ranges_of,
    slot_map_from_json,
    slot_map_of,
)

ALL, LOW, HIGH = ((0, 4096),), ((0, 2048),), ((2048, 4096),)
SESSION = "process"
ACKNOWLEDGED = {"of a": 10, "of b": 10}


def map_of(epoch: int = 1, session: str = SESSION, **slots: Ranges) -> SlotMap:
    owned = {address: mask_of(ranges) for address, ranges in slots.items()}
    incarnations = {address: f"of {address}" for address in owned}
    return slot_map_of(session, epoch, owned, incarnations, incarnations)


def store(address: str, slot_map: SlotMap | None, home: Ranges = ALL) -> StoreDescription:
    return StoreDescription(
        incarnation=f"of {address}",
        slot_map=slot_map,
        address=address,
        sequence=10,
        migrating=False,
        home=home,
        message_bytes=4096,
    )


def slots_of(slot_map: SlotMap | None) -> dict[str, Ranges] | None:
    if slot_map is None:
        return None
    return {address: ranges_of(slot_map.slots_of(address)) for address in slot_map.addresses}


def described(slot_map: SlotMap, **changes: Mapping[str, object] | None) -> Descriptions:
    """Return what the stores of a map say; a change of None is a store that is gone."""
    found: dict[str, StoreDescription | None] = {}
    for address in {*slot_map.addresses, *changes}:
        change = changes.get(address, {})
        found[address] = None if change is None else replace(store(address, slot_map), **change)
    return found


def test_copies_share_what_is_read() -> None:
    found = map_of(a=ALL, b=ALL)
    assert (found.num_copies == 2).all()
    assert np.bincount(found.readers).tolist() == [2048, 2048]
    assert (map_of(a=LOW, b=HIGH).num_copies == 1).all()


TWO, COPIED = map_of(a=LOW, b=HIGH), map_of(a=ALL, b=ALL)
MOVE = SlotMigration(id="move", target="c", slots=LOW, keep=False)
FILL, TO_B = replace(MOVE, keep=True), replace(MOVE, target="b")
MOVED, FILLED = ({"incoming": migration, "received": True} for migration in (MOVE, FILL))
EMPTY = {"slot_map": None, "sequence": 0}
RESTARTED = {"incarnation": "later"}
BEHIND = {"sequence": 9}
OLDER = {"slot_map": map_of(0, "older", a=LOW, b=HIGH)}
Change = Mapping[str, object]
NEXT: dict[str, tuple[SlotMap, dict[str, Change | None], dict[str, Ranges] | None]] = {
    "nothing has happened": (TWO, {}, None),
    "a store without copies is gone: it is waited for": (TWO, {"b": None}, None),
    "one was restarted: it has its log": (TWO, {"b": RESTARTED}, None),
    "a copy is gone": (COPIED, {"b": None}, {"a": ALL}),
    "a copy began empty": (COPIED, {"b": EMPTY}, {"a": ALL}),
    "a copy has lost acknowledged messages": (COPIED, {"b": BEHIND}, {"a": ALL}),
    "a copy is of an older session": (COPIED, {"b": OLDER}, {"a": ALL}),
    "a copy was restarted, and may lack writes": (COPIED, {"b": RESTARTED}, {"a": ALL}),
    "both were": (COPIED, {"a": RESTARTED, "b": RESTARTED}, None),
    "one was restarted, the other is gone": (COPIED, {"a": RESTARTED, "b": None}, {"a": ALL}),
    "both are gone": (COPIED, {"a": None, "b": None}, None),
    "both have lost their rows": (COPIED, {"a": EMPTY, "b": BEHIND}, None),
    "the target has the rows": (
        TWO,
        {"a": {"outgoing": MOVE}, "c": MOVED},
        {"b": HIGH, "c": LOW},
    ),
    "the source has died since": (
        TWO,
        {"a": {"outgoing": MOVE, **RESTARTED}, "c": MOVED},
        {"b": HIGH, "c": LOW},
    ),
    "the target has other slots, and was restarted": (
        TWO,
        {"a": {"outgoing": TO_B}, "b": {"incoming": TO_B, "received": True, **RESTARTED}},
        {"b": ALL},
    ),
    "the target is gone": (TWO, {"a": {"outgoing": MOVE}, "c": None}, {"a": LOW, "b": HIGH}),
    "the target has lost the rows": (
        TWO,
        {"a": {"outgoing": MOVE}, "c": EMPTY},
        {"a": LOW, "b": HIGH},
    ),
    "the target has those of another migration": (
        TWO,
        {"a": {"outgoing": MOVE}, "c": {"incoming": replace(MOVE, id="other"), "received": True}},
        {"a": LOW, "b": HIGH},
    ),
    "a copy was made": (
        TWO,
        {"a": {"outgoing": FILL}, "c": FILLED},
        {"a": LOW, "b": HIGH, "c": LOW},
    ),
    "one of two copies moves": (
        COPIED,
        {"a": {"outgoing": MOVE}, "c": MOVED},
        {"a": HIGH, "b": ALL, "c": LOW},
    ),
    "one of two copies moves while the other dies": (
        COPIED,
        {"a": {"outgoing": MOVE}, "c": MOVED, "b": None},
        {"a": HIGH, "c": LOW},
    ),
    "a migration that an earlier map has decided": (
        replace(TWO, epoch=2),
        {"a": {"outgoing": MOVE, "slot_map": TWO}, "c": MOVED},
        None,
    ),
}


@pytest.mark.parametrize("case", NEXT)
def test_next_slot_map_when(case: str) -> None:
    current, changes, wanted = NEXT[case]
    found = next_slot_map(current, described(current, **changes), ACKNOWLEDGED)
    assert slots_of(found) == wanted
    if found is not None:
        assert (found.session, found.epoch) == (SESSION, current.epoch + 1)
        assert found.incarnations == tuple(f"of {address}" for address in found.addresses)


LOST: dict[str, tuple[SlotMap, dict[str, Change | None], Ranges]] = {
    "a store is gone": (TWO, {"b": None}, ()),
    "one began empty": (TWO, {"b": EMPTY}, HIGH),
    "one acknowledged more than it has": (TWO, {"b": BEHIND}, HIGH),
    "one is of an older session": (TWO, {"b": OLDER}, HIGH),
    "one was restarted": (TWO, {"b": RESTARTED}, ()),
    "a copy is left": (COPIED, {"b": EMPTY}, ()),
    "the other copy may come back": (COPIED, {"a": None, "b": EMPTY}, ()),
    "both copies began empty": (COPIED, {"a": EMPTY, "b": BEHIND}, ALL),
}


@pytest.mark.parametrize("case", LOST)
def test_slots_are_lost_when(case: str) -> None:
    current, changes, wanted = LOST[case]
    assert ranges_of(lost_slots(current, described(current, **changes), ACKNOWLEDGED)) == wanted


def test_copy_that_was_dropped_is_not_believed_until_it_is_filled() -> None:
    alone = next_slot_map(COPIED, described(COPIED, b=None), {})
    assert alone is not None
    back = {"a": store("a", alone), "b": store("b", COPIED)}
    assert next_slot_map(alone, back, {}) is None
    assert slots_of(newest_slot_map(COPIED, back)) == {"a": ALL}
    chosen = next_fill(alone, back, 2)
    assert chosen is not None
    assert (*chosen[:2], ranges_of(chosen[2])) == ("a", "b", ALL)
    fill = SlotMigration(id="fill", target="b", slots=ALL, keep=True)
    filled = {
        "a": replace(back["a"], outgoing=fill),
        "b": replace(store("b", alone), incoming=fill, received=True),
    }
    assert slots_of(next_slot_map(alone, filled, {})) == {"a": ALL, "b": ALL}


def test_copies_in_restarted_stores_are_complete_again_at_some_time() -> None:
    current, restarted = map_of(a=ALL, b=LOW, c=HIGH), ("a", "b")
    for number in range(4):  # c has a better copy of its slots: those of a are dropped and filled
        stores = described(current)
        stores = {
            address: store and (replace(store, **RESTARTED) if address in restarted else store)
            for address, store in stores.items()
        }
        following = next_slot_map(current, stores, ACKNOWLEDGED)
        if following is not None:
            assert slots_of(following) == {"a": LOW, "b": LOW, "c": HIGH}
            assert (following.incarnations, number) == (current.incarnations, 0)
            current = replace(following, epoch=following.epoch + 1, copies=current.copies)
    assert slots_of(current) == {"a": ALL, "b": LOW, "c": HIGH}


def test_copy_is_made_where_a_store_was_started_with_the_slots() -> None:
    alone = map_of(a=ALL)
    stores = {"a": store("a", alone), "c": store("c", None, home=()), "b": store("b", None)}
    chosen = next_fill(alone, stores, 2)
    assert chosen is not None
    assert (*chosen[:2], ranges_of(chosen[2])) == ("a", "b", ALL)
    assert next_fill(COPIED, described(COPIED), 2) is None
    assert next_fill(alone, {**stores, "b": None}, 2) is None


def test_newest_map_is_that_of_the_session() -> None:
    newer, other = map_of(2, a=ALL), map_of(9, "later", b=ALL)
    stores = {"a": store("a", newer), "b": store("b", other), "c": None}
    assert newest_slot_map(TWO, stores) is newer
    assert newest_slot_map(map_of(3, a=ALL), stores).epoch == 3


def test_new_session_takes_slots_as_they_are_or_as_stores_were_started() -> None:
    newest = map_of(3, a=LOW, b=HIGH)
    moved = {"a": store("a", newest, ALL), "b": store("b", map_of(2, a=ALL), ())}
    found = initial_slot_map(moved, 1, "other")
    assert (found.session, found.epoch, slots_of(found)) == ("other", 4, {"a": LOW, "b": HIGH})
    torn = {"a": store("a", newest, ALL), "c": store("c", None, ())}
    assert slots_of(initial_slot_map(torn, 1, "other")) == {"a": ALL}
    # the store that was started with the rest has left, and that which had it has lost it
    left = {
        "a": store("a", map_of(3, a=((0, 3000),), b=((3000, 4096),)), LOW),
        "c": store("c", None, ()),
    }
    assert slots_of(initial_slot_map(left, 1, "other", elastic=True)) == {
        "a": ((0, 3000),),
        "c": ((3000, 4096),),
    }
    forgotten = "stores must serve each of 4096 slots once, got slot 2048 served 0 times by a, c; "
    with pytest.raises(SchemaError, match=f"^{re.escape(forgotten)}"):
        initial_slot_map(left, 1, "other")
    assert not covers_all_slots(left, 1)
    assert covers_all_slots(moved, 1)
    message = (
        "stores must serve each of 4096 slots twice, got slot 0 served 1 times by a, c; "
        "start them with other --slots"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        initial_slot_map(torn, 2, "other")


RANGES = st.lists(st.tuples(st.integers(0, 4095), st.integers(1, 4096)), max_size=5).map(
    lambda pairs: [(min(p), max(p) + (p[0] == p[1])) for p in pairs]
)


@settings(max_examples=50)
@given(RANGES, RANGES)
def test_maps_and_ranges_are_read_as_they_were_written(one: Ranges, other: Ranges) -> None:
    mask = mask_of(one)
    assert mask_of(ranges_of(mask)).tolist() == mask.tolist()
    assert parse_ranges(format_ranges(ranges_of(mask))) == ranges_of(mask)
    slot_map = map_of(a=one, b=other, c=ALL if not (one or other) else ())
    read = slot_map_from_json(json.loads(json.dumps(slot_map.to_json())))
    assert replace(read, copies=slot_map.copies) == slot_map
    assert read.copies.tolist() == slot_map.copies.tolist()
    for address, ranges in (("a", one), ("b", other)):
        assert read.slots_of(address).tolist() == mask_of(ranges).tolist()


@pytest.mark.parametrize("text", ["", "1", "3:2", "0:4097", "a:b", "1:2:3"])
def test_slots_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^slots must "):
        parse_ranges(text)


@pytest.mark.parametrize("missing", ["map", "process"])
def test_control_of_another_release_is_refused(missing: str) -> None:
    body = ShardControl(home=ALL, slot_map=map_of(a=ALL), address="a").to_json()
    assert control_from_json(body).to_json() == body
    del (body if missing == "map" else body["map"]["stores"][0])[missing]
    with pytest.raises(SchemaError, match=r"^log is of another release; start the store with an "):
        control_from_json(body)
