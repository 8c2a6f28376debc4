"""The generations of a job's ranks, whose pods outlive them: which one runs, and what follows it.

Pure: launchers' words and times in, the newest generation out. A generation is over as soon as one
launcher says so, and the next one begins when the ranks of all pods are gone: those of a lost pod
when the launcher of another pod has joined in its place. What begins, if anything does,
:mod:`.pods.following` decides, by how the ranks ended (:mod:`.pods.ending`) and how far they had
come (:mod:`.record.progress`). Which pods are there, :mod:`.pods.presence` knows.

With ``parallelism.minReplicas`` the next generation does not wait long for lost pods: it begins
with the replicas of which all pods are there. When those of another replica are there again, the
ranks are asked to leave between two iterations (:mod:`.pods.leaving`), and a generation with that
replica begins.

The layout changes when the host's decision asks for it (:meth:`Generations.ask`): the ranks leave
between two iterations, and the next generation has the new layout, on trial (:mod:`.pods.layouts`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from typing import Any

from pipemorph.api.layout import RankLayout
from pipemorph.api.running import Running
from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.status_recoveries import PodReplacement, Recoveries
from pipemorph.control.observed.reports import ReportMismatch, WrongAttempt
from pipemorph.control.pods.ending import Ending
from pipemorph.control.pods.following import Begins, Ends, Following
from pipemorph.control.pods.layouts import Layouts, brought, settled
from pipemorph.control.pods.leaving import LEAVE_SECONDS, Leaving
from pipemorph.control.pods.presence import Presence
from pipemorph.control.record.progress import Progress
from pipemorph.exits import PARTS_STAY, TRIAL_ITERATIONS
from pipemorph.wire import GenerationState, LinkHealthReport, PodReport

LOOK_SECONDS = 1.0
"""Of pods that wait many may ask in a second."""


class Generations:
    """The generations of one job, which has ``pods`` pods.

    ``saved``: what is in status; None if no generation has followed a failure. ``done``: iterations
    that are known to be finished, beside those of reports to come. ``cut``: which pods have ranks
    of which replicas, and how many replicas may go on without the others; None: all pods have to
    run. ``most``, ``restarts``, ``patience``: as of :class:`Following`. ``relayout``:
    ``adaptation.relayout``.
    """

    def __init__(
        self,
        pods: int,
        most: int,
        attempt: int = 0,
        saved: Recoveries | None = None,
        *,
        restarts: int = 0,
        done: int = 0,
        cut: Parallelism | None = None,
        patience: float = 0.0,
        relayout: bool = False,
    ) -> None:
        self.pods = pods
        self._cut = cut if cut is not None and cut.min_replicas is not None else None
        """None: the same pods run in every generation."""
        self.saved = saved or Recoveries()
        """What another ingest has to know before a launcher is told of it."""
        self.presence = Presence(pods)
        # Their pods still change the layout if that was switched off since.
        moved = bool(self.saved.layout) or self.saved.layout_before is not None
        self.layouts = Layouts(
            cut,
            move=relayout or moved,
            refused=self.saved.layouts_refused,
            fixed=self.saved.layers_fixed or "",
        )
        self.relayout = relayout
        """Whether the layout may change in the next attempt: pods go by what they were told."""
        self.why = ""
        """Why the ranks that run were started, after a failure."""
        heard = saved is None or saved.attempt != attempt
        self.progress = Progress(self.saved, done, heard=heard)
        self.following = Following(
            self.presence,
            self.layouts,
            self.progress,
            self._cut,
            most=most,
            restarts=restarts,
            patience=patience,
        )
        self._leaving = Leaving(self.layouts)
        self._verdict: GenerationState | None = None
        self._looked_at = -inf
        self._new_generation()
        self.attempt = attempt
        if self.saved.attempt != attempt:
            self.begin_attempt(attempt)
        elif self.saved.last and self.saved.last[-1].seconds is None:
            self.progress.follow(self.saved.last[-1])

    def _new_generation(self, waiting: Collection[int] = ()) -> None:
        """``waiting``: pods that go on waiting if they have no ranks in it."""
        running = None
        if self._cut is not None:
            running = Running(self._cut, self.left_out)
        self.presence.begin_generation(running, waiting)
        self._ending = Ending()
        self._completed: set[int] = set()
        self._leaving.begin_generation()
        self.layouts.begin_generation()
        self.progress.begin_generation()

    def begin_attempt(self, attempt: int) -> None:
        """All pods are others from now on."""
        self.presence.begin_attempt()
        self.layouts.begin_attempt(move=self.relayout)
        self.progress.begin_attempt()
        self._looked_at = -inf
        self.attempt, self._verdict = attempt, None
        update: dict[str, Any] = {"attempt": attempt, "generation": 0, "completed": False}
        saved = self.saved.with_layout(RankLayout(), None)
        self.saved = saved.model_copy(update=update | {"left_out": []})
        self._new_generation()

    @property
    def left_out(self) -> tuple[int, ...]:
        """Replicas that do not run in this generation."""
        return tuple(self.saved.left_out)

    @property
    def layout(self) -> RankLayout:
        """The layout of this generation."""
        return self.saved.layout

    @property
    def layout_before(self) -> RankLayout | None:
        """While that is on trial, the one that a failure goes back to; None: it counts."""
        return self.saved.layout_before

    @property
    def told(self) -> Recoveries | None:
        """Recoveries for status; None if no rank has ever failed."""
        news = self.saved.count or self.saved.last or self.saved.layers_fixed
        return self.saved if news else None

    @property
    def share(self) -> float:
        """The part of the replicas that run in this generation."""
        return 1.0 if self._cut is None else 1.0 - len(self.left_out) / self._cut.replicas

    @property
    def stays(self) -> str:
        """Why the ranks have not left for a replica that may run again, or for the layout that they
        were asked to leave for last; empty if they could."""
        return self._leaving.stays

    @property
    def state(self) -> GenerationState:
        if self._verdict is not None:
            return self._verdict
        awaited = filter(self.presence.runs, self.presence.awaited)
        return GenerationState(
            attempt=self.attempt,
            generation=self.saved.generation,
            over=bool(self._ending),
            reason=self._ending.why,
            hang=self._ending.hang,
            awaits=min(awaited, default=None) if self._ending else None,
            left_out=self.left_out,
            leave=self._leaving.asked and not self._ending,
            leave_for=RankLayout() if self._ending else self.layouts.asked,
            layout=self.layout,
            layout_before=self.layout_before,
            verdict="completed" if self.saved.completed else "",
        )

    def ask(
        self,
        layout: RankLayout,
        now: float,
        *,
        promised: float | None = None,
        undoes: bool = False,
    ) -> bool:
        """Have the ranks leave at the end of an iteration, and the next generation begin with
        ``layout``. Launchers are told by :meth:`pipemorph.ingest.GenerationDesk.ask`. ``now``: wall
        clock, seconds; ``promised``: part of an iteration that this is expected to save, for the
        record; ``undoes``: the layout in force has not brought that, and is not tried again. After
        :data:`LEAVE_SECONDS` in which no ranks have left they are asked no more.

        Returns False, and changes nothing, while the ranks start again or are to leave, a pod is
        lost, or a layout is on trial; and unless :meth:`Layouts.allows` it."""
        ends = self._verdict is not None or self._ending or self._completed or self.saved.completed
        busy = self._leaving.asked or self.layout_before is not None or self.presence.awaited
        if ends or busy or not self.layouts.allows(layout, self.layout):
            return False
        self._leaving.for_layout(layout, now, promised, undoes=undoes)
        return True

    def may_restart(self, retry: bool) -> bool:
        """Whether another attempt may follow one that has ended here."""
        used = self.following.restarts + self.saved.counted
        return (
            retry
            and self._verdict is not None
            and self._verdict.verdict == "attempt"
            and (used < self.following.most)
        )

    def begun(self, generation: int, told: PodReport | None = None) -> bool:
        """Say that a launcher runs ``generation``. Returns whether that is news: another ingest has
        begun it, and could not write that. ``told``: what the launcher says of what runs; None if
        it does not, which is no news where that may change."""
        if generation <= self.saved.generation or self._verdict is not None:
            return False
        saved = self.following.elsewhere(self.saved, generation, told)
        if saved is None:
            return False
        self.saved = saved
        self._new_generation()
        return True

    def heard(self, pod: int, uid: str, now: float) -> None:
        """Say that the launcher of a pod polls. ``uid``: of the pod, as the host knows it, which
        tells one that is lost from the one in its place; empty: it does not."""
        if pod >= self.pods or not self.presence.heard(pod, uid, now):
            return
        if self.presence.runs(pod):
            self._leaving.heard(now)

    def take(self, report: PodReport, now: float, uid: str = "") -> None:
        """Take what a launcher tells. ``now``: wall clock, seconds; ``uid``: of its pod, see
        :meth:`heard`. Raises :class:`WrongAttempt` and :class:`ReportMismatch`."""
        if report.attempt != self.attempt:
            raise WrongAttempt(
                f"attempt {report.attempt} is not the attempt in progress, {self.attempt}"
            )
        if report.pod >= self.pods:
            raise ReportMismatch("pod", f"is {report.pod}; the job has {self.pods} pods")
        self.presence.begin_to_settle(now)
        if report.event == "joined":
            self._join(report, now, uid)
            return
        self.heard(report.pod, uid, now)
        self.presence.speaks(report.pod, report.launcher, uid, now)
        if report.event == "stays" and report.why.startswith(PARTS_STAY):
            # Also of ranks that are gone: so it would be with others.
            self.layouts.fixed = report.why
            self.saved = self.saved.model_copy(update={"layers_fixed": report.why})
        if report.generation < self.saved.generation or self._verdict is not None:
            return
        self.begun(report.generation, report)
        if report.layout_before is None and report.layout == self.layout:
            # Another ingest had told this launcher that it counts, and could not write that.
            self._settle()
        if report.event == "gone":
            news = self.presence.asks(report.pod, now)
            if not self.presence.runs(report.pod):
                if news or now - self._looked_at >= LOOK_SECONDS:
                    self.look(now)
                return
            self.layouts.gone(report)
        if report.event == "stays":
            if self._leaving.asked and not self._ending:
                self._leaving.stay(report.why, now)
            return
        if report.event == "resumed":
            self.progress.resumed(report.resumed)
            if report.resumed is not None and report.resumed.rung == "kept":
                # With a new layout rank 0 says so when it has been trained.
                self._settle()
            self._look_for_recovery(now)
            return
        if report.loss is not None:
            self._ending.losses[report.pod] = report.loss
        if report.finished:
            self.progress.gone(report.finished)
        if report.event != "failed":
            self.presence.ended(report.pod, uid)
        if report.event == "completed":
            self._completed.add(report.pod)
            self._complete()
        elif not self._ending:
            loss = report.loss
            why = loss.reason if loss is not None else self._leaving.reason
            self._ending.begin(why, now, hang=loss is not None and loss.hang)
        if self._ending:
            self._decide(now)

    def _complete(self) -> bool:
        """Take that the ranks that run have finished. Returns whether pods without any, which may
        still come, have to be told."""
        news = bool(self.saved.left_out) and not self._ending and not self.saved.completed
        if news:
            self.saved = self.saved.model_copy(update={"completed": True})
        return news

    def look(self, now: float) -> None:
        """Decide what time alone decides: call it when :meth:`due` says. ``now``: wall clock."""
        if self._verdict is not None or self.saved.completed:
            return
        if not self._ending and now >= self._leaving.left_by():
            self._leaving.stay(f"no ranks have left within {LEAVE_SECONDS:g} s", now)
        if self._cut is None:
            return
        self._looked_at = now
        if self._ending:
            self._decide(now)
            return
        over_at, why = self.presence.unnoticed()
        if now >= over_at:
            self._ending.begin(why, now)
            self._decide(now)
            return
        if self._leaving.asked:
            if now >= self._leaving.silent_at():
                # They may run or have finished: to begin beside them could be to train twice.
                silent = f"nothing was heard for {LEAVE_SECONDS:g} s of ranks that are to leave"
                self._ending.begin(silent, now)
                self._end("attempt", silent, None)
            return
        if not self.left_out or now < self._leaving.again_at():
            return
        there = self.presence.with_ranks - self.presence.awaited.keys()
        running = self.presence.running_in(there | self.presence.present(now))
        if len(running.left_out) < len(self.left_out):
            self._leaving.for_replicas(now)

    def due(self, now: float) -> float | None:
        """When :meth:`look` may have to decide; None if nothing waits for that."""
        if self._verdict is not None or self.saved.completed:
            return None
        leaving = self._leaving
        if not self._ending and (by := leaving.left_by()) < inf:
            return by
        if self._cut is None:
            return None
        if self._ending:
            return self.following.due(self._ending, self.left_out, now)
        over_at = max(now, self.presence.unnoticed()[0])
        if leaving.asked:
            return min(leaving.silent_at(), over_at)
        at = leaving.again_at()
        found = min(at if at > now else inf, over_at)
        return None if found == inf else found

    def _join(self, report: PodReport, now: float, uid: str) -> None:
        """Take a launcher that has begun: in the first start of the ranks, or instead of one that
        is lost."""
        pod = report.pod
        if self._verdict is not None or self.presence.knows(pod, report.launcher, uid):
            return
        ran = self.progress.ran or self.saved.generation > 0
        lost = self.presence.joins(pod, report.launcher, uid, now, ran=ran)
        if not self.presence.runs(pod):
            return
        if not ran:
            self.progress.starts(now)
        if lost is not None:
            self._ending.lose(pod, lost)
            if not self._ending:
                self._ending.begin(lost.why, now)
        if self._ending:
            self.presence.ended(pod, "")
            self._decide(now)

    def expect(self, lost: Sequence[PodReplacement], now: float) -> None:
        """Take from the host which pods are lost, or about to be, and that others will take their
        places; as often as it likes. Their peers notice by themselves: until then, their ranks may
        have time to save."""
        if self.presence.expect(lost, self.attempt, now):
            # Whatever was decided without that: it is told in whole seconds.
            self._ending.decided_at = -inf

    def _decide(self, now: float) -> None:
        """What follows the generation, once that is known."""
        ending = self._ending
        ending.decided_at = now
        if self.following.most == 0 or self._completed or self.saved.completed:
            # Nobody has to be waited for: pods whose ranks have finished cannot start them again.
            why = f"pod {min(self._completed)} has finished" if self._completed else ""
            self._end("attempt", why, ending.cause()[0])
            return
        ready = self.following.ready(ending, self.left_out, now)
        if ready is None:
            return
        match self.following.after(self.saved, ending, ready):
            case Begins() as begins:
                self._begin(begins, now)
            case Ends() as ends:
                self.saved = ends.saved
                self._end(ends.verdict, ends.why, ends.cause)

    def _begin(self, begins: Begins, now: float) -> None:
        """The next generation begins."""
        lost_at = self._ending.lost_at
        # The next loss of a pod that is there is another one.
        self.presence.uncounted &= self.presence.awaited.keys()
        self.saved, self.why = begins.saved, begins.why
        # Those with ranks end these first.
        self._new_generation(self.presence.gone)
        self.progress.begins(begins.record, lost_at, now)

    def _end(self, verdict: str, why: str, cause: int | None) -> None:
        self._verdict = self.state.model_copy(
            update={"over": True, "verdict": verdict, "why": why, "cause": cause}
        )

    def reported(self, report: LinkHealthReport, now: float) -> bool:
        """Take what rank 0's agent reports. Returns whether status has to be written for it: the
        ranks have recovered, or have finished without others."""
        self.progress.heard = True
        self._leaving.heard(now)
        if report.state == "finished" and self._complete():
            self._look_for_recovery(now)
            return True
        self.progress.reported(report.iterations, now)
        # Rank 0 had said so before, if only these ranks can have come so far.
        at = self.layouts.began_at(self.saved)
        reached = at is not None and self.progress.finished > max(
            at + TRIAL_ITERATIONS, self.progress.finished_before
        )
        settled = reached and self._settle()
        return self._look_for_recovery(now) or settled

    def brought(self, generation: int, measured: float) -> None:
        """Take for the record what the layout of a generation of this attempt has saved, as part of
        an iteration."""
        self.saved = brought(self.saved, generation, measured)

    def _settle(self) -> bool:
        """The layout of this generation counts. Returns whether that is news."""
        before, self.saved = self.saved, settled(self.saved)
        return self.saved is not before

    def _look_for_recovery(self, now: float) -> bool:
        done = self.progress.recovered(now)
        if done is None:
            return False
        last = [*self.saved.last[:-1], done]
        self.saved = self.saved.model_copy(update={"last": last})
        return True
