"""``pipemorph explain``: of a run's report, of a cluster's job, and of what is neither."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import Kubectl
from rich.console import Console

from pipemorph.cli import main
from pipemorph.terminal import render_parts
from pipemorph.views.explanation import MOST_LINES, Explanation, explain_job
from pipemorph.views.explanation.explanation_text import (
    MOST_LINE_CHARACTERS,
    convert_to_hours,
    describe_savings,
    format_duration,
    format_hours,
    format_short_duration,
    format_warmup_change,
)

Content = dict[str, Any]


def change(version: int, **fields: Any) -> Content:
    found = {
        "plan_version": version,
        "kind": "adapt",
        "detected_at": 100.0,
        "detected_at_iteration": 10,
        "detectable_at": 10,
        "applied_at_iteration": 11,
        "reason": "link 2 is slow",
        "links": [{"link": 2, "health": "slow", "delay": 0.060}],
        "warmup_before": [7, 5, 3, 1],
        "warmup_after": [12, 11, 9, 1],
        "routes": ["direct", "direct", "delegated"],
        "predicted_seconds_before": 1.06,
        "predicted_seconds_after": 0.46,
        "promised": 0.56,
        "measured": 0.55,
        "iteration_seconds_before": 1.06,
        "iteration_seconds_after": 0.47,
        "saving": 0.6,
        "saved": 60.0,
    }
    return found | fields


def returned(version: int, **fields: Any) -> Content:
    rest: Content = {
        "kind": "return",
        "links": [],
        "detected_at_iteration": 110,
        "detectable_at": 109,
        "applied_at_iteration": 111,
        "saving": 0.0,
        "saved": 0.0,
        "promised": None,
        "measured": None,
    }
    return change(version) | rest | fields


def slow_time(**fields: Any) -> Content:
    return {"link": 2, "begin": 10, "end": None, "delay": 0.06, "column": 0} | fields


def report(*conditions: Content, status: Content | None = None, **fields: Any) -> Content:
    """Report of a run that completed. ``conditions``: at its end; ``status``: fields of it."""
    iterations = [
        {"index": i, "seconds": 0.4, "loss": 1.0, "plan_version": 0, "bubble_fraction": 0.1}
        for i in range(120)
    ]
    training = {"adaptations": 2, "savedSeconds": 60.0, "savedErrorSeconds": 9.0}
    found: Content = {
        "kind": "PipeMorphJob",
        "metadata": {"name": "gpt", "namespace": "team"},
        "spec": {"parallelism": {"stages": 4, "replicas": 2}, "trainer": {"iterations": 120}},
        "status": {
            "state": "Complete",
            "startTime": "2026-01-02T03:04:05Z",
            "completionTime": "2026-01-02T03:05:20Z",
            "training": training,
            "conditions": list(conditions),
        }
        | (status or {}),
        "iterations": iterations,
        "adaptations": [change(1), returned(2)],
        "links": {"slow": [slow_time(end=110)]},
    }
    return found | fields


def explain(content: Content) -> list[str]:
    return lines(explain_job(content))


def lines(story: Explanation) -> list[str]:
    return render_parts(story.to_table()).splitlines()


def test_a_run_with_a_slow_link() -> None:
    assert explain(report()) == [
        "outcome  team/gpt is Complete; 4 stages × 2 replicas; 120 of 120 iterations in 1 min 15 s,"
        " the newest 0.4 s each",
        "seen     link 2 (stage 2 to 3, replica 0) was late by up to 60 ms, from iteration 10 until"
        " 110",
        "done     plan 1 from iteration 11: warm-up 7-5-3-1 became 12-11-9-1, link 2 delegated to"
        " the engine; 1.06 s became 0.47 s per iteration (56% promised, 55% measured)",
        "         plan 2 from iteration 111: back to the plan for healthy links",
        "worth    the plan changes saved 1 min (± 9.0 s), 0.13 rank-hours, against the initial"
        " plan",
        "to do    nothing has to be done",
    ]


@pytest.mark.parametrize(
    ("losses", "seen"),
    [
        ({5: "NaN"}, "the loss was nan in iteration 5"),
        ({5: "NaN", 6: "NaN", 119: "Infinity"}, "the loss was nan in 3 iterations from 5 to 119"),
        ({0: "-Infinity"}, "the loss was -inf in iteration 0"),
        ({5: None}, None),
    ],
)
def test_a_loss_that_is_no_number_is_reported(losses: Content, seen: str | None) -> None:
    content = report(adaptations=[], links={"slow": []})
    for index, loss in losses.items():
        content["iterations"][index]["loss"] = loss
    text = "\n".join(explain(content))
    assert ("seen     " + (seen or "no slow link")) in text
    assert ("find what made the loss NaN or infinite" in text) is (seen is not None)


PAUSED = "Python's garbage collector took 4.0% of the time"


@pytest.mark.parametrize(
    ("inside", "moved", "seen", "advised"),
    [
        (0.016, None, PAUSED + ", inside iterations", True),
        (0.0016, None, None, False),
        (0.016, 20, PAUSED + " inside iterations; from iteration 20 on, 1.0% between them", False),
    ],
)
def test_pauses_of_the_garbage_collector_are_named(
    inside: float, moved: int | None, seen: str | None, advised: bool
) -> None:
    content = report(adaptations=[], links={"slow": []})
    for index, each in enumerate(content["iterations"]):
        after = moved is not None and index >= moved
        each["gc_inside"], each["gc_between"] = (0.0, 0.004) if after else (inside, 0.0)
    text = " ".join("\n".join(explain(content)).split())
    assert ("seen " + (seen or "no slow link")) in text
    assert ("Options(gc='auto')" in text) is advised


@pytest.mark.parametrize(
    ("spread", "unexplained", "reorder", "seen", "advice"),
    [
        (0.41, 0.41, "bits", "standard deviation), without costs; ordered by", {"work", "order"}),
        (0.41, 0.03, "bits", "by 3% beyond their costs; ordered by costs, iterations", {"order"}),
        (0.41, 0.03, "sums", "work by 41% (standard deviation), by 3% beyond their costs", set()),
        (0.41, 0.41, "sums", "work by 41% (standard deviation), without costs", {"work"}),
        (0.05, 0.05, "bits", "no slow link", set()),
    ],
)  # fmt: skip
def test_differences_in_work_are_named(
    spread: float, unexplained: float, reorder: str, seen: str, advice: set[str]
) -> None:
    content = report(adaptations=[], links={"slow": []}, work={"reordering_gain": 0.07})
    content["spec"]["adaptation"] = {"reorder": reorder}
    for each in content["iterations"][5:]:
        each["work_spread"], each["unexplained_spread"] = spread, unexplained
        each["cost"] = None if spread == unexplained else 3.0
    text = " ".join("\n".join(explain(content)).split())
    assert seen in text
    assert ("by costs, iterations would be 7% shorter" in text) is ("order" in advice)
    words = {"work": "as costs=", "order": "Options(reorder='sums')"}
    assert {cause for cause, each in words.items() if each in text} == advice


IDLE = {"bubble": 0.04, "link": 0.06, "data": 0.03, "gc": 0.001, "other": -0.002}


def test_idle_time_is_named_by_cause() -> None:
    """The first iteration is set-up, and checkpoints are no part of an iteration's time."""
    content = report(adaptations=[], links={"slow": []})
    content["iterations"][0]["idle"] = {"data": 9.0}
    content["iterations"][50]["idle"] = IDLE
    content["iterations"][90]["idle"] = IDLE | {"checkpoint": 0.2}
    text = "\n".join(explain(content))
    shares = "bubble 8%, data 6%"
    assert f"\nidle     46% of the ranks' time: checkpoint 20%, link 12%, {shares}\n" in text
    assert "load data ahead" in text and "save less often" in text
    small = {"gc": 0.003, "work": 0.003, "stage": -0.001}
    content["iterations"][90]["idle"] = content["iterations"][50]["idle"] = small | {"link": 0.05}
    assert ": link 12%, smaller ones 1%\n" in "\n".join(explain(content))
    # Of a job of a cluster, its status has them.
    training = {"idleSeconds": IDLE, "iterationSeconds": 0.4}
    job = report(status={"state": "Running", "training": training})
    del job["iterations"]
    assert "\nidle     32% of the ranks' time: link 15%, bubble 10%," in "\n".join(explain(job))


def test_fitted_costs_are_named() -> None:
    content = report(adaptations=[], links={"slow": []})
    content["iterations"][9]["fitted_costs"] = {
        "base": 0.0, "per_token": 3e-6, "per_square": 0.0, "error": 0.02, "equal_error": 0.41,
        "microbatches": 64,
    }  # fmt: skip
    text = " ".join("\n".join(explain(content)).split())
    wanted = "from iteration 10 on, costs are 3e-06 s per token, fitted to 64 microbatches"
    assert f"{wanted} with an error of 2.0% (equal costs: 41%)" in text


def test_changes_are_listed_in_their_order_and_the_best_of_many() -> None:
    changes = [change(i, saved=saved) for i, saved in enumerate((1.0, 5.0, 2.0, 9.0), start=1)]
    text = "\n".join(explain(report(adaptations=changes)))
    assert "done     plan 2 from" in text and "         plan 4 from" in text
    assert "(and 2 more)" in text


@pytest.mark.parametrize(
    ("fault", "advised"),
    [
        ({"link": 2}, False),
        ({"between": [0, 1]}, False),
        ({"reduction": 1}, True),
        ({"device": 3}, True),
    ],
)
def test_no_advice_is_given_on_what_the_job_requests(fault: Content, advised: bool) -> None:
    content = report(late(), adaptations=[], links={"slow": [slow_time()]})
    content["spec"]["faults"] = [fault | {"delay": "60ms"}]
    assert ("check the network" in "".join(explain(content))) is advised


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("status", "startTime"), "<b>"),
        (("status", "startTime"), "2026-13-45T00:00:00Z"),
        (("status", "startTime"), "2026-01-02T03:04:05"),
        (("status", "completionTime"), "0001-01-01T00:00:00+14:00"),
        (("status", "training", "savedSeconds"), math.inf),
        (("status", "training", "savedErrorSeconds"), math.nan),
        (("status", "goodput"), math.nan),
        (("iterations", 3, "seconds"), math.nan),
        (("iterations", 3, "index"), 1e300),
        (("adaptations", 0, "saved"), math.nan),
        (("adaptations", 0, "promised"), -math.inf),
        (("links", "slow", 0, "delay"), math.inf),
        (("links", "slow", 0, "begin"), "\x1b[2Jx"),
        (("spec", "parallelism", "stages"), 10**30),
        (("spec", "faults"), [None]),
        (("iterations",), {}),
    ],
)
def test_a_damaged_report_gives_one_line(
    where: tuple[Any, ...], value: Any, tmp_path: Path, capsysbinary: Any
) -> None:
    content = report(status={"goodput": 0.5, "restarts": 1})
    content["status"]["recoveries"] = {"count": 1, "last": []}
    place = content
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    (tmp_path / "report.json").write_text(json.dumps(content))
    status = main(["explain", str(tmp_path)])
    out, err = capsysbinary.readouterr()
    assert status in (0, 2)
    assert (out.count(b"\n") in range(3, MOST_LINES + 1)) if status == 0 else not out
    assert err.count(b"\n") == (status == 2) and b"\x1b" not in out + err


def test_a_run_without_a_fault() -> None:
    lines = explain(report(adaptations=[], links={"slow": []}, status={"training": None}))
    assert [line[:9].strip() for line in lines] == ["outcome", "seen", "done", "to do"]
    assert lines[1].endswith("no slow link, stage or port was found")


@pytest.mark.parametrize(
    ("kind", "status", "reason", "advice"),
    [
        ("StagesEven", "True", "UnequalWork", "where the script splits the model"),
        ("StagesEven", "False", "SlowStages", "other users of the slow stage's host"),
        ("LinksHealthy", "Unknown", "ReportsStale", "they cannot reach pipemorph serve"),
        ("Failed", "True", "RankFailed", "start the job again"),
    ],
)
def test_advice_on_an_observed_job_names_no_field(
    kind: str, status: str, reason: str, advice: str
) -> None:
    found = since(kind, status, reason, "seen")
    content = report(found, adaptations=[], links={"slow": []}, status={"training": None})
    content["spec"]["trainer"]["iterations"] = 0
    content["status"]["state"] = "Failed" if kind == "Failed" else "Running"
    for each in content["iterations"]:
        each["gc_inside"] = 0.02
    text = " ".join("\n".join(explain(content)).split())
    assert advice in text and "gc.disable(), and gc.collect()" in text
    assert not re.search(r"spec\.|adaptation\.|parallelism\.|Options|operator|advise", text)


def test_a_run_that_starts_waits_for_no_pods() -> None:
    content = report(adaptations=[], links={"slow": []}, status={"training": None})
    content["status"]["state"], content["iterations"] = "Starting", []
    assert "kubectl" not in "".join(explain(content))


@pytest.mark.parametrize(("state", "count"), [("Running", 1), ("Failed", 1), ("Complete", 0)])
def test_missing_reports_are_seen_once_and_not_after_a_good_end(state: str, count: int) -> None:
    kinds = ("LinksHealthy", "RailsHealthy", "StagesEven")
    silent = [since(kind, "Unknown", "ReportsStale", "no report for 30 s") for kind in kinds]
    content = report(*silent, adaptations=[], links={"slow": []}, status={"training": None})
    content["status"]["state"] = state
    text = "".join(explain(content))
    assert text.count("no report for 30 s") == count
    assert ("rank 0, whose agent reports" in text) is bool(count)


def late() -> Content:
    return since("LinksHealthy", "False", "SlowLinks", "link 2 (+60 ms forward) slow")


def test_a_slow_link_is_reported_whether_or_not_the_plan_was_changed() -> None:
    lines = explain(report(late(), adaptations=[], links={"slow": [slow_time()]}))
    assert "was late by up to 60 ms, from iteration 10 until the end" in lines[1]
    assert "forward" not in "".join(lines), "it is reported once"
    assert "pipemorph bench link" in "".join(lines)


def test_a_link_that_is_slow_at_the_end_is_advised_on() -> None:
    lines = explain(report(late(), adaptations=[change(1)], links={"slow": [slow_time()]}))
    assert "from iteration 10 until the end" in lines[1]
    assert "pipemorph bench link" in lines[-1]


def test_a_change_that_did_not_bring_its_promise() -> None:
    lines = explain(report(adaptations=[change(1, measured=0.1), returned(2)]))
    assert "competes for the ranks' processors" in lines[-1]
    assert "promise" not in "".join(explain(report(adaptations=[change(1, measured=0.5)]))[-1:])


def test_a_long_line_still_says_how_many_more_there_are() -> None:
    rows = Explanation("gpt is Running", decisions=["a", "b " * 200, "c"]).label_rows()
    (line,) = [text for _, text in rows if text.startswith("b b")]
    assert line.endswith(" (and 1 more)") and len(line) <= MOST_LINE_CHARACTERS


def test_everything_at_once_is_ten_lines_of_which_none_is_long() -> None:
    slow = [slow_time(link=i, delay=0.01 * (i + 1)) for i in range(3)]
    content = report(
        late(),
        since("Failed", "True", "RankFailed", "rank 1 exited with 1: " + "x" * 1000),
        since("RailsHealthy", "False", "SickPorts", "port mlx5_0/1 of stage 2 is DOWN"),
        since("StagesEven", "False", "SlowStages", "stage 1 is slow"),
        status={
            "state": "Failed", "goodput": 0.9,
            "recoveries": {"count": 1, "last": [recovery(1, "rank 3 was killed", seconds=2.0)]},
        },
        adaptations=[change(i) for i in range(1, 9)],
        links={"slow": slow},
    )  # fmt: skip
    lines = explain(content)
    assert len(lines) <= MOST_LINES
    assert all(len(line) <= MOST_LINE_CHARACTERS + 9 for line in lines)
    assert "(and 2 more)" in lines[3]
    assert "ranks were started again 1 time within their pods; last in 2.0 s" in lines[4]
    assert "read the last lines of the rank that failed first" in lines[-2]
    assert "check cable" in lines[-1]


def test_faults_at_the_end_of_a_run_are_reported() -> None:
    stage = since("StagesEven", "False", "SlowStages", "stage 1 is slow")
    lines = explain(report(stage, links={"slow": []}))
    assert lines[1] == "seen     stage 1 is slow (at the end)"
    assert "clock" in lines[-1]


@pytest.mark.parametrize(
    ("parallelism", "schedule", "words"),
    [
        ({"tensor": 2}, {}, "ranks along tp share"),
        ({"shard": 2}, {}, "ranks along dp_shard share"),
        ({"context": 2, "tensor": 2}, {}, "ranks along cp, tp share"),
        ({"replicas": 2}, {}, ""),
        ({"tensor": 2}, {"dispatch": "static"}, ""),
        ({"tensor": 2}, {"policy": "1f1b"}, ""),
    ],
)
def test_static_dispatch_has_its_reason(
    parallelism: dict[str, int], schedule: dict[str, str], words: str
) -> None:
    content = report()
    content["spec"] |= {"parallelism": {"stages": 4} | parallelism, "schedule": schedule}
    first = explain(content)[0]
    assert ("static dispatch, since" in first) is bool(words)
    assert words in first


def test_a_stage_with_more_work_is_named_and_advised_on() -> None:
    unequal = since("StagesEven", "True", "UnequalWork", "stage 3 takes 45 ms of a microbatch")
    lines = explain(report(unequal, links={"slow": []}))
    assert lines[1] == "seen     stage 3 takes 45 ms of a microbatch"
    assert "adaptation.relayout moves them" in lines[-1]


AT = "2026-01-02T03:04:05Z"
MOVED = {"layers": [5, 3, 4, 4], "promised": 0.2, "measured": 0.18}


def since(kind: str, status: str, reason: str, message: str) -> Content:
    found = {"type": kind, "status": status, "reason": reason, "message": message}
    return found | {"lastTransitionTime": AT}


def recovery(generation: int, cause: str, **fields: Any) -> Content:
    return {"generation": generation, "lostAt": AT, "cause": cause} | fields


def job(**status: Any) -> Content:
    training = {
        "iteration": 118,
        "iterationSeconds": 0.5,
        "adaptations": 3,
        "savedSeconds": 90.0,
        "savedErrorSeconds": 2.0,
        "lastAdaptation": {
            "planVersion": 3,
            "kind": "adapt",
            "reason": "link 1 is slow by 60.0 ms one way",
            "detectedAt": "2026-01-02T03:04:05Z",
            "detectedAtIteration": 10,
            "appliedAtIteration": 11,
            "iterationSecondsBefore": 1.0,
            "iterationSecondsAfter": 0.5,
            "promised": 0.5,
            "measured": 0.5,
        },
    }
    return {
        "kind": "PipeMorphJob",
        "metadata": {"name": "gpt", "namespace": "team"},
        "spec": {"parallelism": {"stages": 4}, "trainer": {"iterations": 1000, "module": "x"}},
        "status": {
            "state": "Running",
            "ready": "4/4",
            "training": training,
            "conditions": [
                since("LinksHealthy", "False", "SlowLinks", "link 1 (+60 ms forward) slow")
            ],
        }
        | status,
    }


def test_each_slow_link_has_its_time() -> None:
    slow = {"replica": 0, "direction": "forward", "delayMs": 60, "wireTimeMs": 61, "confidence": 1}
    given = job()
    given["status"]["training"]["slowLinks"] = [
        {"link": link, "since": f"2026-01-02T03:04:0{link}Z"} | slow for link in (1, 3)
    ]
    assert explain_job(given).observations[0] == (
        "link 1 (+60 ms forward) slow (link 1 since 2026-01-02 03:04:01 UTC, link 3 since"
        " 2026-01-02 03:04:03 UTC)"
    )
    del given["status"]["training"]["slowLinks"][1:]
    (seen,) = explain_job(given).observations
    assert seen == "link 1 (+60 ms forward) slow (since 2026-01-02 03:04:01 UTC)"


def test_a_job_of_a_cluster() -> None:
    assert lines(explain_job(job())) == [
        "outcome  team/gpt is Running; 4 stages, 4/4 pods ready; iteration 118 of 1,000, 0.5 s"
        " each, 7 min 21 s left",
        "seen     link 1 (+60 ms forward) slow (since 2026-01-02 03:04:05 UTC)",
        "done     3 plan changes; the last, plan 3 from iteration 11: another order of the"
        " same ops; 1 s became 0.5 s per iteration (50% promised, 50% measured); why: link 1"
        " is slow by 60.0 ms one way",
        "worth    the plan changes saved 1 min 30 s (± 2.0 s), 0.10 rank-hours, against the initial"
        " plan",
        "to do    check the network between the hosts of the slow link with pipemorph bench link",
    ]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            {
                "state": "Pending",
                "training": None,
                "conditions": [
                    since("PodsReady", "False", "WaitingForPods", "0 of 4 pods are ready")
                ],
            },
            ["is Pending (WaitingForPods: 0 of 4 pods", "an event says what they wait for"],
        ),
        (
            {
                "state": "Failed",
                "conditions": [since("Failed", "True", "RankFailed", "rank 1 exited with 1")],
            },
            ["is Failed (RankFailed: rank 1 exited with 1)", "read the last lines"],
        ),
        (
            {"conditions": [since("LinksHealthy", "Unknown", "ReportsStale", "no report")]},
            ["no report (since", "log of rank 0"],
        ),
        (
            {
                "recoveries": {
                    "count": 2,
                    "last": [recovery(2, "rank 3 was killed", seconds=3.2, state="replica")],
                },
                "disruptions": 1,
                "goodput": 0.874,
            },
            [
                "; goodput 87%",
                "again 2 times within their pods; last in 3.2 s, with the state of: replica",
                "the job was started again 1 time, 1 of them for evictions",
            ],
        ),
        (
            {"recoveries": {"last": [recovery(1, "layers move between stages", **MOVED)]}},
            [
                "layers moved (5-3-4-4 per stage) in generation 1: 20% shorter iterations promised,"
                " 18% measured"
            ],
        ),
    ],
    ids=["pending", "failed", "silent", "recovered", "moved"],
)
def test_states_of_a_job(status: Content, words: list[str]) -> None:
    text = "\n".join(lines(explain_job(job(**status))))
    for each in words:
        assert each in text


def test_output_of_kubectl_is_read_from_a_file_and_a_folder_by_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.json").write_text(json.dumps(job()))
    assert main(["explain", str(tmp_path / "job.json")]) == 0
    assert "team/gpt is Running" in capsys.readouterr().out
    (tmp_path / "report.json").write_text(json.dumps(report()))
    assert main(["explain", str(tmp_path)]) == 0
    assert "team/gpt is Complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "expected a run's report.json or a PipeMorphJob"),
        ("a: [", "is not YAML or JSON"),
        ('{"kind": "Pod"}', "kind: is Pod; expected PipeMorphJob"),
        ('{"job": "x"}', "kind: is None; expected PipeMorphJob"),
        ('{"job": "x", "iterations": []}', "kind: is missing, as in reports of earlier releases"),
        ('{"kind": "PipeMorphJob", "metadata": {"name": "x"}}', "spec: Field required; expected a"),
        (json.dumps(report(links=7)), "links: "),
        (json.dumps(report(status={"conditions": [{}]})), "status.conditions.0."),
        (json.dumps(report())[:1000], "is not YAML or JSON"),
        (json.dumps(job(state=None)), "no operator has processed the job yet"),
        (json.dumps(report(iterations=[{"index": "x"}])), "iterations.0.index: "),
    ],
)
def test_anything_else_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    path = tmp_path / "it.json"
    path.write_text(content)
    assert main(["explain", str(path)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith(f"pipemorph explain: {path}")
    assert said.count("\n") == 1


def test_a_job_of_the_cluster_is_read_by_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    kubectl = Kubectl(tmp_path)
    kubectl.has(job())
    assert main(["explain", "team/gpt", "--context", "prod"]) == 0
    assert "team/gpt is Running" in capsys.readouterr().out
    assert kubectl.calls() == [
        "get pipemorphjobs.pipemorph.io gpt --namespace team --output json --context prod"
    ]
    (tmp_path / "gpt").mkdir()
    assert main(["explain", "gpt", "--namespace", "team"]) == 0
    assert "team/gpt is Running" in capsys.readouterr().out, "not the folder"
    assert main(["explain", "other"]) == 2
    assert capsys.readouterr().err == (
        "pipemorph explain: no file or folder here has this name; as a job: other: Error from"
        ' server (NotFound): pipemorphjobs.pipemorph.io "other" not found\n'
    )


def test_a_path_that_is_no_name_of_a_job_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "out/report.json"]) == 2
    assert "out/report.json: no such file, nor [NAMESPACE/]NAME" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text", "short"),
    [
        (0.0, "0.0 s", "0s"),
        (4.21, "4.2 s", "4s"),
        (59.96, "1 min", "1m"),
        (185, "3 min 5 s", "3m5s"),
        (3600, "1 h", "1h"),
        (7800, "2 h 10 min", "2h10m"),
        (86400 + 3 * 3600 + 59, "1 day 3 h", "1d3h"),
        (3 * 86400, "3 days", "3d"),
    ],
)
def test_durations_in_a_text_and_in_a_column(seconds: float, text: str, short: str) -> None:
    assert (format_duration(seconds), format_short_duration(seconds)) == (text, short)


def test_time_that_was_lost_is_not_called_saved() -> None:
    assert describe_savings(-30.0, 3.0, 8, 1).startswith(
        "the plan changes cost 30.0 s (± 3.0 s), 0.067"
    )
    assert describe_savings(0.0, 0.0, 8, 2) == "no time was saved or lost by the plan changes"
    assert describe_savings(0.0, 0.0, 8, 0) == ""


def test_layers_that_moved_are_reported() -> None:
    change = {"iteration": 5, "measured": 0.2, "layers": [5, 3, 4, 4], "layers_before": [4] * 4}
    (line,) = [each for each in explain(report(relayouts=[change])) if "layers moved" in each]
    assert "layers moved (4-4-4-4 became 5-3-4-4 per stage) at iteration 5" in line
    assert line.endswith("at iteration 5: 20% shorter iterations")


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (0.0, "0"),
        (0.0001, "less than 0.001"),
        (0.0031, "0.003"),
        (0.04, "0.04"),
        (0.142, "0.14"),
        (12.34, "12.3"),
        (1234.5, "1,234"),
    ],
)
def test_hours_are_reported_however_few_they_are(hours: float, text: str) -> None:
    assert format_hours(hours) == text


def test_hours_are_of_gpus_where_a_job_has_some() -> None:
    assert convert_to_hours(3600.0, 8) == (8.0, "rank")
    assert convert_to_hours(3600.0, 8, 16) == (16.0, "GPU")
    given = job()
    limits = {"nvidia.com/gpu": 2}
    pod = {"containers": [{"name": "side"}, {"name": "trainer", "resources": {"limits": limits}}]}
    given["spec"]["template"] = {"spec": pod}
    given["spec"]["parallelism"] = {"stages": 4, "replicas": 2, "ranksPerPod": 2}
    assert " 0.20 GPU-hours, " in "".join(lines(explain_job(given)))
    for wrong in (None, [], {"spec": None}, {"spec": {"containers": [None]}}):
        given["spec"]["template"] = wrong
        assert " rank-hours, " in "".join(lines(explain_job(given)))


def test_on_a_terminal_a_long_line_goes_on_below_itself() -> None:
    story = explain_job(report())
    console = Console(width=60, color_system=None)
    with console.capture() as captured:
        console.print(story.to_table())
    wide = captured.get().splitlines()
    assert max(map(len, wide)) <= 60 and len(wide) > len(lines(story))
    heads = [line[:9] for line in wide]
    assert [head.strip() for head in heads if head.strip()] == [
        "outcome", "seen", "done", "worth", "to do",
    ]  # fmt: skip
    assert " ".join(" ".join(wide).split()) == " ".join(" ".join(lines(story)).split())


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ([7, 5, 3, 1], [12, 11, 9, 1], "warm-up 7-5-3-1 became 12-11-9-1"),
        ([7, 5, 3, 1], [7, 5, 3, 1], ""),
        ([9] * 64, [9] * 21 + [4] * 43, "warm-up of 43 stages changed"),
        ([9] * 9, [8, *[9] * 8], "warm-up of 1 stage changed"),
    ],
)
def test_warm_ups_are_listed_as_long_as_they_can_be_read(
    before: list[int], after: list[int], text: str
) -> None:
    assert format_warmup_change(before, after) == text
