"""What the engine is given to send: an address only where the elements are there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from pipemorph_trainer.links.channels.delegated import payload_of

VALUES = torch.arange(6.0)


@pytest.mark.parametrize(
    "tensor",
    [VALUES, nn.Parameter(VALUES), VALUES.reshape(2, 3).T, torch.conj(VALUES + 1j)],
    ids=["plain", "parameter", "strided", "conjugate"],
)
def test_a_tensor_whose_memory_is_known_is_sent_from_there(tensor: Tensor) -> None:
    found = payload_of(tensor)
    assert isinstance(found, Tensor)
    assert found.is_contiguous() and found.data_ptr()
    assert torch.equal(found, tensor.resolve_conj())


def test_the_result_of_a_collective_is_waited_for() -> None:
    """Such a tensor, as a stage that ends in RowwiseParallel returns it, has the address 0."""
    tensor = AsyncCollectiveTensor(VALUES.clone())
    assert tensor.data_ptr() == 0
    found = payload_of(tensor)
    assert isinstance(found, memoryview)
    assert bytes(found) == VALUES.numpy().tobytes()


def test_a_tensor_without_memory_is_refused() -> None:
    with pytest.raises((TypeError, RuntimeError, NotImplementedError)):
        payload_of(torch.empty(4, device="meta"))


def test_an_empty_tensor_needs_no_memory() -> None:
    found = payload_of(torch.empty(0))
    assert isinstance(found, Tensor) and found.nbytes == 0
