"""Equal problems have one digest, and one proposal."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.findings import NoPlan
from pipemorph.control.decide.forecast import Situation
from pipemorph.control.decide.replan import Proposal, Replan, propose
from pipemorph.control.decide.truth import Evidence, Reference
from pipemorph.control.first_plan import initial_plan, planning_rules
from pipemorph.control.memory_limits import Room
from pipemorph.control.observed.stages import expected_times
from pipemorph.ingest.memo import ENTRY_BYTES, Memo, comparable, digest


def drawn(seed: int, **spec_changes: Any) -> Replan:
    """A decision as jobs of some stages ask for it, made of new objects."""
    rng = random.Random(seed)
    stages, microbatches = rng.choice([2, 3, 4, 6]), rng.choice([6, 12])
    op = {k: rng.uniform(5, 15) for k in ("forward", "backwardInput", "backwardWeight")}
    spec = JobSpec.model_validate(
        {
            "parallelism": {"stages": stages, "replicas": rng.choice([1, 2])},
            "schedule": {
                "microbatches": microbatches, "stageTimes": [op] * stages,
                "inFlightLimit": rng.choice([None, stages + 2]),
            },
            "trainer": {"module": "x", "iterations": 100},
        }
        | spec_changes
    )  # fmt: skip
    times = expected_times(spec)
    assert times is not None
    delays = tuple(rng.choice([0.0, rng.uniform(0.02, 0.08)]) for _ in range(stages - 1))
    now = Situation(
        stages=times,
        wire_times=tuple(0.001 + d for d in delays),
        delays=delays,
        slow=tuple(d > 0 for d in delays),
        unknown=(False,) * (stages - 1),
        barrier=rng.random() < 0.5,
    )
    first = initial_plan(spec)
    current = replace(first, version=rng.randrange(9))
    measured = tuple(rng.uniform(0.5, 2) for _ in range(rng.randrange(3)))
    reference = Reference(current, now, 1.5, 0.01) if rng.random() < 0.5 else None
    return Replan(
        spec=planning_rules(spec),
        cause=rng.choice(["slow", "worse", "recovered", "profile"]),
        situation=now,
        current=current,
        running=replace(first, version=rng.randrange(9)),
        baseline=first,
        lost=rng.random() < 0.2,
        remaining=1000,
        change_seconds=rng.choice([None, 0.2]),
        evidence=Evidence(reference=reference, measured=measured),
    )


def text_of(proposal: Proposal) -> str:
    """To the bit: repr() of a float is exact."""
    return repr(proposal)


def with_versions(asked: Replan, seed: int) -> Replan:
    """The same decision of another job, whose plans have other versions."""
    rng = random.Random(seed)
    current, running = rng.randrange(100), rng.randrange(100)
    return replace(
        asked,
        current=replace(asked.current, version=current),
        running=replace(asked.running, version=running),
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_remembered_proposal_is_what_planning_gives(seed: int) -> None:
    one, other = drawn(seed), with_versions(drawn(seed), seed)
    # Pickling shares and splits objects that are equal.
    far = pickle.loads(pickle.dumps(other))
    assert digest(comparable(one)) == digest(comparable(other)) == digest(comparable(far))
    kept = pickle.loads(pickle.dumps(propose(comparable(one))))
    planned = propose(other)
    if planned.current is not None:
        # Only the version of the plan in effect, which the controller knows.
        plan = replace(planned.current.plan, version=0)
        planned = replace(planned, current=planned.current._replace(plan=plan))
    chosen = planned.chosen
    if chosen is not None:
        planned = replace(planned, chosen=chosen._replace(plan=replace(chosen.plan, version=0)))
    assert text_of(kept) == text_of(planned)


def test_different_decisions_have_different_digests() -> None:
    seen = {digest(comparable(drawn(seed))) for seed in range(200)}
    assert len(seen) == 200


def changed(**changes: Any) -> Callable[[Replan], Replan]:
    return lambda asked: replace(asked, **changes)


def situation(**changes: Any) -> Callable[[Replan], Replan]:
    return lambda asked: replace(asked, situation=replace(asked.situation, **changes))


@pytest.mark.parametrize(
    "change",
    [
        changed(cause="restart"),
        changed(lost=True),
        changed(remaining=999),
        changed(change_seconds=0.25),
        changed(evidence=Evidence(overdue=True)),
        situation(rooms=(Room(device=3),) * 4),
        situation(transfers=(0.0, 0.0, 1e-300)),
        situation(barrier=False),
        situation(recent=((0.1, 0.2), (), ())),
        lambda asked: replace(asked, readings=(asked.situation.stages,)),
        lambda asked: replace(asked, previous=asked.baseline),
        lambda asked: replace(asked, baseline=replace(asked.baseline, warmup=(4, 3, 2, 2))),
        lambda asked: replace(
            asked,
            spec=asked.spec.model_copy(
                update={"adaptation": asked.spec.adaptation.model_copy(update={"min_gain": 0.06})}
            ),
        ),
    ],
)
def test_whatever_a_decision_depends_on_is_in_the_digest(
    change: Callable[[Replan], Replan],
) -> None:
    op = dict.fromkeys(("forward", "backwardInput", "backwardWeight"), 10.0)
    schedule = {"microbatches": 8, "stageTimes": [op] * 4}
    asked = drawn(1, parallelism={"stages": 4}, schedule=schedule)
    asked = replace(
        asked, lost=False, cause="slow", evidence=Evidence(), change_seconds=None,
        situation=replace(asked.situation, barrier=True),
    )  # fmt: skip
    assert digest(change(asked)) != digest(asked)
    assert digest(replace(asked)) == digest(asked)


def test_a_value_without_a_digest_is_refused() -> None:
    with pytest.raises(TypeError, match="depends on a object, which has no digest"):
        digest(replace(drawn(1), change_seconds=object()))  # type: ignore[arg-type]


def test_the_least_recently_used_go_first() -> None:
    memo = Memo(3 * (ENTRY_BYTES + 10))
    for name in (b"a", b"b", b"c"):
        memo.put(name, name * 10)
    assert memo.get(b"a") == b"a" * 10
    memo.put(b"d", b"d" * 10)
    assert (memo.get(b"b"), memo.get(b"a")) == (None, b"a" * 10)
    memo.put(b"a", b"A" * 5)
    assert memo.taken == 3 * ENTRY_BYTES + 25
    memo.put(b"large", b"x" * 10_000)
    assert (memo.taken, memo.get(b"large"), memo.get(b"a")) == (0, None, None)


def test_no_plan_is_a_proposal_like_any_other() -> None:
    proposal = Proposal(None, None, (NoPlan("none"),))
    assert text_of(pickle.loads(pickle.dumps(proposal))) == text_of(proposal)
