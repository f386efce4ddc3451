"""Which slot map follows, whatever stores say of themselves."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.schemas.typed_values import from_json
from presage.trainer.stores.remote.ownership import (
    Descriptions,
    MoveRequest,
    Ranges,
    SlotMap,
    StoreDescription,
    covers_all_slots,
    format_ranges,
    initial_slot_map,
    lost_slots,
    mask_of,
    newest_slot_map,
    next_slot_map,
    parse_ranges,
    ranges_of,
    slot_map_of,
)
from tests.trainer.stores import LAYOUT

ALL, LOW, HIGH = ((0, 4096),), ((0, 2048),), ((2048, 4096),)
SESSION = "process"
ACKNOWLEDGED = {"a": 10, "b": 10}


def map_of(epoch: int = 1, session: str = SESSION, **slots: Ranges) -> SlotMap:
    return slot_map_of(session, epoch, {a: mask_of(ranges) for a, ranges in slots.items()})


def store(address: str, slot_map: SlotMap | None) -> StoreDescription:
    return StoreDescription(slot_map=slot_map, address=address, sequence=10, message_bytes=4096)


def slots_of(slot_map: SlotMap) -> dict[str, Ranges]:
    return {address: ranges_of(slot_map.slots_of(address)) for address in slot_map.addresses}


def described(slot_map: SlotMap, **changes: Mapping[str, object] | None) -> Descriptions:
    """Return what the stores of a map say; a change of None is a store that is gone."""
    found: dict[str, StoreDescription] = {}
    for address in {*slot_map.addresses, *changes}:
        change = changes.get(address, {})
        if change is not None:
            found[address] = replace(store(address, slot_map), **change)
    return found


TWO = map_of(a=LOW, b=HIGH)
LOST: dict[str, tuple[dict[str, Mapping[str, object] | None], Ranges]] = {
    "none": ({}, ()),
    "a store is gone, and may come back": ({"b": None}, ()),
    "one began empty": ({"b": {"slot_map": None, "sequence": 0}}, HIGH),
    "one acknowledged more than it has": ({"b": {"sequence": 9}}, HIGH),
    "one is of an older session": ({"b": {"slot_map": map_of(0, "older", a=LOW, b=HIGH)}}, HIGH),
    "both": ({"a": {"sequence": 0}, "b": {"sequence": 9}}, ALL),
}


@pytest.mark.parametrize("case", LOST)
def test_slots_are_lost_when(case: str) -> None:
    changes, wanted = LOST[case]
    assert ranges_of(lost_slots(TWO, described(TWO, **changes), ACKNOWLEDGED)) == wanted


def test_move_is_a_map_without_the_slots_and_one_with_their_new_store() -> None:
    during = next_slot_map(TWO, moving=((0, 100),))
    assert (during.session, during.epoch, during.moving) == (SESSION, 2, ((0, 100),))
    assert slots_of(during) == slots_of(TWO)
    given_up = next_slot_map(during)
    assert (given_up.epoch, given_up.moving, slots_of(given_up)) == (3, (), slots_of(TWO))
    moved = next_slot_map(during, moved=mask_of(during.moving), target="c")
    assert (moved.epoch, moved.moving) == (3, ())
    assert slots_of(moved) == {"a": ((100, 2048),), "b": HIGH, "c": ((0, 100),)}
    emptied = next_slot_map(TWO, moved=mask_of(LOW), target="b")
    assert slots_of(emptied) == {"b": ALL}


def test_newest_map_is_that_of_the_session() -> None:
    newer, other = map_of(2, a=ALL), map_of(9, "later", b=ALL)
    stores = {"a": store("a", newer), "b": store("b", other)}
    assert newest_slot_map(TWO, stores) is newer
    assert newest_slot_map(map_of(3, a=ALL), stores).epoch == 3


def test_new_session_takes_slots_as_they_are_or_in_equal_parts() -> None:
    newest = replace(map_of(3, a=LOW, b=HIGH), moving=LOW)  # whoever moved them is gone
    moved = {"a": store("a", newest), "b": store("b", map_of(2, a=ALL))}
    found = initial_slot_map(moved, ("a", "b"), "other")
    assert (found.session, found.epoch, slots_of(found)) == ("other", 4, {"a": LOW, "b": HIGH})
    assert found.moving == ()
    assert covers_all_slots(moved)
    left = {"a": store("a", newest), "c": store("c", None)}  # b has left
    assert not covers_all_slots(left)
    found = initial_slot_map(left, ("a", "c"), "other")
    assert slots_of(found) == {"a": LOW, "c": HIGH}
    empty = {name: store(name, None) for name in "bac"}
    assert not covers_all_slots(empty)
    found = initial_slot_map(empty, ("b", "a"), "other")
    assert (found.epoch, slots_of(found)) == (0, {"b": LOW, "a": HIGH})
    three = slots_of(initial_slot_map(empty, ("b", "a", "c"), "other"))
    assert three == {"b": ((0, 1536),), "a": ((1536, 2816),), "c": ((2816, 4096),)}


RANGES = st.lists(st.tuples(st.integers(0, 4095), st.integers(1, 4096)), max_size=5).map(
    lambda pairs: [(min(p), max(p) + (p[0] == p[1])) for p in pairs]
)


@settings(max_examples=50)
@given(RANGES, RANGES)
def test_maps_and_ranges_are_read_as_they_were_written(one: Ranges, moving: Ranges) -> None:
    mask = mask_of(one)
    assert mask_of(ranges_of(mask)).tolist() == mask.tolist()
    assert not one or parse_ranges(format_ranges(ranges_of(mask))) == ranges_of(mask)
    owned = {"a": mask, "b": ~mask}
    slot_map = slot_map_of(SESSION, 3, owned, ranges_of(mask_of(moving)))
    read = from_json(SlotMap, json.loads(json.dumps(asdict(slot_map))))
    assert read == slot_map
    for address, slots in owned.items():
        assert read.slots_of(address).tolist() == slots.tolist()


@pytest.mark.parametrize("text", ["", "1", "3:2", "0:4097", "a:b", "1:2:3"])
def test_slots_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^slots must "):
        parse_ranges(text)


def test_description_is_read_as_it_was_written() -> None:
    request = MoveRequest(sources=("a", "b"), target="c", slots=LOW)
    described = replace(store("a", map_of(a=ALL)), layouts={"items": LAYOUT}, requested=request)
    assert from_json(StoreDescription, json.loads(json.dumps(asdict(described)))) == described
