"""Products of vectors by the compiled kernel, against torch operators and their autograd."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from presage.trainer.data.lookup import Inverse, inverse_of
from presage.trainer.embedding.kernels.compiled import CompiledInteractions
from presage.trainer.embedding.kernels.interface import Vectors
from presage.trainer.embedding.kernels.torch_ops import TorchInteractions
from presage.trainer.models.torchrec_models import interact

COMPILED, TORCH = CompiledInteractions(), TorchInteractions()
Interactions = CompiledInteractions | TorchInteractions


def case(
    seed: int, shape: tuple[int, ...], firsts: tuple[bool, bool], dtype: torch.dtype
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """Return the vectors of rows and samples, and the row of each sample."""
    num_rows, num_samples, m, k, dim = shape
    random = torch.Generator().manual_seed(seed)

    def vectors(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, dtype=dtype).requires_grad_()

    tensors: list[torch.Tensor | None] = []
    for count, block, first in zip((num_rows, num_samples), (m, k), firsts, strict=True):
        tensors += [vectors(count, dim) if first else None, vectors(count, block, dim)]
    indices = torch.randint(0, num_rows, (num_samples,), generator=random)
    return tensors, indices


def products_by(
    kernel: Interactions, tensors: Sequence, inverse: Inverse
) -> tuple[torch.Tensor, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("presage.trainer.models.torchrec_models.CompiledInteractions", lambda: kernel)
        return interact(Vectors(*tensors[:2]), Vectors(*tensors[2:]), inverse)


def results(
    kernel: Interactions, tensors: Sequence, indices: torch.Tensor, num_rows: int
) -> list[torch.Tensor]:
    """Return both outputs and the gradients of all vectors under a fixed gradient."""
    inverse = inverse_of(indices.numpy(), num_rows)
    out = products_by(kernel, tensors, inverse)
    random = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=out[0].dtype)
    for o in out:
        loss = loss + (o * torch.randn(o.shape, generator=random, dtype=o.dtype)).sum()
    given = [t for t in tensors if t is not None]
    return [*(o.detach() for o in out), *torch.autograd.grad(loss, given)]


SHAPES = st.tuples(
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 70),
)


@pytest.mark.slow
@given(st.integers(0, 99), SHAPES, st.tuples(st.booleans(), st.booleans()))
@example(0, (3, 900, 3, 1, 64), (True, False))  # rows of several pieces
@example(0, (300, 40, 17, 14, 64), (False, True))  # rows without samples
def test_compiled_products_are_those_of_torch(
    seed: int, shape: tuple[int, ...], firsts: tuple[bool, bool]
) -> None:
    assume(shape[2] or firsts[0])
    tensors, indices = case(seed, shape, firsts, torch.float64)
    wanted = results(TORCH, tensors, indices, shape[0])
    found = results(COMPILED, tensors, indices, shape[0])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_torch_products_have_the_gradients_of_autograd() -> None:
    tensors, indices = case(2, (4, 9, 3, 2, 5), (True, True), torch.float64)
    inverse = inverse_of(indices.numpy(), 4)

    def products(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return products_by(TORCH, given, inverse)

    assert torch.autograd.gradcheck(products, [t for t in tensors if t is not None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    shape = (40, 3000, 7, 5, 32)
    tensors, indices = case(3, shape, (True, False), dtype)
    indices = indices // 13  # few rows, some of several pieces, some of none
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(results(COMPILED, tensors, indices, shape[0]))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
