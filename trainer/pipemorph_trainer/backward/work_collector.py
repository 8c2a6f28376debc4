"""Collector of the work that a stage's B defers to W, and records of the stages' parameters.

A parameter is identified by its id, whatever module or function uses it. It is registered when a
stage begins to train, or at its first use: a layer that is added later, and FSDP2's gathered
parameters, are then among the stage's parameters.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from pipemorph_trainer.autograd_internals import (
    current_graph_task,
    has_gradient_hooks,
    is_accumulator_held,
    read_version,
)
from pipemorph_trainer.backward.weight_products import Grad

HOOKED = "it has gradient hooks"
HELD = (
    "something holds the node that accumulates its gradient, as DistributedDataParallel and an"
    " optimizer that runs in the backward do"
)


class TrainedParameter:
    """Trainable parameter of a stage. ``excluded``: why its gradients never wait for W; empty if
    they may."""

    __slots__ = ("collector", "excluded", "linear_with", "name", "parameter")

    def __init__(
        self,
        parameter: nn.Parameter,
        name: str,
        collector: WorkCollector,
        *,
        in_graph: bool = False,
    ) -> None:
        key = id(parameter)
        self.parameter = weakref.ref(parameter, lambda _: _forget_parameter(key, self))
        self.name, self.collector = name, collector
        # A graph holds the nodes of its own leaves.
        held = parameter.is_leaf and not in_graph and is_accumulator_held(parameter)
        self.excluded = HELD if held else ""
        self.linear_with: object = _NOTHING
        """Record of the bias (None without one) with which it was the weight of a linear that may
        wait."""


_NOTHING = object()
known_parameters: dict[int, TrainedParameter] = {}
"""Registered parameters, by their ids."""
_foreign_parameters: dict[int, weakref.ref[Tensor]] = {}
"""Parameters of no stage, by their ids."""
active_collectors: list[WorkCollector] = []
"""Collectors of the stages whose F or B runs now and may defer work to W."""


def _forget_parameter(key: int, owned: TrainedParameter) -> None:
    if known_parameters.get(key) is owned:
        del known_parameters[key]


def _forget_foreign(key: int, gone: weakref.ref[Tensor]) -> None:
    if _foreign_parameters.get(key) is gone:
        del _foreign_parameters[key]


def find_trained_parameter(
    parameter: Any, *, in_graph: bool = False, in_use: bool = True
) -> TrainedParameter | None:
    """Return the record of a stage's parameter while an F or B of that stage may defer work to W;
    else None.

    ``in_graph``: it was found in a graph, not at its use. ``in_use``: a module has it now; FSDP2's
    gathered parameters belong to no module until the backward reaches them.
    """
    key = id(parameter)
    found = known_parameters.get(key)
    if found is None or found.parameter() is not parameter:
        foreign = _foreign_parameters.get(key)
        if foreign is not None and foreign() is parameter:
            return None
        found = _search_stages(parameter, in_graph, in_use)
    return found if found is not None and found.collector in active_collectors else None


def _search_stages(
    parameter: nn.Parameter, in_graph: bool, in_use: bool
) -> TrainedParameter | None:
    """Search the parameters of the active collectors' stages, and register a match."""
    for collector in active_collectors:
        for name, each in collector.named_parameters():
            if each is parameter:
                return collector.register_parameter(name, parameter, in_graph=in_graph)
    if active_collectors and in_use:
        key = id(parameter)
        _foreign_parameters[key] = weakref.ref(parameter, lambda gone: _forget_foreign(key, gone))
    return None


class WeightWork(ABC):
    """Data that W needs for the gradients of a few parameters, for one call of an op.

    ``parameters``: each once; ``owners``: their records.
    """

    __slots__ = ("owners", "parameters", "task")

    def __init__(
        self, parameters: Sequence[nn.Parameter], owners: Sequence[TrainedParameter]
    ) -> None:
        self.parameters, self.owners = parameters, owners
        self.task = current_graph_task()

    @property
    def uses_values(self) -> bool:
        """True if W uses the values of parameters."""
        return True

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise :class:`SplitError` if a tensor was overwritten since B."""

    @abstractmethod
    def compute_gradients(self) -> Iterable[Grad]:
        """Compute the gradient of each parameter. Called without grad mode."""


class WorkCollector:
    """Collector of the work that the backward of one stage defers to W.

    ``verify``: compare each deferred call with the original op.
    """

    def __init__(self, stage: nn.Module, *, verify: bool = False) -> None:
        self._stage = weakref.ref(stage)
        self.verify = verify
        self.work: list[WeightWork] | None = None
        """Work of the running deferring B; None outside one: every gradient is computed at once."""
        self.computed_in_b: dict[str, str] = {}
        """Reason for each parameter whose gradients B has computed, by name."""
        self.tolerance = 0.0
        """Tolerated difference of gradients from an unsplit backward's, relative to the largest
        element: 0 unless compiled code that was cut has run, which may round elsewhere."""
        self.compared = 0
        """Number of gradients compared."""
        self.different: dict[str, str] = {}
        """First difference of each parameter, by name."""
        self._marks: dict[int, tuple[TrainedParameter, int | None]] = {}
        """Number of writes to the ``.grad`` of each deferred parameter; None without a gradient."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        stage = self._stage()
        return iter(()) if stage is None else stage.named_parameters()

    def register_parameter(
        self, name: str, parameter: nn.Parameter, *, in_graph: bool = False
    ) -> TrainedParameter:
        """Register a parameter of this stage."""
        found = known_parameters[id(parameter)] = TrainedParameter(
            parameter, name, self, in_graph=in_graph
        )
        _foreign_parameters.pop(id(parameter), None)
        return found

    def register_all(self) -> None:
        """Register all trained parameters, while no graph has them."""
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                self.register_parameter(name, parameter)

    def recheck_exclusions(self) -> None:
        """Check again parameters excluded because something held their gradient node."""
        for each in list(known_parameters.values()):
            if each.collector is self and each.excluded == HELD:
                parameter = each.parameter()
                if parameter is not None and not is_accumulator_held(parameter):
                    each.excluded = ""

    def __enter__(self) -> None:
        """Begin an op in which calls with the stage's parameters may defer work to W."""
        active_collectors.append(self)

    def __exit__(self, *_: object) -> None:
        active_collectors.remove(self)

    def activate_permanently(self) -> None:
        """Let calls defer work from now on, until :meth:`close`."""
        if self not in active_collectors:
            active_collectors.append(self)

    def close(self) -> None:
        """End :meth:`activate_permanently`. Idempotent."""
        if self in active_collectors:
            active_collectors.remove(self)

    def begin_backward(self) -> None:
        """Begin a deferring B."""
        self.work, self._marks = [], {}

    def take_work(self) -> list[WeightWork]:
        """End a deferring B. Returns its work; nothing if none began.

        A parameter whose gradient autograd wrote, too, is also used in another way, so the sum
        would depend on the time of W: its gradients no longer wait.
        """
        work, self.work = self.work or [], None
        marks, self._marks = self._marks, {}
        for each, mark in marks.values():
            parameter = each.parameter()
            if parameter is None or each.excluded:
                continue
            grad = parameter.grad
            if (None if grad is None else read_version(grad)) != mark:
                each.excluded = "it is also used in another way"
        return work

    def list_excluded(self) -> dict[str, str]:
        """Return the reason for each parameter whose gradients never wait, by name."""
        mine = [each for each in known_parameters.values() if each.collector is self]
        return {each.name: each.excluded for each in mine if each.excluded}

    @staticmethod
    def find_obstacle(each: TrainedParameter, parameter: Tensor) -> str:
        """Return why a parameter's gradient cannot wait for W now; empty if it can."""
        return each.excluded or (HOOKED if has_gradient_hooks(parameter) else "")

    def add_work(self, item: WeightWork) -> None:
        """Add work, in the order in which autograd would have computed it."""
        assert self.work is not None
        self.work.append(item)
        marks = self._marks
        for each, parameter in zip(item.owners, item.parameters, strict=True):
            if (key := id(parameter)) not in marks:
                # Autograd writes after all uses of a parameter in the graph, so not yet.
                grad = parameter.grad
                marks[key] = each, None if grad is None else read_version(grad)
