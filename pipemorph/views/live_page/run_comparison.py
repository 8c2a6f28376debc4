"""Compares two runs of one shape: which was faster, since when, and where the time went.

Iterations that both have are compared, without the first, which starts everything. They are divided
into phases, in which neither run changes its plan nor sees a link change. The spread is that of the
differences of single iterations within phases.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt
from pathlib import Path
from statistics import mean, median

from pipemorph.errors import InputError
from pipemorph.planning.ir import join_dashed
from pipemorph.views.live_page.page_document import IterationPicture, PageDocument
from pipemorph.views.pictures.html import fill_template

MOST_NAMED = 4
"""Most links and stages that are named."""
LEAST_ITERATIONS = 3
"""Fewest iterations that are compared."""
LEAST_CHANGE = 0.02
"""Least difference of a phase, as a fraction of an iteration, that counts."""
ERRORS = 2.0
"""Standard errors of the spread that is stated, and that a difference has to exceed."""
TO_DEVIATION = 1.4826
"""Standard deviation over the median of absolute deviations, of a normal distribution."""
ALIKE_WITHIN = 0.05
"""Relative difference of the op times of a stage up to which they count as alike."""
PARTS = {
    "ops": "ops", "link": "waits for messages on links", "dependency": "waits for other stages",
    "order": "the host between ops", "fill": "fill", "drain": "drain", "outside": "outside ops",
}  # fmt: skip
"""Parts of an iteration's time, a mean over its ranks, and their names."""


@dataclass(frozen=True)
class Phase:
    """Iterations that both runs have, between two events. ``seconds``: by run and iteration."""

    iterations: Sequence[int]
    seconds: tuple[Sequence[float], Sequence[float]]

    @property
    def means(self) -> tuple[float, float]:
        return mean(self.seconds[0]), mean(self.seconds[1])

    @property
    def differences(self) -> list[float]:
        """Seconds by which each iteration of the first run is longer."""
        return [a - b for a, b in zip(*self.seconds, strict=True)]

    def join(self, other: Phase) -> Phase:
        mine, theirs = self.seconds, other.seconds
        joined = ([*mine[0], *theirs[0]], [*mine[1], *theirs[1]])
        return Phase([*self.iterations, *other.iterations], joined)


@dataclass(frozen=True)
class RunComparison:
    """Two runs and the phases of their common iterations. ``deviation``: standard deviation of the
    difference of an iteration within a phase, seconds; ``usual_deviation``: without outliers."""

    names: tuple[str, str]
    pages: tuple[PageDocument, PageDocument]
    phases: Sequence[Phase]
    deviation: float
    usual_deviation: float

    @staticmethod
    def from_pages(
        names: tuple[str, str], pages: tuple[PageDocument, PageDocument]
    ) -> RunComparison:
        """Compare two runs. Raises :class:`InputError` if their shapes differ, or if they have too
        few iterations in common."""
        shapes = [(page.stages, page.microbatches) for page in pages]
        if shapes[0] != shapes[1]:
            text = " and ".join(
                f"{name} has {page.described}" for name, page in zip(names, pages, strict=True)
            )
            raise InputError(
                f"{text}; runs with as many stages and microbatches can be compared: view each by"
                " itself"
            )
        times = [dict(zip(p.steps.index, p.steps.seconds, strict=True)) for p in pages]
        common = sorted(times[0].keys() & times[1].keys())[1:]
        if len(common) < LEAST_ITERATIONS:
            raise InputError(
                f"{names[0]} and {names[1]} have {len(common)} iterations in common after the"
                f" first; expected at least {LEAST_ITERATIONS}"
            )
        bounds = sorted({-inf, *_list_events(pages[0]), *_list_events(pages[1]), inf})
        phases = []
        for begin, end in pairwise(bounds):
            mine = [each for each in common if begin <= each < end]
            if mine:
                a, b = ([time[each] for each in mine] for time in times)
                phases.append(Phase(mine, (a, b)))
        squares = [
            (d - mean(phase.differences)) ** 2
            for phase in phases
            if len(phase.iterations) > 1
            for d in phase.differences
        ]
        freedom = max(1, len(common) - len(phases))
        usual = TO_DEVIATION * sqrt(median(squares)) if squares else 0.0
        return RunComparison(names, pages, phases, sqrt(sum(squares) / freedom), usual)

    @property
    def whole(self) -> Phase:
        """Iterations that both runs have, as one phase."""
        found = self.phases[0]
        for each in self.phases[1:]:
            found = found.join(each)
        return found

    def compute_error(self, count: int) -> float:
        """Spread of the mean difference of ``count`` iterations, seconds."""
        return ERRORS * self.deviation / sqrt(count)

    def find_difference(self) -> Phase | None:
        """Consecutive phases in which one run was faster, those that account for most seconds; None
        if no phase differs."""
        groups: list[tuple[bool, Phase]] = []
        last: int | None = None
        for number, phase in enumerate(self.phases):
            a, b = map(median, phase.seconds)  # An outlier is no difference.
            spread = ERRORS * self.usual_deviation / sqrt(len(phase.iterations))
            spread = max(spread, LEAST_CHANGE * max(a, b))
            if abs(a - b) <= spread:
                continue
            if groups and last == number - 1 and groups[-1][0] == (a > b):
                groups[-1] = (a > b, groups[-1][1].join(phase))
            else:
                groups.append((a > b, phase))
            last = number
        found = [phase for _, phase in groups]
        return max(found, key=lambda each: abs(sum(each.differences)), default=None)

    def build_rows(self) -> list[tuple[str, str]]:
        """Label and text of each sentence."""
        rows = [("result", self._describe_result())]
        stretch = self.find_difference()
        if stretch is not None:
            rows.append(("where", self._describe_stretch(stretch)))
        parts = self._describe_parts(stretch or self.whole)
        rows += [("from", parts)] if parts else []
        at = (stretch or self.whole).iterations
        middle = at[len(at) // 2]
        rows.append(("links", self._describe_links(middle)))
        rows.append(("plan", self._describe_plans(middle)))
        stages = self._describe_stages(stretch or self.whole)
        return [*rows, *([("stages", stages)] if stages else [])]

    def _describe_result(self) -> str:
        whole = self.whole
        a, b = whole.means
        fast, slow = (0, 1) if a < b else (1, 0)
        error, count = self.compute_error(len(whole.iterations)), len(whole.iterations)
        over = f"over {count} iterations, {whole.iterations[0]} to {whole.iterations[-1]}"
        text = (
            f"{self.names[fast]} took {min(a, b):.3f} s per iteration, {self.names[slow]}"
            f" {max(a, b):.3f} s: {1 - min(a, b) / max(a, b):.1%} less (± {error / max(a, b):.1%}),"
            f" {over}"
        )
        alike = abs(a - b) <= error
        return f"no difference beyond the spread: {text}" if alike else text

    def _describe_stretch(self, stretch: Phase) -> str:
        a, b = stretch.means
        share = sum(stretch.differences) / (sum(self.whole.differences) or inf)
        of_all = f", {share:.0%} of the difference" if 0 < share <= 1 else ""
        first, last = stretch.iterations[0], stretch.iterations[-1]
        return (
            f"since iteration {first}, up to {last}: {self.names[0]} {a:.3f} s per iteration,"
            f" {self.names[1]} {b:.3f} s{of_all}"
        )

    def _describe_parts(self, stretch: Phase) -> str:
        """Difference of each part of an iteration, largest first; empty without pictures."""
        parts = [_measure_parts(_list_pictures(page, stretch)) for page in self.pages]
        if not parts[0] or not parts[1]:
            return ""
        changes = {part: parts[0][part] - parts[1][part] for part in PARTS}
        total = sum(changes.values())
        slow = self.names[0] if total > 0 else self.names[1]
        sign, least = (1e3 if total > 0 else -1e3), LEAST_CHANGE * sum(parts[0].values())
        longer = {part: sign * each for part, each in changes.items() if abs(each) >= least}
        listed = [
            f"{abs(each):.0f} ms {'more' if each > 0 else 'less'} in {PARTS[part]}"
            for part, each in sorted(longer.items(), key=lambda item: -item[1])
        ]
        counts = [len(_list_pictures(page, stretch)) for page in self.pages]
        drawn = f"(mean of the ranks, by the ops of {counts[0]} and {counts[1]} iterations)"
        if not listed:
            return f"every part of an iteration takes the same time in both {drawn}"
        return f"per iteration {slow} spends {', '.join(listed)} {drawn}"

    def _describe_links(self, iteration: int) -> str:
        """States of links that are not healthy in both runs."""
        found = []
        for lanes in zip(self.pages[0].links, self.pages[1].links, strict=False):
            states = [
                next(
                    (s.text for s in lane.spans if s.begin <= iteration < (s.end or inf)), "unknown"
                )
                for lane in lanes
            ]
            if set(states) <= {"healthy", "unknown"}:
                continue
            each = ", ".join(f"{t} in {n}" for n, t in zip(self.names, states, strict=True))
            found.append(
                f"{lanes[0].name}: {states[0] + ' in both' if states[0] == states[1] else each}"
            )
        return f"in iteration {iteration}: {_join_some(found) or 'all healthy in both'}"

    def _describe_plans(self, iteration: int) -> str:
        plans = [_describe_plan(page, iteration) for page in self.pages]
        if plans[0] == plans[1]:
            return f"in iteration {iteration}: {plans[0]} in both"
        each = ", ".join(f"{n} ran {t}" for n, t in zip(self.names, plans, strict=True))
        return f"in iteration {iteration}: {each}"

    def _describe_stages(self, stretch: Phase) -> str:
        """Stages whose ops took longer in one run; empty without pictures."""
        busy = [_measure_stages(_list_pictures(page, stretch)) for page in self.pages]
        if not busy[0] or not busy[1]:
            return ""
        found = [
            f"{name}: ops of {1e3 * a:.0f} ms in {self.names[0]}, {1e3 * b:.0f} ms in"
            f" {self.names[1]}"
            for (name, a), b in zip(busy[0].items(), busy[1].values(), strict=False)
            if abs(a - b) > ALIKE_WITHIN * max(a, b)
        ]
        return (
            "; ".join(found) or f"their ops take the same time in both, within {ALIKE_WITHIN:.0%}"
        )


def render_comparison(compared: RunComparison) -> str:
    """Page of two runs: that of the first, with the second one on the same scales."""
    whole = compared.whole
    a, b = whole.means
    error = compared.compute_error(len(whole.iterations))
    cards = [
        [f"{seconds:.3f} s", f"per iteration, {name}"]
        for name, seconds in zip(compared.names, (a, b), strict=True)
    ]
    kind = "" if abs(a - b) <= error else "loss" if b > a else "gain"
    change = f"{abs(a - b):.3f} ± {error:.3f} s"
    cards.append(
        [change, f"{'less' if b < a else 'more'} per iteration, {compared.names[1]}", kind]
    )
    first, second = (page.model_dump_json() for page in compared.pages)
    texts = {"names": compared.names, "rows": compared.build_rows(), "cards": cards}
    return fill_template(
        Path(__file__).with_name("page.html"),
        f'{{"view":{first},"other":{second},"texts":{json.dumps(texts)}}}',
    )


def _join_some(texts: Sequence[str]) -> str:
    """Join at most :data:`MOST_NAMED` texts."""
    more = f"; and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    return "; ".join(texts[:MOST_NAMED]) + more


def _list_events(page: PageDocument) -> list[int]:
    """Iterations in which a plan or the state of a link began, or training went on."""
    plans = [each.applied_at_iteration for each in page.adaptations]
    restarts = [each.went_on_with for each in page.recoveries]
    links = [span.begin for lane in page.links for span in lane.spans]
    return [each for each in (*plans, *restarts, *links) if each is not None]


def _list_pictures(page: PageDocument, stretch: Phase) -> list[IterationPicture]:
    """Pictures of the iterations of a stretch, in the column of the page."""
    wanted = set(stretch.iterations)
    mine = (each.measured for each in page.stored if each.column == page.column)
    return list({each.iteration: each for each in mine if each.iteration in wanted}.values())


def _measure_parts(pictures: Sequence[IterationPicture]) -> Mapping[str, float]:
    """Seconds of the parts of an iteration, a mean over ranks and iterations."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in pictures:
        span = 1e-6 * each.span_us
        for part in PARTS:
            found[part].append(span * each.causes.get(part, 0.0))
        found["ops"][-1] = span * (1 - each.bubble)
        found["outside"][-1] = max(0.0, (each.seconds or span) - span)
    return {part: mean(values) for part, values in found.items()}


def _measure_stages(pictures: Sequence[IterationPicture]) -> Mapping[str, float]:
    """Mean seconds of all ops of an iteration, by the name of the row."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in pictures:
        for row in each.rows:
            found[row.name].append(1e-6 * sum(row.durations))
    return {name: mean(values) for name, values in found.items()}


def _describe_plan(page: PageDocument, iteration: int) -> str:
    """Plan of an iteration: warm-up and delegated links; of the initial plan only that it is it."""
    record = None
    for each in page.adaptations:
        if each.applied_at_iteration is not None and each.applied_at_iteration <= iteration:
            record = each
    if record is None:
        return "the initial plan" if page.wanted else "the job's own schedule"
    away = [str(link) for link, route in enumerate(record.routes) if route == "delegated"]
    delegated = f", link {', '.join(away)} delegated" if away else ""
    warmup = join_dashed(record.warmup_after)
    return f"plan v{record.plan_version} (warm-up {warmup}{delegated})"
