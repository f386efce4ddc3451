"""The functions of `embedding.cpp`, called by `compiled.py`.

Floats are all float32, or all float64.
"""

from collections.abc import Sequence

from torch import Tensor

def pool(
    features: Sequence[
        tuple[
            Tensor,  # rows with their state
            Tensor | None,  # positions of rows
            Tensor,  # row of each look-up
            Tensor,  # offsets of bags
            Tensor | None,  # weights of look-ups
            Tensor | None,  # samples by bag
            Tensor | None,  # offsets of samples
            int,  # first vector
            int,  # stride of vectors
            int,  # column
        ]
    ],
    out: Tensor,
    scales: Tensor | None,
    threads: int,
) -> None: ...
def segment_sum(
    groups: Sequence[tuple[Tensor, Tensor, int, int, int]],
    gradient: Tensor,
    out: Tensor,
    threads: int,
) -> None: ...
def update(
    tables: Sequence[
        tuple[
            Tensor,  # rows with their state
            Tensor | None,  # positions of rows
            Tensor,  # readers
            Tensor,  # offsets of readers
            Tensor | None,  # weights of readers
            Tensor | None,  # extra gradient
        ]
    ],
    gradients: tuple[Tensor, int, Tensor, Tensor | None],
    rule: tuple[str, float, float, float, float],
    threads: int,
) -> None: ...
def merge(
    left: Tensor, left_sums: Tensor, right: Tensor, right_sums: Tensor, rows: Tensor, sums: Tensor
) -> int: ...
