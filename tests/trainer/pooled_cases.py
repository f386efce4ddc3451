"""Jagged steps over two tables, and how they are expanded for a reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from presage.schemas.arrays import offsets_of
from presage.schemas.dataset.order import Step
from presage.trainer.data.collate import CollatedBatch
from presage.trainer.data.lookup import KeyedBags, inverse_of, table_lookups, vector_layout

NUM_ROWS = 6
TABLES = {"items": ("item", "clicked"), "users": ("user",)}
FEATURES = ("item", "clicked", "user")
GROUP_OF: dict[str, str | None] = {"item": None, "clicked": "session", "user": "session"}


@dataclass(frozen=True)
class Case:
    """One step: bags of each feature, those of the group once per tuple."""

    bags: dict[str, list[list[int]]]
    inverse: list[int]
    dim: int
    seed: int

    @property
    def num_samples(self) -> int:
        return len(self.inverse)

    def rng(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def expanded(self, feature: str) -> list[list[int]]:
        bags = self.bags[feature]
        return bags if GROUP_OF[feature] is None else [bags[i] for i in self.inverse]

    def factors_of(self, feature: str) -> list[list[float]]:
        """Return a weight of each look-up, made from its row and its place in the bag."""
        return [[(row + 1) / (at + 2) for at, row in enumerate(b)] for b in self.bags[feature]]

    def batch(
        self, *, weighted: torch.dtype | None = None, expanded: bool = False
    ) -> CollatedBatch:
        """Return what the reader makes of it."""
        group_of: dict[str, str | None] = dict.fromkeys(FEATURES) if expanded else GROUP_OF
        bags = {f: self.expanded(f) if expanded else self.bags[f] for f in FEATURES}
        indices = np.array(self.inverse, np.int64)
        num_tuples = len(self.bags["user"])
        places = vector_layout(group_of, {"session": num_tuples}, self.num_samples)
        inverse = inverse_of(indices, num_tuples)
        lengths = np.array([len(bag) for f in FEATURES for bag in bags[f]], np.int64)
        weights = np.array([x for f in FEATURES for bag in self.factors_of(f) for x in bag])
        dtype = {torch.float32: np.float32, torch.float64: np.float64}
        keyed = KeyedBags(
            num_bags={f: len(bags[f]) for f in FEATURES},
            values=np.concatenate([flat(bags[f]) for f in FEATURES]),
            lengths=lengths,
            offsets=offsets_of(lengths),
            weights=None if weighted is None else weights.astype(dtype[weighted]),
            weighted=frozenset() if weighted is None else frozenset(FEATURES),
        )
        return CollatedBatch(
            step=Step(0, 0, 0, np.arange(1)),
            num_samples=self.num_samples,
            labels=torch.zeros(self.num_samples),
            weights=torch.ones(self.num_samples),
            dense=torch.zeros(self.num_samples, 0),
            sparse=KeyedJaggedTensor.empty(),
            lookups=table_lookups(TABLES, keyed, places),
            groups={} if expanded else {"session": inverse},
            group_of=group_of,
        )


def flat(bags: list[list[int]]) -> np.ndarray:
    """Return all look-ups end to end."""
    return np.array([row for bag in bags for row in bag], np.int64)


@st.composite
def cases(draw: st.DrawFn, dims: tuple[int, ...] = (4, 8, 12, 16, 20, 32, 64, 128, 148)) -> Case:
    """Draw a step: empty bags, repeated rows, one row, no row."""
    num_tuples = draw(st.integers(1, 5))
    rest = draw(st.lists(st.integers(0, num_tuples - 1), max_size=8))
    inverse = draw(st.permutations([*range(num_tuples), *rest]))
    bag = st.lists(st.integers(0, draw(st.integers(0, NUM_ROWS - 1))), max_size=6)
    bags = {
        f: draw(st.lists(bag, min_size=n, max_size=n))
        for f, n in (("item", len(inverse)), ("clicked", num_tuples), ("user", num_tuples))
    }
    return Case(bags, list(inverse), draw(st.sampled_from(dims)), draw(st.integers(0, 99)))
