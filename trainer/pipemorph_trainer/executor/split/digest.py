"""Digests of tensors of a few kilobytes, to compare runs without copies of their tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Elements hashed at a time. Bounds the extra memory of a digest to a few megabytes."""
SAMPLE = 1024
"""Evenly spread elements kept of each tensor, for comparisons with a tolerance."""
LOOSE = 1e-2
"""Tolerance for values that differ even between two unsplit runs."""

_ROUNDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Digest:
    """Shape, dtype, a 64-bit hash per :data:`CHUNK` elements, and data for tolerances.

    The hash always detects a single different element, and misses several with a probability of
    about 2⁻⁶³. Like in ``torch.equal``, 0 and -0 are equal; unlike there, equal NaN are equal.
    """

    shape: torch.Size
    dtype: torch.dtype
    hashes: Tensor
    sums: Tensor
    """Sum of absolute values per chunk; empty if the dtype is not floating-point."""
    sample: Tensor

    @staticmethod
    def of(tensor: Tensor) -> Digest:
        """Digest of a tensor; of this rank's part if it is distributed."""
        to_local = getattr(tensor, "to_local", None)
        local: Tensor = tensor.detach() if to_local is None else to_local().detach()
        if local.layout is not torch.strided:
            local = local.to_dense()
        flat = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
        flat = flat.reshape(-1)
        hasher = _Hasher(flat)
        hashes, sums = [], []
        for chunk in torch.split(flat, CHUNK):
            hashes.append(hasher.hash(chunk))
            if chunk.dtype in _ROUNDED:
                wide = torch.promote_types(chunk.dtype, torch.float32)
                sums.append(torch.linalg.vector_norm(chunk, 1, dtype=wide))
        return Digest(
            shape=tensor.shape,
            dtype=tensor.dtype,
            hashes=torch.stack(hashes),
            sums=torch.stack(sums) if sums else torch.empty(0),
            sample=flat[:: max(1, flat.numel() // SAMPLE)].clone(),
        )

    def same(self, other: Digest) -> bool:
        """Whether the tensors are equal to the bit."""
        return self._alike(other) and torch.equal(self.hashes, other.hashes)

    def close(self, other: Digest, tolerance: float = LOOSE) -> bool:
        """Whether the tensors agree to ``tolerance``: sampled elements relative to the largest one,
        and the sum of absolute values of each chunk."""
        if self.same(other):
            return True
        if not self._alike(other) or not self.sums.numel():
            return False
        sample = self.sample.double()
        scale = float(sample.abs().max())
        return torch.allclose(
            sample, other.sample.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True
        ) and torch.allclose(self.sums, other.sums, rtol=tolerance, atol=0.0, equal_nan=True)

    def _alike(self, other: Digest) -> bool:
        return self.shape == other.shape and self.dtype == other.dtype


class _Hasher:
    """Hashes the chunks of one tensor, with buffers allocated once."""

    def __init__(self, flat: Tensor) -> None:
        words = -(-min(flat.numel(), CHUNK) * flat.element_size() // 8)
        self._bytes = torch.empty(8 * words, dtype=torch.uint8, device=flat.device)
        self._products = torch.empty(words, dtype=torch.int64, device=flat.device)
        self._weights = _weights(words, flat.device)

    def hash(self, chunk: Tensor) -> Tensor:
        """Sum of 8-byte words, each multiplied by the odd number of its position, modulo 2⁶⁴.
        Integers, so the result does not depend on the order of additions."""
        nbytes = chunk.numel() * chunk.element_size()
        words = -(-nbytes // 8)
        self._bytes[nbytes : 8 * words] = 0
        known = self._bytes[:nbytes].view(chunk.dtype)
        if chunk.dtype in _ROUNDED:
            # -0 becomes 0.
            torch.add(chunk, 0.0, out=known)
        else:
            known.copy_(chunk)
        bits = self._bytes[: 8 * words].view(torch.int64)
        return torch.mul(bits, self._weights[:words], out=self._products[:words]).sum()


def _weights(count: int, device: torch.device) -> Tensor:
    """Pseudo-random odd numbers, the same at every call. Does not use global random state."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    for factor in (-0x61C8864680B583EB, -0x2917014799A6026D):
        mixed.mul_(factor)
        mixed.bitwise_xor_(mixed >> 32)
    return mixed.bitwise_or_(1)
