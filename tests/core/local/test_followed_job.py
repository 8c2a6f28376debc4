"""A job that PipeMorph observes: its links are judged from the steps that its ranks report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from observed_ranks import USUAL, make_report, order_1f1b, run_step, shift_clock

from pipemorph.control import JobController
from pipemorph.diagnose.analysis.idle_time import attribute_idle_time
from pipemorph.local.observed.followed_job import FollowedJob
from pipemorph.local.results.journal import RunJournal
from pipemorph.protocol import Health
from pipemorph.protocol.observed_steps import ObservedPlace, StepsReply
from pipemorph.spec.job_spec import PipeMorphJob

STAGES, MICROBATCHES = 4, 8


class Host:
    """Host of an observed job, with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.journal, self.started = RunJournal(), list[PipeMorphJob]()
        self.controller: JobController | None = None
        self.job = FollowedJob(
            "observed", clock=lambda: self.now, on_started=self.start,
            on_report=lambda report: self.journal.record_report(
                report, self.job.controller or pytest.fail("no controller"), self.now
            ),
            on_attempt=lambda _: self.journal.reset_view(), attribute_idle=attribute_idle_time,
        )  # fmt: skip

    def start(self, job: PipeMorphJob, controller: JobController) -> None:
        self.started.append(job)

    def run(
        self,
        steps: range,
        wires: Callable[[int], dict[int, float]] = lambda _: {},
        *,
        ahead: tuple[float, ...] = (0.0,) * STAGES,
        session: str = "a",
        waiting: Mapping[int, float] | None = None,
        **messages: Any,
    ) -> None:
        """Run steps, whose ranks report one after the other. ``wires``: of a step's links;
        ``waiting``: seconds by rank for which it waited for a processor in a step; ``messages``:
        see :func:`run_step`."""
        order = order_1f1b(STAGES, MICROBATCHES)
        for step in steps:
            ran = run_step(step, self.now, order, wires(step), noise=0.0002, **messages)
            self.now = ran[0].ended_at + 0.01
            for stage, plain in enumerate(ran):
                waited = round(1e6 * (waiting or {}).get(stage, 0.0))
                lasted = round(1e6 * (plain.ended_at - plain.began_at))
                each = plain.model_copy(update={"waits": [(lasted, waited)]})
                body = make_report(stage, STAGES, [each], ahead=ahead[stage], session=session)
                assert self.job.handle_report(body).status == 200

    def describe_slow_links(self) -> dict[int, float]:
        return {
            link.link: round(link.delay, 3)
            for link in self.journal.view.links
            if link.health is Health.SLOW
        }


def test_a_late_link_is_named_with_its_delay_and_since_when() -> None:
    host = Host()

    def wires(step: int) -> dict[int, float]:
        return {1: USUAL + 0.030} if 20 <= step < 40 else {}

    # The clocks of the hosts differ by far more than any message takes.
    ahead = (0.0, 5.0, -3.0, 0.25)
    host.run(range(1, 30), wires, ahead=ahead)
    (job,) = host.started
    assert (job.spec.schedule.policy, job.spec.schedule.microbatches) == ("1f1b", MICROBATCHES)
    assert host.describe_slow_links() == {1: pytest.approx(0.030, abs=0.001)}
    (slow,) = host.journal.copy_link_history().list_slow_periods()
    assert (slow.link, slow.begin, slow.end) == (1, 20, None)
    host.run(range(30, 60), wires, ahead=ahead)
    assert host.describe_slow_links() == {}
    (slow,) = host.journal.copy_link_history().list_slow_periods()
    assert 40 <= (slow.end or 0) <= 44
    lines = [each.line for each in host.journal.view.decisions]
    assert len(lines) == 1
    assert lines[0].startswith("link 1 is slow by 29.9 ms one way")


@pytest.mark.parametrize(
    ("sizes", "is_narrow", "transfer"),
    [
        ((1_000_000, 3_000_000, 2_000_000), False, 0.0),
        ((1_000_000, 3_000_000, 2_000_000), True, 0.020),
        # Sizes that do not differ do not show it.
        ((2_000_000,), True, 0.0),
    ],
)
def test_a_link_is_narrow_if_larger_messages_take_longer(
    sizes: tuple[int, ...], is_narrow: bool, transfer: float
) -> None:
    host = Host()
    host.run(range(1, 20), sizes=sizes)
    if is_narrow:
        host.run(range(20, 40), sizes=sizes, rates={1: 1e8})
    else:
        host.run(range(20, 40), lambda _: {1: USUAL + 0.020}, sizes=sizes)
    link = host.journal.view.links[1]
    assert (link.health, link.in_doubt) == (Health.SLOW, False)
    assert link.delay == pytest.approx(0.020, rel=0.25)
    assert link.transfer == pytest.approx(transfer, rel=0.25)


@pytest.mark.parametrize(
    ("waiting", "fewest", "most"), [({}, 1, 1), ({0: 0.02}, 1, 1), ({2: 0.02}, 3, 8)]
)
def test_a_late_link_may_be_a_rank_without_a_processor(
    waiting: dict[int, float], fewest: int, most: int
) -> None:
    """Rank 2 is at one end of link 1, rank 0 is not."""
    host = Host()
    host.run(range(1, 20), waiting=waiting)

    def wires(_: int) -> dict[int, float]:
        return {1: USUAL + 0.020}

    steps = 19
    while not host.describe_slow_links() and steps < 60:
        steps += 1
        host.run(range(steps, steps + 1), wires, waiting=waiting)
    assert [*host.describe_slow_links()] == [1]
    assert fewest <= steps - 19 <= most


def test_the_plan_in_force_is_the_order_that_was_seen() -> None:
    host = Host()
    host.run(range(1, 12))
    controller = host.job.controller
    assert controller is not None
    assert controller.running_plan.warmup == (4, 3, 2, 1)
    outlook = controller.get_outlook(host.now)
    assert outlook is not None
    sampled = [each for each in host.journal.list_iterations() if each.idle is not None]
    assert len(sampled) >= 3, "idle time is attributed once a second"
    assert outlook.seconds == pytest.approx(sampled[-1].seconds, rel=0.02)
    idle = sampled[-1].idle or {}
    assert sum(idle.values()) == pytest.approx(
        sampled[-1].bubble_fraction * sampled[-1].seconds, rel=0.02
    )
    assert max(idle, key=lambda cause: idle[cause]) == "bubble"


def test_steps_that_a_rank_left_out_are_dropped() -> None:
    host = Host()
    order = order_1f1b(STAGES, 2)
    for step in range(1, 9):
        for stage, each in enumerate(run_step(step, host.now, order, {})):
            sent = [] if stage == 2 and step % 2 else [each]
            assert host.job.handle_report(make_report(stage, STAGES, sent)).status == 200
        host.now += 1
    assert [each.index for each in host.journal.list_iterations()] == [2, 4, 6, 8]


def test_steps_with_impossible_times_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    order = order_1f1b(STAGES, 2)
    for step in range(1, 4):
        for stage, each in enumerate(run_step(step, host.now, order, {})):
            shifted = shift_clock(each, 1e9 if (step, stage) == (2, 1) else 0.0)
            assert host.job.handle_report(make_report(stage, STAGES, [shifted])).status == 200
        host.now += 1
    assert [each.index for each in host.journal.list_iterations()] == [1, 3]
    assert "step 2 has impossible times: " in caplog.text


def test_ranks_that_start_again_begin_another_attempt() -> None:
    host = Host()
    host.run(range(1, 10), lambda _: {0: 0.05})
    host.run(range(1, 3), session="b")
    assert (host.job.attempt, host.journal.view.links) != (0, ())
    assert host.job.attempt == 1
    assert [each.index for each in host.journal.list_iterations()] == [*range(1, 10)]
    # The last report of a process that has ended comes late.
    late = host.job.handle_report(make_report(1, STAGES, session="a", finished=True))
    assert (late.status, json.loads(late.body)["error"]) == (
        409, "another process of this rank has reported since",
    )  # fmt: skip
    assert not host.job.finished
    for stage in range(STAGES):
        assert not host.job.finished
        host.job.handle_report(make_report(stage, STAGES, session="b", finished=True))
    assert host.job.finished


def test_reports_of_another_job_are_refused() -> None:
    host = Host()
    host.run(range(1, 3))
    reply = host.job.handle_report(make_report(1, 2))
    assert reply.status == 409
    assert json.loads(reply.body)["error"] == (
        "the rank is of a job of 2 stages; this host observes 4 stages"
    )


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"chunks": (4,)}, "stages 4 of 4, replica 0 of 1: expected as many stages on each rank"),
        ({"replica": 1}, "stages 0 of 4, replica 1 of 1"),
        ({"stages": 5, "chunks": (0, 1)}, "stages 0, 1 of 5"),
        ({"stages": 8, "chunks": (0, 1)}, "a rank has stages 0, 1 of 8; expected every 4-th stage"),
        ({"stages": 600}, "stages: Input should be less than or equal to 512"),
    ],
)
def test_impossible_places_are_refused(place: dict[str, Any], message: str) -> None:
    host = Host()
    first = ObservedPlace(rank=0, stages=4, chunks=(0,), host="h").model_dump() | place
    body = {"protocol": 1, "session": "s", "place": first}
    reply = host.job.handle_report(json.dumps(body).encode())
    assert reply.status == 409
    assert message in json.loads(reply.body)["error"]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"protocol": 2}', b'{"protocol": 1, "x": 1}'])
def test_bad_bodies_are_refused_in_one_line(body: bytes) -> None:
    reply = Host().job.handle_report(body)
    assert reply.status == 422
    assert "\n" not in json.loads(reply.body)["error"]


def test_ranks_that_share_a_processor_are_named() -> None:
    host = Host()
    for step in range(1, 4):
        for stage, each in enumerate(run_step(step, host.now, order_1f1b(STAGES, 2), {})):
            body = make_report(stage, STAGES, [each], crowding=2.0)
            assert host.job.handle_report(body).status == 200
        host.now += 1
    assert [each.line for each in host.journal.view.decisions] == [
        "2 ranks per processor compute on a host, so it is slow when links are not; give each rank"
        " a processor"
    ]


def test_replies_have_the_clock_of_the_host() -> None:
    host = Host()
    reply = host.job.handle_report(make_report(0, STAGES))
    assert StepsReply.model_validate_json(reply.body).at == host.now
