"""Compares predictions with measured iterations, before a change of plan and after it.

A prediction is only as good as the delays and op times it is made of, and on a busy machine both
may show a fault that is not there. So the iterations themselves have the last word:

- Before a change, iterations of the current plan that ran in the present state must take as long as
  predicted. If they are shorter by more than the gain of the change, the evidence is not believed
  for now, and the plan stays.
- After a change, its first iterations must bring half of the predicted gain. If not, and if they
  are hardly shorter than those before, the plan before comes back, and the links (or op times)
  that were the reason are *doubted*: next time a change for them needs iterations that confirm it,
  more each time. Doubt fades slowly.

An iteration takes longer than its ops: optimizer, data loading, gradient norm. This *overhead* is
what earlier iterations took beyond their prediction (:class:`Reference`), so that only changes of
the iteration time are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from statistics import median

from pipemorph.control.decide import findings
from pipemorph.control.decide.forecast import SAME, Forecast, Option, Situation
from pipemorph.control.record.history import Finished, Ledger
from pipemorph.planning import Plan, StageTimes

OPS, BARRIER = -1, -2
"""The evidence "op times", and whether stages wait for each other between iterations; links have
their numbers."""
Sources = frozenset[int]
"""Evidence that a decision is based on: links, :data:`OPS` or :data:`BARRIER`."""

FEWEST, MOST = 3, 8
"""Iterations in a median of measured times."""
JUDGED_AFTER, GIVEN_UP_AFTER = 4, 20
"""Iterations under a new plan, without its first, from which its gain is judged; and after which it
is left open, if noise still allows both results."""
KEPT_PROMISE, PAYS = 0.5, 0.02
"""Fraction of the predicted gain that a change must bring. If it saves the fraction PAYS of an
iteration it stays, even if it promised more: the plan before is measured to be slower."""
SIGMAS = 2.0
"""Standard errors of a median that count as noise."""
MODEL_ERROR = 0.05
"""Predictions that differ by less, as a fraction, are not told apart by measuring."""
DOUBTED_NEEDS, MOST_DOUBT = 4, 3
"""Confirming iterations that a change needs after the first failure; twice as many after each
further one, at most MOST_DOUBT times."""
PATIENCE = 16
"""Iterations after which evidence that measured iterations do not confirm is tried nevertheless,
since the link may be slow in a way that is not modelled; 4 times as many for each doubt."""
LONGEST_WAIT = 32
"""Most iterations between two looks at evidence that is not believed."""
FORGET = 200
"""Iterations until a doubt counts one less."""


@dataclass(frozen=True)
class Reference:
    """Measured iterations of a plan in a known situation. ``seconds``: their median; ``spread``:
    standard deviation of one of them, robust to outliers."""

    plan: Plan
    situation: Situation
    seconds: float
    spread: float


@dataclass(frozen=True)
class Evidence:
    """What is known about a situation beside the situation itself. ``measured``: seconds of
    iterations of the current plan that ran in it from start to end; ``otherwise``: the situation if
    what is new in it is wrong; ``doubted``: the same kind of evidence has been wrong before;
    ``overdue``: it has been waiting for too long."""

    reference: Reference | None = None
    otherwise: Situation | None = None
    measured: tuple[float, ...] = ()
    doubted: bool = False
    overdue: bool = False


@dataclass(frozen=True)
class Promise:
    """Predicted iteration times of a change of plan in seconds, including overhead.

    ``before``: with the old plan; ``after``: with the new one; ``if_wrong``: with the new one if
    the evidence is wrong, None if unknown; ``may_go_back``: whether in this case the old plan is
    no slower than the new one. ``spread``: standard deviation of a measured iteration.
    """

    before: float
    after: float
    if_wrong: float | None = None
    may_go_back: bool = True
    spread: float = 0.0

    @property
    def seconds(self) -> float:
        return self.before - self.after

    @property
    def gain(self) -> float:
        """Fraction of an iteration that the change saves."""
        return 1 - self.after / self.before if self.before > 0 else 0.0


def promise(forecast: Forecast, current: Option, chosen: Option, evidence: Evidence) -> Promise:
    """The promise of a change from ``current`` to ``chosen``."""
    reference, overhead, spread = evidence.reference, 0.0, 0.0
    if reference is not None:
        earlier = forecast.under(reference.situation).of(reference.plan).seconds
        # A pipeline is never faster than its ops: a negative overhead is an error of the op times.
        overhead, spread = max(0.0, reference.seconds - earlier), reference.spread
    old, new = current.seconds, chosen.seconds
    if evidence.otherwise is not None:
        other = forecast.under(evidence.otherwise)
        old, new = other.of(current.plan).seconds, other.of(chosen.plan).seconds
    return Promise(
        before=overhead + current.seconds,
        after=overhead + chosen.seconds,
        if_wrong=overhead + new if reference is not None else None,
        may_go_back=old <= new * (1 + SAME),
        spread=spread,
    )


def objection(promised: Promise, evidence: Evidence) -> findings.NotConfirmed | None:
    """Why the change must wait for more measured iterations; None if it need not."""
    newest = evidence.measured[-MOST:]
    count = len(newest)
    if evidence.overdue:
        return None
    if count:
        measured = median(newest)
        allowed = promised.seconds + SIGMAS * promised.spread / sqrt(count)
        missed = promised.before - measured
        # Shorter than predicted: the disturbance is not there. Longer: there is more than what was
        # found, which is no reason to wait, unless this kind of evidence has been wrong before.
        if missed > allowed or (evidence.doubted and -missed > allowed):
            return findings.NotConfirmed(promised.before, promised.seconds, count, measured)
    if count < _needed(promised):
        return findings.NotConfirmed(promised.before, promised.seconds, count, None)
    return None


def _needed(promised: Promise) -> int:
    """Iterations needed to see the gain in the noise of iteration times."""
    noise = SIGMAS * promised.spread
    if noise <= promised.seconds:
        return 0
    return min(MOST, ceil((noise / promised.seconds) ** 2))


def without(situation: Situation, sources: Iterable[int], before: Situation) -> Situation:
    """``situation``, but with what is in ``sources`` as it was ``before``."""
    sources = tuple(sources)
    own = tuple(
        without(situation.at(each), sources, before.of(each.replicas)).links_of(each.replicas)
        for each in situation.own
    )
    wires, delays = list(situation.wire_times), list(situation.delays)
    slow = list(situation.slow)
    transfers = [situation.transfer(i) for i in range(len(slow))]
    stages, barrier = situation.stages, situation.barrier
    recent = list(situation.recent)
    for source in sources:
        if source == BARRIER:
            barrier = before.barrier
            continue
        if source == OPS:
            # Assumed times have no unit: they are as long together as the measured ones.
            unit = _total(stages) / _total(before.stages) if before.assumed else 1.0
            stages = tuple(
                new.model_copy(
                    update={
                        "forward": unit * old.forward,
                        "backward_input": unit * old.backward_input,
                        "backward_weight": unit * old.backward_weight,
                        "fused_backward": None
                        if old.fused_backward is None
                        else unit * old.fused_backward,
                    }
                )
                for new, old in zip(stages, before.stages, strict=True)
            )
            continue
        wires[source] = max(0.0, wires[source] - delays[source] + before.delays[source])
        delays[source], slow[source] = before.delays[source], before.slow[source]
        transfers[source] = before.transfer(source)
        if recent:
            recent[source] = before.recent[source] if before.recent else ()
    return replace(
        situation,
        stages=stages,
        wire_times=tuple(wires),
        delays=tuple(delays),
        slow=tuple(slow),
        transfers=tuple(transfers),
        barrier=barrier,
        recent=tuple(recent),
        own=own,
    )


def _total(stages: Iterable[StageTimes]) -> float:
    return sum(s.forward + s.backward_input + s.backward_weight for s in stages)


@dataclass
class _Hold:
    """Evidence that is not believed for now. ``since``: iteration in which it began to show;
    ``began``: when it was first not believed; both, and ``retry_at``, count finished iterations."""

    since: int
    began: int
    retry_at: int
    wait: int = 1


@dataclass(frozen=True)
class Trial:
    """A change of plan that is not judged yet. ``before``: the situation of the decision before;
    ``since``: iteration in which the reason for the change began to show; ``previous`` and
    ``baseline``: the plan in effect and the one for healthy links before the change."""

    version: int
    previous: Plan
    baseline: Plan
    sources: Sources
    promise: Promise
    before: Situation
    since: int


@dataclass(frozen=True)
class Verdict:
    """The result of a trial. ``failed``: the change is to be taken back; ``seconds``: median of the
    measured ``iterations``; ``saved``: the measured gain as a fraction of an iteration, None if
    there are none to compare with."""

    trial: Trial
    failed: bool
    seconds: float
    saved: float | None
    iterations: int


class TruthCheck:
    """What measured iterations say about the evidence of one attempt."""

    def __init__(self) -> None:
        self.reference: Reference | None = None
        self.trial: Trial | None = None
        self._complete = False
        self._from = 0
        self._doubts: dict[int, tuple[int, int | None]] = {}
        """Per source: the level of doubt, and the iteration it is from; None before the first."""
        self._holds: dict[int, _Hold] = {}

    # --- measured iterations ----------------------------------------------------------------

    @property
    def collects(self) -> bool:
        """Whether the reference may get more iterations."""
        return not self._complete and self.trial is None

    def collect(self, iterations: Sequence[Finished], plan: Plan, situation: Situation) -> None:
        """Take the reference from undisturbed ``iterations`` of ``plan`` in ``situation``."""
        seconds = [f.seconds for f in iterations if f.index >= self._from][:MOST]
        if len(seconds) < FEWEST:
            return
        middle = median(seconds)
        spread = 1.4826 * median(abs(each - middle) for each in seconds)
        self.reference = Reference(plan, situation, middle, spread)
        self._complete = len(seconds) == MOST

    def decided(self, last: int) -> None:
        """Begin another reference after a decision, made after iteration ``last``. A trial of the
        situation before it says nothing any more."""
        self._from, self._complete = last + 2, False  # Not the iteration that is running.
        self.trial = None

    def evidence(
        self,
        sources: Sources,
        otherwise: Situation,
        iterations: Sequence[Finished],
        since: int,
        last: int,
    ) -> Evidence:
        """``otherwise``: the situation if the sources are wrong; ``iterations``: of the current
        plan; ``since``: the iteration in which the sources began to show what they show now."""
        holds = [self._holds[source] for source in sources if source in self._holds]
        since = min([since, *(hold.since for hold in holds)])
        doubt = max((self.doubt(source, last) for source in sources), default=0)
        waited = last - min((hold.began for hold in holds), default=last)
        return Evidence(
            self.reference,
            otherwise,
            tuple(f.seconds for f in iterations if f.index > since),
            doubted=doubt > 0,
            overdue=waited >= PATIENCE * 4**doubt,
        )

    # --- doubt --------------------------------------------------------------------------------

    def doubt(self, source: int, last: int) -> int:
        """How often a source has been wrong lately, after iteration ``last``."""
        level, at = self._doubts.get(source, (0, last))
        if at is None:
            self._doubts[source] = (level, at := last)
        return max(0, level - max(0, last - at) // FORGET)

    def contradict(self, sources: Sources, last: int) -> None:
        """Measured iterations contradict the sources: no doubt about them fades."""
        for source in sources:
            self._doubts[source] = (self.doubt(source, last), last)

    def lacks(self, sources: Sources, evidence: Evidence, last: int) -> int:
        """Iterations that doubted sources lack until they may be the reason for a change."""
        doubt = max((self.doubt(source, last) for source in sources), default=0)
        if not doubt or evidence.overdue:
            return 0
        return max(0, int(DOUBTED_NEEDS * 2 ** (doubt - 1)) - len(evidence.measured))

    def doubts(self) -> dict[int, int]:
        """Levels of doubt, for a snapshot."""
        return {source: level for source, (level, _) in self._doubts.items() if level}

    def restore_doubts(self, levels: dict[int, int]) -> None:
        """Inverse of :meth:`doubts`."""
        self._doubts = {source: (level, None) for source, level in levels.items()}

    # --- evidence that is not believed ----------------------------------------------------------

    def held(self, last: int) -> Sources:
        """Sources that are not believed now, after iteration ``last``."""
        return frozenset(source for source, hold in self._holds.items() if last < hold.retry_at)

    def waits(self, last: int) -> bool:
        """Whether a decision waits for iterations after ``last``."""
        return self.trial is not None or bool(self.held(last))

    def hold(self, sources: Sources, since: int, last: int, wait: int | None = None) -> bool:
        """Do not believe ``sources`` for ``wait`` iterations, by default twice as many as the last
        time. Returns whether any was believed before."""
        new = False
        for source in sources:
            hold = self._holds.get(source)
            if hold is None:
                hold, new = _Hold(since, last, last), True
                self._holds[source] = hold
            hold.retry_at = last + (wait or hold.wait)
            hold.wait = min(LONGEST_WAIT, 2 * hold.wait)
        return new

    def seen_well(self, slow: Sequence[bool]) -> None:
        """Drop the holds of links that are not ``slow`` any more."""
        for source in [s for s in self._holds if s >= 0 and not slow[s]]:
            del self._holds[source]

    # --- after a change -------------------------------------------------------------------------

    def begin(self, trial: Trial) -> None:
        """A change was issued; its sources are believed. What was held back until now began to show
        when it was first held."""
        ended = [self._holds.pop(source) for source in trial.sources if source in self._holds]
        self.trial = replace(trial, since=min([trial.since, *(hold.since for hold in ended)]))

    def judge(self, ledger: Ledger, last: int) -> Verdict | None:
        """The result of the trial; None as long as it is open."""
        trial = self.trial
        if trial is None:
            return None
        after = [f.seconds for f in ledger.under(trial.version)[1:]]
        if len(after) < JUDGED_AFTER:
            return None
        ran = ledger.under(trial.previous.version)
        old = ran[1:]
        before = [f.seconds for f in old if f.index > trial.since][-MOST:]
        part = [f.seconds for f in old if f.index == trial.since]
        if not (before or part) and ran and ran[0].index >= trial.since:
            part = [ran[0].seconds]  # The old plan ran only once. It includes the change to it.
        failed = _has_failed(trial.promise, before, part, after)
        if failed is None and len(after) < GIVEN_UP_AFTER:
            return None
        self.trial = None
        if failed is not None:
            for source in trial.sources:
                level = self.doubt(source, last) + (1 if failed else -1)
                self._doubts[source] = (min(MOST_DOUBT, max(0, level)), last)
        saved = 1 - median(after) / median(before) if before else None
        return Verdict(trial, failed is True, median(after), saved, len(after))


def _has_failed(
    promised: Promise, before: Sequence[float], part: Sequence[float], after: Sequence[float]
) -> bool | None:
    """Whether the change is to be taken back; None if noise allows both. ``part``: the iteration of
    the old plan that ran in this state for a part of its time."""
    middle = median(after)
    spread = max(promised.spread, 1.4826 * median(abs(each - middle) for each in after))
    half = KEPT_PROMISE * promised.seconds
    shorter = False
    if old := before or part:
        least = min(half, PAYS * median(old))
        noise = SIGMAS * spread * sqrt(1 / len(old) + 1 / len(after))
        saved = median(old) - middle
        shorter = saved > least
        # The whole of the iteration in ``part`` would have taken longer, so it is no proof of
        # failure.
        if abs(saved - least) >= noise and (before or shorter):
            return not shorter
        if before:
            return None
    if promised.if_wrong is None:
        return None  # What iterations take beyond their prediction is not known.
    # Compare with the two predictions for the new plan: with the evidence, and without it.
    noise = SIGMAS * spread / sqrt(len(after))
    if not shorter and middle - promised.after > half + noise:
        return True
    if abs(promised.after - promised.if_wrong) < MODEL_ERROR * promised.after:
        return None
    between = (promised.after + promised.if_wrong) / 2
    if abs(middle - between) < noise:
        return None
    return (middle < between) == (promised.if_wrong < promised.after)
