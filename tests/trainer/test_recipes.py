"""What training loops of torch do to a model, with our collection and with TorchRec's.

`table()` is the table of docs/own_model.md.
"""

import copy
import io
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.modules.embedding_modules import EmbeddingBagCollection as TheirBags

from presage.trainer.embedding.collections import (
    EmbeddingBagCollection,
    rows_of,
    set_learning_rate,
    set_rows,
)
from presage.trainer.embedding.optimizer import RowOptimizer
from tests.trainer.test_collections import (
    NUM_ROWS,
    OPTIMIZERS,
    RATE,
    assert_same_rows,
    bag_tables,
    config_of,
    copy_rows,
    keyed,
    lists_of,
    score,
)

TABLES = ("articles", "users", "countries")


class Model(nn.Module):
    """A collection and a layer."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tables, self.top = tables, nn.Linear(32, 2)

    def forward(self, step: int) -> torch.Tensor:
        return self.top(self.tables(keyed(lists_of(step), unique=False)).values())


class Loop:
    """A model with its optimizers, of TorchRec or ours."""

    def __init__(self, optimizer: str, *, ours: bool, deferred: bool = False) -> None:
        torch.manual_seed(0)
        theirs = TheirBags(bag_tables("sum"))
        self.weights: dict[str, Any] = {n: b.weight for n, b in theirs.embedding_bags.items()}
        self.ours, self.optimizer = ours, optimizer
        tables: nn.Module = theirs
        if ours:
            tables = self.new_tables()
            copy_rows(self.weights, tables)
        else:
            for bag in theirs.embedding_bags.values():
                bag.sparse = optimizer == "adam"  # type: ignore[assignment]
        self.model: Any = Model(tables)
        dense = torch.optim.SGD((self.model if ours else self.model.top).parameters(), lr=RATE)
        self.optimizers: list[torch.optim.Optimizer] = [dense]
        if not ours:
            self.optimizers.append(OPTIMIZERS[optimizer](list(theirs.parameters())))
        elif deferred:
            self.optimizers.append(RowOptimizer(self.model))

    def new_tables(self) -> EmbeddingBagCollection:
        return EmbeddingBagCollection(bag_tables("sum"), optimizer=config_of(self.optimizer))

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def train(self, first: int, last: int, change: Callable[[], Any] = lambda: None) -> None:
        for step in range(first, last):
            self.zero_grad()
            score(self.model(step)).backward()
            change()
            self.step()


def plain(loop: Loop) -> None:
    loop.train(0, 3)


def zeros_for_gradients(loop: Loop) -> None:
    for step in range(3):
        for each in loop.optimizers:
            each.zero_grad(set_to_none=False)
        score(loop.model(step)).backward()
        loop.step()


def two_losses(loop: Loop) -> None:
    for step in range(3):
        loop.zero_grad()
        first, second = loop.model(step).unbind(1)
        score(first).backward(retain_graph=True)
        score(second).backward()
        loop.step()


def accumulation(loop: Loop) -> None:
    for step in range(3):
        loop.zero_grad()
        for part in range(2):
            score(loop.model(2 * step + part)).backward()
        loop.step()


def grad_scaler(loop: Loop) -> None:
    """Scale losses, and skip a step that is not finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        loop.zero_grad()
        loss = score(loop.model(step)) * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        for each in loop.optimizers:
            scaler.step(each)
        scaler.update()


def clipping(clip: Callable[[list[torch.Tensor], float], Any]) -> Callable[[Loop], None]:
    def run(loop: Loop) -> None:
        parameters = list(loop.model.parameters())
        for each in loop.optimizers:
            if isinstance(each, RowOptimizer):
                parameters += each.parameters()
        loop.train(0, 3, lambda: clip(parameters, 0.05))

    return run


def schedule(loop: Loop) -> None:
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in loop.optimizers]
    for step in range(3):
        loop.train(step, step + 1)
        for each in schedules:
            each.step()
        if loop.ours and len(loop.optimizers) == 1:
            set_learning_rate(loop.model.tables, float(schedules[0].get_last_lr()[0]))


def freezing(loop: Loop) -> None:
    loop.train(0, 1)
    loop.model.tables.requires_grad_(False)
    loop.train(1, 2)
    loop.model.requires_grad_(True)
    loop.train(2, 3)


def best_weights(loop: Loop) -> None:
    """Return to an earlier state, after other rows were trained."""
    loop.train(0, 1)
    model, optimizers = (copy.deepcopy(x.state_dict()) for x in (loop.model, loop.optimizers[-1]))
    loop.train(1, 3)
    loop.model.load_state_dict(model)
    loop.optimizers[-1].load_state_dict(optimizers)
    loop.train(1, 2)


def copying(copy_of: Callable[[Any], Any]) -> Callable[[Loop], None]:
    """Return a loop that trains a copy for nothing, and then itself."""

    def run(loop: Loop) -> None:
        loop.train(0, 1)
        copied = copy_of(loop.model)
        assert torch.equal(copied(1), loop.model(1))
        score(copied(1)).backward()
        loop.train(1, 3)

    return run


def compiled(loop: Loop) -> None:
    if loop.ours:
        loop.model.forward = torch.compile(loop.model.forward, backend="eager")
    loop.train(0, 2)


def saved(save_and_load: Callable[[dict[str, Any], Path], Any]) -> Callable[[Loop], None]:
    """Return a loop that is saved, and loaded into a new model."""

    def run(loop: Loop) -> None:
        loop.train(0, 2)
        with TemporaryDirectory() as folder:
            state = save_and_load(loop.model.state_dict(), Path(folder))
        if loop.ours:
            loop.model.tables = loop.new_tables()
        loop.model.load_state_dict(state)
        loop.train(2, 3)

    return run


def by_torch(state: dict[str, Any], folder: Path) -> Any:
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


def by_bytes(state: dict[str, Any], folder: Path) -> Any:
    """Write what safetensors, and so Accelerate, write of each tensor: type, shape and bytes."""
    del folder
    kept = {
        name: (t.dtype, t.shape, bytes(t.detach().untyped_storage())) for name, t in state.items()
    }
    return {
        name: torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        if data
        else torch.empty(shape, dtype=dtype)
        for name, (dtype, shape, data) in kept.items()
    }


def by_dcp(state: dict[str, Any], folder: Path) -> Any:
    save(state, checkpoint_id=folder / "dcp", no_dist=True)
    dcp_to_torch_save(folder / "dcp", folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


def into_a_new_model(loop: Loop) -> None:
    loop.train(0, 1)
    with TemporaryDirectory() as folder:
        save(loop.model.state_dict(), checkpoint_id=folder, no_dist=True)
        new = Model(loop.new_tables()).state_dict()
        load(new, checkpoint_id=folder, no_dist=True)


def state_of_parts(loop: Loop) -> None:
    loop.train(0, 1)
    new = Model(loop.new_tables()) if loop.ours else loop.model
    set_model_state_dict(new, get_model_state_dict(loop.model))
    if loop.ours:
        loop.model.tables = new.tables
    loop.train(1, 2)


def averaged(loop: Loop) -> None:
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    loop.train(0, 1)
    average.update_parameters(loop.model)
    average(1)


def with_source(loop: Loop) -> None:
    source: Any = SimpleNamespace(add_tables=lambda *_: None, version=0, train_step=0)
    copy.deepcopy(EmbeddingBagCollection(bag_tables("sum"), source=source))


CHANGED = (
    "gradients were changed after the backward pass, which had updated the rows by them, as by "
    "GradScaler or clip_grad_norm_; update rows by presage.trainer.embedding.optimizer.RowOptimizer"
)
FUSED, DEFERRED, BOTH = "in the backward pass", "by `RowOptimizer`", "both"


@dataclass(frozen=True)
class Recipe:
    """A use of a model; `message` if it is refused."""

    use: str
    run: Callable[[Loop], None]
    updated: str = BOTH
    message: str = ""
    optimizer: str = "sgd"

    @property
    def deferred(self) -> list[bool]:
        return {FUSED: [False], DEFERRED: [True], BOTH: [False, True]}[self.updated]


RECIPES = [
    Recipe("one loss and one `step`", plain, BOTH, "", "adagrad"),
    Recipe("`zero_grad(set_to_none=False)`, SGD", zeros_for_gradients),
    Recipe("several `backward` of one forward pass, SGD", two_losses),
    Recipe("the same, other optimizers", two_losses, DEFERRED, "", "adagrad"),
    Recipe("gradient accumulation", accumulation, DEFERRED, "", "adam"),
    Recipe("`GradScaler`, with a skipped step", grad_scaler, DEFERRED, "", "rowwise_adagrad"),
    Recipe("`GradScaler`", grad_scaler, FUSED, CHANGED),
    Recipe(
        "`clip_grad_norm_`, also of `optimizer.parameters()`",
        clipping(nn.utils.clip_grad_norm_),
        DEFERRED,
    ),
    Recipe("`clip_grad_norm_`", clipping(nn.utils.clip_grad_norm_), FUSED, CHANGED),
    Recipe("`clip_grad_value_`, likewise", clipping(nn.utils.clip_grad_value_), DEFERRED),
    Recipe("`clip_grad_value_`", clipping(nn.utils.clip_grad_value_), FUSED, CHANGED),
    Recipe("schedules, by `set_learning_rate(collection, rate)`", schedule, FUSED),
    Recipe("schedules of `torch.optim.lr_scheduler`", schedule, DEFERRED, "", "rowwise_adagrad"),
    Recipe("`requires_grad_(False)` of the collection or the model", freezing),
    Recipe("`load_state_dict`, also of an earlier state", best_weights, BOTH, "", "adagrad"),
    Recipe("`copy.deepcopy`", copying(copy.deepcopy)),
    Recipe("pickle", copying(lambda model: pickle.loads(pickle.dumps(model)))),
    Recipe(
        "arguments of spawned processes",
        copying(lambda model: pickle.loads(ForkingPickler.dumps(model))),
    ),
    Recipe("`torch.compile`, with a graph break", compiled),
    Recipe("`torch.save`", saved(by_torch), FUSED),
    Recipe("safetensors, Accelerate's `save_state`", saved(by_bytes), FUSED),
    Recipe("`get_model_state_dict`, `set_model_state_dict`", state_of_parts, FUSED),
    Recipe(
        "`torch.distributed.checkpoint.save`, and `dcp_to_torch_save` to load it",
        saved(by_dcp),
        FUSED,
    ),
    Recipe(
        "`torch.distributed.checkpoint.load` into a model with other rows",
        into_a_new_model,
        FUSED,
        "Size mismatch between saved torch.Size",
    ),
    Recipe(
        "`AveragedModel` (EMA, SWA)",
        averaged,
        BOTH,
        "rows of a collection are no parameters, which AveragedModel and others copy; average the "
        "other modules, and look up the rows of the trained model",
    ),
    Recipe(
        "`share_memory()` (Hogwild)",
        lambda loop: loop.model.share_memory(),
        BOTH,
        "rows of a collection cannot be shared by processes, as share_memory() would; use ranks "
        "of torch.distributed, or presage train --replicas",
    ),
    Recipe(
        "`half()`, `bfloat16()`, `double()`",
        lambda loop: loop.model.half(),
        BOTH,
        "rows of a collection must stay float32, got float16; convert the other modules, or make "
        "the collection with another dtype",
    ),
    Recipe(
        "copies of a collection with a source",
        with_source,
        BOTH,
        "collection with a source cannot be copied or pickled: table 'countries'; "
        "make the copy without source, and set its rows by "
        "presage.trainer.embedding.collections.set_rows",
    ),
]


def table() -> str:
    """Return the uses as a table in Markdown."""
    lines = ["| use | rows are updated | result |", "| --- | --- | --- |"]
    for each in RECIPES:
        result = f"refused: `{each.message}`" if each.message else "as TorchRec's"
        lines.append(f"| {each.use} | {each.updated} | {result} |")
    return "\n".join(lines)


def test_table_of_the_document_is_that_of_the_recipes(repository: Path) -> None:
    text = (repository / "docs/own_model.md").read_text()
    written = text.partition("<!-- recipes -->")[2].partition("<!-- end -->")[0].strip()
    assert written == table(), "copy what tests.trainer.test_recipes.table() returns"


CASES = [
    pytest.param(
        each,
        deferred,
        id=f"{each.use}{', deferred' * deferred}",
        marks=[pytest.mark.slow] * (each.run is compiled),
    )
    for each in RECIPES
    for deferred in each.deferred
]


@pytest.mark.parametrize(("recipe", "deferred"), CASES)
def test_loop_trains_as_with_torchrec_or_is_refused(recipe: Recipe, deferred: bool) -> None:
    ours = Loop(recipe.optimizer, ours=True, deferred=deferred)
    if recipe.message:
        # torch wraps the errors of a checkpoint
        with pytest.raises(BaseException, match=re.escape(recipe.message)):
            recipe.run(ours)
        return
    theirs = Loop(recipe.optimizer, ours=False)
    recipe.run(theirs)
    recipe.run(ours)
    assert_same_rows(theirs.weights, ours.model.tables)
    torch.testing.assert_close(ours.model.top.weight, theirs.model.top.weight, rtol=1e-4, atol=1e-5)


def test_state_of_another_collection_is_refused() -> None:
    state = Loop("adam", ours=True).model.tables.state_dict()
    shared = "; load it into a collection that is made with the same arguments"
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (bag_tables("sum"), {"optimizer": config_of("sgd")}, "optimizer='sgd', got 'adam'"),
        (bag_tables("sum"), {"seed": 3}, "tables.countries.seed=3, got 0"),
        (bag_tables("mixed"), {}, "tables.countries.dim=4, got 8"),
        (bag_tables("sum")[1:], {}, "tables.countries=None, got {"),
    ]
    for tables, options, message in cases:
        other = EmbeddingBagCollection(tables, **{"optimizer": config_of("adam"), **options})
        with pytest.raises(ValueError, match=re.escape(f"must have {message}")) as caught:
            other.load_state_dict(state)
        assert str(caught.value).endswith(shared)
    with pytest.raises(ValueError, match="is not one uint8 tensor, but Tensor"):
        EmbeddingBagCollection(bag_tables("sum")).set_extra_state(torch.zeros(4))


@pytest.mark.slow
def test_large_collection_is_copied_without_the_memory_reserved_for_it() -> None:
    tables = bag_tables("sum")
    tables[0].num_embeddings = 1 << 20
    tables[0].embedding_dim = 32
    ours = EmbeddingBagCollection(tables[:1], optimizer=config_of("sgd"))
    rows = torch.arange(600_000)  # beyond 64 MiB, addresses of all memory are reserved
    set_rows(ours, "countries", rows, torch.zeros(len(rows), 32))
    buffer = io.BytesIO()
    pickle.dump(ours, buffer)
    assert buffer.tell() < 100 << 20
    assert torch.equal(
        rows_of(copy.deepcopy(ours), "countries", rows[-NUM_ROWS:]), torch.zeros(NUM_ROWS, 32)
    )
