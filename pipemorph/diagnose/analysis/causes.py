"""Causes of lost time: each with its place, and what the steps would save without it.

A cause is found by comparison: a worker with the same stage of other replicas or with its own past,
a stage and a link with the others, a microbatch with those of its step. Its cost is the difference
between two simulations: with the recorded times, and with those that the comparison expects.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import correlation, fmean, median, median_low, pstdev

from pipemorph.diagnose.analysis.slowdown import StepSimulator
from pipemorph.diagnose.analysis.step_graph import COLLECTIVES, IN_ORDER, PairedTransfer
from pipemorph.diagnose.analysis.steps import RecordedStep, join_named
from pipemorph.diagnose.operation import (
    BACKWARD,
    CHECKPOINT,
    CLIP,
    COMPUTE,
    DATA,
    FORWARD,
    GC,
    LOSS,
    NORM_REDUCE,
    OPTIMIZER,
    TRANSFERS,
)
from pipemorph.diagnose.operation_table import CODE_OF_OPTYPE

LEAST_SHARE = 0.01
"""Share of a step below which a cause is not named."""
SLOW = 1.05
"""Ratio to its peers from which a worker or a stage is slow."""
SLOW_LINK = 1.5
"""Ratio to the other links from which a link may be slow."""
LINK_NOISE = 0.02
"""Excess of a slow link's transfers over those of others, as a share of a usual compute op."""
VARIATION = 0.03
"""Standard deviation of the microbatches' lengths, relative to the mean, from which they vary."""
AGREEMENT = 0.7
"""Correlation of forwards and backwards from which it is microbatches that vary, and no noise."""
PAUSE = 2.0
"""Ratio to the usual time of an op from which it is taken for a pause, with ``LONGEST_PAUSES`` as
their largest share of all ops."""
LONGEST_PAUSES = 0.05
LEAST_AFTER = 3
"""Steps with a cause from which on it has a beginning; one or two are noise."""
JOINT = 1.2
"""Causes of one kind in several places are one cause if together they cost so many times more than
one by one: replicas wait for each other."""

_COMPUTE = frozenset(CODE_OF_OPTYPE[name] for name in (*COMPUTE, LOSS))
_KINDS = frozenset(CODE_OF_OPTYPE[name] for name in COMPUTE)
_LOSS = CODE_OF_OPTYPE[LOSS]
_FORWARD, _BACKWARD = CODE_OF_OPTYPE[FORWARD], CODE_OF_OPTYPE[BACKWARD]

Change = Callable[[RecordedStep, list[float]], None]
"""Removal of a cause from the times of a step."""


@dataclass(frozen=True)
class Cause:
    """Cause of lost time. ``seconds``: mean time that each step would save; ``share``: of the step.
    ``since``: first step with it, if earlier ones are without.

    ``workers``, ``stage``, ``link``: its place, as far as it has one; a link is named by its first
    stage. ``directions``: replica, sending and receiving stage, of each slow direction of the link.
    ``removal``: of the cause from the times of a step, None for gaps between ops.
    """

    cause: str
    where: str
    seconds: float
    share: float
    since: int | None
    workers: tuple[int, ...] = ()
    stage: int | None = None
    link: int | None = None
    directions: tuple[tuple[int, int, int], ...] = ()
    removal: Change | None = field(default=None, repr=False, compare=False)


def find_causes(simulator: StepSimulator) -> list[Cause]:
    """Causes of at least ``LEAST_SHARE`` of a step, the most costly first."""
    return _CauseFinder(simulator).find()


class _CauseFinder:
    def __init__(self, simulator: StepSimulator) -> None:
        self.simulator = simulator
        self.set = simulator.set
        self.steps = simulator.set.steps
        self.workers = simulator.set.workers
        self.span = fmean(step.span for step in self.steps)
        self.usual = self._find_usual_times()
        self.lengths = self._find_lengths()
        self.paces = self._find_paces()
        self.levels = {
            key: find_usual_level([paces[key] for paces in self.paces if key in paces])
            for key in self.usual
        }

    def find(self) -> list[Cause]:
        found = [
            *self._find_slow_workers(),
            *self._find_long_stages(),
            *self._find_slow_links(),
            *self._find_varying_lengths(),
            *self._find_pauses(),
            *self._find_kinds(),
            *self._find_gaps(),
        ]
        # The cost of all transfers includes that of slow links.
        linked = any(cause.link is not None for cause in found)
        return sorted(
            (
                cause
                for cause in found
                if cause.share >= LEAST_SHARE and not (linked and cause.cause == "transfers")
            ),
            key=lambda cause: -cause.seconds,
        )

    # --- what is usual ------------------------------------------------------------------------

    def _find_usual_times(self) -> dict[tuple[int, int, int], float]:
        """Median time of an op by worker, type and chunk."""
        times: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        for step in self.steps:
            for op, time in zip(step.ops, step.times, strict=False):
                if op.optype in _COMPUTE:
                    times[op.worker, op.optype, op.chunk].append(time)
        return {key: median(found) for key, found in times.items()}

    def _find_lengths(self) -> list[dict[tuple[int, int], float]]:
        """Length of each microbatch of each step, by replica and number, relative to the usual one;
        empty if they do not vary. Forwards and backwards of a microbatch must agree on it."""
        by_chunk: dict[tuple[int, int], list[float]] = defaultdict(list)
        for (_, optype, chunk), usual in self.usual.items():
            by_chunk[optype, chunk].append(usual)
        # Relative to all replicas: one whose microbatches are longer waits for none, others do.
        usual_of = {key: fmean(each) for key, each in by_chunk.items()}
        found: list[dict[tuple[int, int], float]] = []
        forward: list[float] = []
        backward: list[float] = []
        within: list[float] = []
        for step in self.steps:
            ratios: dict[tuple[int, int], dict[int, list[float]]] = {}
            for op, time in zip(step.ops, step.times, strict=False):
                usual = usual_of.get((op.optype, op.chunk), 0.0)
                if op.optype in (_FORWARD, _BACKWARD) and usual > 0:
                    key = self.workers[op.worker].dp_rank, op.microbatch
                    by_kind = ratios.setdefault(key, {_FORWARD: [], _BACKWARD: []})
                    by_kind[op.optype].append(time / usual)
            lengths: dict[tuple[int, int], float] = {}
            of_replica: dict[int, list[float]] = defaultdict(list)
            for key, by_kind in ratios.items():
                if by_kind[_FORWARD] and by_kind[_BACKWARD]:
                    forward.append(median_low(by_kind[_FORWARD]))
                    backward.append(median_low(by_kind[_BACKWARD]))
                    lengths[key] = median_low(by_kind[_FORWARD] + by_kind[_BACKWARD])
                    of_replica[key[0]].append(lengths[key])
            within += [x / fmean(row) for row in of_replica.values() if any(row) for x in row]
            found.append(lengths)
        varies = len(within) > 1 and pstdev(within) > VARIATION
        if varies and pstdev(forward) > 0 < pstdev(backward):
            varies = correlation(forward, backward) > AGREEMENT
        return found if varies else [{} for _ in found]

    def _get_length(self, place: int, worker: int, microbatch: int) -> float:
        return self.lengths[place].get((self.workers[worker].dp_rank, microbatch), 1.0) or 1.0

    def _find_paces(self) -> list[dict[tuple[int, int, int], float]]:
        """Median time of an op in each step, by worker, type and chunk, for the usual length."""
        paces = []
        for place, step in enumerate(self.steps):
            times: dict[tuple[int, int, int], list[float]] = defaultdict(list)
            for op, time in zip(step.ops, step.times, strict=False):
                if op.optype in _COMPUTE:
                    length = self._get_length(place, op.worker, op.microbatch)
                    times[op.worker, op.optype, op.chunk].append(time / length)
            paces.append({key: median(found) for key, found in times.items()})
        return paces

    def _sum_paces(self) -> dict[int, list[float]]:
        """Time of a microbatch on each worker, by step."""
        sums: dict[int, list[float]] = {}
        for place, paces in enumerate(self.paces):
            for (worker, _, _), pace in paces.items():
                row = sums.setdefault(worker, [0.0] * len(self.steps))
                row[place] += pace
        return sums

    # --- causes -------------------------------------------------------------------------------

    def _make_cause(
        self, cause: str, where: str, change: Change, *, least: float = LEAST_SHARE, **place: object
    ) -> list[Cause]:
        """Cause whose removal is ``change``; empty if it costs less than ``least``."""
        without = self.simulator.simulate_changed(change)
        return self._make_measured(
            cause,
            where,
            [a - b for a, b in zip(self.simulator.recorded_steps, without, strict=True)],
            least,
            removal=change,
            **place,
        )

    def _make_measured(
        self,
        cause: str,
        where: str,
        costs: Sequence[float],
        least: float = LEAST_SHARE,
        **place: object,
    ) -> list[Cause]:
        """Cause with its cost in each step."""
        seconds = fmean(costs)
        whole = max(self.span, 1e-12)
        if seconds < least * whole:
            return []
        at = find_beginning(costs)
        since = self.steps[at].step if at else None
        return [Cause(cause, where, seconds, seconds / whole, since, **place)]  # type: ignore[arg-type]

    def _join_causes(self, several: str, found: Sequence[tuple[Cause, Change]]) -> Iterable[Cause]:
        """Causes of one kind; as one if they hide each other."""
        if len(found) > 1:
            change_all = _join_changes([change for _, change in found])
            where = join_named(cause.where for cause, _ in found)
            joint = self._make_cause(
                several,
                where,
                change_all,
                workers=tuple(worker for cause, _ in found for worker in cause.workers),
                link=found[0][0].link,
                directions=tuple(each for cause, _ in found for each in cause.directions),
            )
            if joint and joint[0].seconds > JOINT * sum(cause.seconds for cause, _ in found):
                return joint
        return [cause for cause, _ in found]

    def _find_slow_workers(self) -> Iterable[Cause]:
        sums = self._sum_paces()
        found: list[tuple[Cause, Change]] = []
        self.references: dict[int, float] = {}
        by_stage: dict[int, list[int]] = defaultdict(list)
        for worker in sums:
            by_stage[self.workers[worker].stage].append(worker)
        for mine in by_stage.values():
            own = {worker: find_usual_level(sums[worker]) for worker in mine}
            reference = median_low(own.values())
            for worker in mine:
                self.references[worker] = reference
                if fmean(sums[worker]) <= SLOW * reference and not any(
                    pace > SLOW * reference for pace in _list_levels(sums[worker])
                ):
                    continue
                change = self._scale_worker(worker, sums[worker], reference)
                place = self.workers[worker]
                rank = self.set.ranks[worker]
                name = f"stage {place.stage} of dp_rank {place.dp_rank}"
                name += f" (rank {rank})" if rank >= 0 else ""
                cause = self._make_cause(
                    "slow worker", name, change, least=-1.0, workers=(worker,), stage=place.stage
                )
                found.append((cause[0], change))
        if 2 * len(found) > len(sums):
            # Nodes do not become slow together: the work or what all of them share has changed.
            return self._make_cause(
                "slower ops", "most workers", _join_changes([change for _, change in found])
            )
        return self._join_causes("slow workers", found)

    def _scale_worker(self, worker: int, paces: Sequence[float], reference: float) -> Change:
        """Removal of a worker's slowness: in each step its ops take their share of what the
        reference takes. The lengths of its microbatches stay as they were."""
        factors = {
            step.step: min(1.0, reference / pace) if pace else 1.0
            for step, pace in zip(self.steps, paces, strict=True)
        }

        def change(step: RecordedStep, times: list[float]) -> None:
            for i, op in enumerate(step.ops):
                if op.worker == worker and op.optype in _COMPUTE:
                    times[i] *= factors[step.step]

        return change

    def _find_long_stages(self) -> Iterable[Cause]:
        """Find stages whose ops, on the fastest replica, take longer than those of others."""
        per_chunk: dict[tuple[int, int], list[float]] = defaultdict(list)
        for (_, optype, chunk), level in self.levels.items():
            per_chunk[optype, chunk].append(level)
        times = {key: median_low(found) for key, found in per_chunk.items()}
        stages = self.set.chunk_stages
        totals = [0.0] * self.set.stages
        for (_, chunk), time in times.items():
            if chunk >= 0:
                totals[stages[chunk]] += time
        reference = median_low(totals)
        kinds = {optype for optype, _ in times}
        for stage, total in enumerate(totals):
            if not reference or total <= SLOW * reference:
                continue
            usual = {
                kind: median_low(
                    [t for (k, c), t in times.items() if k == kind and stages[c] != stage]
                )
                for kind in kinds & _KINDS
                if any(k == kind and stages[c] != stage for k, c in times)
            }
            usual[_LOSS] = 0.0
            yield from self._make_cause(
                "long stage",
                f"stage {stage} ({total / reference:.2f} times the others)",
                self._shorten_stage(stage, times, usual),
                stage=stage,
            )

    def _shorten_stage(
        self,
        stage: int,
        times: Mapping[tuple[int, int], float],
        usual: Mapping[int, float],
    ) -> Change:
        """Removal of a stage's length. ``times``: by type and chunk; ``usual``: of other stages, by
        type. Types that are no longer than those do not change."""

        def change(step: RecordedStep, changed: list[float]) -> None:
            for i, op in enumerate(step.ops):
                if op.optype in usual and self.workers[op.worker].stage == stage:
                    own = times.get((op.optype, op.chunk), 0.0)
                    if own > usual[op.optype]:
                        changed[i] *= usual[op.optype] / own

        return change

    def _find_slow_links(self) -> Iterable[Cause]:
        """Find links whose transfers take longer than those of the others."""
        spent: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        early: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        for step in self.steps:
            mine: dict[tuple[int, int, int], list[float]] = defaultdict(list)
            for message in step.graph.messages:
                if message.receive >= 0:
                    mine[self._get_link(step, message)].append(step.times[message.receive])
            for link, times in mine.items():
                spent[link].append(fmean(times))
                early[link].append(median(times))
        if not spent:
            return
        noise = LINK_NOISE * median(self.usual.values())
        by_pair: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        references = {}
        for link, times in spent.items():
            others = [median(early[other]) for other in spent if set(other[1:]) != set(link[1:])]
            least = min(find_usual_level(early[link]), *(median(early[o]) for o in early))
            references[link] = median_low(others) if others else least
            if max(_list_levels(times)) > SLOW_LINK * references[link] + noise:
                by_pair[min(link[1:]), max(link[1:])].append(link)
        for (a, b), links in by_pair.items():
            yield from self._join_causes(
                "slow link", list(self._name_links(a, b, links, references))
            )

    # A link is a replica and the two stages that it connects, in the direction of its messages.

    def _get_link(self, step: RecordedStep, message: PairedTransfer) -> tuple[int, int, int]:
        sender = self.workers[step.ops[message.producer].worker]
        return sender.dp_rank, sender.stage, self.workers[step.ops[message.consumer].worker].stage

    def _name_links(
        self,
        a: int,
        b: int,
        links: Sequence[tuple[int, int, int]],
        references: Mapping[tuple[int, int, int], float],
    ) -> Iterable[tuple[Cause, Change]]:
        """Cause of each replica whose link of two stages is slow."""
        for replica in sorted({link[0] for link in links}):
            mine = {link for link in links if link[0] == replica}
            change = self._shorten_transfers({link: references[link] for link in mine})
            back = " and back" if len(mine) > 1 else ""
            first, second = (a, b) if (replica, a, b) in mine else (b, a)
            of = f" of dp_rank {replica}" if self.set.replicas > 1 else ""
            (cause,) = self._make_cause(
                "slow link",
                f"stage {first} to {second}{back}{of}",
                change,
                least=-1.0,
                link=a,
                directions=tuple(sorted(mine)),
            )
            yield cause, change

    def _shorten_transfers(self, usual: Mapping[tuple[int, int, int], float]) -> Change:
        """Removal of the excess of some links. ``usual``: seconds of a transfer, by link."""

        def change(step: RecordedStep, times: list[float]) -> None:
            for message in step.graph.messages:
                link = self._get_link(step, message)
                if link in usual:
                    for i in (message.send, message.receive):
                        if i >= 0:
                            times[i] = min(times[i], usual[link])

        return change

    def _find_varying_lengths(self) -> Iterable[Cause]:
        """Find what it costs that microbatches of a step, also of several replicas, are not equal:
        with the mean length of the step, the work is the same in total."""
        if not any(self.lengths):
            return
        every = [length for lengths in self.lengths for length in lengths.values()]
        places = {step.step: place for place, step in enumerate(self.steps)}

        def change(step: RecordedStep, times: list[float]) -> None:
            place = places[step.step]
            mean = fmean(self.lengths[place].values())
            for i, op in enumerate(step.ops):
                if op.optype in _COMPUTE:
                    times[i] *= mean / self._get_length(place, op.worker, op.microbatch)

        yield from self._make_cause(
            "varying lengths",
            f"microbatches take {min(every):.2f} to {max(every):.2f} times the usual time",
            change,
        )

    def _find_pauses(self) -> Iterable[Cause]:
        """Find single ops that took far longer than the others of their worker."""
        limits: dict[str, dict[int, float]] = {}
        count = 0
        by_worker: dict[int, float] = defaultdict(float)
        for place, (step, paces) in enumerate(zip(self.steps, self.paces, strict=True)):
            found: dict[int, float] = {}
            for i, (op, time) in enumerate(zip(step.ops, step.times, strict=False)):
                if op.optype not in _COMPUTE:
                    continue
                count += 1
                key = (op.worker, op.optype, op.chunk)
                usual = max(paces[key], self.usual[key])
                usual *= self._get_length(place, op.worker, op.microbatch)
                if time > PAUSE * usual:
                    found[i] = usual
                    by_worker[op.worker] += time - usual
            limits[str(step.step)] = found
        if not 0 < sum(map(len, limits.values())) <= LONGEST_PAUSES * count:
            return

        def change(step: RecordedStep, times: list[float]) -> None:
            for i, usual in limits[str(step.step)].items():
                times[i] = usual

        yield from self._make_cause("pauses", self._name_workers(by_worker), change)

    def _name_workers(self, spent: Mapping[int, float]) -> str:
        """Name the workers with most of something: one, a few, or all."""
        if not spent:
            return "all workers"
        most = max(spent, key=lambda worker: spent[worker])
        high = [worker for worker in spent if spent[worker] > 0.5 * spent[most]]
        if len(high) > max(1, len(self.paces[0]) and len({k[0] for k in self.paces[0]}) // 2):
            return "all workers"
        return join_named(self.workers[worker].key for worker in sorted(high))

    def _find_kinds(self) -> Iterable[Cause]:
        """Find what gc, data, reductions and the optimizer cost, each without its waiting."""
        norm, clip = CODE_OF_OPTYPE[NORM_REDUCE], CODE_OF_OPTYPE[CLIP]
        of = {
            "transfers": frozenset(CODE_OF_OPTYPE[name] for name in TRANSFERS),
            "gc": frozenset((CODE_OF_OPTYPE[GC],)),
            "slow loader": frozenset((CODE_OF_OPTYPE[DATA],)),
            "checkpoints": frozenset((CODE_OF_OPTYPE[CHECKPOINT],)),
            "gradient reduction": COLLECTIVES - {norm, clip},
            "gradient norm": frozenset((norm, clip)),
            "optimizer": frozenset((CODE_OF_OPTYPE[OPTIMIZER],)),
        }
        for name, codes in of.items():
            spent: dict[int, float] = defaultdict(float)
            for step in self.steps:
                for op, time in zip(step.ops, step.times, strict=False):
                    if op.optype in codes:
                        spent[op.worker] += time

            def change(
                step: RecordedStep, times: list[float], codes: frozenset[int] = codes
            ) -> None:
                for i, op in enumerate(step.ops):
                    if op.optype in codes:
                        times[i] = 0.0

            if sum(spent.values()) > 0:
                yield from self._make_cause(name, self._name_workers(spent), change)

    def _find_gaps(self) -> Iterable[Cause]:
        """Find time between the moment when an op could start and its start."""
        costs = [
            step.span - seconds
            for step, seconds in zip(self.steps, self.simulator.recorded_steps, strict=True)
        ]
        spent: dict[int, float] = defaultdict(float)
        for step in self.steps:
            graph = step.graph
            ends = [step.begin]
            for i, a, b in zip(graph.ops, graph.first, graph.second, strict=True):
                ready = max(ends[a], ends[b])
                if i >= 0 and step.ops[i].optype in IN_ORDER:
                    spent[step.ops[i].worker] += max(0.0, step.ops[i].start - ready)
                ends.append(step.ops[i].end if i >= 0 else ready)
        yield from self._make_measured("gaps between ops", self._name_workers(spent), costs)


def _join_changes(changes: Sequence[Change]) -> Change:
    """Join changes: one is made after the other."""

    def change_all(step: RecordedStep, times: list[float]) -> None:
        for change in changes:
            change(step, times)

    return change_all


def find_usual_level(values: Sequence[float]) -> float:
    """Median before the values rise for good; of all if they do not."""
    at = find_beginning([value - min(values) for value in values]) if values else 0
    if at and fmean(values[at:]) > SLOW * median(values[:at]):
        return median(values[:at])
    return median(values)


def find_beginning(costs: Sequence[float]) -> int:
    """Index from which on there mostly are costs, without any before; 0 if they were there from the
    beginning, or come and go."""
    high = sorted(costs)[int(0.9 * (len(costs) - 1))]
    at = next((i for i, cost in enumerate(costs) if cost >= 0.5 * high), 0)
    if high <= 0 or not at or fmean(costs[:at]) > 0.25 * high:
        return 0
    after = costs[at:]
    if len(after) < LEAST_AFTER:
        return 0
    return at if 2 * sum(cost >= 0.5 * high for cost in after) > len(after) else 0


def _list_levels(values: Sequence[float]) -> list[float]:
    """Means of the values: of all, and of those from where they rise."""
    at = find_beginning([value - min(values) for value in values]) if values else 0
    return [fmean(values), fmean(values[at:])]
