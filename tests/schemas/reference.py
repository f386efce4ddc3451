"""Slow reference implementations of the formats, to test the fast ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import gcd


def dedup(rows: Sequence[Hashable]) -> tuple[list[Hashable], list[int]]:
    """Return distinct rows in order of first appearance, and the position of each row in them.

    Example:
        >>> dedup([(7, 3), (5,), (), (7, 3)])
        ([(7, 3), (5,), ()], [0, 1, 2, 0])
    """
    unique: list[Hashable] = []
    inverse_indices: list[int] = []
    for row in rows:
        if row not in unique:
            unique.append(row)
        inverse_indices.append(unique.index(row))
    return unique, inverse_indices


def expand(unique: Sequence[Hashable], inverse_indices: Sequence[int]) -> list[Hashable]:
    """Return the row of each sample.

    Example:
        >>> expand(["a", "b"], [0, 1, 0])
        ['a', 'b', 'a']
    """
    return [unique[index] for index in inverse_indices]


def hash_text(text: str) -> int:
    """Return the id of a text in a table with `rows: hash`, a signed integer of 64 bits.

    Example:
        >>> hash_text("a")
        6292077030810485607
    """
    salt = splitmix64(0)
    data = text.encode()
    mixed = [splitmix64(byte + splitmix64(index) + salt) for index, byte in enumerate(data)]
    hashed = splitmix64(splitmix64(sum(mixed) + len(data)) ^ salt)
    return hashed - (1 << 64) if hashed >> 63 else hashed


def splitmix64(x: int) -> int:
    """Return the hash of an integer of 64 bits."""
    mask = (1 << 64) - 1
    z = (x + 0x9E3779B97F4A7C15) & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def block_order(
    seed: int | None, epoch: int, shuffle_key: int, row_groups: Sequence[int], blocks_per_batch: int
) -> list[int]:
    """Return the blocks of one segment in the order of one epoch.

    Args:
        seed: None if blocks are not shuffled.
        epoch: pass over the training range.
        shuffle_key: of the segment.
        row_groups: row group of each block, numbered by first appearance.
        blocks_per_batch: blocks of a full batch.

    Example:
        >>> block_order(None, 0, 0, [0, 0, 1, 1, 2], 2)
        [0, 2, 1, 3, 4]
    """
    mask, num_blocks, count = (1 << 64) - 1, len(row_groups), len(set(row_groups))
    draws, sequence = [0.0] * num_blocks, list(range(count))
    if seed is not None:
        key = splitmix64((splitmix64(seed & mask) + epoch) & mask)
        key = splitmix64((key + shuffle_key) & mask)
        draws = [(splitmix64(block ^ key) >> 11) / 2**53 for block in range(num_blocks)]
        sequence.sort(key=lambda each: splitmix64(each ^ splitmix64(key)) >> 11)
    num_lanes = gcd(blocks_per_batch, 8)
    if num_lanes > count:
        num_lanes = 1
    per_lane = blocks_per_batch // num_lanes

    lanes: list[list[int]] = [[] for _ in range(num_lanes)]
    for each in sequence:
        blocks = [block for block in range(num_blocks) if row_groups[block] == each]
        blocks.sort(key=lambda block: draws[block])
        min(lanes, key=len).extend(blocks)
    if seed is None:
        for lane in lanes:
            lane.sort()
    equal = min(map(len, lanes)) // per_lane * per_lane if num_lanes > 1 else num_blocks
    excess = [block for lane in lanes for block in lane[equal:]]
    lanes = [lane[:equal] for lane in lanes]
    if seed is not None:
        reach = (16 / num_lanes - 1) / 2
        for lane in lanes:
            places = list(dict.fromkeys(row_groups[block] for block in lane))

            def position(block: int, places: list[int] = places) -> float:
                place = places.index(row_groups[block])
                low, high = max(0, place - reach), min(len(places), place + 1 + reach)
                return low + draws[block] * (high - low)

            lane.sort(key=position)

    order: list[int] = []
    while any(lanes):
        for lane in lanes:
            order += [lane.pop(0) for _ in range(min(per_lane, len(lane)))]
    full, last = divmod(len(excess), blocks_per_batch)
    runs: list[list[int]] = []
    for lane in range(num_lanes):
        more = -(-last * (lane + 1) // num_lanes) + (last * lane // -num_lanes)
        runs.append([excess.pop(0) for _ in range(full * per_lane + more)])
    while any(runs):
        for run in runs:
            order += [run.pop(0) for _ in range(min(per_lane, len(run)))]
    return order


def next_use(accesses: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the next-use distance of each row of each step, 0 if it is not used again.

    Example:
        >>> next_use([[1, 2], [2], [1]])
        [[2, 1], [0], [0]]
    """
    distances: list[list[int]] = []
    for step, rows in enumerate(accesses):
        later = [
            [s - step for s in range(step + 1, len(accesses)) if row in accesses[s]] for row in rows
        ]
        distances.append([steps_ahead[0] if steps_ahead else 0 for steps_ahead in later])
    return distances


def lru_hits(accesses: Sequence[int], capacity: int) -> int:
    """Return the hits of an LRU cache of `capacity` rows.

    Example:
        >>> lru_hits([1, 2, 1, 3, 2], 2)
        1
    """
    cache: list[int] = []
    hits = 0
    for row in accesses:
        if row in cache:
            hits += 1
            cache.remove(row)
        cache.append(row)
        if len(cache) > capacity:
            cache.pop(0)
    return hits


def belady_hits(accesses: Sequence[int], capacity: int) -> int:
    """Return the hits of the optimal cache of `capacity` rows.

    Every accessed row enters the cache; the one with the farthest next use is evicted.

    Source: Belady, "A study of replacement algorithms" (1966).

    Example:
        >>> belady_hits([1, 2, 1, 3, 2], 2)
        2
    """
    cache: set[int] = set()
    hits = 0
    for now, row in enumerate(accesses):
        hits += row in cache
        cache.add(row)
        if len(cache) > capacity:
            rest = list(accesses[now + 1 :])
            ahead = {r: rest.index(r) if r in rest else len(accesses) for r in cache if r != row}
            cache.remove(max(sorted(ahead), key=lambda r: ahead[r]))
    return hits


def windows(
    lists: Sequence[Sequence[int]], shortest_repeat: int
) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
    """Return buffers, and (buffer, start, length) of each list, for lists that grow at their end.

    Args:
        lists: entries of each row.
        shortest_repeat: lists of at least this length are searched among all previous lists.

    Example:
        >>> windows([[7, 3, 5], [3, 5, 9], [8], [3, 5, 9, 4]], 64)
        ([[7, 3, 5, 9], [8], [3, 5, 9, 4]], [(0, 0, 3), (0, 1, 3), (1, 0, 1), (2, 0, 4)])
    """
    buffers: list[list[int]] = []
    window_of: dict[tuple[int, ...], tuple[int, int, int]] = {}
    result: list[tuple[int, int, int]] = []
    previous: list[int] = []
    window = (0, 0, 0)  # of `previous`
    for row in lists:
        entries = list(row)
        if not entries:
            result.append((0, 0, 0))
            continue
        if len(entries) >= shortest_repeat and tuple(entries) in window_of:
            result.append(window_of[tuple(entries)])
            continue
        shorter = min(len(previous), len(entries))
        common = [k for k in range(1, shorter + 1) if previous[-k:] == entries[:k]]
        overlap = max([k for k in common if 2 * k >= shorter], default=0)
        if overlap:
            buffer, start, length = window
            buffers[buffer].extend(entries[overlap:])
            window = (buffer, start + length - overlap, len(entries))
        else:
            buffers.append(entries.copy())
            window = (len(buffers) - 1, 0, len(entries))
        previous = entries
        window_of.setdefault(tuple(entries), window)
        result.append(window)
    return buffers, result


@dataclass(frozen=True, slots=True)
class StepRef:
    """One step of a cache.

    Attributes:
        cache: rows cached during the step, rows fetched for later steps included.
        fetch: rows fetched for the step.
        evict: rows evicted after it.
    """

    cache: frozenset[int]
    fetch: frozenset[int]
    evict: frozenset[int]


def next_step(steps: Sequence[frozenset[int]], row: int, after: int) -> int | None:
    """Return the first step after `after` that uses the row."""
    return next((s for s in range(after + 1, len(steps)) if row in steps[s]), None)


def plan_ref(
    steps: Sequence[frozenset[int]],
    policy: str,
    *,
    lookahead: int,
    prefetch_steps: int,
    rows: int | None,
) -> list[StepRef]:
    """Plan with sets and a scan of all later steps.

    Args:
        steps: rows of each step.
        policy: `ttl` or `belady`.
        lookahead: with `ttl`, longest distance to the next use of a cached row.
        prefetch_steps: a row is fetched this many steps previous its use.
        rows: size of the cache; exceeded if the window alone does not fit.

    Example:
        >>> steps = [frozenset({1}), frozenset({2}), frozenset({1})]
        >>> result = plan_ref(steps, "belady", lookahead=1, prefetch_steps=0, rows=1)
        >>> [sorted(step.fetch) for step in result]
        [[1], [2], [1]]
    """
    cache = frozenset[int]()
    fetches: list[frozenset[int]] = []
    for step in steps[: prefetch_steps + 1]:
        fetches.append(step - cache)
        cache |= step
    result: list[StepRef] = []
    for now, used in enumerate(steps):
        gone: set[int] = set()
        for row in used:
            later = next_step(steps, row, now)
            if later is None or (policy == "ttl" and later - now > lookahead):
                gone.add(row)
        coming = now + prefetch_steps + 1
        if coming < len(steps):
            fetches.append(steps[coming] - (cache - gone))
            if policy != "ttl" and rows is not None:
                held = frozenset[int]().union(*steps[now + 1 : coming + 1])
                gone |= _pushed_out(steps, cache - gone, held, rows, now)
        result.append(StepRef(cache, fetches[now], frozenset(gone)))
        cache -= gone
        if coming < len(steps):
            cache |= steps[coming]
    return result


def _pushed_out(
    steps: Sequence[frozenset[int]],
    cache: frozenset[int],
    held: frozenset[int],
    rows: int,
    now: int,
) -> set[int]:
    movable = sorted(cache - held, key=lambda row: -(next_step(steps, row, now) or 0))
    return set(movable[: max(0, len(cache | held) - rows)])


def fewest_fetches(
    steps: Sequence[frozenset[int]], *, prefetch_steps: int, rows: int
) -> int | None:
    """Return the fewest fetches of any cache of a size, by exhaustive search.

    Returns:
        The number of fetches, None if the rows of a window do not fit.

    Example:
        >>> steps = [frozenset({1}), frozenset({2}), frozenset({1})]
        >>> fewest_fetches(steps, prefetch_steps=0, rows=2)
        2
    """
    costs: dict[frozenset[int], int] = {frozenset(): 0}
    for coming, step in enumerate(steps):
        held = frozenset[int]().union(*steps[max(0, coming - prefetch_steps) : coming + 1])
        after: dict[frozenset[int], int] = {}
        for cache, cost in costs.items():
            rest = sorted(cache - held)
            for count in range(min(len(rest), rows - len(held)) + 1):
                for kept in combinations(rest, count):
                    state = held | frozenset(kept)
                    total = cost + len(step - cache)
                    after[state] = min(total, after.get(state, total))
        costs = after
    return min(costs.values(), default=None)
