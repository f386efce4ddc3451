"""Our collections against TorchRec's, with the optimizers of torch and TorchRec."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection as TheirBags
from torchrec.modules.embedding_modules import EmbeddingCollection as TheirLists
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from presage.schemas.config.train import SparseOptimizerConfig
from presage.trainer.embedding.collections import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    rows_of,
    set_rows,
)
from presage.trainer.embedding.state_tensor import unpack

NUM_ROWS = 20
RATE, EPS = 0.1, 1e-6
FEATURES = ("clicked", "item", "user", "country")
INVERSE = [0, 0, 1, 2, 1, 1, 0, 2]
GROUPED = ("clicked", "user")
Lists = dict[str, list[list[int]]]


def bag_tables(pooling: str) -> list[EmbeddingBagConfig]:
    """Return three tables, one shared; `mixed` has two widths and both poolings."""
    mean = PoolingType.SUM if pooling == "sum" else PoolingType.MEAN
    mixed = pooling == "mixed"
    return [
        EmbeddingBagConfig(
            name="countries",
            num_embeddings=NUM_ROWS,
            embedding_dim=4 if mixed else 8,
            feature_names=["country"],
            pooling=mean,
        ),
        EmbeddingBagConfig(
            name="articles",
            num_embeddings=NUM_ROWS,
            embedding_dim=8,
            feature_names=["clicked", "item"],
            pooling=mean,
        ),
        EmbeddingBagConfig(
            name="users",
            num_embeddings=NUM_ROWS,
            embedding_dim=8,
            feature_names=["user"],
            pooling=PoolingType.SUM if mixed else mean,
        ),
    ]


def list_tables() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(
            name=t.name, num_embeddings=NUM_ROWS, embedding_dim=8, feature_names=t.feature_names
        )
        for t in bag_tables("sum")
    ]


def lists_of(step: int) -> Lists:
    """Draw lists, those of the group once per tuple."""
    rng = torch.Generator().manual_seed(step)

    def drawn(count: int) -> list[list[int]]:
        lengths = torch.randint(0, 5, (count,), generator=rng).tolist()
        return [torch.randint(0, NUM_ROWS, (n,), generator=rng).tolist() for n in lengths]

    return {f: drawn(3 if f in GROUPED else len(INVERSE)) for f in FEATURES}


def keyed(lists: Lists, *, unique: bool, weighted: bool = False) -> KeyedJaggedTensor:
    """Return a KeyedJaggedTensor as a user makes it, with inverse indices or expanded."""
    if not unique:
        lists = {f: [x[i] for i in INVERSE] if f in GROUPED else x for f, x in lists.items()}
    flat = [one for f in FEATURES for one in lists[f]]
    own, inverse = torch.arange(len(INVERSE)), torch.tensor(INVERSE)
    values = torch.tensor([row for one in flat for row in one], dtype=torch.int64)
    weights = [(row + 1) / (10 * place + 20) for one in flat for place, row in enumerate(one)]
    indices = torch.stack([inverse if f in GROUPED else own for f in FEATURES])
    return KeyedJaggedTensor(
        list(FEATURES),
        values,
        torch.tensor(weights, dtype=torch.float32) if weighted else None,
        lengths=torch.tensor([len(one) for one in flat]),
        stride=None if unique else len(INVERSE),
        stride_per_key_per_rank=[[len(lists[f])] for f in FEATURES] if unique else None,
        inverse_indices=(list(FEATURES), indices) if unique else None,
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=RATE),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=RATE, eps=EPS),
    "rowwise_adagrad": lambda p: RowWiseAdagrad(p, lr=RATE, eps=EPS),
    "adam": lambda p: torch.optim.SparseAdam(p, lr=RATE, eps=EPS),
}


def config_of(optimizer: str) -> SparseOptimizerConfig:
    return SparseOptimizerConfig(name=optimizer, learning_rate=RATE, eps=EPS)  # type: ignore[arg-type]


def copy_rows(theirs: dict[str, torch.Tensor], ours: Any) -> None:
    """Start both from the same rows."""
    for table, weight in theirs.items():
        set_rows(ours, table, torch.arange(NUM_ROWS), weight.detach().clone())


def assert_same_rows(theirs: dict[str, torch.Tensor], ours: Any, rtol: float = 1e-4) -> None:
    for table, weight in theirs.items():
        found = rows_of(ours, table, torch.arange(NUM_ROWS))
        torch.testing.assert_close(found, weight.detach(), rtol=rtol, atol=1e-5)


def score(values: torch.Tensor) -> torch.Tensor:
    """Return a loss that weights every number apart."""
    target = torch.linspace(0.5, 2.0, values.numel()).view_as(values)
    return (values * target).sin().sum()


@pytest.mark.parametrize("unique", [True, False], ids=["unique", "plain"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pooling", ["sum", "mean", "mixed", "weighted"])
def test_bags_train_like_torchrecs(pooling: str, optimizer: str, unique: bool) -> None:
    torch.manual_seed(2)
    weighted = pooling == "weighted"
    tables = bag_tables("sum" if weighted else pooling)
    theirs = TheirBags(tables, is_weighted=weighted)
    for bag in theirs.embedding_bags.values():
        bag.sparse = optimizer == "adam"  # type: ignore[assignment]
    ours = EmbeddingBagCollection(tables, weighted, optimizer=config_of(optimizer))
    weights: dict[str, Any] = {n: b.weight for n, b in theirs.embedding_bags.items()}
    copy_rows(weights, ours)
    update = OPTIMIZERS[optimizer](list(weights.values()))
    for step in range(4):
        lists = lists_of(step)
        expected = theirs(keyed(lists, unique=False, weighted=weighted))
        found = ours(keyed(lists, unique=unique, weighted=weighted))
        assert found.keys() == expected.keys()
        assert found.length_per_key() == expected.length_per_key()
        torch.testing.assert_close(found.values(), expected.values(), rtol=1e-4, atol=1e-5)
        update.zero_grad()
        score(expected.values()).backward()
        update.step()
        score(found.values()).backward()
    assert_same_rows(weights, ours)


@pytest.mark.parametrize("unique", [True, False], ids=["unique", "plain"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lists_train_like_torchrecs(optimizer: str, unique: bool) -> None:
    torch.manual_seed(2)
    theirs = TheirLists(list_tables(), need_indices=True)
    for table in theirs.embeddings.values():
        table.sparse = optimizer == "adam"  # type: ignore[assignment]
    ours = EmbeddingCollection(list_tables(), need_indices=True, optimizer=config_of(optimizer))
    weights: dict[str, Any] = {n: t.weight for n, t in theirs.embeddings.items()}
    copy_rows(weights, ours)
    update = OPTIMIZERS[optimizer](list(weights.values()))
    for step in range(4):
        lists = lists_of(step)
        expected, found = theirs(keyed(lists, unique=False)), ours(keyed(lists, unique=unique))
        assert found.keys() == expected.keys()
        for feature, jagged in expected.items():
            mine = found[feature]
            assert torch.equal(mine.lengths(), jagged.lengths())
            assert torch.equal(mine.weights(), jagged.weights())
            torch.testing.assert_close(mine.values(), jagged.values(), rtol=1e-4, atol=1e-5)
        update.zero_grad()
        sum(score(j.values()) for j in expected.values()).backward()  # type: ignore[union-attr]
        update.step()
        sum(score(j.values()) for j in found.values()).backward()  # type: ignore[union-attr]
    assert_same_rows(weights, ours)


def test_unique_lists_are_given_once_per_tuple_with_their_inverse() -> None:
    collection = EmbeddingCollection(list_tables())
    lists = lists_of(0)
    found = collection.unique(keyed(lists, unique=True))
    jagged, inverse = found["clicked"]
    assert jagged.lengths().tolist() == [len(one) for one in lists["clicked"]]
    assert inverse is not None
    assert inverse.tolist() == INVERSE
    assert found["item"][1] is None


def test_keyed_tensor_in_another_order_regroups_like_torchrecs() -> None:
    theirs, ours = TheirBags(bag_tables("mixed")), EmbeddingBagCollection(bag_tables("mixed"))
    copy_rows({n: b.weight for n, b in theirs.embedding_bags.items()}, ours)  # type: ignore[misc]
    sparse = keyed(lists_of(1), unique=True)
    plain = keyed(lists_of(1), unique=False)
    groups = [["user", "country"], ["item"]]
    found = KeyedTensor.regroup([ours(sparse)], groups)
    for mine, other in zip(found, KeyedTensor.regroup([theirs(plain)], groups), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours(sparse)["item"], ours(sparse).to_dict()["item"])


def test_two_look_ups_before_one_backward_pass_lose_no_update() -> None:
    tables = bag_tables("sum")
    both = EmbeddingBagCollection(tables, optimizer=config_of("sgd"))
    one = EmbeddingBagCollection(tables, optimizer=config_of("sgd"))
    first, second = (keyed(lists_of(step), unique=True) for step in (0, 1))
    (both(first).values().sum() + both(second).values().sum()).backward()
    for sparse in (first, second):  # of a sum, gradients depend on no row
        one(sparse).values().sum().backward()
    for table in ("articles", "users"):
        rows = torch.arange(NUM_ROWS)
        torch.testing.assert_close(rows_of(both, table, rows), rows_of(one, table, rows))


def test_rows_that_move_after_a_look_up_lose_no_update() -> None:
    table = EmbeddingBagConfig(
        name="items", num_embeddings=5000, embedding_dim=8, feature_names=["item"]
    )
    both = EmbeddingBagCollection([table], optimizer=config_of("sgd"))
    one = EmbeddingBagCollection([table], optimizer=config_of("sgd"))
    few, many = (
        KeyedJaggedTensor(["item"], rows, lengths=torch.ones_like(rows))
        for rows in (torch.arange(10), torch.arange(10, 5000))
    )
    loss = both(few).values().sum()
    both(many)  # its rows need larger arrays
    loss.backward()
    one(few).values().sum().backward()
    rows = torch.arange(10)
    assert torch.equal(rows_of(both, "items", rows), rows_of(one, "items", rows))


def test_look_up_without_gradients_creates_and_changes_no_row() -> None:
    collection = EmbeddingBagCollection(bag_tables("mean"))
    with torch.no_grad():
        assert not collection(keyed(lists_of(0), unique=True)).values().requires_grad
    arrays = unpack(collection.state_dict()["_extra_state"])[1]
    assert [len(array) for array in arrays.values()] == [0] * 6


@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_state_dict_continues_training(kind: Any, tmp_path: Path) -> None:
    tables: Any = bag_tables("mixed") if kind is EmbeddingBagCollection else list_tables()

    def train(collection: Any, steps: range) -> None:
        for step in steps:
            found = collection(keyed(lists_of(step), unique=True))
            parts = found.to_dict() if isinstance(found, KeyedTensor) else found
            vectors = [p if isinstance(p, torch.Tensor) else p.values() for p in parts.values()]
            sum(score(v) for v in vectors).backward()  # type: ignore[union-attr]

    straight = kind(tables, optimizer=config_of("adam"))
    train(straight, range(4))
    stopped = kind(tables, optimizer=config_of("adam"))
    train(stopped, range(2))
    torch.save(stopped.state_dict(), tmp_path / "model.pt")
    resumed = kind(tables, optimizer=config_of("adam"))
    resumed.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    train(resumed, range(2, 4))
    rows = torch.arange(NUM_ROWS)
    for table in ("articles", "users", "countries"):
        assert torch.equal(rows_of(resumed, table, rows), rows_of(straight, table, rows))


def with_tables(**changes: Any) -> list[EmbeddingBagConfig]:
    tables = bag_tables("mean")
    for name, value in changes.items():
        setattr(tables[0], name, value)
    return tables


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a GPU": (
        lambda: EmbeddingBagCollection(bag_tables("mean"), device=torch.device("cuda")),
        "device must be cpu, where a collection of Presage keeps its rows, got cuda; leave it out "
        "and move the result, or shard TorchRec's as in docs/distributed.md",
    ),
    "look-ups on a device": (
        lambda: EmbeddingBagCollection(bag_tables("mean"))(
            keyed(lists_of(0), unique=True).to(torch.device("meta"))
        ),
        "look-ups must be in CPU memory, where a collection of Presage keeps its rows, got a "
        "KeyedJaggedTensor on meta; pass the batch's before it is moved, and move the result",
    ),
    "half precision": (
        lambda: EmbeddingBagCollection(with_tables(data_type=DataType.FP16)),
        "data_type must be FP32, got FP16 of table 'countries'; leave it out",
    ),
    "no pooling": (
        lambda: EmbeddingBagCollection(with_tables(pooling=PoolingType.NONE)),
        "pooling must be SUM or MEAN, got NONE of table 'countries'; use "
        "EmbeddingCollection for sequences",
    ),
    "a feature of two tables": (
        lambda: EmbeddingBagCollection(with_tables(feature_names=["user"])),
        "feature names must be unique, got 'user' twice; rename one",
    ),
    "a table without features": (
        lambda: EmbeddingBagCollection(with_tables(feature_names=[])),
        "table 'countries' has no feature_names; add one",
    ),
    "a feature that is not there": (
        lambda: EmbeddingBagCollection(with_tables(feature_names=["city"]))(
            keyed(lists_of(0), unique=True)
        ),
        "features must be keys of the KeyedJaggedTensor, got 'city'; it has clicked, item, user, "
        "country",
    ),
    "an id beyond its table": (
        lambda: EmbeddingBagCollection(with_tables(num_embeddings=2))(
            keyed({**lists_of(0), "country": [[1, 3]] * 8}, unique=True)
        ),
        "ids must be below num_embeddings, got 3 for table 'countries' with num_embeddings=2; "
        "hash them, or enlarge the table",
    ),
    "a negative id": (
        lambda: EmbeddingBagCollection(bag_tables("mean"))(
            keyed({**lists_of(0), "country": [[1, -3]] * 8}, unique=False)
        ),
        "ids must not be negative, got -3 of feature 'country'; hash them",
    ),
    "no weights": (
        lambda: EmbeddingBagCollection(bag_tables("mean"), is_weighted=True)(
            keyed(lists_of(0), unique=True)
        ),
        "KeyedJaggedTensor has no weights for a weighted collection; pass them, or leave "
        "is_weighted out",
    ),
    "lists of two widths": (
        lambda: EmbeddingCollection(
            [
                EmbeddingConfig(
                    name=n, num_embeddings=9, embedding_dim=dim, feature_names=[f"f{dim}"]
                )
                for n, dim in (("a", 4), ("b", 8))
            ]
        ),
        "tables of an EmbeddingCollection must have one width, got {'a': 4, 'b': 8}; make a "
        "collection of each",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_collection_refuses_by_name(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


def test_init_function_that_is_left_out_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="init_fn of table 'countries' is ignored"):
        EmbeddingBagCollection(with_tables(init_fn=torch.nn.init.zeros_))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EmbeddingBagCollection(bag_tables("mean"))
