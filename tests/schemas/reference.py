"""Slow reference implementations of the formats, to test the fast ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations


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
    salt = _splitmix64(0)
    data = text.encode()
    mixed = [_splitmix64(byte + _splitmix64(index) + salt) for index, byte in enumerate(data)]
    hashed = _splitmix64(_splitmix64(sum(mixed) + len(data)) ^ salt)
    return hashed - (1 << 64) if hashed >> 63 else hashed


def _splitmix64(x: int) -> int:
    mask = (1 << 64) - 1
    z = (x + 0x9E3779B97F4A7C15) & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def steps(num_blocks: Sequence[int], blocks_per_batch: int) -> list[tuple[int, list[int]]]:
    """Return (segment, block positions) of each step of one unshuffled epoch.

    Args:
        num_blocks: training blocks of each segment.
        blocks_per_batch: blocks of a full batch; a batch never straddles two segments.

    Example:
        >>> steps([3, 1], 2)
        [(0, [0, 1]), (0, [2]), (1, [0])]
    """
    result: list[tuple[int, list[int]]] = []
    for segment, count in enumerate(num_blocks):
        for start in range(0, count, blocks_per_batch):
            result.append((segment, list(range(start, min(start + blocks_per_batch, count)))))
    return result


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
        policy: `ttl`, `belady` or, for comparison, `lru`.
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
                gone |= _pushed_out(steps, policy, cache - gone, held, rows, now)
        result.append(StepRef(cache, fetches[now], frozenset(gone)))
        cache -= gone
        if coming < len(steps):
            cache |= steps[coming]
    return result


def _pushed_out(
    steps: Sequence[frozenset[int]],
    policy: str,
    cache: frozenset[int],
    held: frozenset[int],
    rows: int,
    now: int,
) -> set[int]:
    def leaves_first(row: int) -> int:
        if policy == "belady":
            return -(next_step(steps, row, now) or 0)
        return max(step for step in range(now + 1) if row in steps[step])

    movable = sorted(cache - held, key=leaves_first)
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
