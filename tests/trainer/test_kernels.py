"""The kernels against FBGEMM's and torch's sparse optimizers."""

from dataclasses import replace

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.schemas.config.train import SparseOptimizerConfig
from presage.trainer.data.collate import CollatedBatch
from presage.trainer.embedding.kernels import compiled
from presage.trainer.embedding.kernels.interface import (
    ArenaRows,
    RowRule,
    RowSums,
    TableRows,
    rule_at,
    state_width,
)
from presage.trainer.embedding.pooling import Pooling
from tests.shared import in_pairs
from tests.trainer.pooled_cases import FEATURES, NUM_ROWS, TABLES, Case, cases, flat

RATE, EPS = 0.1, 1e-6
TABLE_OF = {feature: table for table, features in TABLES.items() for feature in features}
Tables = dict[str, tuple[torch.Tensor, torch.Tensor]]


def first_tables(case: Case, dtype: torch.dtype, width: int) -> Tables:
    """Return whole tables with their state."""
    rng = case.rng()
    return {
        table: (
            torch.randn(NUM_ROWS, case.dim, generator=rng, dtype=torch.float64).to(dtype),
            torch.zeros(NUM_ROWS, width, dtype=dtype),
        )
        for table in TABLES
    }


def output_gradient(case: Case, train_step: int, dtype: torch.dtype) -> torch.Tensor:
    """Return (num_samples, num_features, dim), features as in `FEATURES`."""
    rng = torch.Generator().manual_seed(case.seed + 1000 * train_step + 1)
    shape = (case.num_samples, len(FEATURES), case.dim)
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)


def run_step(
    batch: CollatedBatch, tables: Tables, gradient: torch.Tensor, rule: RowRule, *, mean: bool
) -> torch.Tensor:
    """Pool, go back and update whole tables in place; return pooled vectors as in `FEATURES`."""
    rows = {
        t: ArenaRows(
            torch.cat([values, state], 1),
            values.shape[1],
            torch.from_numpy(batch.lookups[t].rows).int(),
        )
        for t, (values, state) in tables.items()
    }
    pooling = Pooling(batch, rows, mean=mean)
    columns = [pooling.keys.index(f) for f in FEATURES]
    pooled = pooling.pool().view(gradient.shape[0], len(FEATURES), -1)[:, columns]
    pooled.backward(gradient)
    assert pooling.gradients is not None
    compiled.update(
        [
            TableRows(
                block=rows[t].block,
                positions=rows[t].positions,
                readers=batch.lookups[t].readers,
                reader_offsets=batch.lookups[t].reader_offsets,
                per_sample_weights=batch.lookups[t].reader_weights,
            )
            for t in tables
        ],
        pooling.gradients,
        rule,
    )
    for t, (values, state) in tables.items():
        values[:], state[:] = rows[t].values, rows[t].block[:, values.shape[1] :]
    return pooled.detach()


def config_of(name: str) -> SparseOptimizerConfig:
    return SparseOptimizerConfig(name=name, learning_rate=RATE, eps=EPS)  # pyright: ignore[reportArgumentType]


FBGEMM_RULES = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
POOLINGS = {"sum": (False, False), "mean": (True, False), "weighted": (False, True)}
"""Name to (mean, weighted)."""


@pytest.mark.slow
@pytest.mark.parametrize(("pooling", "optimizer"), in_pairs(POOLINGS, FBGEMM_RULES))
@given(case=cases())
@settings(max_examples=25, deadline=None)
def test_steps_give_what_fbgemm_gives(pooling: str, optimizer: str, case: Case) -> None:
    mean, weighted = POOLINGS[pooling]
    dim = case.dim // 4 * 4  # FBGEMM takes multiples of 4
    case = replace(case, dim=dim)
    config = config_of(optimizer)
    tables = first_tables(case, torch.float32, state_width(config, dim))
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(NUM_ROWS, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for _ in TABLES],
        feature_table_map=[list(TABLES).index(TABLE_OF[f]) for f in FEATURES],
        optimizer=FBGEMM_RULES[optimizer],
        pooling_mode=PoolingMode.MEAN if mean else PoolingMode.SUM,
        learning_rate=RATE,
        eps=EPS,
    )
    for weight, (values, _) in zip(theirs.split_embedding_weights(), tables.values(), strict=True):
        weight.copy_(values)
    bags = [bag for f in FEATURES for bag in case.expanded(f)]
    offsets = torch.tensor([0, *(len(b) for b in bags)]).cumsum(0)
    per_sample_weights = [
        x
        for f in FEATURES
        for bag in replace(case, bags=case.bags | {f: case.expanded(f)}).factors_of(f)
        for x in bag
    ]
    for step in range(3):
        gradient = output_gradient(case, step, torch.float32)
        batch = case.batch(weighted=torch.float32 if weighted else None)
        pooled = run_step(batch, tables, gradient, rule_at(config, step), mean=mean)
        expected = theirs(
            torch.from_numpy(flat(bags)),
            offsets,
            torch.tensor(per_sample_weights) if weighted else None,
        ).view(gradient.shape)
        torch.testing.assert_close(pooled, expected.detach(), rtol=1e-4, atol=1e-5)
        expected.backward(gradient)
        weights = theirs.split_embedding_weights()
        for weight, (values, _) in zip(weights, tables.values(), strict=True):
            torch.testing.assert_close(values, weight, rtol=1e-3, atol=1e-4)


TORCH_RULES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=RATE),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=RATE, eps=EPS),
    "adam": lambda p: torch.optim.SparseAdam(p, lr=RATE, eps=EPS),
}


@pytest.mark.slow
@pytest.mark.parametrize(("pooling", "optimizer"), in_pairs(POOLINGS, TORCH_RULES))
@given(case=cases())
@settings(max_examples=25, deadline=None)
def test_steps_in_float64_give_what_torch_gives(pooling: str, optimizer: str, case: Case) -> None:
    mean, weighted = POOLINGS[pooling]
    config = config_of(optimizer)
    tables = first_tables(case, torch.float64, state_width(config, case.dim))
    theirs = {t: values.clone().requires_grad_() for t, (values, _) in tables.items()}
    update = TORCH_RULES[optimizer](list(theirs.values()))
    for step in range(3):
        gradient = output_gradient(case, step, torch.float64)
        batch = case.batch(weighted=torch.float64 if weighted else None)
        rule = rule_at(config, step)
        pooled = run_step(batch, tables, gradient, rule, mean=mean)
        update.zero_grad()
        expected = torch.stack(
            [
                reference_pooled(case, f, theirs[TABLE_OF[f]], mean=mean, weighted=weighted)
                for f in FEATURES
            ],
            1,
        )
        torch.testing.assert_close(pooled, expected.detach(), rtol=1e-12, atol=1e-12)
        expected.backward(gradient)
        update.step()
        for table, weight in theirs.items():
            found = tables[table][0]
            torch.testing.assert_close(found, weight.detach(), rtol=1e-6, atol=1e-8)


def reference_pooled(
    case: Case, feature: str, weight: torch.Tensor, *, mean: bool, weighted: bool
) -> torch.Tensor:
    bags = case.bags[feature]
    per_sample_weights = torch.tensor(
        [x for b in case.factors_of(feature) for x in b], dtype=torch.float64
    )
    pooled = torch.nn.functional.embedding_bag(
        torch.from_numpy(flat(bags)),
        weight,
        torch.tensor([0, *(len(b) for b in bags)]).cumsum(0),
        mode="mean" if mean else "sum",
        sparse=True,
        include_last_offset=True,
        per_sample_weights=per_sample_weights if weighted else None,
    )
    return pooled if feature == "item" else pooled[torch.tensor(case.inverse)]


@pytest.mark.slow
@given(case=cases(), dtype=st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=40, deadline=None)
def test_rowwise_adagrad_gives_what_its_formula_gives(case: Case, dtype: torch.dtype) -> None:
    tables = first_tables(case, dtype, 1)
    expected = {t: (values.double(), state.double()) for t, (values, state) in tables.items()}
    for step in range(3):
        gradient = output_gradient(case, step, dtype)
        rule = rule_at(config_of("rowwise_adagrad"), step)
        run_step(case.batch(), tables, gradient, rule, mean=False)
        for table, features in TABLES.items():
            sums = torch.zeros(NUM_ROWS, case.dim, dtype=torch.float64)
            for feature in features:
                column = gradient[:, FEATURES.index(feature)].double()
                for sample, bag in enumerate(case.expanded(feature)):
                    for row in bag:
                        sums[row] += column[sample]
            values, state = expected[table]
            state += sums.square().mean(1, keepdim=True)
            values -= RATE * sums / (state.sqrt() + EPS)
    exact = dtype is torch.float64
    for table, found in tables.items():
        for ours, theirs in zip(found, expected[table], strict=True):
            tolerance = 1e-9 if exact else 1e-3
            torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    in_pairs(["sgd", "adagrad", "rowwise_adagrad", "adam"], ["float32", "float64"]),
)
def test_bits_do_not_depend_on_threads(optimizer: str, precision: str) -> None:
    case, dtype = large_case(), getattr(torch, precision)
    config, threads = config_of(optimizer), torch.get_num_threads()
    found: list[list[bytes]] = []
    try:
        for num_threads in (1, 2, 3, 7):
            torch.set_num_threads(num_threads)
            tables = first_tables(case, dtype, state_width(config, case.dim))
            pooled = [
                run_step(
                    case.batch(),
                    tables,
                    output_gradient(case, step, dtype),
                    rule_at(config, step),
                    mean=True,
                )
                for step in range(2)
            ]
            arrays = [*pooled, *(array for pair in tables.values() for array in pair)]
            found.append([array.numpy().tobytes() for array in arrays])
    finally:
        torch.set_num_threads(threads)
    assert all(bits == found[0] for bits in found[1:])


def large_case() -> Case:
    """Return a step large enough for several threads, with rows that pieces are cut from."""
    rng = torch.Generator().manual_seed(5)
    num_tuples, per_tuple = 4000, 3
    lengths = torch.randint(0, 8, (num_tuples,), generator=rng).tolist()
    return Case(
        {
            "item": [[i % NUM_ROWS] for i in range(num_tuples * per_tuple)],
            "clicked": [[(i + j) % 3 for j in range(n)] for i, n in enumerate(lengths)],
            "user": [[i % 2] for i in range(num_tuples)],
        },
        [i % num_tuples for i in range(num_tuples * per_tuple)],
        20,
        3,
    )


def test_row_with_many_readers_has_the_sum_of_all() -> None:
    case = large_case()
    gradient = output_gradient(case, 0, torch.float64)
    tables = first_tables(case, torch.float64, 0)
    run_step(case.batch(), tables, gradient, RowRule(name="sum"), mean=False)
    users = torch.tensor(case.inverse) % 2
    expected = [gradient[users == row, FEATURES.index("user")].sum(0) for row in (0, 1)]
    torch.testing.assert_close(tables["users"][0][:2], torch.stack(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@given(case=cases())
@settings(max_examples=30, deadline=None)
def test_deduplicated_step_gives_what_the_expanded_one_gives(mean: bool, case: Case) -> None:
    gradient = output_gradient(case, 0, torch.float64)
    found = []
    for expanded in (False, True):
        tables = first_tables(case, torch.float64, case.dim)
        batch = case.batch(expanded=expanded)
        rule = rule_at(config_of("adagrad"), 0)
        pooled = run_step(batch, tables, gradient, rule, mean=mean)
        found.append([pooled, *(array for pair in tables.values() for array in pair)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-9)


WRONG = {
    "type of rows": (RowSums(torch.arange(2), torch.ones(2, 3)), TypeError),
    "type of sums": (RowSums(torch.arange(2).int(), torch.ones(2, 3).half()), TypeError),
    "order": (RowSums(torch.arange(2).int(), torch.ones(3, 2).t()), TypeError),
    "place": (RowSums(torch.arange(2).int(), torch.ones(2, 3, device="meta")), TypeError),
    "length": (RowSums(torch.arange(3).int(), torch.ones(2, 3)), ValueError),
    "width": (RowSums(torch.arange(2).int(), torch.ones(2, 4)), ValueError),
}


@pytest.mark.parametrize("case", WRONG)
def test_tensors_are_checked(case: str) -> None:
    right, (wrong, error) = RowSums(torch.arange(2).int(), torch.ones(2, 3)), WRONG[case]
    with pytest.raises(error):
        compiled.merge(right, wrong)
