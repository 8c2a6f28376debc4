"""Tensors of microbatches whose samples have different lengths: packed, or padded to rows.

All microbatches of a step have the same shapes, since the stages of a pipeline exchange them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipemorph.errors import InputError


def pack_samples(
    samples: Sequence[Tensor], capacity: int, fill: float = 0
) -> tuple[Tensor, Tensor]:
    """Pack samples of shape (length, …) one after another: a tensor of shape (capacity, …), filled
    up with ``fill``; and the number of the sample at each place, shape (capacity,), −1 after the
    last. Raises :class:`InputError` if they do not fit."""
    lengths = torch.tensor([len(each) for each in samples])
    if int(lengths.sum()) > capacity:
        raise InputError(
            f"samples are {int(lengths.sum())} long in all; expected at most the capacity,"
            f" {capacity}"
        )
    packed = samples[0].new_full((capacity, *samples[0].shape[1:]), fill)
    packed[: int(lengths.sum())] = torch.cat(list(samples))
    numbers = torch.full((capacity,), -1)
    numbers[: int(lengths.sum())] = torch.repeat_interleave(lengths)
    return packed, numbers


def pad_microbatches(microbatches: Sequence[Sequence[Tensor]], fill: float = 0) -> list[Tensor]:
    """Pad the samples of a step, by microbatch, to rows of one length, and microbatches to one
    number of rows: tensors of shape (rows, longest, …)."""
    rows = max(map(len, microbatches))
    longest = max(len(each) for own in microbatches for each in own)
    first = microbatches[0][0]
    found = [first.new_full((rows, longest, *first.shape[1:]), fill) for _ in microbatches]
    for padded, own in zip(found, microbatches, strict=True):
        for row, each in enumerate(own):
            padded[row, : len(each)] = each
    return found
