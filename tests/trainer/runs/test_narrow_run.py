"""``pipemorph run`` while a link is narrow, then narrower: found out, planned for, taken back."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from local_runs import MICROBATCHES, Done, manifest, run

pytestmark = [pytest.mark.times, pytest.mark.timeout(300)]

LINK, FROM, WORSE, TO, ITERATIONS = 2, 6, 18, 26, 42
MESSAGE_BYTES, TRANSFER_MS, WORSE_MS = 16384, 25.0, 55.0
"""Times for which a message occupies the link: two and a half ops, and more than what a stage takes
for a microbatch."""


def narrow(first: int, end: int, transfer_ms: float) -> dict[str, Any]:
    rate = MESSAGE_BYTES * 8 / transfer_ms / 1e3
    return {"link": LINK, "fromIteration": first, "toIteration": end, "bandwidthMbps": rate}


@pytest.fixture(scope="module")
def narrowed(tmp_path_factory: pytest.TempPathFactory) -> Done:
    faults = [narrow(FROM, WORSE, TRANSFER_MS), narrow(WORSE, TO, WORSE_MS)]
    trainer = {"module": "pipemorph_trainer.examples.emulated", "iterations": ITERATIONS}
    # Guided dispatch loses next to nothing to such a link, so there would be little to plan.
    schedule = {"microbatches": MICROBATCHES, "policy": "pipemorph", "dispatch": "static"}
    job = manifest(faults=faults, trainer=trainer, schedule=schedule)
    return run(tmp_path_factory.mktemp("narrow"), job)


def answers(done: Done, first: int, end: int) -> list[dict[str, Any]]:
    """The adaptations to the narrow link in these iterations; a busy machine may cause others."""
    return [
        adaptation
        for adaptation in done.report["adaptations"]
        if first <= adaptation["detected_at_iteration"] < end
        and any(x["link"] == LINK and x["health"] == "slow" for x in adaptation["links"])
    ]


def test_the_link_is_called_narrow(narrowed: Done) -> None:
    assert narrowed.status == 0, narrowed
    found = answers(narrowed, FROM, WORSE)
    assert found and found[0]["kind"] == "adapt", narrowed
    assert found[0]["detectable_at"] <= FROM + 1, narrowed
    assert f"link {LINK} is slow" in found[0]["reason"], narrowed
    assert "narrow: " in found[0]["reason"], narrowed


def test_it_is_not_taken_for_a_delayed_one_when_it_gets_narrower(narrowed: Done) -> None:
    """The plan may stay: the link decides now. None may come with a promise for a delay."""
    for each in answers(narrowed, WORSE, TO):
        assert "narrow: " in each["reason"], narrowed


def test_the_promised_gain_is_measured(narrowed: Done) -> None:
    found = answers(narrowed, FROM, WORSE)
    applied = [each for each in found if each["applied_at_iteration"] is not None]
    assert applied, narrowed
    iterations = [each["seconds"] for each in narrowed.report["iterations"]]
    print([(each["promised"], each["measured"]) for each in applied], iterations)
    well, before = median(iterations[1:FROM]), iterations[FROM]
    settled = iterations[WORSE - 6 : WORSE]
    assert applied[0]["promised"] > 0.15, "the best plan saves a quarter of an iteration"
    # Half of it is what the controller itself requires of a change.
    assert 1 - median(settled) / before > 0.5 * applied[0]["promised"], narrowed
    # It is predicted to take 1.07 times as long as without the fault, and 1.45 with the old plan.
    assert median(settled) < 1.25 * well, narrowed


def test_the_plan_goes_back_when_it_is_over(narrowed: Done) -> None:
    report = narrowed.report
    back = [a for a in report["adaptations"] if a["detected_at_iteration"] >= TO]
    assert [each["kind"] for each in back[:1]] == ["return"], narrowed
    assert set(back[0]["routes"]) == {"direct"}
    assert back[0]["warmup_after"] == report["adaptations"][0]["warmup_before"]
    assert back[0]["applied_at_iteration"] <= TO + 4, narrowed
    seconds = [each["seconds"] for each in report["iterations"]]
    # The shortest: a stall of this machine takes several iterations.
    assert min(seconds[back[0]["applied_at_iteration"] + 1 :]) < 1.1 * median(seconds[1:FROM])
