"""The generations of a job's ranks, whose pods outlive them: which one runs, and what follows it.

Pure: launchers' words and times in, the newest generation out. A generation is over as soon as one
launcher says so, and the next one begins when the ranks of all pods are gone: those of a lost pod
when the launcher of another pod has joined in its place. The
:class:`~.decide.ladder.Ladder` decides whether there is a next one, by what all launchers have
told: how the ranks ended, and how many iterations they had finished. What ranks report is behind.
Which pods are there, :mod:`.pods.presence` knows.

With ``parallelism.minReplicas`` the next generation does not wait long for lost pods: it begins
with the replicas of which all pods are there. When those of another replica are there again, the
ranks are asked to leave between two iterations, and a generation with that replica begins.

With ``parallelism.spares`` a pod that has no ranks takes the place of a lost one as soon as the
loss is known. The pod that Kubernetes makes is a spare from then on (:mod:`.pods.places`). So is a
pod that comes late: at the first start of the ranks, a spare takes its place after a while.

Layers move between stages when whoever decides on that asks for it (:meth:`Generations.ask`): the
ranks leave between two iterations, and the next generation has the new layers, on trial
(:mod:`.pods.splits`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from typing import Any

from pipemorph.api.parallelism import Parallelism
from pipemorph.api.running import Places, Running
from pipemorph.api.status import (
    MAX_RECOVERIES_KEPT,
    MAX_REPLACED_KEPT,
    PlaceInPod,
    PodReplacement,
    Recoveries,
    RecoveryRecord,
    SpareUsed,
)
from pipemorph.control.decide.ladder import Ladder, Rung
from pipemorph.control.observed.reports import ReportMismatch, WrongAttempt
from pipemorph.control.pods.places import Filled
from pipemorph.control.pods.presence import COMES_SECONDS, SELDOM_SECONDS, Lost, Presence
from pipemorph.control.pods.splits import Split, Splits, named, split_of
from pipemorph.control.record.recovering import Recovering
from pipemorph.exits import PARTS_STAY, TRIAL_ITERATIONS
from pipemorph.wire import GenerationState, LinkHealthReport, Loss, PodReport
from pipemorph.wire.generations import LONGEST_LINE

LEAVE_SECONDS = SELDOM_SECONDS
"""Of ranks that are to leave: how long to wait while nothing is heard of them."""
STAY_SECONDS = 60.0
"""Ranks that could not leave are asked again after so long."""
LOOK_SECONDS = 1.0
"""Of pods that wait many may ask in a second."""


class Generations:
    """The generations of one job, which has ``pods`` pods, spares among them.

    ``most``: ``failurePolicy.maxRestarts``; ``restarts``: attempts that count against it, too.
    ``saved``: what is in status; None if no generation has followed a failure. ``done``: iterations
    that are known to be finished, beside those of reports to come. ``cut``: which pods have ranks
    of which replicas, how many replicas may go on without the others, and how many pods are spares;
    None: all pods have to run. ``patience``: seconds that replicas that may go on without others
    wait for the pod that replaces a lost one. ``comes``: those after which spares take the places
    of pods that have not come. ``relayout``: ``adaptation.relayout``.
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
        comes: float = COMES_SECONDS,
        relayout: bool = False,
    ) -> None:
        self.pods, self.most, self.restarts = pods, most, restarts
        self.patience = patience
        changes = cut is not None and (cut.min_replicas is not None or cut.spares > 0)
        self._cut = cut if changes else None
        """None: the same pods run in every generation."""
        self.saved = saved or Recoveries()
        """What another ingest has to know before a launcher is told of it."""
        self.presence = Presence(
            pods, self._cut, stood_by=self.saved.spares_ready or 0, comes=comes
        )
        # Their pods still move layers if that was switched off since.
        moved = bool(self.saved.layers) or self.saved.layers_before is not None
        self.splits = Splits(cut, move=relayout or moved)
        self.relayout = relayout
        """Whether layers may move in the next attempt: pods go by what they were told."""
        self._finished = max(done, self.saved.finished)
        """Iterations that a rank is known to have finished."""
        told = [each.iterations_done for each in self.saved.last[-1:]]
        self._done = max(done, self.saved.finished - 1, *told)
        """Those after which all ranks are known to have begun the next one: none of them is run
        again by ranks that have kept their state."""
        self._verdict: GenerationState | None = None
        self._recovering = Recovering()
        self.longest_start: float | None = None
        """Seconds from a start of the ranks, once all pods were there, to the first iteration that
        they finished; None: none was seen here. Records of other hosts' say only when ranks were
        lost."""
        self._starts_at: float | None = None
        """When the last pod came for the first start, until an iteration is finished."""
        self._looked_at = -inf
        self._ran = done > 0
        """Whether an iteration of this attempt is known to be finished."""
        self._heard = saved is None or saved.attempt != attempt
        """Whether what the ranks have finished is known: not where another ingest was told last."""
        self._new_generation()
        self.attempt = attempt
        if self.saved.attempt != attempt:
            self.begin_attempt(attempt)
        elif self.saved.last and self.saved.last[-1].seconds is None:
            self._recovering.follow(self.saved.last[-1])

    def _new_generation(self, waiting: Collection[int] = ()) -> None:
        """``waiting``: pods that go on waiting if they have no ranks in it."""
        running = None
        if self._cut is not None:
            running = Running(self._cut, self.left_out, self.places)
        self.presence.begin_generation(running, waiting)
        self._since = inf
        """When the first of them was lost: earlier than any launcher may have said."""
        self._over, self._over_at = "", 0.0
        self._decided_at = -inf
        """When it was last looked whether the next one begins."""
        self._leave = False
        """Whether the ranks are to leave, since more replicas may run."""
        self._heard_of = -inf
        """When anything was heard of ranks of this generation, or they were first to leave."""
        self._asked_at = inf
        """When they were asked to leave for other layers."""
        self._stays: tuple[str, float] | None = None
        """Why the ranks could not leave, and when they said so."""
        self._hang = False
        self._waited: float | None = None
        """Seconds from the loss of the ranks before to the start of these; None: it was not seen
        here."""
        self._losses: dict[int, Loss] = {}
        self._completed: set[int] = set()
        self._finished_before = self._finished
        self.splits.begin_generation()
        self._recovering.begin()

    def begin_attempt(self, attempt: int) -> None:
        """All pods are others from now on."""
        self.presence.begin_attempt()
        self.splits.begin_attempt(move=self.relayout)
        self._starts_at = None
        self._looked_at, self._ran = -inf, False
        self.attempt, self._verdict = attempt, None
        self._recovering.follow(None)
        update: dict[str, Any] = {"attempt": attempt, "generation": 0, "completed": False}
        update |= {"left_out": [], "places": [], "layers": [], "layers_before": None}
        self.saved = self.saved.model_copy(update=update)
        self._new_generation()

    @property
    def left_out(self) -> tuple[int, ...]:
        """Replicas that do not run in this generation."""
        return tuple(self.saved.left_out)

    @property
    def places(self) -> Places:
        """Places that are not in the pods of their numbers in this generation."""
        return self.saved.moved

    @property
    def layers(self) -> Split:
        """By stage, how many layers it holds in this generation; empty: evenly many."""
        return tuple(self.saved.layers)

    @property
    def layers_before(self) -> Split | None:
        """While these are on trial, those that a failure goes back to; None: they count."""
        before = self.saved.layers_before
        return None if before is None else tuple(before)

    @property
    def spares_ready(self) -> int:
        """Spares that stand by."""
        return self.presence.spares_ready

    @property
    def told(self) -> Recoveries | None:
        """What belongs into status; None where ranks have always been well, and there are no
        spares."""
        if not self.presence.spares:
            return self.saved if self.saved.count or self.saved.last else None
        return self.saved.model_copy(update={"spares_ready": self.spares_ready})

    @property
    def share(self) -> float:
        """The part of the replicas that run in this generation."""
        return 1.0 if self._cut is None else 1.0 - len(self.left_out) / self._cut.replicas

    @property
    def stays(self) -> str:
        """Why the ranks have not left for a replica that may run again, or for the layers that they
        were asked to leave for last; empty if they could."""
        return self._stays[0] if self._stays is not None else ""

    @property
    def state(self) -> GenerationState:
        if self._verdict is not None:
            return self._verdict
        return GenerationState(
            attempt=self.attempt,
            generation=self.saved.generation,
            over=bool(self._over),
            reason=self._over,
            hang=self._hang,
            awaits=min(self._awaited, default=None) if self._over else None,
            left_out=self.left_out,
            places=self.places,
            leave=self._leave and not self._over,
            leave_layers=() if self._over else self.splits.asked,
            layers=self.layers,
            layers_before=self.layers_before,
            verdict="completed" if self.saved.completed else "",
        )

    @property
    def _awaited(self) -> Iterator[int]:
        """Lost pods whose places have ranks in this generation."""
        return filter(self.presence.runs, self.presence.awaited)

    def ask(self, layers: tuple[int, ...], now: float) -> bool:
        """Have the ranks leave at the end of an iteration, and the next generation begin with so
        many ``layers`` per stage: those of all stages, also if they are evenly many. Launchers are
        told by :meth:`pipemorph.ingest.GenerationDesk.ask`. ``now``: wall clock, seconds. After
        :data:`LEAVE_SECONDS` in which no ranks have left they are asked no more.

        Returns False, and changes nothing, while the ranks start again or are to leave, a pod is
        lost, or layers are on trial; if these layers do not make up the model, are those in force,
        or have been refused, since ranks failed with them; and where layers cannot move
        (:attr:`Splits.fixed`)."""
        ends = self._verdict is not None or self._over or self._completed or self.saved.completed
        busy = self._leave or self.layers_before is not None or self.presence.awaited
        if ends or busy or not self.splits.allows(layers, self.layers):
            return False
        self._leave, self._stays, self.splits.asked = True, None, tuple(layers)
        self._asked_at = now
        return True

    def begun(
        self,
        generation: int,
        left_out: Sequence[int] | None = None,
        places: Places = (),
        layers: Split = (),
        layers_before: Split | None = None,
    ) -> bool:
        """Say that a launcher runs ``generation``. Returns whether that is news: another ingest has
        begun it, and could not write that. ``left_out``: the replicas without which it runs; None
        if the launcher did not say what runs, which is no news where that may change. ``places``:
        as of :class:`Running`; ``layers``, ``layers_before``: as those of this."""
        if generation <= self.saved.generation or self._verdict is not None:
            return False
        update: dict[str, Any] = {"generation": generation}
        if self.splits.move:
            told = [split for split in (layers, layers_before) if split]
            if left_out is None or not all(map(self.splits.fits, told)):
                return False
            before = None if layers_before is None else list(split_of(layers_before))
            update |= {"layers": list(split_of(layers)), "layers_before": before}
        if self._cut is not None:
            if left_out is None or not Running(self._cut, places=places).fits():
                return False
            update["left_out"] = [each for each in left_out if each < self._cut.replicas]
            update["places"] = _placed(places)
        self.saved = self.saved.model_copy(update=update)
        self._new_generation()
        return True

    def heard(self, pod: int, uid: str, now: float) -> None:
        """Say that the launcher of a pod polls. ``uid``: of the pod, as the host knows it, which
        tells one that is lost from the one in its place; empty: it does not."""
        if pod >= self.pods or not self.presence.heard(pod, uid, now):
            return
        if self.presence.runs(pod):
            self._heard_of = max(self._heard_of, now)
        self._count_spares(now)

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
            self.splits.fixed = report.why
        if report.generation < self.saved.generation or self._verdict is not None:
            return
        self.begun(
            report.generation, report.left_out, report.places, report.layers, report.layers_before
        )
        if report.layers_before is None and split_of(report.layers) == self.layers:
            # Another ingest had told this launcher that they count, and could not write that.
            self._settle()
        if report.event == "gone":
            news = self.presence.asks(report.pod, now)
            if not self.presence.runs(report.pod):
                self._count_spares(now)
                if news or now - self._looked_at >= LOOK_SECONDS:
                    self.look(now)
                return
            self.splits.gone(report)
        if report.event == "stays":
            if self._leave and not self._over:
                self._leave, self._stays, self.splits.asked = False, (report.why, now), ()
            return
        if report.event == "resumed":
            self._recovering.resumed(report.resumed)
            if report.resumed is not None and report.resumed.rung == "kept":
                # With new layers rank 0 says so when they have been trained.
                self._settle()
            self._look_for_recovery(now)
            return
        if report.loss is not None:
            self._losses[report.pod] = report.loss
        if report.finished:
            self._heard = self._ran = True
            self._finish(report.finished)
        if report.event != "failed":
            self.presence.ended(report.pod, uid)
        if report.event == "completed":
            self._completed.add(report.pod)
            self._complete()
        elif not self._over:
            other = "a replica can join" if self._leave else "it is over"
            if self.splits.asked:
                other = f"the ranks leave for {named(self.splits.asked)}"
            self._over, self._over_at = report.loss.reason if report.loss else other, now
            self._hang = report.loss is not None and report.loss.hang
        if self._over:
            self._decide(now)

    def _complete(self) -> bool:
        """Take that the ranks that run have finished. Returns whether pods without any, which may
        still come, have to be told."""
        waits = bool(self.saved.left_out) or self.presence.spares > 0
        news = waits and not self._over and not self.saved.completed
        if news:
            self.saved = self.saved.model_copy(update={"completed": True})
        return news

    def look(self, now: float) -> None:
        """Decide what time alone decides: call it when :meth:`due` says. ``now``: wall clock."""
        if self._verdict is not None or self.saved.completed:
            return
        if now >= self._left_by():
            why = f"no ranks have left within {LEAVE_SECONDS:g} s"
            self._leave, self._stays, self.splits.asked = False, (why, now), ()
        if self._cut is None:
            return
        self._looked_at = now
        self._count_spares(now)
        if self._over:
            self._decide(now)
            return
        if now >= self._come_by():
            if (late := self.presence.do_without(now)) is not None:
                self._over, self._over_at = late.why, now
                self._decide(now)
            return
        if self._leave:
            # Nobody waits for ranks that leave for other layers.
            if not self.splits.asked and now - self._heard_of >= LEAVE_SECONDS:
                # They may run or have finished: to begin beside them could be to train twice.
                silent = f"nothing was heard for {LEAVE_SECONDS:g} s of ranks that are to leave"
                self._over, self._over_at = silent, now
                self._end("attempt", silent, None)
            return
        if self._stays is not None and now < self._stays[1] + STAY_SECONDS:
            return
        if not self.left_out:
            return
        there = self.presence.with_ranks - self.presence.awaited.keys()
        filled = self.presence.fill(there | self.presence.present(now))
        if len(filled.running.left_out) < len(self.left_out):
            self._leave, self._heard_of = True, now

    def due(self, now: float) -> float | None:
        """When :meth:`look` may have to decide; None if nothing waits for that."""
        if self._verdict is not None or self.saved.completed:
            return None
        if (by := self._left_by()) < inf:
            return by
        if self._cut is None:
            return None
        if not self._over:
            if self._leave:
                return self._heard_of + LEAVE_SECONDS
            again = self._stays[1] + STAY_SECONDS if self._stays is not None else -inf
            return min((at for at in (again, self._come_by()) if now < at < inf), default=None)
        presence = self.presence
        missing = presence.missing()
        silent = presence.silent_until(self._over_at)
        if missing - presence.lost.keys() and self._decided_at < silent:
            return silent
        filled = presence.fill(presence.present(now))
        at = self._given_up_at(missing, filled)
        if filled.running.left_out:
            at = max(at, presence.settled_at())
        return at if self._decided_at < at < inf else None

    def _left_by(self) -> float:
        """Until when ranks have to begin to leave for other layers."""
        asked = self._leave and bool(self.splits.asked) and not self._over
        return self._asked_at + LEAVE_SECONDS if asked else inf

    def _come_by(self) -> float:
        """Until when pods that have not come are waited for, before spares take their places."""
        first = self.saved.generation == 0 and not self._ran
        return self.presence.come_by() if first else inf

    def _given_up_at(self, missing: frozenset[int], filled: Filled) -> float:
        """When none of these pods is waited for any more. ``filled``: what runs without them."""
        whole = set(filled.running.left_out) <= set(self.left_out)
        patience = 0.0 if whole else self.patience
        return self.presence.given_up_at(missing, self._over_at, patience)

    def _count_spares(self, now: float) -> None:
        """Take how many spares stand by. Of a generation that is over some may be needed."""
        if not self._over:
            self.presence.count_spares(now)

    def _join(self, report: PodReport, now: float, uid: str) -> None:
        """Take a launcher that has begun: in the first start of the ranks, or instead of one that
        is lost."""
        pod = report.pod
        if self._verdict is not None or self.presence.knows(pod, report.launcher, uid):
            return
        ran = self._ran or self.saved.generation > 0
        lost = self.presence.joins(pod, report.launcher, uid, now, ran=ran)
        if not self.presence.runs(pod):
            self._count_spares(now)
            return
        if self.saved.generation == 0 and not self._ran:
            self._starts_at = now
        if lost is not None:
            self._since = min(self._since, lost.at)
            self._lose(pod, lost)
            if not self._over:
                self._over, self._over_at = lost.why, now
        if self._over:
            self.presence.ended(pod, "")
            self._decide(now)

    def expect(self, lost: Sequence[PodReplacement], now: float) -> None:
        """Take from the host which pods are lost, or about to be, and that others will take their
        places; as often as it likes. Their peers notice by themselves: until then, their ranks may
        have time to save."""
        if self.presence.expect(lost, self.attempt, now):
            # Whatever was decided without that: it is told in whole seconds.
            self._decided_at = -inf
        self._count_spares(now)

    def _decide(self, now: float) -> None:
        """What follows the generation, once that is known."""
        self._decided_at = now
        if self.most == 0 or self._completed or self.saved.completed:
            # Nobody has to be waited for: pods whose ranks have finished cannot start them again.
            why = f"pod {min(self._completed)} has finished" if self._completed else ""
            self._end("attempt", why, self._cause()[0])
            return
        missing: frozenset[int] = frozenset()
        filled: Filled | None = None
        if self._cut is None:
            if len(self.presence.gone) < self.pods:
                return
        else:
            missing = self.presence.missing()
            unknown = missing - self.presence.lost.keys()
            if unknown and now < self.presence.silent_until(self._over_at):
                return
            filled = self.presence.fill(self.presence.present(now))
            if missing and now < self._given_up_at(missing, filled):
                return
            left_out = filled.running.left_out
            least = self._cut.min_replicas or self._cut.replicas
            if self._cut.replicas - len(left_out) < least:
                return
            if left_out and now < self.presence.settled_at():
                return
        resizes = self._cut is not None and self._cut.min_replicas is not None
        if (resizes or self.splits.left) and not self._losses and not missing:
            # Of ranks that leave none has failed, whoever had asked them to.
            self._begin(self._change(filled), filled, self._moved(), now)
            return
        self._blame(missing)
        cause_pod, cause = self._cause()
        if (at := self._left_at) is not None and self.splits.have_counted(at):
            self._settle()
        back = self._back()
        if back:
            # What failed may be the layers.
            cause = cause.model_copy(update={"retry": True})
            self.splits.refused.add(self.splits.spread(self.layers))
        before = self.saved
        ladder = Ladder(
            self.most,
            self.restarts + before.counted,
            before.finished,
            before.idle,
            # What was finished meanwhile may have been told to another ingest alone: then the same
            # error again is no proof that it came at the same iteration.
            before.error if self._heard else None,
        )
        rung, why = ladder.after(
            cause,
            self._finished,
            replaced=bool(self.presence.replaced or missing),
            counted=cause_pod not in self.presence.uncounted,
        )
        begins = rung in (Rung.GENERATION, Rung.POD)
        record = RecoveryRecord(
            attempt=self.attempt,
            generation=before.generation + 1,
            lost_at=_timestamp(min(self._over_at, self._since)),
            cause=self._words(cause),
            pod=cause_pod,
            rank=cause.rank,
            iterations_done=self._done,
            **self._words_of(filled),
        )
        told: dict[str, Any] = {
            "finished": ladder.best, "idle": ladder.idle, "error": ladder.error
        }  # fmt: skip
        if not begins:
            # An attempt is counted by who begins it.
            self.saved = before.model_copy(update=told)
            # Where restarts are used up, the end of the attempt is the job's.
            twice = cause.retry and self.restarts + before.counted < self.most
            none = rung is Rung.NONE and twice
            self._end("none" if none else "attempt", why, cause_pod)
            return
        self.presence.uncounted -= self.presence.replaced | missing
        told |= {"counted": ladder.counted - self.restarts, "count": before.count + 1}
        self._begin(record, filled, told | back, now)

    # --- layers -------------------------------------------------------------------------------

    def _moved(self) -> dict[str, Any]:
        """What of status changes as ranks leave: with layers that they were asked to leave for,
        they go on with these, on trial."""
        if not self.splits.asked:
            return {}
        layers = list(split_of(self.splits.asked))
        return {"layers": layers, "layers_before": list(self.layers)}

    def _back(self) -> dict[str, Any]:
        """The same as ranks have failed: from layers on trial they go back."""
        before = self.layers_before
        return {} if before is None else {"layers": list(before), "layers_before": None}

    def _settle(self) -> bool:
        """The layers of this generation count. Returns whether that is news."""
        if self.layers_before is None:
            return False
        self.saved = self.saved.model_copy(update={"layers_before": None})
        return True

    @property
    def _left_at(self) -> int | None:
        """The first iteration with the layers that are on trial; None: none are, or it is not known
        here. Where another ingest has begun this generation, ranks that are gone have said so."""
        if self.layers_before is None:
            return None
        now = self.saved
        for last in now.last[-1:]:
            if (last.attempt, last.generation) == (now.attempt, now.generation):
                return last.iterations_done
        return self.splits.began or None

    def _words_of(self, filled: Filled | None) -> dict[str, Any]:
        """What a record tells of the pods that run."""
        taken = filled.taken if filled is not None else {}
        spares = [SpareUsed(pod=pod, instead_of=lost) for pod, lost in sorted(taken.items())]
        found: dict[str, Any] = {
            "replaced": sorted(self.presence.replaced - set(taken.values()))[:MAX_REPLACED_KEPT],
            "spares": spares[:MAX_REPLACED_KEPT],
        }
        if filled is not None and filled.running.cut.min_replicas is not None:
            found["replicas"] = len(filled.running.replicas)
        return found

    def _begin(
        self, record: RecoveryRecord, filled: Filled | None, told: Mapping[str, Any], now: float
    ) -> None:
        """The next generation begins."""
        if "layers" in told:
            layers = list(self.splits.spread(tuple(told["layers"])))
            record = record.model_copy(update={"layers": layers})
        lost_at = min(self._over_at, self._since)
        self._recovering.follow(record, lost_at)
        # The next loss of a pod that is there is another one.
        self.presence.uncounted &= self.presence.awaited.keys()
        update = dict(told) | {
            "generation": record.generation,
            "last": [*self.saved.last, record][-MAX_RECOVERIES_KEPT:],
        }
        if filled is not None:
            update["left_out"] = list(filled.running.left_out)
            update["places"] = _placed(filled.running.places)
        self.saved = self.saved.model_copy(update=update)
        # Those with ranks end these first.
        self._new_generation(self.presence.gone)
        self._waited = now - lost_at
        self.presence.stand_by_anew()
        self._count_spares(now)

    def _change(self, filled: Filled | None) -> RecoveryRecord:
        """The record of a generation of other replicas, or with other layers, which no failure was
        the cause of."""
        left_out = filled.running.left_out if filled is not None else ()
        back = ", ".join(str(each) for each in self.left_out if each not in left_out)
        cause = f"all pods of replica {back} are there again" if back else "the ranks left"
        if self.splits.asked:
            cause = f"layers move between stages: from {named(self.splits.spread(self.layers))}"
            cause += f" to {named(self.splits.asked)}"
        return RecoveryRecord(
            attempt=self.attempt,
            generation=self.saved.generation + 1,
            lost_at=_timestamp(self._over_at),
            cause=cause,
            # All have left at the same iteration.
            iterations_done=self.splits.reached or self._done,
            **self._words_of(filled),
        )

    def _blame(self, missing: frozenset[int]) -> None:
        """Take pods that do not come for the cause of the failure: others lost them."""
        for pod in missing:
            unknown = Lost(f"pod {pod} does not say that its ranks have ended", self._over_at)
            lost = self.presence.lost.get(pod, unknown)
            self._since = min(self._since, lost.at)
            self._lose(pod, lost)

    def _lose(self, pod: int, lost: Lost) -> None:
        """Take the loss of a pod for that of its ranks, unless these have failed by themselves."""
        own = self._losses.get(pod)
        if own is None or own.lost_peer:
            self._losses[pod] = Loss(reason=lost.why[:LONGEST_LINE], at=lost.at)

    def _cause(self) -> tuple[int | None, Loss]:
        """The pod whose failure caused the others, and that failure: what no restart changes, then
        what lost no peer, then the first."""
        found = min(
            self._losses.items(),
            key=lambda each: (each[1].retry, each[1].lost_peer, each[1].at),
            default=None,
        )
        return found or (None, Loss(reason=self._over, at=self._over_at, lost_peer=True))

    def _words(self, cause: Loss) -> str:
        """Of ranks that hang also who waits for whom, those first that wait for no other."""
        if not cause.hang:
            return cause.reason
        told = [self._losses[pod] for pod in sorted(self._losses)]
        waits = [each for loss in sorted(told, key=lambda x: x.lost_peer) for each in loss.waits]
        return f"{cause.reason}: {'; '.join(waits)}"[:LONGEST_LINE]

    def _end(self, verdict: str, why: str, cause: int | None) -> None:
        self._verdict = self.state.model_copy(
            update={"over": True, "verdict": verdict, "why": why, "cause": cause}
        )

    def reported(self, report: LinkHealthReport, now: float) -> bool:
        """Take what rank 0's agent reports. Returns whether status has to be written for it: the
        ranks have recovered, or have finished without others."""
        self._heard = True
        self._heard_of = max(self._heard_of, now)
        if report.state == "finished" and self._complete():
            self._look_for_recovery(now)
            return True
        self._ran = self._ran or bool(report.iterations)
        if report.iterations and self._starts_at is not None:
            self._took(now - self._starts_at)
            self._starts_at = None
        for sample in report.iterations:
            self._done = max(self._done, sample.index + 1)
            self._finish(sample.index + 1)
        # Rank 0 had said so before, if only these ranks can have come so far.
        at = self._left_at
        reached = at is not None and self._finished > max(
            at + TRIAL_ITERATIONS, self._finished_before
        )
        settled = reached and self._settle()
        self._recovering.reported(report.iterations, now)
        return self._look_for_recovery(now) or settled

    def _took(self, seconds: float) -> None:
        """Take how long a start of the ranks took."""
        self.longest_start = max(self.longest_start or 0.0, seconds)

    def _finish(self, iterations: int) -> None:
        """Take that a rank has finished so many."""
        self._finished = max(self._finished, iterations)
        # No rank can be more than an iteration ahead of another.
        self._done = max(self._done, self._finished - 1)

    def _look_for_recovery(self, now: float) -> bool:
        done = self._recovering.done(now)
        if done is None:
            return False
        if done.seconds is not None and self._waited is not None:
            self._took(max(0.0, done.seconds - self._waited))
        last = [*self.saved.last[:-1], done]
        self.saved = self.saved.model_copy(update={"last": last})
        return True


def _placed(places: Places) -> list[PlaceInPod]:
    return [PlaceInPod(place=place, pod=pod) for place, pod in places]


def _timestamp(seconds: float) -> str:
    when = datetime.fromtimestamp(seconds, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
