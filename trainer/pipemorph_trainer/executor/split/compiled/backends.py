"""The backends of ``torch.compile`` whose blocks can leave weight gradients to W.

``torch.compile(block, backend="pipemorph")`` compiles with inductor, ``"pipemorph_aot_eager"`` with
nothing behind AOTAutograd. They are found by name since the package registers them as entry points
of torch. Outside a B that defers, blocks run as with torch's own backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.split import sinks
from pipemorph_trainer.executor.split.compiled import private
from pipemorph_trainer.executor.split.compiled.cut import NOT_A_PRODUCT, Cut, cut_backward
from pipemorph_trainer.executor.split.sinks import Owned, Sink, Work
from pipemorph_trainer.executor.split.verifying import compare_compiled
from pipemorph_trainer.executor.torch_private import accumulates, version

TOLERANCE = 1e-5
"""Of gradients of fused code, relative to the largest element."""
HALF_TOLERANCE = 1e-2
"""The same where a value of it is bfloat16 or float16."""

_HALF = (torch.bfloat16, torch.float16)


def pipemorph(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Any:
    """``torch.compile(..., backend="pipemorph")``: inductor, with W apart."""
    chosen = {**(private.mode_options(mode) if mode else {}), **(options or {})}
    return private.compile_inductor(graph, inputs, chosen, _Backward(inputs, fuses=True))


def pipemorph_aot_eager(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
    """``torch.compile(..., backend="pipemorph_aot_eager")``: ``aot_eager``, with W apart."""
    return private.compile_eager(graph, inputs, _Backward(inputs, fuses=False))


def whole_why(module: nn.Module) -> str:
    """Why a compiled module's backward stays whole; empty if its W can be apart."""
    if why := private.missing():
        return f"this version of torch is not supported: {why}"
    if private.backend_of(module) not in (pipemorph, pipemorph_aot_eager):
        return 'not with backend="pipemorph"'
    return ""


def rounds_if_cut(module: nn.Module) -> bool:
    """Whether a compiled module's backward may be cut, and its gradients rounded elsewhere then."""
    return not private.missing() and private.backend_of(module) is pipemorph


class _Backward:
    """Compiles the backward of one graph: whole, and cut. ``inputs``: of its forward. ``fuses``:
    the compiler fuses ops, so that a cut changes where values are rounded."""

    def __init__(self, inputs: Sequence[Any], *, fuses: bool) -> None:
        self._fuses = fuses
        self._weights = {
            index: each.shape
            for index, each in enumerate(inputs)
            if isinstance(each, nn.Parameter) and each.requires_grad
        }
        self._argument = {
            index: sum(isinstance(each, Tensor) for each in inputs[:index])
            for index in self._weights
        }
        self._count = len(inputs)
        self._why = private.missing()
        if not self._why and private.distributed(inputs):
            self._why = "its compiled code has DTensors"

    def __call__(
        self, whole: fx.GraphModule, examples: Sequence[Any], part: private.Part, why: str
    ) -> private.Runs:
        cut: Cut | None = None
        why = why or self._why
        if not why and self._weights:
            outputs = next(reversed(whole.graph.nodes)).args[0]
            if len(outputs) == self._count:
                cut = cut_backward(whole, self._weights)
                why = "" if cut else NOT_A_PRODUCT
            else:
                why = "its backward has more outputs than its forward has inputs"
        if cut is None:
            halves = None
        else:
            first = part(cut.first, examples, cut.held_inputs)
            second = part(cut.second, cut.examples, None)
            halves = _Halves(cut, first, second, self._tolerance(whole))
        region = _Region(part(whole, examples, ()), halves, why, self._argument)

        def run(args: list[Any]) -> Sequence[Any]:
            return region(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _tolerance(self, whole: fx.GraphModule) -> float:
        if not self._fuses:
            return 0.0
        values = [node.meta.get("val") for node in whole.graph.nodes]
        half = any(isinstance(v, Tensor) and v.dtype in _HALF for v in values)
        return HALF_TOLERANCE if half else TOLERANCE


@dataclass(frozen=True)
class _Halves:
    """A compiled cut. ``tolerance``: how much its gradients may differ from the whole's."""

    cut: Cut
    first: private.Runs
    second: private.Runs
    tolerance: float


class _Region:
    """The backward of compiled code: ``whole``, or in ``halves`` unless ``why`` says why not.

    ``argument``: by the output that is a weight's gradient, the number of the weight among the
    tensors that the forward takes.
    """

    def __init__(
        self,
        whole: private.Runs,
        halves: _Halves | None,
        why: str,
        argument: Mapping[int, int],
    ) -> None:
        self._whole, self._halves = whole, halves
        self._why, self._argument = why, argument
        self._late = () if halves is None else halves.cut.late

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if not sinks.catching or (targets := private.targets()) is None:
            return self._whole(args)
        nodes = {index: targets[number] for index, number in self._argument.items()}
        weights: dict[int, Any] = {
            index: getattr(node, "variable", None) for index, node in nodes.items()
        }
        owners = {index: sinks.owned(weight, in_graph=True) for index, weight in weights.items()}
        sink = next((each.sink for each in owners.values() if each is not None), None)
        if sink is None or sink.work is None:
            return self._whole(args)
        why = self._why or self._not_now(nodes, owners, sink)
        for index, each in owners.items():
            if each is not None and (why or index not in self._late):
                sink.whole[each.name] = why or NOT_A_PRODUCT
        if why or self._halves is None:
            return self._whole(args)
        late = [each for index in self._late if (each := owners[index]) is not None]
        want = self._whole(_copied(args)) if sink.verify else None
        outputs, work = self._run_first(
            self._halves, args, [weights[index] for index in self._late], late
        )
        if want is not None:
            got = list(outputs)
            for index, grad in zip(self._late, work.copy().gradients(), strict=True):
                got[index] = grad
            compare_compiled(sink, late[0].name, want, got, self._halves.tolerance)
        return outputs

    def _not_now(
        self, nodes: Mapping[int, Any], owners: Mapping[int, Owned | None], sink: Sink
    ) -> str:
        """Why this call's gradients cannot wait for W; empty if they can."""
        for index in self._late:
            each = owners[index]
            if each is None:
                return "in compiled code with a weight that is not of the stage"
            if why := sink.reason(each, nodes[index].variable):
                return f"in compiled code with {each.name}: {why}"
            if not accumulates(nodes[index]):
                return f"in compiled code with {each.name}: its gradient is not accumulated"
        return ""

    @staticmethod
    def _run_first(
        halves: _Halves, args: list[Any], late: list[nn.Parameter], owners: list[Owned]
    ) -> tuple[Sequence[Any], CompiledWork]:
        cut, sink = halves.cut, owners[0].sink
        held = [None if index is None else args[index] for index, _ in cut.held]
        results = halves.first(args)
        for k, (_, index) in enumerate(cut.held):
            if index is not None:
                held[k] = results[index]
        sink.tolerance = max(sink.tolerance, halves.tolerance)
        work = CompiledWork(halves.second, held, late, owners)
        sink.add(work)
        outputs: list[Any] = [None] * cut.outputs
        for number, index in enumerate(cut.early):
            outputs[index] = results[number]
        return outputs, work


class CompiledWork(Work):
    """What W needs of one call of compiled code. ``run`` makes one gradient per parameter."""

    __slots__ = ("_held", "_run", "_versions")

    def __init__(
        self,
        run: private.Runs,
        held: list[Any],
        parameters: Sequence[nn.Parameter],
        owners: Sequence[Owned],
    ) -> None:
        super().__init__(parameters, owners)
        self._run, self._held = run, held
        self._versions = _versions(held)

    def copy(self) -> CompiledWork:
        """Work on copies, since the code empties its list, and may reuse its memory."""
        return CompiledWork(self._run, _copied(self._held), self.parameters, self.owners)

    def check_unchanged(self) -> None:
        if self._versions != _versions(self._held):
            raise SplitError(
                f"a tensor that the compiled code of {self.owners[0].name!r} needs in W was"
                " written in place after B"
            )

    def gradients(self) -> list[Tensor]:
        grads = list(self._run(self._held))
        seen: set[int] = set()
        for index, grad in enumerate(grads):
            # Two weights may have the same gradient, and `.grad` is written in place.
            memory = grad.untyped_storage().data_ptr()
            if memory in seen:
                grads[index] = grad.clone()
            seen.add(memory)
        return grads


def _versions(held: Sequence[Any]) -> list[int]:
    return [version(each) for each in held if isinstance(each, Tensor)]


def _copied(values: Sequence[Any]) -> list[Any]:
    return [each.clone() if isinstance(each, Tensor) else each for each in values]
