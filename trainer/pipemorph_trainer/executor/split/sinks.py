"""The parameters of a stage whose gradients may wait for W, and where they wait.

A parameter is known by its identity, in whatever module or function it is used. It is found when a
stage begins to train, or at its first use: a layer that comes later, and FSDP2's gathered
parameters, are then among the stage's parameters.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from pipemorph_trainer.executor.split.products import Grad
from pipemorph_trainer.executor.torch_private import (
    accumulator_held,
    graph_task,
    tensor_hooked,
    version,
)

HOOKED = "it has gradient hooks"
HELD = (
    "something holds the node that accumulates its gradient, as DistributedDataParallel and an"
    " optimizer that runs in the backward do"
)


class Owned:
    """A trainable parameter of a stage. ``excluded``: why its gradients never wait for W; empty if
    they may."""

    __slots__ = ("excluded", "linear_with", "name", "parameter", "sink")

    def __init__(
        self, parameter: nn.Parameter, name: str, sink: Sink, *, in_graph: bool = False
    ) -> None:
        key = id(parameter)
        self.parameter = weakref.ref(parameter, lambda _: _forget(key, self))
        self.name, self.sink = name, sink
        # A graph holds the nodes of its own leaves.
        held = parameter.is_leaf and not in_graph and accumulator_held(parameter)
        self.excluded = HELD if held else ""
        self.linear_with: object = _NOTHING
        """What is known of the bias (None without one) with which it was the weight of a linear
        that may wait."""


_NOTHING = object()
known: dict[int, Owned] = {}
"""What is known of parameters, by their ids."""
_foreign: dict[int, weakref.ref[Tensor]] = {}
"""Parameters that no stage has, by their ids."""
catching: list[Sink] = []
"""Stages whose F, or B, runs now and may leave work to W."""


def _forget(key: int, owned: Owned) -> None:
    if known.get(key) is owned:
        del known[key]


def _forget_foreign(key: int, gone: weakref.ref[Tensor]) -> None:
    if _foreign.get(key) is gone:
        del _foreign[key]


def owned(parameter: Any, *, in_graph: bool = False, in_use: bool = True) -> Owned | None:
    """What is known of a stage's parameter, while that stage runs such an op; else None.

    ``in_graph``: it is found in a graph, and not at its use. ``in_use``: a module has it now;
    FSDP2's gathered parameters are no module's until the backward reaches them.
    """
    key = id(parameter)
    found = known.get(key)
    if found is None or found.parameter() is not parameter:
        foreign = _foreign.get(key)
        if foreign is not None and foreign() is parameter:
            return None
        found = _find(parameter, in_graph, in_use)
    return found if found is not None and found.sink in catching else None


def _find(parameter: nn.Parameter, in_graph: bool, in_use: bool) -> Owned | None:
    """Look among the parameters that the running stages have now."""
    for sink in catching:
        for name, each in sink.named_parameters():
            if each is parameter:
                return sink.own(name, parameter, in_graph=in_graph)
    if catching and in_use:
        key = id(parameter)
        _foreign[key] = weakref.ref(parameter, lambda gone: _forget_foreign(key, gone))
    return None


class Work(ABC):
    """Data that W needs for the gradients of a few parameters, for one call of an op.

    ``parameters``: each once; ``owners``: what is known of each.
    """

    __slots__ = ("owners", "parameters", "task")

    def __init__(self, parameters: Sequence[nn.Parameter], owners: Sequence[Owned]) -> None:
        self.parameters, self.owners = parameters, owners
        self.task = graph_task()

    @property
    def uses_values(self) -> bool:
        """Whether W uses the values of parameters."""
        return True

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise :class:`SplitError` if a tensor was overwritten since B."""

    @abstractmethod
    def gradients(self) -> Iterable[Grad]:
        """Compute the gradient of each parameter. Called without grad mode."""


class Sink:
    """Collects the work that the backward of one stage leaves to W.

    ``verify``: compare each deferred call with the original op.
    """

    def __init__(self, stage: nn.Module, *, verify: bool = False) -> None:
        self._stage = weakref.ref(stage)
        self.verify = verify
        self.work: list[Work] | None = None
        """None outside a deferring B; then every gradient is computed at once."""
        self.whole: dict[str, str] = {}
        """Parameters whose gradients B has computed, by name, each with the reason."""
        self.tolerance = 0.0
        """How much gradients may differ from those of an unsplit backward, relative to the largest
        element: 0 unless compiled code that was cut has run, which may round elsewhere."""
        self.compared = 0
        """Gradients compared, and below the first difference of each parameter."""
        self.different: dict[str, str] = {}
        self._marks: dict[int, tuple[Owned, int | None]] = {}
        """Number of writes to the ``.grad`` of each deferred parameter; None without a gradient."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        stage = self._stage()
        return iter(()) if stage is None else stage.named_parameters()

    def own(self, name: str, parameter: nn.Parameter, *, in_graph: bool = False) -> Owned:
        """Make a parameter this stage's."""
        found = known[id(parameter)] = Owned(parameter, name, self, in_graph=in_graph)
        _foreign.pop(id(parameter), None)
        return found

    def own_all(self) -> None:
        """Take all parameters that are trained, while no graph has them."""
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                self.own(name, parameter)

    def look_again(self) -> None:
        """Look whether what held parameters between iterations still does."""
        for each in list(known.values()):
            if each.sink is self and each.excluded == HELD:
                parameter = each.parameter()
                if parameter is not None and not accumulator_held(parameter):
                    each.excluded = ""

    def __enter__(self) -> None:
        """Begin an op in which calls with the stage's parameters may leave work to W."""
        catching.append(self)

    def __exit__(self, *_: object) -> None:
        catching.remove(self)

    def catch_for_good(self) -> None:
        if self not in catching:
            catching.append(self)

    def close(self) -> None:
        """End :meth:`catch_for_good`. Idempotent."""
        if self in catching:
            catching.remove(self)

    def open(self) -> None:
        """Begin a deferring B."""
        self.work, self._marks = [], {}

    def take(self) -> list[Work]:
        """End a deferring B. Returns its work; nothing if none began.

        A parameter whose gradient autograd wrote, too, is used in another way as well, so that the
        sum would depend on when W runs: its gradients no longer wait.
        """
        work, self.work = self.work or [], None
        marks, self._marks = self._marks, {}
        for each, mark in marks.values():
            parameter = each.parameter()
            if parameter is None or each.excluded:
                continue
            grad = parameter.grad
            if (None if grad is None else version(grad)) != mark:
                each.excluded = "it is also used in another way"
        return work

    def excluded(self) -> dict[str, str]:
        """Parameters whose gradients never wait, by name, each with the reason."""
        mine = [each for each in known.values() if each.sink is self]
        return {each.name: each.excluded for each in mine if each.excluded}

    @staticmethod
    def reason(each: Owned, parameter: Tensor) -> str:
        """Why the gradient of a parameter cannot wait for W now; empty if it can."""
        return each.excluded or (HOOKED if tensor_hooked(parameter) else "")

    def add(self, item: Work) -> None:
        """Add work, in the order in which autograd would have computed it."""
        assert self.work is not None
        self.work.append(item)
        marks = self._marks
        for each, parameter in zip(item.owners, item.parameters, strict=True):
            if (key := id(parameter)) not in marks:
                # Autograd writes behind all uses of a parameter in the graph, so not yet.
                grad = parameter.grad
                marks[key] = each, None if grad is None else version(grad)
