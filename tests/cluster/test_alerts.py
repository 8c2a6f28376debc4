"""The chart's alerts by Prometheus's own tool, on made-up series: which fire, and when."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from operator_support import CHART, ROOT
from prometheus_client import REGISTRY
from rendered_chart import rendered
from testbed import TestbedError, prometheus

import pipemorph_operator.metrics
from pipemorph.cli import COMMANDS
from pipemorph.views.status import job_metrics
from pipemorph_trainer.telemetry import metrics as rank_metrics

assert pipemorph_operator.metrics and job_metrics, "imported, they register their metrics"

JOB = 'namespace="team",name="gpt"'
TESTBEDS = ("api", "prometheus")


class Provoked(NamedTuple):
    """Series that make an alert fire after ``minutes``, and such that do not. Values as promtool
    takes them, one a minute."""

    firing: dict[str, str]
    quiet: dict[str, str]
    minutes: int
    labels: dict[str, str]


GPT = {"namespace": "team", "name": "gpt"}
SERVICES = {
    "operator": {"namespace": "sys", "service": "x-pipemorph-operator-operator-metrics"},
    "ingest": {"namespace": "sys", "service": "x-pipemorph-operator-ingest-metrics"},
}


def of(program: str, metric: str, **labels: str) -> str:
    """A series of a program of this release."""
    found = SERVICES[program] | labels
    return f"{metric}{{{','.join(f'{key}={json.dumps(value)}' for key, value in found.items())}}}"


def leads(program: str, pod: str) -> str:
    return of(program, f"pipemorph_{program}_leads", pod=pod)


def refused(reason: str) -> str:
    return of("ingest", "pipemorph_ingest_refused_total", reason=reason)


def restarted(pod: str) -> str:
    return of("operator", "pipemorph_operator_jobs_restarted_total", pod=pod, job_namespace="team")


RECOVERIES = f"pipemorph_job_recoveries{{{JOB}}}"
HELD_BACK = f"pipemorph_job_plan_held_back{{{JOB}}}"
OTHERS = 'pipemorph_operator_leads{namespace="other",service="y-operator-metrics",pod="c"}'
ACCUSED = of("operator", "pipemorph_node_accusing_jobs", node="n7")
FAILED = of("operator", "pipemorph_operator_reconcile_seconds_count", result="error")
CONFIRMED = of("operator", "pipemorph_watch_confirmed_timestamp_seconds", kind="Job", pod="i-0")
FALLBACKS = f'pipemorph_rank_link_fallbacks_total{{{JOB},link="1"}}'
PROVOKED = {
    "PipeMorphLinkSlow": Provoked(
        {f"pipemorph_job_slow_links{{{JOB}}}": "1x30"},
        {f"pipemorph_job_slow_links{{{JOB}}}": "1x10 0x20"},
        20,
        GPT,
    ),
    "PipeMorphPlanNotAdopted": Provoked(
        {
            f"pipemorph_job_wanted_plan_version{{{JOB}}}": "2x10",
            f"pipemorph_job_applied_plan_version{{{JOB}}}": "1x10",
        },
        {
            f"pipemorph_job_wanted_plan_version{{{JOB}}}": "2x10",
            f"pipemorph_job_applied_plan_version{{{JOB}}}": "1x2 2x8",
        },
        8,
        GPT,
    ),
    "PipeMorphPlanHeldBack": Provoked(
        {HELD_BACK: "1x10 0 1x10 0 1x30"},
        {HELD_BACK: "1x20 0x30"},
        40,
        GPT,
    ),
    "PipeMorphJobSilent": Provoked(
        {f"pipemorph_job_last_report_timestamp_seconds{{{JOB}}}": "0x20"},
        {f"pipemorph_job_last_report_timestamp_seconds{{{JOB}}}": "0x4 300x4 600x4 900x8"},
        14,
        GPT,
    ),
    "PipeMorphStageSlow": Provoked(
        {f"pipemorph_job_slow_stages{{{JOB}}}": "1x30"},
        {f"pipemorph_job_slow_stages{{{JOB}}}": "1x10 0x20"},
        20,
        GPT,
    ),
    "PipeMorphReductionSlow": Provoked(
        {f"pipemorph_job_slow_reductions{{{JOB}}}": "2x30"},
        {f"pipemorph_job_slow_reductions{{{JOB}}}": "2x10 0x20"},
        20,
        GPT,
    ),
    "PipeMorphGoodputLow": Provoked(
        {f"pipemorph_job_goodput_fraction{{{JOB}}}": "0.7x60"},
        # The start of a job.
        {f"pipemorph_job_goodput_fraction{{{JOB}}}": "0+0.04x60"},
        40,
        GPT,
    ),
    "PipeMorphRecoveriesRepeated": Provoked(
        {RECOVERIES: "2x10 3x10 5x10 7x60"},
        {RECOVERIES: "2x10 3x10 4x10 5x60"},
        60,
        GPT,
    ),
    "PipeMorphRailSick": Provoked(
        {f"pipemorph_job_rails_healthy{{{JOB}}}": "0x10"},
        {f"pipemorph_job_rails_healthy{{{JOB}}}": "1x10"},
        5,
        GPT,
    ),
    "PipeMorphRailFlapping": Provoked(
        {FALLBACKS: "0+1x60"},
        {FALLBACKS: "0 1x60"},
        60,
        GPT | {"link": "1"},
    ),
    "PipeMorphNodeAccused": Provoked(
        {ACCUSED: "2x20"},
        {ACCUSED: "1x20"},
        10,
        {"node": "n7"},
    ),
    "PipeMorphJobsRestarting": Provoked(
        # Two replicas of the operator, one after the other.
        {restarted("a"): "0 1 2x60", restarted("b"): "0x30 1 2 3x60"},
        {restarted("a"): "0 1x60", restarted("b"): "0x30 1x60"},
        60,
        {"job_namespace": "team"},
    ),
    "PipeMorphNoLeader": Provoked(
        {leads("operator", "a"): "0x10", leads("operator", "b"): "0x10", OTHERS: "1x10"},
        {leads("operator", "a"): "1x10", leads("operator", "b"): "0x10", OTHERS: "1x10"},
        5,
        {},
    ),
    "PipeMorphIngestNoLeader": Provoked(
        {leads("ingest", "a"): "0x10", leads("ingest", "b"): "0x10"},
        {leads("ingest", "a"): "1x10", leads("ingest", "b"): "0x10"},
        5,
        {},
    ),
    "PipeMorphReconcileErrors": Provoked(
        {FAILED: "0+1x20"},
        {FAILED: "7x20"},
        16,
        {"result": "error"},
    ),
    "PipeMorphWatchSilent": Provoked(
        {CONFIRMED: "0x10"},
        {CONFIRMED: "0+60x10"},
        6,
        {"kind": "Job", "pod": "i-0"},
    ),
    "PipeMorphTokensMisused": Provoked(
        # Before the process was scraped first.
        {refused("pod"): "_x5 1x15"},
        {
            refused("silent"): "0+1x20", refused("review"): "3x20", refused("pod"): "_x5 0x15",
        },
        16,
        {"reason": "pod"},
    ),
    "PipeMorphConnectionsRefused": Provoked(
        {refused("silent"): "0+60x20"},
        {refused("silent"): "0+1x20"},
        15,
        {"reason": "silent"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart's rules as Prometheus reads them."""
    made = rendered(**{"metrics.alerts.enabled": True, "metrics.alerts.labels.release": "p"})
    (rule,) = (each for each in made if each["kind"] == "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "p"
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.safe_dump(rule["spec"]))
    return path


def chart_rules(**values: Any) -> dict[str, dict[str, Any]]:
    """Rules of the chart with these values below ``metrics.alerts``, by alert."""
    set_values: dict[str, Any] = {"metrics.alerts.enabled": True}
    set_values |= {f"metrics.alerts.{name}": value for name, value in values.items()}
    (rule,) = (each for each in rendered(**set_values) if each["kind"] == "PrometheusRule")
    return {each["alert"]: each for group in rule["spec"]["groups"] for each in group["rules"]}


def alerts(rules: Path) -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(rules.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def promtool_says(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(prometheus.find()), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_prometheus_accepts_the_rules(rules: Path) -> None:
    status, said = promtool_says("check", "rules", str(rules))
    assert status == 0, said
    assert f"{len(PROVOKED)} rules found" in said


def test_every_alert_is_provoked_here(rules: Path) -> None:
    assert set(alerts(rules)) == set(PROVOKED)


def test_alerts_are_made_of_metrics_that_exist(rules: Path) -> None:
    known = {
        f"{metric.name}{suffix}"
        for metric in REGISTRY.collect()
        for suffix in ("", "_total", "_count")
    }
    text = Path(rank_metrics.__file__).read_text()
    for name, rule in alerts(rules).items():
        words = rule["expr"].replace("{", " ").replace("[", " ").replace("(", " ").replace(")", " ")
        used = [w for w in words.split() if w.startswith("pipemorph_")]
        assert used, name
        for metric in used:
            own = metric.removeprefix("pipemorph_rank_").removesuffix("_total")
            assert metric in known or f'"{own}"' in text, f"{name}: no program has {metric}"


@pytest.mark.parametrize("name", PROVOKED)
def test_an_alert_fires_when_it_should_and_says_of_what(
    name: str, rules: Path, tmp_path: Path
) -> None:
    provoked, rule = PROVOKED[name], alerts(rules)[name]
    for fires, series in ((True, provoked.firing), (False, provoked.quiet)):
        expected = {"exp_labels": provoked.labels | rule["labels"]}
        test = {
            "rule_files": [str(rules)],
            "evaluation_interval": "15s",
            "tests": [
                {
                    "interval": "1m",
                    "input_series": [{"series": s, "values": v} for s, v in series.items()],
                    "alert_rule_test": [
                        {
                            "eval_time": f"{provoked.minutes}m",
                            "alertname": name,
                            "exp_alerts": [expected] if fires else [],
                        }
                    ],
                }
            ],
        }
        path = tmp_path / f"{fires}.yaml"
        path.write_text(json.dumps(test))
        _, said = promtool_says("test", "rules", str(path))
        # The tool compares annotations, too; the test below checks those.
        found = said.partition("got:[")[2] if fires else said
        if fires:
            assert f'alertname="{name}"' in found, said
            assert all(f'{key}="{value}"' in found for key, value in provoked.labels.items())
        else:
            assert "SUCCESS" in said, said


VERBS = {"get", "describe", "logs", "cordon"}


def test_each_says_what_to_do(rules: Path) -> None:
    """Annotations name a command to run."""
    for name, rule in alerts(rules).items():
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), name
        annotations, labels = rule["annotations"], PROVOKED[name].labels
        if labels.keys() & {"namespace", "name", "link", "kind", "job_namespace"}:
            assert "{{ $labels." in annotations["summary"], f"{name} does not say of what"
        commands = re.findall("`([^`]+)`", annotations["description"])
        assert commands, f"{name} does not say what to run"
        for command in commands:
            program, verb, *_ = command.split()
            known = {"kubectl": VERBS, "pipemorph": set(COMMANDS)}[program]
            assert verb in known, f"{name}: {command}"
        used = re.findall(r"\$labels\.(\w+)", annotations["summary"] + annotations["description"])
        assert set(used) <= labels.keys(), f"{name}: its series have no {set(used) - labels.keys()}"


def test_each_has_a_runbook_that_the_page_of_alerts_links_to() -> None:
    """Links of pages are tested with all others."""
    page = (ROOT / "docs/reference/alerts.md").read_text()
    linked = dict(re.findall(r"(?m)^\| `(\w+)` \|.*\]\(([^)]+)\) \|$", page))
    plain, addressed = chart_rules(), chart_rules(runbooks="https://docs.example/x/")
    for name, rule in plain.items():
        path = rule["annotations"]["runbook"]
        assert os.path.normpath(f"docs/reference/{linked[name]}") == path, name
        assert "runbook_url" not in rule["annotations"], name
        assert addressed[name]["annotations"]["runbook_url"] == f"https://docs.example/x/{path}"


def test_thresholds_and_times_are_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["metrics"]["alerts"]["rules"]
    assert set(values) == set(PROVOKED)
    changed = {
        name: {"for": "77s"} | ({"threshold": 4321} if "threshold" in value else {})
        for name, value in values.items()
    }
    for name, rule in chart_rules(rules=changed).items():
        assert rule["for"] == "77s", name
        assert ("4321" in rule["expr"]) == ("threshold" in values[name]), name
    one = chart_rules(**{"rules.PipeMorphLinkSlow.for": "2m"})["PipeMorphLinkSlow"]
    assert one["expr"].endswith("> 0") and one["annotations"]["summary"].endswith("for 2m")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rules.PipeMorphLinkSlo", {"threshold": 1, "for": "1m"}),
        ("rules.PipeMorphLinkSlow.for", "15 minutes"),
        ("rules.PipeMorphLinkSlow.threshold", "1"),
        ("rules.PipeMorphNoLeader.threshold", 1),
        ("runbooks", "docs.example"),
    ],
)
def test_invalid_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(TestbedError, match=name.rpartition(".")[2]):
        chart_rules(**{name: value})
