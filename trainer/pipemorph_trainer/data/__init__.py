"""Batches whose samples differ in work: costs of samples, and deals of them to microbatches."""

from pipemorph_trainer.data.balance import Deal, balance
from pipemorph_trainer.data.cost_model import CostModel, fit_costs
from pipemorph_trainer.data.sampler import BalancedBatchSampler, StepBatch
from pipemorph_trainer.data.shapes import pack_samples, pad_microbatches

__all__ = [
    "BalancedBatchSampler",
    "CostModel",
    "Deal",
    "StepBatch",
    "balance",
    "fit_costs",
    "pack_samples",
    "pad_microbatches",
]
