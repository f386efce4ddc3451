"""Pieces of a part: together what the part is at once, none much larger than asked for."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelines.clustering.part
from pipelines.clustering.order import cluster
from pipelines.clustering.part import cluster_chunks, expanded_bytes, split_at_blocks
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import Tuples, compact, join
from pipelines.sources.rows import ORIGIN
from tests.pipelines.test_cluster import START, data_config

BLOCK = data_config().block_samples


def parts_of(rng: np.random.Generator, sizes: list[int], num_sessions: int) -> list[Tuples]:
    """Return parts of samples with a group of few tuples, sessions of very unequal lengths."""
    parts: list[Tuples] = []
    first = 0
    for size in sizes:
        session = np.minimum(rng.geometric(0.4, size), num_sessions)
        samples = {
            "session": pa.array(session),
            "time": pa.array(START + rng.integers(0, 40, size) * 1_000_000, pa.timestamp("us")),
            ORIGIN: pa.array(first + np.arange(size)),
            LIST_INDEX: pa.array(np.zeros(size, np.int32)),
        }
        uniques = pa.table({"_hash_g": pa.array(np.arange(7, dtype=np.uint64)), "g": np.arange(7)})
        references = {"g": rng.integers(0, 7, size)}
        parts.append(Tuples(pa.table(samples), references, {"g": uniques}))
        first += size
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 600, 2000, 1 << 20])
@given(seed=st.integers(0, 1000), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_pieces_are_the_part_in_order(limit: int, seed: int, sizes: list[int]) -> None:
    data = data_config(gap=15, evaluation_from=20)
    parts = parts_of(np.random.default_rng(seed), sizes, 5)
    whole = cluster(join(parts), data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelines.clustering.part, "CHUNK_BYTES", limit)
        found = list(cluster_chunks(parts, data))
    assert sum(p.num_sessions for p in found) == whole.num_sessions
    for name in ("starts_session", "session_samples", "is_evaluation", "window"):
        joined = np.concatenate([getattr(p, name) for p in found])
        assert np.array_equal(joined, getattr(whole, name)), name
    blocks = np.concatenate([p.block + p.first_block for p in found])
    assert np.array_equal(blocks, whole.block)
    for column in ("session", "time", "g", ORIGIN):
        joined = pa.concat_arrays([p.samples.column(column) for p in found])
        assert joined.equals(whole.samples.column(column)), column
    assert all(p.samples.num_samples <= BLOCK for p in found) or limit > 1
    assert len(found) == 1 or limit < 1 << 20


def test_bytes_are_those_of_expanded_samples_however_they_are_cut() -> None:
    (part,) = parts_of(np.random.default_rng(0), [100], 5)
    whole = expanded_bytes(part)
    assert whole == 100 * (8 + 8 + 8 + 4) + 100 * (8 + 8)
    cut = [part.take(np.arange(0, 30)), part.take(np.arange(30, 100))]
    assert sum(expanded_bytes(compact(p)) for p in cut) == whole
    texts = pa.table({"x": pa.array([["a", "bcd"], [], None, [""]])})
    assert expanded_bytes(Tuples(texts, {}, {})) == (8 + 9 + 11) + 8 + 8 + (8 + 8)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.integers(1, 12))
def test_cuts_lie_between_blocks_and_cover_all_samples(lengths: list[int], limit: int) -> None:
    block = np.repeat(np.arange(len(lengths)), lengths)
    found = list(split_at_blocks(block, limit))
    assert [found[0].start, *(c.stop for c in found)] == [*(c.start for c in found), len(block)]
    for cut in found:
        assert cut.stop == len(block) or block[cut.stop] != block[cut.stop - 1]
        assert cut.stop - cut.start <= limit or len(set(block[cut])) == 1
