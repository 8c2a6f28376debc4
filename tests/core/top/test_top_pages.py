"""What top shows of jobs, and what keys change about it: without a terminal or a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from cluster_jobs import (
    CHANGE,
    NOW,
    SLOW,
    WELL,
    adapted,
    at,
    cluster_job,
    found,
    healthy,
    running,
    slow_link,
)

from pipemorph.api.status import JobStatus, TrainingStatus
from pipemorph.api.status_links import FallenLink, RailsStatus, SickPort
from pipemorph.api.status_recoveries import Recoveries, RecoveryRecord
from pipemorph.explain.cluster_job import ClusterJob, read_job
from pipemorph.top.browser import Browser
from pipemorph.top.job import job_page
from pipemorph.top.jobs import ORDERS, jobs_table, ordered
from pipemorph.top.page import PLAIN_BARS, plain, sparkline
from pipemorph.top.seen import Seen
from pipemorph.top.times import since, wall


def job(name: str, status: JobStatus | None, **fields: Any) -> ClusterJob:
    return read_job(cluster_job(name, status, **fields))


def page(of: ClusterJob, seen: Seen | None = None, **kind: Any) -> str:
    return plain(job_page(of, seen or Seen(), NOW, **kind))


GPT = job("gpt", running(adapted(), SLOW, ready="8/8", goodput=0.913), replicas=2)


def test_a_first_look_tells_which_link_since_when_what_was_done_and_what_it_saved() -> None:
    assert page(GPT) == (
        """\
team/gpt  Running  4 stages × 2 replicas  8/8 pods ready
iteration  118 of 1,000 (11%), 7 min 21 s left; as of 03:09:56 UTC (4 s ago)
speed      0.5 s per iteration, stages idle 21% of it
plan       v1 since iteration 11: warm-up 7-5-3-1 became 12-11-9-1, link 2 left to the engine
because    link 2 is slow by 60.1 ms one way
gain       promised 56%, measured 53%: 1.06 s per iteration became 0.472 s
worth      the plan changes saved 1 min 4 s (± 9.6 s), 0.14 rank-hours, against the plan of"""
        """ the start
goodput    91.3% of the time that it had its place went into iterations
recoveries none

links      1 slow link since 03:07:50 UTC (2 min 10 s)

SLOW LINK              REPLICA  LATE BY         SINCE (UTC)            ONE-WAY TIME  ROUTE      """
        """TRANSPORT
link 2 (stage 2 to 3)  0        +60 ms forward  03:07:50 (2 min 10 s)       61.3 ms  delegated  """
        """rdma
delegated: the transfer engine carries it beside compute; direct: torch

rails      8 RDMA ports, none sick
to do      check the network between the hosts of the slow link: pipemorph fabric check, or """
        """pipemorph bench between two of them
"""
    )


def test_80_columns_hold_all_that_matters() -> None:
    several = adapted(slow_link(0, 12.4), slow_link(2, 83.0, replica=1, seconds_ago=45))
    text = page(job("gpt", running(several, SLOW), replicas=2), width=80)
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split("  ") for line in text.splitlines() if line.startswith("link ")]
    assert [[cell for cell in row if cell] for row in rows] == [
        ["link 2 (stage 2 to 3)", "1", "+83 ms forward", "03:09:15 (45 s)", "delegated"],
        ["link 0 (stage 0 to 1)", "0", "+12 ms forward", "03:07:50 (2 min 10 s)", "direct"],
    ]
    by_link = page(job("gpt", running(several, SLOW)), order="link").splitlines()
    assert [line[:6] for line in by_link if line.startswith("link ")] == ["link 0", "link 2"]


def test_healthy_links_have_no_delays_and_no_plan_change_no_gain() -> None:
    text = page(job("gpt", running(healthy(), WELL)))
    assert "links      3 links, all healthy, since 03:06:40 UTC (3 min 20 s)\n" in text
    assert "plan       v0, the one of the start\n" in text
    assert "worth      nothing so far: the plan was never changed\n" in text
    assert "rails      no RDMA port was reported\n" in text
    for word in ("SLOW LINK", "gain", "because", "trend", "+0 ms"):
        assert word not in text


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, ["team/gpt  -  4 stages", "no operator has looked at the job yet"]),
        (
            JobStatus(
                state="Pending",
                conditions=[found("PodsReady", "False", "Waiting", "0 of 4 pods are ready", 9)],
            ),
            ["why        Waiting: 0 of 4 pods", "nothing is known of them yet", "an event says"],
        ),
        (
            running(
                adapted(),
                found("LinksHealthy", "Unknown", "ReportsStale", "no report for 60 s", 70),
            ),
            [
                "1 slow link by the last report; no report for 60 s",
                "+60 ms forward  03:07:50 (2 min 10 s)  ",
                "rank 0",
            ],
        ),
        (
            running(adapted(wanted_plan_version=2), SLOW),
            ["plan       v1; the ranks are changing to v2"],
        ),
        (
            running(
                healthy(
                    applied_plan_version=2,
                    wanted_plan_version=2,
                    adaptations=2,
                    last_adaptation=CHANGE.model_copy(
                        update={"kind": "return", "plan_version": 2, "promised": None}
                    ),
                ),
                WELL,
            ),
            ["plan       v2 since iteration 11: back to the plan for healthy links"],
        ),
        (
            running(
                adapted(
                    last_adaptation=CHANGE.model_copy(
                        update={"warmup_before": [2] * 64, "warmup_after": [2] * 60 + [1] * 4}
                    )
                ),
                SLOW,
            ),
            ["warm-up of 4 stages changed"],
        ),
        (
            running(adapted(last_adaptation=CHANGE.model_copy(update={"measured": None})), SLOW),
            ["promised 56%, measured not yet"],
        ),
        (
            running(
                adapted(
                    rails=RailsStatus(
                        ports=8,
                        sick_count=1,
                        sick_ports=[
                            SickPort(stage=2, device="m0", port=1, state="DOWN", message="is DOWN")
                        ],
                    ),
                    fallen_links=[
                        FallenLink(
                            link=2, direction="forward", agreed="rdma", transport="tcp", message="x"
                        )
                    ],
                ),
                SLOW,
                found("StagesEven", "False", "SlowStages", "stage 1 takes 31 ms", 60),
            ),
            [
                "rails      1 of 8 RDMA ports sick: m0 port 1 of stage 2 is DOWN; fell back: link 2"
                " from rdma to tcp (x)",
                "stages     stage 1 takes 31 ms, since 03:09:00 UTC (1 min)",
            ],
        ),
        (
            running(
                healthy(),
                WELL,
                restarts=1,
                recoveries=Recoveries(
                    count=2,
                    last=[
                        RecoveryRecord(
                            generation=2, lost_at=at(60), cause="rank 3 died", seconds=3.2
                        )
                    ],
                ),
            ),
            [
                "recoveries ranks were started again 2 times within their pods; the last at"
                " 03:09:00 UTC (1 min ago): rank 3 died; 3.2 s until the next iteration was done;"
                " the job started again 1 time"
            ],
        ),
    ],
    ids=[
        "new", "pending", "silent", "changing", "returned", "many stages", "not measured", "sick",
        "recovered",
    ],
)  # fmt: skip
def test_states_of_one_job(status: JobStatus | None, words: Sequence[str]) -> None:
    text = page(job("gpt", status))
    for each in words:
        assert each in text


def test_control_characters_do_not_get_to_the_terminal() -> None:
    link = slow_link(2, 60.0).model_copy(update={"direction": "\x1b[31mforward"})
    status = running(adapted(link, transports=["", "", "a\x1b]0;x\x07"]), SLOW, ready="\x1b[2J")
    assert all(part.isprintable() for part in page(job("gpt", status)).splitlines())


# --- what top sees by itself -----------------------------------------------------------------


def look(seen: Seen, training: TrainingStatus) -> None:
    condition = SLOW if training.slow_links else WELL
    seen.look(job("gpt", running(training, condition)))


def test_the_trend_has_a_bar_per_time_that_status_told() -> None:
    seen = Seen()
    for iteration, seconds in ((10, 0.5), (10, 0.5), (14, 1.0), (18, 0.25)):
        look(seen, adapted(iteration=iteration, iteration_seconds=seconds))
    assert list(seen.times) == [0.5, 1.0, 0.25]
    assert "trend      ▅█▃ 0.25 to 1 s, as seen since top started\n" in page(GPT, seen)
    assert "trend      +@- 0.25 to" in page(GPT, seen, bars=PLAIN_BARS)


def test_a_slow_link_has_a_bar_per_delay_that_status_told() -> None:
    seen = Seen()
    told = [(20.0, 4), (60.0, 3), (60.0, 3), (None, 2), (None, 1), (30.0, 0)]
    for delay, seconds_ago in told:
        links = [] if delay is None else [slow_link(2, delay), slow_link(0, 10.0)]
        training = adapted(*links) if links else healthy()
        look(seen, training.model_copy(update={"last_report_time": at(seconds_ago)}))
    assert {link: [*each] for link, each in seen.delays.items()} == {
        (2, 0): [20.0, 60.0, 0.0, 0.0, 30.0],
        (0, 0): [10.0, 10.0, 0.0, 0.0, 10.0],
    }
    two = adapted(slow_link(2, 30.0), slow_link(0, 10.0))
    text = page(job("gpt", running(two, SLOW)), seen)
    assert "+30 ms forward  ▃█▁▁▅  03:07:50" in text and "+10 ms forward  ██▁▁█" in text
    assert "-@__+" in page(job("gpt", running(two, SLOW)), seen, bars=PLAIN_BARS)
    for seconds_ago in range(20):
        well = healthy().model_copy(update={"last_report_time": at(-seconds_ago)})
        look(seen, well)
    assert seen.delays == {}


def test_bars_begin_at_zero() -> None:
    assert sparkline([0.0, 0.5, 0.9, 1.0]) == "▁▅██"
    assert sparkline([1.0]) == "" and sparkline([0.0, 0.0]) == ""


def test_times_in_words() -> None:
    assert since(NOW - 200000, NOW, " UTC") == "2025-12-30 19:36 UTC (2 days 7 h)"
    assert since(NOW + 5, NOW) == "03:10:05 (0 s)", "clocks differ"
    assert since(None, NOW) == "?"
    assert wall("x") is None and wall(None) is None and wall(at(0)) == NOW


# --- many jobs -------------------------------------------------------------------------------

DONE = job(
    "done",
    JobStatus(
        state="Complete",
        ready="0/4",
        training=healthy(iteration=999, adaptations=3, saved_seconds=5400.0),
        conditions=[found("LinksHealthy", "Unknown", "JobFinished", "the job has finished", 60)],
    ),
)
SMALL = job("small", running(healthy(), WELL), namespace="other")
NEW = job("new", None)
JOBS = [GPT, SMALL, NEW, DONE]


def test_a_line_per_job() -> None:
    assert plain(jobs_table(ordered(JOBS, "name"), {})) == (
        """\
NAMESPACE  NAME   STATE     READY  DONE        LEFT  S/ITER  SLOW LINKS     PLAN  """
        """GAIN (PROMISED)  GOODPUT       SAVED  RECOVERIES
other      small  Running   4/4      4%  6 min 34 s    0.41  none             v0  """
        """-                      -           -           0
team       done   Complete  0/4    100%           -    0.41  -                v0  """
        """-                      -  1 h 30 min           0
team       gpt    Running   8/8     11%  7 min 21 s     0.5  link 2 +60 ms    v1  """
        """53% (56%)            91%   1 min 4 s           0
team       new    -         -         -           -       -  -                 -  """
        """-                      -           -           -
"""
    )


def test_a_narrow_terminal_spares_columns_and_cuts_names() -> None:
    long = job("a" * 40, running(adapted(), SLOW))
    lines = plain(jobs_table([long], {}, width=80, namespaced=False)).splitlines()
    assert max(map(len, lines)) <= 80
    for word in ("NAME", "STATE", "DONE", "S/ITER", "SLOW LINKS", "SAVED"):
        assert word in lines[0]
    assert "…  Running" in lines[1]


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("name", "small"),
        ("state", "new"),
        ("done", "done"),
        ("left", "small"),
        ("s/iter", "gpt"),
        ("slow links", "gpt"),
        ("goodput", "gpt"),
        ("saved", "done"),
        ("recoveries", "small"),
    ],
)
def test_orders(order: str, first: str) -> None:
    assert ordered(JOBS, order)[0].metadata.name == first
    assert len(ORDERS) == 9


# --- keys ------------------------------------------------------------------------------------


def browse(*keys: str, jobs: Sequence[ClusterJob] = JOBS, height: int = 40, **kind: Any) -> str:
    browser = Browser("all namespaces", **kind)
    browser.take(jobs, [])
    browser.page(NOW, 120, height)
    for key in keys:
        browser.press(key)
    lines = browser.page(NOW, 120, height)
    assert len(lines) == height
    return plain(lines)


def test_the_list_opens_a_job_and_the_job_goes_back() -> None:
    text = browse()
    assert "4 jobs, 1 with slow links, by name" in text
    assert "\n>  other      small " in text
    assert "\n>  team       gpt " in browse("down", "j", "down", "up")
    assert "team/gpt  Running" in browse("j", "j", "enter")
    assert "\n>  team       gpt " in browse("j", "j", "enter", "back")
    assert "other/small  Running" in browse("enter")


def test_keys_sort_and_reverse() -> None:
    assert "by state" in browse("s")
    assert "by name" in browse(*"s" * len(ORDERS))
    names = [line.removeprefix(">").split()[1] for line in browse("s", "r").splitlines()[4:8]]
    assert "by state, reversed" in browse("s", "r")
    assert names == ["small", "gpt", "done", "new"]


def test_one_job_has_nothing_to_go_back_to() -> None:
    text = browse("back", jobs=[GPT], only=True)
    assert "team/gpt  Running" in text and "b back" not in text


def test_what_does_not_fit_is_scrolled() -> None:
    many = [job(f"job-{i:02}", None) for i in range(50)]
    text = browse(*["down"] * 30, jobs=many, height=12)
    assert ">  team       job-30" in text and "job-22" not in text
    opened = browse("enter", *["down"] * 99, jobs=[GPT], height=10)
    assert "team/gpt  Running" not in opened and "to do" in opened
    assert "up/down scroll" in opened


def test_unreadable_jobs_leave_room() -> None:
    browser = Browser("x")
    browser.take([GPT], [f"team/odd-{i}: spec: Field required" for i in range(40)])
    lines = browser.page(NOW, 120, 24)
    assert len(lines) == 24
    text = plain(lines)
    assert "gpt" in text and "team/odd-0" in text and "q quit" in text


def test_a_job_that_is_gone_is_said_to_be() -> None:
    browser = Browser("x")
    browser.take([GPT], [])
    browser.press("enter")
    browser.take([], ["team/odd: spec: Field required"])
    text = plain(browser.page(NOW, 80, 24))
    assert "team/gpt is not there any more" in text and "!          team/odd: spec" in text
    browser.press("back")
    assert "no PipeMorphJob was found" in plain(browser.page(NOW, 80, 24))
    browser.press("q")
    assert browser.over
