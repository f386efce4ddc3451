"""The functions of `interaction.cpp`, called by `compiled.py`.

Floats are all float32, or all float64.
"""

from torch import Tensor

_Vectors = tuple[Tensor | None, Tensor, Tensor]

def interact(
    rows: _Vectors, own: _Vectors, order: Tensor, offsets: Tensor, threads: int
) -> None: ...
def interact_back(
    rows: _Vectors,
    own: _Vectors,
    to_rows: _Vectors,
    to_own: _Vectors,
    order: Tensor,
    offsets: Tensor,
    threads: int,
) -> None: ...
