"""What a controller says of its decisions: one line each, with the numbers they rest on."""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.forecast import Option, Situation
from pipemorph.control.decide.replan import Cause, Proposal, shown_paths, shown_stages, shown_time
from pipemorph.control.observe.link_health import Health, LinkHealth
from pipemorph.planning import Policy


def why_not(spec: JobSpec) -> str | None:
    """Why a job's plan must not adapt; None if it may."""
    if not spec.adaptation.enabled:
        return "adaptation is disabled in the spec"
    if spec.schedule.policy_kind is not Policy.PIPEMORPH:
        return f"policy {spec.schedule.policy} keeps its schedule and paths"
    return None


def describe(slow: Sequence[LinkHealth]) -> str:
    """Slow links and how slow they are."""
    return ", ".join(
        f"link {link.link} is slow by {shown_time(link.delay)} one way"
        f" ({link.direction}, {link.confidence:.0%} sure)"
        for link in slow
    )


def why(cause: Cause, links: Sequence[LinkHealth]) -> str:
    """What a decision was made for."""
    slow = [link for link in links if link.health is Health.SLOW]
    match cause:
        case "profile":
            return "op times or wire times are not those planned with"
        case "steady":
            return f"{describe(slow)}, for a while now"
        case "restart":
            return "the plan in effect is not one this controller knows of"
        case "memory":
            return "the plan in effect holds more than there is room for"
        case "recovered":
            return "a link recovered" + (f", {describe(slow)}" if slow else ", none is slow")
        case _:
            return describe(slow)


def not_measured(stages: Sequence[int]) -> str:
    """``activationMemory`` is not kept on these stages, in rising order."""
    return (
        f"activationMemory does not limit {shown_stages(stages)}: not measured there what"
        " a microbatch holds; give inFlightLimit"
    )


def no_room(situation: Situation, memory: int | None) -> str:
    """``activationMemory``, in bytes, is too little for any plan: a room is 0."""
    stage = next(i for i, room in enumerate(situation.rooms) if room.device == 0)
    return (
        f"a microbatch holds {situation.stages[stage].activation_bytes} bytes on stage {stage},"
        f" more than activationMemory, {memory} bytes: no plan fits; kept the plan"
    )


def change(because: str, proposal: Proposal, chosen: Option) -> str:
    """What a change is made for, and what it is predicted to be worth."""
    current = proposal.current
    old = f"{shown_time(current.seconds)} with the present plan" if current else "unknown before"
    return (
        f"{because}; predicted per iteration {old}, {shown_time(chosen.seconds)} with"
        f" warm-up {'-'.join(map(str, chosen.plan.warmup))} and"
        f" {shown_paths(chosen.plan.paths)}"
        f"{'; ' + proposal.reason if proposal.reason else ''}"
    )
