"""Backends of ``torch.compile`` whose blocks can defer weight gradients to W.

``torch.compile(block, backend="pipemorph")`` compiles with inductor, ``"pipemorph_aot_eager"`` with
AOTAutograd alone. torch finds them by name, since the package registers them as its entry points.
Outside a deferring B, blocks run as with torch's own backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipemorph_trainer.autograd_internals import read_version, will_accumulate
from pipemorph_trainer.backward import work_collector
from pipemorph_trainer.backward.compiled import compiler_internals
from pipemorph_trainer.backward.compiled.graph_cut import NOT_A_PRODUCT, GraphCut, cut_backward
from pipemorph_trainer.backward.gradient_comparison import compare_compiled
from pipemorph_trainer.backward.work_collector import TrainedParameter, WeightWork, WorkCollector
from pipemorph_trainer.errors import SplitError

TOLERANCE = 1e-5
"""Tolerance of gradients of fused code, relative to the largest element."""
HALF_TOLERANCE = 1e-2
"""Tolerance if the code has a bfloat16 or float16 value."""

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
    chosen = {**(compiler_internals.read_mode_options(mode) if mode else {}), **(options or {})}
    return compiler_internals.compile_inductor(
        graph, inputs, chosen, _BackwardCompiler(inputs, fuses=True)
    )


def pipemorph_aot_eager(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
    """``torch.compile(..., backend="pipemorph_aot_eager")``: ``aot_eager``, with W apart."""
    return compiler_internals.compile_eager(graph, inputs, _BackwardCompiler(inputs, fuses=False))


def explain_whole_backward(module: nn.Module) -> str:
    """Return why a compiled module's backward stays whole; empty if its W can be apart."""
    if why := compiler_internals.find_missing_features():
        return f"this version of torch is not supported: {why}"
    if compiler_internals.find_backend(module) not in (pipemorph, pipemorph_aot_eager):
        return 'not with backend="pipemorph"'
    return ""


def may_round_if_cut(module: nn.Module) -> bool:
    """True if a compiled module's backward may be cut, and its gradients then rounded elsewhere."""
    return (
        not compiler_internals.find_missing_features()
        and compiler_internals.find_backend(module) is pipemorph
    )


class _BackwardCompiler:
    """Compiler of one graph's backward: whole, and cut. ``inputs``: those of its forward.
    ``fuses``: the compiler fuses ops, so that a cut changes where values are rounded."""

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
        self._why = compiler_internals.find_missing_features()
        if not self._why and compiler_internals.has_distributed_tensor(inputs):
            self._why = "its compiled code has DTensors"

    def __call__(
        self,
        whole: fx.GraphModule,
        examples: Sequence[Any],
        part: compiler_internals.GraphCompiler,
        why: str,
    ) -> compiler_internals.CompiledCode:
        cut: GraphCut | None = None
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
            halves = _CompiledHalves(cut, first, second, self._choose_tolerance(whole))
        region = _CompiledBackward(part(whole, examples, ()), halves, why, self._argument)

        def run(args: list[Any]) -> Sequence[Any]:
            return region(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _choose_tolerance(self, whole: fx.GraphModule) -> float:
        if not self._fuses:
            return 0.0
        values = [node.meta.get("val") for node in whole.graph.nodes]
        half = any(isinstance(v, Tensor) and v.dtype in _HALF for v in values)
        return HALF_TOLERANCE if half else TOLERANCE


@dataclass(frozen=True)
class _CompiledHalves:
    """Compiled cut. ``tolerance``: of its gradients, from those of the whole, relative."""

    cut: GraphCut
    first: compiler_internals.CompiledCode
    second: compiler_internals.CompiledCode
    tolerance: float


class _CompiledBackward:
    """Backward of compiled code: ``whole``, or in ``halves`` unless ``why`` is a reason against it.

    ``argument``: by the output that is a weight's gradient, the number of the weight among the
    tensors that the forward takes.
    """

    def __init__(
        self,
        whole: compiler_internals.CompiledCode,
        halves: _CompiledHalves | None,
        why: str,
        argument: Mapping[int, int],
    ) -> None:
        self._whole, self._halves = whole, halves
        self._why, self._argument = why, argument
        self._late = () if halves is None else halves.cut.late

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if (
            not work_collector.active_collectors
            or (targets := compiler_internals.find_gradient_nodes()) is None
        ):
            return self._whole(args)
        nodes = {index: targets[number] for index, number in self._argument.items()}
        weights: dict[int, Any] = {
            index: getattr(node, "variable", None) for index, node in nodes.items()
        }
        owners = {
            index: work_collector.find_trained_parameter(weight, in_graph=True)
            for index, weight in weights.items()
        }
        collector = next((each.collector for each in owners.values() if each is not None), None)
        if collector is None or collector.work is None:
            return self._whole(args)
        why = self._why or self._find_obstacle(nodes, owners, collector)
        for index, each in owners.items():
            if each is not None and (why or index not in self._late):
                collector.computed_in_b[each.name] = why or NOT_A_PRODUCT
        if why or self._halves is None:
            return self._whole(args)
        late = [each for index in self._late if (each := owners[index]) is not None]
        want = self._whole(_clone_tensors(args)) if collector.verify else None
        outputs, work = self._run_input_half(
            self._halves, args, [weights[index] for index in self._late], late
        )
        if want is not None:
            got = list(outputs)
            for index, grad in zip(
                self._late, work.copy_operands().compute_gradients(), strict=True
            ):
                got[index] = grad
            compare_compiled(collector, late[0].name, want, got, self._halves.tolerance)
        return outputs

    def _find_obstacle(
        self,
        nodes: Mapping[int, Any],
        owners: Mapping[int, TrainedParameter | None],
        collector: WorkCollector,
    ) -> str:
        """Return why this call's gradients cannot wait for W; empty if they can."""
        for index in self._late:
            each = owners[index]
            if each is None:
                return "in compiled code with a weight of no stage"
            if why := collector.find_obstacle(each, nodes[index].variable):
                return f"in compiled code with {each.name}: {why}"
            if not will_accumulate(nodes[index]):
                return f"in compiled code with {each.name}: its gradient is not accumulated"
        return ""

    @staticmethod
    def _run_input_half(
        halves: _CompiledHalves,
        args: list[Any],
        late: list[nn.Parameter],
        owners: list[TrainedParameter],
    ) -> tuple[Sequence[Any], CompiledWork]:
        cut, collector = halves.cut, owners[0].collector
        held = [None if index is None else args[index] for index, _ in cut.held]
        results = halves.first(args)
        for k, (_, index) in enumerate(cut.held):
            if index is not None:
                held[k] = results[index]
        collector.tolerance = max(collector.tolerance, halves.tolerance)
        work = CompiledWork(halves.second, held, late, owners)
        collector.add_work(work)
        outputs: list[Any] = [None] * cut.outputs
        for number, index in enumerate(cut.early):
            outputs[index] = results[number]
        return outputs, work


class CompiledWork(WeightWork):
    """Data that W needs from a call of compiled code. ``run`` makes one gradient per parameter."""

    __slots__ = ("_held", "_run", "_versions")

    def __init__(
        self,
        run: compiler_internals.CompiledCode,
        held: list[Any],
        parameters: Sequence[nn.Parameter],
        owners: Sequence[TrainedParameter],
    ) -> None:
        super().__init__(parameters, owners)
        self._run, self._held = run, held
        self._versions = _read_versions(held)

    def copy_operands(self) -> CompiledWork:
        """Return the work on copies, since the code empties its list and may reuse its memory."""
        return CompiledWork(self._run, _clone_tensors(self._held), self.parameters, self.owners)

    def check_unchanged(self) -> None:
        if self._versions != _read_versions(self._held):
            raise SplitError(
                f"a tensor that the compiled code of {self.owners[0].name!r} needs in W was"
                " written in place after B"
            )

    def compute_gradients(self) -> list[Tensor]:
        grads = list(self._run(self._held))
        seen: set[int] = set()
        for index, grad in enumerate(grads):
            # Two weights may have the same gradient, and `.grad` is written in place.
            memory = grad.untyped_storage().data_ptr()
            if memory in seen:
                grads[index] = grad.clone()
            seen.add(memory)
        return grads


def _read_versions(held: Sequence[Any]) -> list[int]:
    return [read_version(each) for each in held if isinstance(each, Tensor)]


def _clone_tensors(values: Sequence[Any]) -> list[Any]:
    return [each.clone() if isinstance(each, Tensor) else each for each in values]
