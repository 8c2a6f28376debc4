"""Shows progress: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import TextIO

from pipemorph.control.history.job_history import DecisionRecord
from pipemorph.errors import one_line
from pipemorph.local.results.journal import RunJournal
from pipemorph.protocol import (
    AdaptationRecord,
    Health,
    IterationSample,
    LinkState,
    RailsView,
    ReductionHealth,
    StragglersView,
    TransportsView,
)
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.standard_streams import silence_stream
from pipemorph.terminal import (
    StreamConsole,
    Text,
    make_live_display,
    make_printable,
    make_single_line,
)
from pipemorph.views.explanation.explanation_text import format_count, format_duration, join_few

PLAIN_INTERVAL_SECONDS = 0.5
"""Minimum time between two plain lines, so that the log of a fast job stays readable."""
LONGEST_MESSAGE = 2000
"""Longest line of text from ranks and their reports, in characters."""
MEASURED_FIGURE = re.compile(r"\d[\d.,]*(?= ?(?:ms\b|s\b|%|iteration|remaining))")
"""Figures that differ between equal reasons."""
MOST_ERRORS = 100
"""Most different errors that are printed."""
NEWEST = 5
"""Newest iterations whose median time predicts the rest."""


def format_job_headline(job: PipeMorphJob) -> str:
    """A summary of the job in one line."""
    spec = job.spec
    parts = [format_count(spec.parallelism.stages, "stage")]
    if spec.parallelism.replicas > 1:
        parts.append(format_count(spec.parallelism.replicas, "replica"))
    for axis in ("shard", "context", "tensor"):
        if (size := getattr(spec.parallelism, axis)) > 1:
            parts.append(f"{axis} {size}")
    parts.append(format_count(spec.schedule.microbatches, "microbatch", "microbatches"))
    if spec.is_observed:
        own = spec.schedule.policy == "pipemorph"
        order = "an order of its own" if own else f"in the order of {spec.schedule.policy}"
        return f"observed: {', '.join(parts)}, {order}; PipeMorph changes nothing"
    parts += [
        format_count(spec.trainer.iterations, "iteration"),
        f"policy {spec.schedule.policy}",
    ]
    return f"{job.metadata.name}: {', '.join(parts)}{format_emulation_note(job)}"


def format_emulation_note(job: PipeMorphJob) -> str:
    """A note that the stages are emulated; empty if they are not."""
    emulation = job.spec.emulation
    if emulation is None:
        return ""
    sizes = f"messages of {_format_bytes(emulation.message_bytes)}"
    if emulation.stands_for_bytes is not None:
        sizes += f" in place of {_format_bytes(emulation.stands_for_bytes)}"
    return f"; EMULATED: stages wait instead of computing, {sizes}"


def format_iteration_line(
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

    ``total``: 0 for an observed job, which has no plan of ours. ``seconds``: expected time of each
    further iteration; None if unknown. ``troubles``: texts on rails and stages; empty ones are
    skipped.
    """
    known = [f"step {sample.index}", "", ""]
    if total:
        remaining = total - sample.index - 1
        done = f"{100 * (sample.index + 1) // total}%"
        if seconds is not None and remaining > 0:
            done += f", {format_duration(remaining * seconds)} left"
        loss = "loss -" if sample.loss is None else f"loss {sample.loss:.4f}"
        plan = f"plan v{sample.plan_version}"
        known = [f"iteration {sample.index} of {total} ({done})", loss, plan]
    parts = [
        *known[:2],
        f"{sample.seconds:.3f} s/it",
        describe_links(links),
        *troubles,
        known[2],
        # Last, as a narrow terminal cuts the line off.
        f"bubble {sample.bubble_fraction:.0%}",
    ]
    return "  ".join(([] if not emulated else ["EMULATED"]) + [part for part in parts if part])


def describe_links(links: tuple[LinkState, ...]) -> str:
    """The slowest three slow links; else links in doubt, the number of unknown links, or that all
    are healthy."""
    slow = sorted((x for x in links if x.is_late), key=lambda x: -x.delay)
    if slow:
        named = join_few((f"{link.link} +{1e3 * link.delay:.0f} ms" for link in slow), 3)
        return f"slow link{'s' * (len(slow) > 1)} {named}"
    if doubtful := [str(x.link) for x in links if x.health is Health.SLOW]:
        return f"in doubt: link {join_few(doubtful, 3)}"
    unknown = sum(link.health is Health.UNKNOWN for link in links)
    if not links:
        return ""
    return f"links: {unknown} of {len(links)} unknown" if unknown else "links healthy"


def describe_reductions(reductions: tuple[ReductionHealth, ...]) -> str:
    """The slowest gradient reduction, if any is slow; else empty."""
    slow = sorted((each for each in reductions if each.slow), key=lambda each: -each.delay)
    named = join_few((f"{each.name} +{1e3 * each.delay:.0f} ms" for each in slow), 1)
    return f"slow {named}" if slow else ""


def describe_rails(rails: RailsView, transports: TransportsView) -> str:
    """A short list of the rails' problems; empty if there are none, or no rails."""
    fallen = sorted({(f.link, f.transport) for f in transports.fallen})
    parts = [f"link {link} fell back to {transport}" for link, transport in fallen[:3]]
    if len(fallen) > 3:
        parts.append(f"{len(fallen) - 3} more fell back")
    if rails.faulty_count:
        parts.append(f"{format_count(rails.faulty_count, 'unhealthy RDMA port')}")
    return ", ".join(parts)


def describe_stragglers(
    stragglers: StragglersView, layers: int | None = None, held: Sequence[int] = ()
) -> str:
    """The slowest straggler, the number of others, and the better number of the model's ``layers``
    for that stage; empty if there is none. ``held``: layers of each stage; empty: evenly many."""
    if not stragglers.slowest:
        return ""
    worst, split = stragglers.slowest[0], stragglers.suggest_split(layers, held)
    more = f" and {stragglers.count - 1} more" if stragglers.count > 1 else ""
    better = f" (-{split.gain:.0%} with {split.layers[worst.stage]} layers)" if split else ""
    return f"slow stage {worst.stage} x{worst.ratio:.1f}{better}{more}"


class ProgressDisplay:
    """Shows the journal's progress. Call :meth:`show_changes` a few times a second.

    ``on_closed`` is called once when ``stream`` has no reader any more. Other errors in writing it,
    as of a full disk, end the display. ``command``: for its own errors. ``live``: False for plain
    lines also on a terminal, on which another program prints.
    """

    def __init__(
        self,
        stream: TextIO,
        job: PipeMorphJob | None,
        journal: RunJournal,
        *,
        command: str = "pipemorph run",
        on_closed: Callable[[], None] = lambda: None,
        live: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            # Characters that its encoding lacks must not end a run.
            stream.reconfigure(errors="replace")
        self._command = command
        self._on_closed = on_closed
        self._closed = False
        self._console = StreamConsole(stream, terminal=None if live else False)
        self._live = make_live_display(self._console)
        self.job = job
        """Job of the iterations; None before it is known."""
        self.layers: tuple[int, ...] = ()
        """Layers of each stage; empty: evenly many."""
        self._journal = journal
        self._clock = clock
        self._held: IterationSample | None = None
        self._printed_at = -PLAIN_INTERVAL_SECONDS
        self._decided: set[tuple[float, str]] = set()
        self._keep_reasons: set[str] = set()
        """Reasons, without figures, for which the present plan was kept and that were printed."""
        self._in_force: set[int] = set()
        self._newest: deque[IterationSample] = deque(maxlen=NEWEST)
        self._happened = -1
        self._message: str | None = None
        self._line = ""
        self._diverged = False
        """True once a loss that is not finite has been printed."""
        self._errors: set[str] = set()
        """Errors of :meth:`run_guarded` that have been printed."""

    def print_note(self, text: str) -> None:
        """Print ``text`` on separate lines. Callers pass text of ranks or reports as one line."""
        # Not wrapped, so that a path in the text can be copied whole.
        self._write_guarded(lambda: self._console.print(Text(make_printable(text)), soft_wrap=True))

    def show_changes(self, *, final: bool = False) -> None:
        """Show changes since the last call. ``final``: do not skip lines in a plain log."""
        self.run_guarded("the job's progress cannot be shown", lambda: self._show_view(final))

    def run_guarded(self, failed: str, what: Callable[[], None]) -> None:
        """Run a function that the job does not need, and print each of its errors once. ``failed``:
        consequence of an error, for its message."""
        try:
            what()
        except Exception as error:  # noqa: BLE001  # Whatever it is, the job goes on.
            message = one_line(f"{failed}: {error!r}", 300)
            if message not in self._errors and len(self._errors) < MOST_ERRORS:
                self._errors.add(message)
                self.print_note(message)

    def _show_view(self, final: bool) -> None:
        view, unseen = self._journal.view, self._journal.take_unseen_iterations()
        if view.message is not None and view.message != self._message:
            self._message = view.message
            self.print_note(one_line(view.message, LONGEST_MESSAGE))
        for event in view.events:
            if event.number > self._happened:
                self._happened = event.number
                self.print_note(one_line(event.text, LONGEST_MESSAGE))
        for decision in view.decisions:
            self._show_decision(decision)
        for record in view.adaptations:
            self._show_applied_plan(record)
        diverged = next((each for each in unseen if each.diverged), None)
        if diverged is not None and not self._diverged:
            self._diverged = True
            self.print_note(
                f"iteration {diverged.index}: the loss is {diverged.loss}; the job goes on"
            )
        if unseen:
            self._held = unseen[-1]
            self._newest.extend(unseen)
        if self._held is None or self.job is None:
            return
        shown = format_iteration_line(
            self._held,
            self.job.spec.trainer.iterations,
            view.links,
            emulated=self.job.spec.emulation is not None,
            troubles=(
                describe_reductions(view.reductions),
                describe_rails(view.rails, view.transports),
                describe_stragglers(view.stragglers, self.job.spec.parallelism.layers, self.layers),
            ),
            seconds=median(each.seconds for each in self._newest),
        )
        if self._console.is_interactive:
            self._redraw_line(shown)
        elif final or self._clock() - self._printed_at >= PLAIN_INTERVAL_SECONDS:
            self._held = None
            self._printed_at = self._clock()
            self.print_note(shown)

    def close(self) -> None:
        """Show the last iteration and end the live line. Later notes are printed below it."""
        self.show_changes(final=True)
        self._write_guarded(self._live.stop)

    def _show_decision(self, decision: DecisionRecord) -> None:
        if (decision.at, decision.reason) in self._decided:
            return
        self._decided.add((decision.at, decision.reason))
        if decision.kind in ("adapt", "return", "revert"):
            self._keep_reasons.clear()
        elif decision.kind == "keep":
            reason = MEASURED_FIGURE.sub("#", decision.reason)
            if reason in self._keep_reasons:
                return
            self._keep_reasons.add(reason)
        self.print_note(one_line(decision.line, LONGEST_MESSAGE))

    def _show_applied_plan(self, record: AdaptationRecord) -> None:
        first = record.applied_at_iteration
        if first is not None and record.plan_version not in self._in_force:
            self._in_force.add(record.plan_version)
            self.print_note(f"plan v{record.plan_version}: in effect since iteration {first}")

    def _redraw_line(self, shown: str) -> None:
        def write_line() -> None:
            self._live.start()
            self._live.update(make_single_line(shown), refresh=True)

        if shown != self._line:
            self._line = shown
            self._write_guarded(write_line)

    def _write_guarded(self, write: Callable[[], object]) -> None:
        """Write to the stream, unless that has failed before."""
        if self._closed:
            return
        try:
            write()
        except OSError as error:
            self._closed = True
            if isinstance(error, BrokenPipeError):  # As of `| head`.
                self._on_closed()
                return
            silence_stream(self._stream)
            why = f"standard output cannot be written: {error.strerror}"
            with contextlib.suppress(OSError):  # stderr may be the same disk
                print(f"{self._command}: {why}; the job goes on without it", file=sys.stderr)


def _format_bytes(size: int) -> str:
    for unit, scale in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"
