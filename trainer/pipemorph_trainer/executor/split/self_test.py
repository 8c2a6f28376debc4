"""Chooses how a stage splits its backward, by tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from torch import nn

from pipemorph_trainer.executor.split.flight import StageCall, find_clone_inputs
from pipemorph_trainer.executor.split.graph_split import GraphSplit
from pipemorph_trainer.executor.split.linears import find_layers, opaque_modules
from pipemorph_trainer.executor.split.module_split import ModuleSplit
from pipemorph_trainer.executor.split.report import (
    Attempt,
    OffloadAttempt,
    OpTimes,
    RecomputeAttempt,
    Split,
    SplitReport,
    grouped,
    in_words,
)
from pipemorph_trainer.executor.split.snapshot import Rerun, Snapshot
from pipemorph_trainer.executor.split.splitters import Splitter
from pipemorph_trainer.executor.split.trial import (
    Outcome,
    Sample,
    activation_bytes,
    differences,
    input_bytes,
    run_trial,
)
from pipemorph_trainer.executor.torch_private import (
    holders_unknown,
    missing,
    module_backward_hooked,
)

if TYPE_CHECKING:
    from pipemorph_trainer.executor.offload.store import ActivationStore

SMALL_SHARE = 0.05
"""If a module split defers a smaller share of the parameters, a graph split is tried."""
MAX_OVERHEAD = 1.5
"""A graph split is refused if its B + W takes longer than this many unsplit backwards."""
ROUNDS = 3
"""Alternating runs with and without the split, for the ratio of their times."""
MEASURABLE = 1e-3
"""Least seconds of an unsplit backward for its times to be used."""


Agree = Callable[[Any], list[Any]]


def alone(value: Any) -> list[Any]:
    """For a rank that runs no collectives inside its stage."""
    return [value]


class SelfTest:
    """One self-test of one stage. :meth:`run` returns the splitter and the report.

    ``samples``: real microbatches, of which the first two are used. A single one is used twice;
    then a confusion of the two microbatches only shows in their output gradients. With ``store``
    the chosen splitter is also tested with offload, with ``recompute`` also with recomputation.

    The test needs memory for one additional set of gradients, since runs are compared by digests.
    ``agree`` gathers a value of every rank that runs collectives inside the stage. These ranks
    decide every step alike, so that they run the stage equally often and choose one split.
    """

    def __init__(
        self,
        call: StageCall,
        samples: Sequence[Sample],
        store: ActivationStore | None = None,
        agree: Agree = alone,
        *,
        recompute: bool = False,
    ) -> None:
        self._call = call
        self._recompute = recompute
        self._agree = agree
        self._store = store
        self._samples = [*samples, *samples][:2]
        self._snapshot = Snapshot(call.module)
        self._notes: list[str] = []
        self._loose: tuple[str, ...] = ()
        self._attempts: list[Attempt] = []
        self._refused: dict[str, str] = {}
        self._graph_overheads: list[float] = []
        self._sizes = trainable(call.module)

    def run(self) -> tuple[Splitter, SplitReport]:
        """Run the test. If the stage cannot be run on the samples again, it stays unsplit."""
        try:
            return self._run()
        finally:
            self._snapshot.restore()

    def _run(self) -> tuple[Splitter, SplitReport]:
        failure = ""
        try:
            self._baseline()
        except Exception as error:  # noqa: BLE001 - any error, since the stage has run in training
            failure = _first_line(error)
        if failure := self._first(failure):
            why = f"the self-test could not run the stage: {failure}"
            return Splitter(), SplitReport(
                "fused", why, tested=False, sizes=self._sizes,
                offload=None if self._store is None else OffloadAttempt(reason=why),
                recompute=RecomputeAttempt(reason=why) if self._recompute else None,
            )  # fmt: skip
        self._loose = self._union(self._loose)
        chosen = self._try_module()
        if chosen is None or self._share(chosen) < SMALL_SHARE:
            graph = self._try_graph()
            if graph is not None and chosen is not None:
                self._notes.append(
                    f"a module split would defer only {self._share(chosen):.1%} of the parameters"
                )
            chosen = graph or chosen
        splitter = chosen or Splitter()
        offload = None if self._store is None else self._try_offload(splitter, self._store)
        recompute = self._try_recompute(splitter) if self._recompute else None
        report = self._report(splitter, offload, recompute)
        return splitter, replace(report, fused_ratio=self._fused_ratio(splitter))

    def _baseline(self) -> None:
        self._reference = find_clone_inputs(self._call, lambda: self._trial(Splitter(), fused=True))
        if self._call.clone_inputs:
            self._notes.append("the stage writes to its input in place; it gets a copy")
        again = self._trial(Splitter(), fused=True)
        self._loose = tuple(differences(self._reference, again))
        self._times = OpTimes(
            forward=again.seconds["F"],
            backward=again.seconds["BW"],
            backward_input=again.seconds["BW"],
            backward_weight=0.0,
        )
        self._activation = activation_bytes(self._call, self._samples[0], self._snapshot)

    def _trial(self, splitter: Splitter, *, fused: bool = False) -> Outcome:
        return run_trial(splitter, self._call, self._samples, self._snapshot, fused=fused)

    def _try_module(self) -> Splitter | None:
        if why := missing():
            return self._refuse("module", f"this version of torch is not supported: {why}")
        layers, self._refused = find_layers(self._call.module)
        for _ in range(len(layers) + 1):
            active = [layer for layer in layers if not layer.excluded]
            if not active:
                return self._refuse("module", self._nothing_to_defer())
            splitter = ModuleSplit(active)
            excluded_before = len(layers) - len(active)
            outcome, wrong = self._attempt(splitter)
            foreign = self._union([layer.name for layer in active if layer.excluded])
            for layer in active:
                if layer.name in foreign and not layer.excluded:
                    layer.excluded = "another rank of the stage cannot defer it"
                names = [name for name, _ in layer.parameters()]
                changed = [name for name in names if f"the gradient of {name!r}" in wrong]
                if not layer.excluded and changed:
                    layer.excluded = f"deferring {changed[0]} changes its gradient"
                if layer.excluded:
                    self._refused.update(dict.fromkeys(names, layer.excluded))
            if outcome is None:
                return self._refuse("module", wrong[0])
            if not wrong and not any(layer.excluded for layer in active):
                if not splitter.deferred:
                    self._refused.update(splitter.not_deferred())
                    return self._refuse("module", self._nothing_to_defer())
                return self._accept(splitter, outcome)
            if sum(bool(layer.excluded) for layer in layers) == excluded_before:
                return self._refuse("module", _differs(wrong))
        return self._refuse("module", self._nothing_to_defer())

    def _nothing_to_defer(self) -> str:
        return nothing_to_defer(self._sizes, self._refused)

    def _try_graph(self) -> Splitter | None:
        if why := graph_refusal(self._call.module):
            return self._refuse("graph", why)
        splitter = GraphSplit(self._call.module)
        outcome, wrong = self._attempt(splitter)
        if outcome is None:
            return self._refuse("graph", wrong[0])
        if wrong:
            return self._refuse("graph", _differs(wrong))
        if outcome.reruns and not self._call.is_first:
            name = min(outcome.reruns, key=lambda key: (-len(key), key))
            return self._refuse(
                "graph",
                f"W runs the forward of {name!r} again (activation checkpointing), "
                f"{outcome.reruns[name]} times for {len(self._samples)} microbatches",
            )
        if not splitter.deferred:
            return self._refuse("graph", "every parameter is used in several places")
        self._graph_overheads = self._overheads(splitter)
        ratio = median(self._graph_overheads)
        slow = ""
        if self._times.backward > MEASURABLE and ratio > MAX_OVERHEAD:
            slow = f"B + W take {ratio:.1f} times the unsplit backward"
        if slow := self._first(slow):
            return self._refuse("graph", slow)
        return self._accept(splitter, outcome)

    def _overheads(self, splitter: Splitter) -> list[float]:
        """B + W divided by the unsplit backward, of alternating runs, so that other load of the
        machine has little effect."""
        ratios = []
        for _ in range(ROUNDS):
            whole = self._trial(Splitter(), fused=True).seconds["BW"]
            apart = self._trial(splitter).seconds
            ratios.append((apart["B"] + apart["W"]) / whole)
        return ratios

    def _fused_ratio(self, splitter: Splitter) -> float | None:
        """The unsplit backward divided by B + W, for planning: the largest ratio found, since a
        fused backward that is not shorter costs more than one that is not tried."""
        if splitter.split == "fused" or self._first(self._too_short()):
            return None
        known = self._graph_overheads if splitter.split == "graph" else []
        return 1 / min(known or self._overheads(splitter))

    def _too_short(self) -> str:
        return "" if self._times.backward > MEASURABLE else "too short to be measured"

    def _try_offload(self, splitter: Splitter, store: ActivationStore) -> OffloadAttempt:
        """Test offload with two runs: the first one fills the pool, the second one is timed."""
        if why := holders_unknown():
            return OffloadAttempt(reason=f"this version of torch is not supported: {why}")
        moved, seconds = 0, 0.0
        for _ in range(2):
            outcome, failure = Outcome(), ""
            try:
                outcome = run_trial(
                    splitter, self._call, self._samples, self._snapshot, fused=False, store=store
                )
                if wrong := self._differences(splitter, outcome):
                    failure = f"{wrong[0]} differs from a run without it"
            except Exception as error:  # noqa: BLE001 - after any error, activations stay
                failure = _first_line(error)
            if failure := self._first(failure):
                return OffloadAttempt(reason=failure)
            moved = outcome.moved_bytes
            seconds = max(outcome.seconds["out"], outcome.seconds["back"])
        return OffloadAttempt(moved, seconds)

    def _try_recompute(self, splitter: Splitter) -> RecomputeAttempt:
        """Test recomputation with one run."""
        failure = ""
        try:
            outcome = run_trial(
                splitter, self._call, self._samples, self._snapshot, fused=False,
                rerun=Rerun(self._call.module),
            )  # fmt: skip
            if wrong := self._differences(splitter, outcome):
                failure = f"{wrong[0]} differs from a run without it"
        except Exception as error:  # noqa: BLE001 - after any error, activations stay
            failure = _first_line(error)
        if failure := self._first(failure):
            return RecomputeAttempt(reason=failure)
        return RecomputeAttempt(input_bytes(self._samples[0]))

    def _attempt(self, splitter: Splitter) -> tuple[Outcome | None, list[str]]:
        """Run the split twice; the first run is a warm-up. Without an outcome, returns the
        error."""
        outcome, wrong = self._compared(splitter)
        if outcome is None or wrong:
            return outcome, wrong
        again, wrong = self._compared(splitter)
        if again is not None:
            outcome.seconds = again.seconds
        return again and outcome, wrong

    def _compared(self, splitter: Splitter) -> tuple[Outcome | None, list[str]]:
        """Run the split, and name what differs on any rank."""
        outcome, wrong, failure = Outcome(), [], ""
        try:
            outcome = self._trial(splitter)
            wrong = self._differences(splitter, outcome)
        except Exception as error:  # noqa: BLE001 - after any error, the stage runs unsplit
            failure = _first_line(error)
        if failure := self._first(failure):
            return None, [failure]
        return outcome, list(self._union(wrong))

    def _differences(self, splitter: Splitter, outcome: Outcome) -> list[str]:
        return differences(self._reference, outcome, self._loose, splitter.tolerance)

    def _first(self, text: str) -> str:
        """The first text that is not empty, of all ranks."""
        return next((found for found in self._agree(text) if found), "")

    def _union(self, texts: Sequence[str]) -> tuple[str, ...]:
        """The texts of all ranks, each once."""
        return tuple(dict.fromkeys(text for found in self._agree(list(texts)) for text in found))

    def _accept(self, splitter: Splitter, outcome: Outcome) -> Splitter:
        took = outcome.seconds
        if splitter.tolerance and (rounded := differences(self._reference, outcome, self._loose)):
            self._notes.append(
                f"compiled code rounds elsewhere when it is cut: {rounded[0]} and"
                f" {len(rounded) - 1} more differ by at most {splitter.tolerance:g}"
            )
        times = replace(self._times, backward_input=took["B"], backward_weight=took["W"])
        self._attempts.append(Attempt(splitter.split, accepted=True, times=times))
        return splitter

    def _refuse(self, split: Split, reason: str) -> Splitter | None:
        self._attempts.append(Attempt(split, accepted=False, reason=reason))
        return None

    def _share(self, splitter: Splitter) -> float:
        total = sum(self._sizes.values())
        return sum(self._sizes[name] for name in splitter.deferred) / total if total else 0.0

    def _report(
        self,
        splitter: Splitter,
        offload: OffloadAttempt | None,
        recompute: RecomputeAttempt | None,
    ) -> SplitReport:
        times = next(
            (a.times for a in self._attempts if a.split == splitter.split and a.times), self._times
        )
        if splitter.split != "fused" and times.weight_fraction < SMALL_SHARE:
            self._notes.append(f"W is only {times.weight_fraction:.1%} of B + W")
        return SplitReport(
            split=splitter.split,
            reason=self._reason(splitter),
            attempts=tuple(self._attempts),
            times=times,
            sizes=self._sizes,
            deferred=tuple(name for name in self._sizes if name in splitter.deferred),
            not_deferred=self._not_deferred(splitter),
            irreproducible=self._loose,
            notes=tuple(self._notes),
            activation_bytes=self._activation,
            offload=offload,
            recompute=recompute,
        )

    def _reason(self, splitter: Splitter) -> str:
        if splitter.split != "fused":
            refused = [a for a in self._attempts if not a.accepted]
            because = f"; not {refused[0].split}: {refused[0].reason}" if refused else ""
            return f"defers {self._share(splitter):.0%} of the trainable parameters{because}"
        return "; ".join(f"not {a.split}: {a.reason}" for a in self._attempts)

    def _not_deferred(self, splitter: Splitter) -> dict[str, str]:
        if splitter.split == "fused":
            return dict(self._refused)
        if isinstance(splitter, GraphSplit):
            several = "used in several places of the graph"
            why = dict.fromkeys(splitter.in_b, several)
        else:
            why = dict(self._refused)
            if isinstance(splitter, ModuleSplit):
                why.update(splitter.not_deferred())
        return {
            name: why.get(name, "did not run in the self-test; deferred when it does")
            for name in self._sizes
            if name not in splitter.deferred
        }


def trainable(stage: nn.Module) -> dict[str, int]:
    """Elements of each trainable parameter."""
    return {name: p.numel() for name, p in stage.named_parameters() if p.requires_grad}


def nothing_to_defer(sizes: Mapping[str, int], refused: Mapping[str, str]) -> str:
    """Why a module split defers no parameter. ``refused``: reasons by parameter."""
    if not sizes:
        return "the stage has no trainable parameter"
    if refused:
        return f"no nn.Linear to defer: {in_words(grouped(refused, sizes))}"
    return "no nn.Linear of the stage ran"


def graph_refusal(stage: nn.Module) -> str:
    """Why the graph of a stage cannot be cut, judged by its modules; empty if it can."""
    if why := missing():
        return f"this version of torch is not supported: {why}"
    if not trainable(stage):
        return "the stage has no trainable parameter"
    if opaque := opaque_modules(stage):
        return next(iter(opaque.values()))
    for name, module in stage.named_modules():
        if module_backward_hooked(module):
            what = f"{name!r}" if name else "the stage"
            return f"{what} has backward hooks, which would fire twice"
    return ""


def _first_line(error: Exception) -> str:
    first = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[0]}"


def _differs(wrong: Sequence[str]) -> str:
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"{wrong[0]} differs from the unsplit backward{more}"
