"""Batch sampler for torch's DataLoader, whose microbatches are balanced over replicas."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from pipemorph.errors import InputError
from pipemorph.planning import Problem
from pipemorph_trainer.data.balance import Deal, balance

PrepareStep = Callable[[list[Any]], Iterable[Any]]
"""Function that makes the microbatches of a step from those that a loader yielded."""


class StepBatch(NamedTuple):
    """Microbatches of one step of this replica, as the loader returned them, and their costs."""

    microbatches: list[Any]
    costs: tuple[float, ...]


class BalancedBatchSampler(Sampler[list[int]]):
    """Batch sampler that yields the microbatches of one replica, each a list of sample indices.

    Step *k* uses the same samples as without balancing, in all replicas together: the *k*-th
    ``batch_size`` of the epoch's permutation. :func:`balance` deals them, equally on every rank, so
    ranks need not exchange anything: make it with the same arguments, but ``replica``, on each rank
    that reads data. Samples that do not fill the last step of an epoch are left out.

    Give it to a loader as ``batch_sampler``, and draw steps with :meth:`iterate_steps`, or let
    ``step`` of the pipeline draw them from :meth:`make_source`. As
    ``state={"sampler": sampler}`` of :class:`pipemorph_trainer.Pipeline` it resumes after the last
    finished step, also with another number of replicas or microbatches.

    Args:
        costs: of all samples of the data set: tokens, or :meth:`CostModel.price_sample`.
        batch_size: samples of a step, over all replicas.
        replicas, microbatches, stages, problem, base, capacity, padded: as of :func:`balance`.
        sizes: of all samples, for ``capacity``.
        replica: number of this replica; all ranks of a pipeline have one.
        seed: of the permutations; None: samples stay in their order.

    Raises :class:`InputError` for arguments that do not fit together.
    """

    def __init__(
        self,
        costs: Sequence[float] | Tensor,
        *,
        batch_size: int,
        replicas: int,
        replica: int,
        microbatches: int | Sequence[int],
        stages: int | None = None,
        problem: Problem | Sequence[Problem] | None = None,
        base: float = 0.0,
        sizes: Sequence[float] | Tensor | None = None,
        capacity: float | None = None,
        padded: bool = False,
        seed: int | None = 0,
    ) -> None:
        self._costs = torch.as_tensor(costs, dtype=torch.float64).tolist()
        if not 1 <= batch_size <= len(self._costs):
            raise InputError(
                f"batch_size is {batch_size}; expected 1 to {len(self._costs)}, the number of"
                " samples"
            )
        if not 0 <= replica < replicas:
            raise InputError(f"replica is {replica}; expected 0 to {replicas - 1}")
        self._batch_size, self._seed = batch_size, seed
        self._replicas, self._replica, self._microbatches = replicas, replica, microbatches
        self._options: dict[str, Any] = {
            "stages": stages, "problem": problem, "base": base, "capacity": capacity,
            "padded": padded,
        }  # fmt: skip
        self._sizes = None if sizes is None else torch.as_tensor(sizes).tolist()
        self._in_proportion = False
        self._step = 0
        """Next step of a loader, which may draw ahead."""
        self._finished: int | None = None
        """Steps that :meth:`iterate_steps` has yielded; None before."""
        self._permutation: tuple[int, list[int]] = (-1, [])
        self._drawn: dict[int, tuple[float, ...]] = {}
        """Costs of the steps that a loader has drawn, until they are yielded."""
        self.deal_samples(0)

    @property
    def steps_per_epoch(self) -> int:
        return len(self._costs) // self._batch_size

    @property
    def step(self) -> int:
        """Number of steps so far, over all epochs."""
        return self._step if self._finished is None else self._finished

    def __len__(self) -> int:
        """Number of this replica's microbatches in the rest of the epoch."""
        return (self.steps_per_epoch - self.step % self.steps_per_epoch) * self._own_microbatches

    @property
    def _own_microbatches(self) -> int:
        counts = self._microbatches
        return counts if isinstance(counts, int) else counts[self._replica]

    def list_samples(self, step: int) -> list[int]:
        """Samples of a step, over all replicas, in the order of the permutation."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._permutation[0] != epoch:
            order = list(range(len(self._costs)))
            if self._seed is not None:
                # An epoch of one seed is not that of another.
                generator = torch.Generator().manual_seed((self._seed * 2**20 + epoch) % 2**63)
                order = torch.randperm(len(order), generator=generator).tolist()
            self._permutation = epoch, order
        begin = place * self._batch_size
        return self._permutation[1][begin : begin + self._batch_size]

    def deal_samples(self, step: int) -> Deal:
        """Deal of a step's samples, with their indices in the data set."""
        samples = self.list_samples(step)
        found = balance(
            [self._costs[i] for i in samples], self._replicas, self._microbatches,
            sizes=None if self._sizes is None else [self._sizes[i] for i in samples],
            in_proportion=self._in_proportion, **self._options,
        )  # fmt: skip
        named = tuple(
            tuple(tuple(samples[i] for i in each) for each in replica) for replica in found.samples
        )
        return Deal(named, found.costs, found.times)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the microbatches of the rest of the epoch."""
        step = self.step
        end = (step // self.steps_per_epoch + 1) * self.steps_per_epoch
        self._drawn.clear()
        while step < end:
            deal = self.deal_samples(step)
            self._drawn[step] = deal.costs[self._replica]
            *first, last = deal.samples[self._replica]
            yield from map(list, first)
            # The step is drawn when its last microbatch is.
            step = self._step = step + 1
            yield list(last)

    def iterate_steps(self, loader: Iterable[Any]) -> Iterator[StepBatch]:
        """Yield the steps of the rest of the epoch from ``loader``, which has this sampler.

        A step counts as finished once it is yielded, whatever the loader has drawn ahead. Raises
        :class:`InputError` if the loader ends within a step.
        """
        self._finished = step = self.step
        found: list[Any] = []
        for microbatch in loader:
            found.append(microbatch)
            if step not in self._drawn:
                raise InputError("the loader has another sampler; give it this as batch_sampler")
            if len(found) == self._own_microbatches:
                costs = self._drawn.pop(step)
                step = self._finished = step + 1
                yield StepBatch(found, costs)
                found = []
        if found:
            raise InputError(
                f"the loader ended after {len(found)} of {self._own_microbatches} microbatches of"
                f" step {step}; give it this sampler as batch_sampler"
            )

    def make_source(
        self, loader: Iterable[Any], prepare: PrepareStep | None = None
    ) -> BalancedSource:
        """Make a source for ``step(microbatches=…)``. ``loader`` has this sampler, and yields
        :class:`~pipemorph_trainer.Microbatch`, or pairs of input and target; ``prepare`` makes them
        from the list of what it yields for a step, such as padded rows.

        The epochs follow each other. Where a plan gives replicas unequal numbers of microbatches,
        samples are dealt to as many, and replicas with fewer get less work.
        """
        return BalancedSource(self, loader, prepare)

    def set_shares(self, shares: Sequence[int]) -> bool:
        """Deal the steps from the next one on to these numbers of microbatches of all replicas.
        True if others were dealt before. Raises :class:`InputError` for another number of
        replicas."""
        if len(shares) != self._replicas:
            raise InputError(
                f"the sampler deals to {self._replicas} replicas, and the pipeline has"
                f" {len(shares)}; expected replicas={len(shares)}"
            )
        mine = self._microbatches
        if list(shares) == ([mine] * self._replicas if isinstance(mine, int) else list(mine)):
            return False
        self._microbatches = tuple(shares)
        # A list of problems says itself which replicas are slow.
        problem = self._options["problem"]
        self._in_proportion = problem is None or isinstance(problem, Problem)
        return True

    def finish_step(self, step: int) -> None:
        """Count all steps up to ``step`` as finished: their samples are not drawn again."""
        self._finished = step + 1

    def state_dict(self) -> dict[str, Any]:
        """State after the last step."""
        return {"step": self.step, **self._describe_order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last step of a saved state. Raises :class:`InputError` if that one had
        another order of samples."""
        for name, value in self._describe_order().items():
            if name not in state or state[name] != value:
                raise InputError(
                    f"the saved sampler has {name} {state.get(name)}, and this one {value};"
                    " expected the same, so that no sample is skipped or used twice"
                )
        self._step, self._finished = operator.index(state["step"]), None
        self._drawn.clear()

    def _describe_order(self) -> dict[str, Any]:
        return {"samples": len(self._costs), "batch_size": self._batch_size, "seed": self._seed}


class BalancedSource:
    """Source of a pipeline's steps, see :meth:`BalancedBatchSampler.make_source`."""

    def __init__(
        self, sampler: BalancedBatchSampler, loader: Iterable[Any], prepare: PrepareStep | None
    ) -> None:
        self._sampler, self._loader, self._prepare = sampler, loader, prepare
        self._steps: Iterator[StepBatch] | None = None
        self._next = 0

    def draw_step(self, shares: Sequence[int]) -> StepBatch:
        """Draw this replica's microbatches of the next step, and their costs. ``shares``: numbers
        of microbatches of all replicas. What the loader has drawn ahead for others is dropped, and
        its samples are dealt again. A step whose samples cannot be read counts as finished, as on
        other ranks."""
        step = self._sampler.step
        if self._sampler.set_shares(shares) or step != self._next:
            self._steps = None
        self._next = step + 1
        try:
            found = self._draw_next()
            if self._prepare is not None:
                found = found._replace(microbatches=list(self._prepare(found.microbatches)))
            return found
        except BaseException:
            self._steps = None
            self._sampler.finish_step(step)
            raise

    def _draw_next(self) -> StepBatch:
        """Draw the next step, in the next epoch if one is over."""
        for _ in range(2):
            if self._steps is None:
                self._steps = self._sampler.iterate_steps(self._loader)
            for found in self._steps:
                return found
            self._steps = None
        raise InputError("the loader yields no microbatches; give it this sampler")
