"""Shows progress: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import TextIO

from pipemorph.api.spec import PipeMorphJob
from pipemorph.control.record.history import Decision
from pipemorph.errors import one_line
from pipemorph.explain.story import duration, few, plural
from pipemorph.local.results.history import Journal
from pipemorph.streams import silence
from pipemorph.terminal import StreamConsole, Text, line, live, printable
from pipemorph.wire import (
    AdaptationRecord,
    Health,
    IterationSample,
    LinkState,
    RailsView,
    ReductionHealth,
    StragglersView,
    TransportsView,
)

PLAIN_INTERVAL_SECONDS = 0.5
"""Minimum time between two plain lines, so that the log of a fast job stays readable."""
LONGEST_TOLD = 2000
"""Characters of a line of what ranks and their reports say."""
MOST_TOLD = 100
"""Different errors that are told."""
NEWEST = 5
"""Newest iterations whose median time tells how long the rest will take."""


def headline(job: PipeMorphJob) -> str:
    """A summary of the job in one line."""
    spec = job.spec
    parts = [plural(spec.parallelism.stages, "stage")]
    if spec.parallelism.replicas > 1:
        parts.append(plural(spec.parallelism.replicas, "replica"))
    for word in ("shard", "context", "tensor"):
        if (size := getattr(spec.parallelism, word)) > 1:
            parts.append(f"{word} {size}")
    parts += [
        plural(spec.schedule.microbatches, "microbatch", "microbatches"),
        plural(spec.trainer.iterations, "iteration"),
        f"policy {spec.schedule.policy}",
    ]
    return f"{job.metadata.name}: {', '.join(parts)}{emulation_note(job)}"


def emulation_note(job: PipeMorphJob) -> str:
    """A note that the stages are emulated; empty if they are not."""
    emulation = job.spec.emulation
    if emulation is None:
        return ""
    sizes = f"messages of {_bytes(emulation.message_bytes)}"
    if emulation.stands_for_bytes is not None:
        sizes += f" in place of {_bytes(emulation.stands_for_bytes)}"
    return f"; EMULATED: stages wait instead of computing, {sizes}"


def iteration_line(
    sample: IterationSample,
    total: int,
    links: tuple[LinkState, ...],
    *,
    emulated: bool,
    troubles: Sequence[str] = (),
    seconds: float | None = None,
) -> str:
    """``iteration 11 of 40 (30%, 34.4 s left)  loss 2.3451  1.230 s/it  slow link 2 +30 ms  plan v3
    bubble 18%``

    ``seconds``: that each of the next iterations is expected to take; None if it is not known.
    ``troubles``: of rails and stages, in words; empty texts are left out.
    """
    left = total - sample.index - 1
    done = f"{100 * (sample.index + 1) // total}%"
    if seconds is not None and left > 0:
        done += f", {duration(left * seconds)} left"
    loss = "loss -" if sample.loss is None else f"loss {sample.loss:.4f}"
    parts = [
        f"iteration {sample.index} of {total} ({done})",
        loss,
        f"{sample.seconds:.3f} s/it",
        links_phrase(links),
        *troubles,
        f"plan v{sample.plan_version}",
        # Last: a narrow terminal cuts the line off.
        f"bubble {sample.bubble_fraction:.0%}",
    ]
    return "  ".join(([] if not emulated else ["EMULATED"]) + [part for part in parts if part])


def links_phrase(links: tuple[LinkState, ...]) -> str:
    """The slowest three slow links; else those that may be well again, the number of unknown links,
    or that all are healthy."""
    slow = sorted((x for x in links if x.is_late), key=lambda x: -x.delay)
    if slow:
        named = few((f"{link.link} +{1e3 * link.delay:.0f} ms" for link in slow), 3)
        return f"slow link{'s' * (len(slow) > 1)} {named}"
    if doubtful := [str(x.link) for x in links if x.health is Health.SLOW]:
        return f"in doubt: link {few(doubtful, 3)}"
    unknown = sum(link.health is Health.UNKNOWN for link in links)
    if not links:
        return ""
    return f"links: {unknown} of {len(links)} unknown" if unknown else "links healthy"


def reductions_phrase(reductions: tuple[ReductionHealth, ...]) -> str:
    """The slowest gradient reduction, if any is slow; else empty."""
    slow = sorted((each for each in reductions if each.slow), key=lambda each: -each.delay)
    named = few((f"{each.name} +{1e3 * each.delay:.0f} ms" for each in slow), 1)
    return f"slow {named}" if slow else ""


def rails_phrase(rails: RailsView, transports: TransportsView) -> str:
    """A short list of the rails' problems; empty if there are none, or no rails."""
    fallen = sorted({(f.link, f.transport) for f in transports.fallen})
    parts = [f"link {link} fell back to {transport}" for link, transport in fallen[:3]]
    if len(fallen) > 3:
        parts.append(f"{len(fallen) - 3} more fell back")
    if rails.sick_count:
        parts.append(f"{plural(rails.sick_count, 'sick RDMA port')}")
    return ", ".join(parts)


def stragglers_phrase(
    stragglers: StragglersView, layers: int | None = None, held: Sequence[int] = ()
) -> str:
    """The slowest straggler, the number of others, and how many of the model's ``layers`` that
    stage should have; empty if there is none. ``held``: how many each stage has; empty: evenly
    many."""
    if not stragglers.slowest:
        return ""
    worst, split = stragglers.slowest[0], stragglers.better_split(layers, held)
    more = f" and {stragglers.count - 1} more" if stragglers.count > 1 else ""
    better = f" (-{split.gain:.0%} with {split.layers[worst.stage]} layers)" if split else ""
    return f"slow stage {worst.stage} x{worst.ratio:.1f}{better}{more}"


class Progress:
    """Shows the journal's progress. Call :meth:`update` a few times a second.

    ``on_closed`` is called once when nobody reads ``stream`` any more. Other errors in writing it,
    as of a full disk, end the display. ``who``: the command, for its own errors.
    """

    def __init__(
        self,
        stream: TextIO,
        job: PipeMorphJob,
        journal: Journal,
        *,
        who: str = "pipemorph run",
        on_closed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            # What its encoding lacks is no reason to end a run.
            stream.reconfigure(errors="replace")
        self._who = who
        self._on_closed = on_closed
        self._closed = False
        self._console = StreamConsole(stream)
        self._live = live(self._console)
        self._job = job
        self.layers: tuple[int, ...] = ()
        """How many each stage holds; empty: evenly many."""
        self._journal = journal
        self._clock = clock
        self._held: IterationSample | None = None
        self._printed_at = -PLAIN_INTERVAL_SECONDS
        self._decided: set[tuple[float, str]] = set()
        self._in_force: set[int] = set()
        self._newest: deque[IterationSample] = deque(maxlen=NEWEST)
        self._happened = -1
        self._message: str | None = None
        self._line = ""
        self._diverged = False
        """Whether a loss that is not finite was told of."""
        self._errors: set[str] = set()
        """Of what was attempted, that were told."""

    def note(self, text: str) -> None:
        """Print ``text`` on separate lines. What ranks or reports supply comes here as one line."""
        # Not wrapped, so that a path in it can be copied whole.
        self._guard(lambda: self._console.print(Text(printable(text)), soft_wrap=True))

    def update(self, *, final: bool = False) -> None:
        """Show changes since the last call. ``final``: do not skip lines in a plain log."""
        self.attempt("the job's progress cannot be shown", lambda: self._show(final))

    def attempt(self, failed: str, what: Callable[[], None]) -> None:
        """Do what the job can go on without, and say each error of it once. ``failed``: what an
        error means."""
        try:
            what()
        except Exception as error:  # noqa: BLE001  # Whatever it is, the job goes on.
            told = one_line(f"{failed}: {error!r}", 300)
            if told not in self._errors and len(self._errors) < MOST_TOLD:
                self._errors.add(told)
                self.note(told)

    def _show(self, final: bool) -> None:
        view, unseen = self._journal.view, self._journal.unseen()
        if view.message is not None and view.message != self._message:
            self._message = view.message
            self.note(one_line(view.message, LONGEST_TOLD))
        for event in view.events:
            if event.number > self._happened:
                self._happened = event.number
                self.note(one_line(event.text, LONGEST_TOLD))
        for decision in view.decisions:
            self._show_decision(decision)
        for record in view.adaptations:
            self._show_in_effect(record)
        diverged = next((each for each in unseen if each.diverged), None)
        if diverged is not None and not self._diverged:
            self._diverged = True
            self.note(f"iteration {diverged.index}: the loss is {diverged.loss}; the job goes on")
        if unseen:
            self._held = unseen[-1]
            self._newest.extend(unseen)
        if self._held is None:
            return
        shown = iteration_line(
            self._held,
            self._job.spec.trainer.iterations,
            view.links,
            emulated=self._job.spec.emulation is not None,
            troubles=(
                reductions_phrase(view.reductions),
                rails_phrase(view.rails, view.transports),
                stragglers_phrase(view.stragglers, self._job.spec.parallelism.layers, self.layers),
            ),
            seconds=median(each.seconds for each in self._newest),
        )
        if self._console.is_interactive:
            self._redraw(shown)
        elif final or self._clock() - self._printed_at >= PLAIN_INTERVAL_SECONDS:
            self._held = None
            self._printed_at = self._clock()
            self.note(shown)

    def close(self) -> None:
        """Show the last iteration and end the live line. What is noted later is below."""
        self.update(final=True)
        self._guard(self._live.stop)

    def _show_decision(self, decision: Decision) -> None:
        if (decision.at, decision.reason) not in self._decided:
            self._decided.add((decision.at, decision.reason))
            self.note(one_line(decision.line, LONGEST_TOLD))

    def _show_in_effect(self, record: AdaptationRecord) -> None:
        first = record.applied_at_iteration
        if first is not None and record.plan_version not in self._in_force:
            self._in_force.add(record.plan_version)
            self.note(f"plan v{record.plan_version}: in effect since iteration {first}")

    def _redraw(self, shown: str) -> None:
        def write() -> None:
            self._live.start()
            self._live.update(line(shown), refresh=True)

        if shown != self._line:
            self._line = shown
            self._guard(write)

    def _guard(self, write: Callable[[], object]) -> None:
        """Write, unless that has failed before."""
        if self._closed:
            return
        try:
            write()
        except OSError as error:
            self._closed = True
            if isinstance(error, BrokenPipeError):  # As of `| head`.
                self._on_closed()
                return
            silence(self._stream)
            why = f"standard output cannot be written: {error.strerror}"
            with contextlib.suppress(OSError):  # stderr may be the same disk
                print(f"{self._who}: {why}; the job goes on without it", file=sys.stderr)


def _bytes(size: int) -> str:
    for unit, scale in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"
