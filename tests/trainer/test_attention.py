"""Target attention against a slow per-sample formula in float64, deduplicated and expanded."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from presage.trainer.data.attention_layout import bucket_queries
from presage.trainer.models import attention
from presage.trainer.models.attention import AttentionModel
from tests.trainer.model_samples import (
    CONFIG,
    DIM,
    FEATURES,
    MAX_HISTORY,
    NUM_DENSE,
    NUM_ROWS,
    PlainTables,
    Samples,
    assert_equal_models,
    batch_of,
    gradients,
    random_samples,
)


def attention_model(num_dense: int = NUM_DENSE) -> AttentionModel:
    """Build the model with every parameter away from zero."""
    model = attention.build(CONFIG, FEATURES, num_dense, PlainTables())
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=rng)
    return model


def slow_norm(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    """Normalize one vector."""
    centered = x - x.mean()
    return centered / (centered.square().mean() + norm.eps).sqrt() * norm.weight + norm.bias


def slow_attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Let one query read some keys."""
    scores = torch.stack([query @ key for key in keys]) / len(query) ** 0.5
    shares = scores.exp() / scores.exp().sum()
    return torch.stack([share * value for share, value in zip(shares, values, strict=True)]).sum(0)


def slow_read(model: AttentionModel, history: Sequence[int], item: Sequence[int]) -> torch.Tensor:
    """Encode the history of one sample and let its target read it."""
    tables, encoder = model.embedding, model.encoder
    assert isinstance(tables, PlainTables)
    newest_first = list(reversed(history))[:MAX_HISTORY]
    if not newest_first:
        return model.empty_history
    table = tables.table_of("clicked")
    x = torch.stack([table[row] + encoder.positions[i] for i, row in enumerate(newest_first)])
    q, k, v = encoder.project(x).chunk(3, dim=1)
    half = DIM // 2  # two heads
    encoded: list[torch.Tensor] = []
    for i in range(len(x)):
        heads = [slow_attend(q[i, s], k[:, s], v[:, s]) for s in (slice(half), slice(half, DIM))]
        mixed = slow_norm(encoder.mix_norm, x[i] + encoder.mix(torch.cat(heads)))
        encoded.append(slow_norm(encoder.feed_forward_norm, mixed + encoder.feed_forward(mixed)))
    key, value = model.attention.key_value(torch.stack(encoded)).chunk(2, dim=1)
    return slow_attend(model.attention.query(tables.pooled("item", item)), key, value)


def slow_logits(model: AttentionModel, samples: Samples) -> torch.Tensor:
    """Compute each sample on its own."""
    tables = model.embedding
    assert isinstance(tables, PlainTables)
    logits: list[torch.Tensor] = []
    for sample in range(len(samples.inverse_indices)):
        bags = {f: samples.bag_of(f, sample) for f in FEATURES}
        dense = [] if model.bottom is None else [model.bottom(samples.dense[sample])]
        pooled = [tables.pooled(f, bags[f]) for f in FEATURES]
        read = slow_read(model, bags["clicked"], bags["item"])
        logits.append(model.top(torch.cat([*dense, *pooled, read])))
    return torch.cat(logits)


SHARED = {
    "histories of every length": (range(8), [0, 1, 2, 3, 4, 5, 6, 7]),
    "one history of many samples": ([4, 3, 6], [1] * 19 + [0, 2, 2]),
    "samples out of order": ([2, 0, 7, 3], [3, 0, 2, 0, 1, 3, 2, 0, 0]),
    "unique rows that no sample has": ([2, 5, 3, 1], [2, 2, 0]),
    "empty histories only": ([0, 0], [0, 1, 1]),
    "one sample": ([3], [0]),
}


@pytest.mark.parametrize(("lengths", "inverse_indices"), SHARED.values(), ids=SHARED.keys())
def test_attention_of_shared_histories_equals_the_slow_reference(
    lengths: Sequence[int], inverse_indices: list[int]
) -> None:
    samples, model = random_samples(list(lengths), inverse_indices), attention_model()
    slow = slow_logits(model, samples)
    assert_equal_models((model, model(batch_of(samples))), (model, slow))
    assert_equal_models((model, model(batch_of(samples, expanded=True))), (model, slow))


@pytest.mark.slow
@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 99))
def test_attention_deduplicated_equals_expanded(data: st.DataObject, seed: int) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    index = st.integers(0, len(lengths) - 1)
    samples = random_samples(lengths, data.draw(st.lists(index, min_size=1, max_size=30)), seed)
    model = attention_model()
    deduplicated, expanded = batch_of(samples), batch_of(samples, expanded=True)
    assert_equal_models((model, model(deduplicated)), (model, model(expanded)))


def test_attention_without_dense_features_equals_the_slow_reference() -> None:
    samples = random_samples([2, 6], [0, 1, 1], num_dense=0)
    model = attention_model(num_dense=0)
    assert model.bottom is None
    assert_equal_models((model, model(batch_of(samples))), (model, slow_logits(model, samples)))


def test_attention_gradients_of_empty_histories_are_finite() -> None:
    model = attention_model()
    encoded: list[Any] = []
    model.encoder.register_forward_hook(lambda *call: encoded.append(call[1]))
    found = gradients(model, model(batch_of(random_samples([0, 3], [0, 1, 0]))))
    padded, readable = encoded[0]
    assert padded.shape[:2] == readable.shape == (2, 3)
    assert readable.any(1).all(), "a softmax over nothing is NaN in some kernels"
    assert all(g.isfinite().all() for g in found.values())
    assert found["empty_history"].abs().sum() > 0


def test_attention_reads_nothing_older_than_max_history() -> None:
    samples, model = random_samples([9], [0, 0]), attention_model()
    reads: list[torch.Tensor] = []
    model.attention.register_forward_hook(lambda *call: reads.append(call[2]))
    clicked = samples.bags["clicked"][0]
    for changed in (None, 9 - MAX_HISTORY - 1, 9 - MAX_HISTORY):
        other = [(row + (i == changed)) % NUM_ROWS for i, row in enumerate(clicked)]
        model(batch_of(replace(samples, bags={**samples.bags, "clicked": [other]})))
    assert torch.equal(reads[0], reads[1])
    assert not torch.equal(reads[0], reads[2])


class LargestTensor(TorchDispatchMode):
    """Note the most elements that any result of an operator has."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, torch.Tensor):
                self.num_elements = max(self.num_elements, part.numel())
        return result


@pytest.mark.slow
def test_attention_never_expands_histories_to_samples() -> None:
    # One row has 449 samples, so that a common width would pad all rows to 512 queries.
    config = replace(CONFIG, model=replace(CONFIG.model, max_history=50))
    model = attention.build(config, FEATURES, NUM_DENSE, PlainTables())
    samples = random_samples([50] * 20, [0] * 449 + list(range(1, 20)) * 3)
    batch, encoded = batch_of(samples), []
    model.encoder.register_forward_hook(lambda *call: encoded.append(tuple(call[2].shape)))
    with LargestTensor() as largest:
        gradients(model, model(batch))
    assert encoded == [(20, 50, DIM)]
    histories, one_width = 506 * 50 * DIM, 20 * 512 * 50
    # What is built: the queries' scores and the feed forward of unique rows.
    assert largest.num_elements <= max(2 * 506 * 50, 20 * 50 * 4 * DIM)
    assert 2 * largest.num_elements < min(histories, one_width)


@given(
    inverse_indices=st.lists(st.integers(0, 9), min_size=1, max_size=80)
    | st.lists(st.integers(0, 1), min_size=1, max_size=80)
)
def test_bucket_queries_of_any_sharing_gives_each_sample_a_place_of_its_row(
    inverse_indices: list[int],
) -> None:
    buckets = bucket_queries(torch.tensor(inverse_indices), 10)
    widths = [w for w, n in zip(buckets.widths, buckets.row_counts, strict=True) for _ in range(n)]
    row_of_place = np.repeat(buckets.rows.numpy(), widths)
    places = buckets.slots.tolist()
    assert len(row_of_place) == sum(buckets.slot_counts) < 2 * len(inverse_indices)
    assert len(set(places)) == len(places)
    assert row_of_place[places].tolist() == inverse_indices
    assert sorted(buckets.rows.tolist()) == sorted(set(inverse_indices))
    assert list(buckets.widths) == sorted(set(buckets.widths))
    for row, width in zip(buckets.rows.tolist(), widths, strict=True):
        assert width == 1 << (inverse_indices.count(row) - 1).bit_length()


def test_bucket_queries_of_one_sample_per_row_changes_no_order() -> None:
    buckets = bucket_queries(torch.arange(5), 5)
    assert buckets.rows.tolist() == buckets.slots.tolist() == list(range(5))
    assert (buckets.row_counts, buckets.widths) == ((5,), (1,))


@pytest.mark.parametrize("name", ["history", "target"])
def test_attention_over_an_unknown_feature_is_refused(name: str) -> None:
    config = replace(CONFIG, model=replace(CONFIG.model, **{name: "likes"}))
    message = (
        f"model.{name} must be a sparse feature, got {name}='likes'; "
        "use one of hour, clicked, item, viewed"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        attention.build(config, FEATURES, NUM_DENSE, PlainTables())
