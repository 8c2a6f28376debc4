"""What to do now, by what is wrong now: one line per cause, the most urgent first."""

from __future__ import annotations

from collections.abc import Iterable

ADVICE = {
    "failed": "read the last lines of the rank that failed first, fix their cause and start the"
    " job again; with spec.checkpoint it goes on with the newest checkpoint",
    "pending": "kubectl describe the job's pods: an event says what they wait for",
    "silent": "look at the log of rank 0, whose agent reports for all ranks, and at the operator's",
    "port": "check cable, optics and switch port of each port named, or take its node out of use",
    "fell-back": "run pipemorph doctor in a pod at one end of the link: it says what keeps the"
    " agreed transport from being used",
    "reduction": "check the network between the replicas of that stage with pipemorph fabric check",
    "link": "check the network between the hosts of the slow link: pipemorph fabric check, or"
    " pipemorph bench between two of them",
    "stage": "look at the clock and the other users of the slow stage's host; pipemorph advise"
    " says what another split of the layers would give",
    "undelivered": "a plan brought less than half of what was promised: see whether other work"
    " competes for the ranks' processors",
    "disabled": "set adaptation.enabled and schedule.policy pipemorph, so that slow links are"
    " planned for",
}
"""By cause, in the order of urgency."""


KEPT_PROMISE, NOISE = 0.5, 0.05
"""A plan change brought too little if it brought less than this share of its promised gain, and the
difference is more than this fraction of an iteration."""


def undelivered(kind: str, promised: float | None, measured: float | None) -> bool:
    """Whether a plan change of this kind and these gains brought too little."""
    if kind != "adapt" or not promised or measured is None:
        return False
    return measured < KEPT_PROMISE * promised and promised - measured > NOISE


def advice(causes: Iterable[str]) -> list[str]:
    """The advice for each cause, the most urgent first."""
    found = set(causes)
    return [text for cause, text in ADVICE.items() if cause in found]
