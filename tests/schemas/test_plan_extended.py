"""Plans whose index is extended while they run: no row is stale, lost or in a wrong slot."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.schemas.config.train import CacheConfig
from presage.schemas.oracle.cache_plan import CachePlan, IndexStep, required_rows
from presage.schemas.oracle.next_uses import clip_to_horizon, next_use


def indexed(trace: list[np.ndarray], first: int, until: int) -> list[IndexStep]:
    """Return steps from one on with what is known before another."""
    num_numbers = max((int(step.max()) + 1 for step in trace if len(step)), default=0)
    distances = next_use(trace, num_numbers)
    return [(trace[s], clip_to_horizon(distances[s], s, until)) for s in range(first, until)]


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[np.ndarray], list[int]]:
    """Return the numbers of each step, and the steps that are known after each extension."""
    num_steps = draw(st.integers(2, 14))
    numbers = st.lists(st.integers(0, 11), unique=True, max_size=6)
    trace = [np.array(sorted(draw(numbers)), np.int64) for _ in range(num_steps)]
    ends = draw(st.lists(st.integers(1, num_steps), max_size=4, unique=True))
    return trace, sorted({*ends, num_steps})


@pytest.mark.parametrize("policy", ["ttl", "belady"])
@given(traces(), st.integers(1, 3), st.data())
def test_plan_that_is_extended_keeps_every_row_where_it_says(
    policy: str, found: tuple[list[np.ndarray], list[int]], prefetch: int, data: st.DataObject
) -> None:
    trace, ends = found
    lookahead = data.draw(st.integers(prefetch, 5))
    cache = CacheConfig(policy=policy, lookahead=lookahead, prefetch_steps=prefetch)  # type: ignore[arg-type]
    if policy == "belady":
        whole = [distances for _, distances in indexed(trace, 0, len(trace))]
        rows = required_rows([whole], cache)
        cache = CacheConfig(policy="belady", prefetch_steps=prefetch, rows=max(1, rows))
    version = dict.fromkeys(range(12), 0)  # of the row in its store
    slots: dict[int, tuple[int, int]] = {}  # slot -> number and version
    uses = dict.fromkeys(range(12), 0)
    step, steps = 0, CachePlan({"": indexed(trace, 0, ends[0])}, cache)
    for end, more in zip(ends, [*ends[1:], None], strict=True):
        # segments come before the end, too: the reads that are in flight are trained first
        until = end if more is None else data.draw(st.integers(step, end))
        step = train(steps, step, until, prefetch, end, version, slots, uses)
        if more is not None:
            frames = steps.keyframes()
            assert frames[""].train_step == step
            more_steps = {"": indexed(trace, step, more)}
            steps = CachePlan(more_steps, cache, first_step=step, starts=frames)
    assert step == len(trace)
    for number, (row, newest) in slots.items():
        assert uses[row] == newest, number
    held = {row for row, _ in slots.values()}
    assert all(version[row] == uses[row] for row in uses if row not in held)


def train(
    steps: CachePlan,
    step: int,
    until: int,
    prefetch: int,
    end: int,
    version: dict[int, int],
    slots: dict[int, tuple[int, int]],
    uses: dict[int, int],
) -> int:
    """Do what a cache does, reads as early as it issues them; return the next step."""
    arrivals: list[tuple[object, dict[int, int]]] = []
    planned = step

    def issue(before: int) -> None:
        nonlocal planned
        while planned < min(before, end):
            found = next(steps)[""]
            read = {int(n): version[int(n)] for n in found.numbers[found.fetch]}
            arrivals.append((found, read))
            planned += 1

    while step < until or arrivals:
        if step < until:
            issue(step + prefetch + 1)
        found, read = arrivals.pop(0)
        for number, slot, fetched in zip(found.numbers, found.slots, found.fetch, strict=True):  # type: ignore[attr-defined]
            number, slot = int(number), int(slot)
            if fetched:
                slots[slot] = (number, read[number])
            row, newest = slots[slot]
            assert row == number, "another row lies in the slot"
            assert newest == uses[number], "a row is stale"
            uses[number] += 1
            slots[slot] = (number, uses[number])
        for number, slot in zip(found.evict, found.evict_slots, strict=True):  # type: ignore[attr-defined]
            row, newest = slots.pop(int(slot))
            assert row == int(number)
            version[row] = newest
        step += 1
    return step
