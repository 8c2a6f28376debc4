"""``pipemorph serve --observe``: what it prints, reports and refuses, with simulated ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from launch import free_port
from observed_ranks import STAGES, STEPS, serve_while_ranks_report
from prometheus_client.parser import text_string_to_metric_families

from pipemorph.cli import main
from pipemorph.http_client import HttpClient
from pipemorph.local.results.result_folder import ResultFolder
from pipemorph.local.results.status_file import read_run_folder
from pipemorph.local.results.stored_page import read_page
from pipemorph.views.explanation import explain_job


def test_an_observed_job_is_followed_and_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_urlsafe", lambda _: "not-a-secret")
    watch, token, out = free_port(), tmp_path / "token", tmp_path / "out"
    seen, running = list[dict[str, Any]](), dict[str, Any]()
    page = f"http://127.0.0.1:{watch}/not-a-secret"

    def look() -> bool:
        answer = HttpClient(page).request_blocking("/view", seconds=5.0)
        if answer.status != 200 or not (out / "status.json").exists():
            return False
        seen.append(json.loads(answer.body))
        running.update(read_run_folder(out))
        return True

    serve_while_ranks_report(tmp_path, 30, look, "--out", str(out), "--watch", str(watch))
    (document,) = seen
    assert (document["wanted"], document["status"]["state"]) == (0, "Running")
    assert [len(row["kinds"]) for row in document["measured"]["rows"]] == [8] * STAGES
    assert document["no_alternative"] == "the schedule is the job's own: PipeMorph only observes it"
    assert running["status"]["state"] == "Running" and not (out / "status.json").exists()
    assert explain_job(running).outcome.startswith("default/observed is Running; 4 stages; ")
    kinds = [[span["kind"] for span in link["spans"]] for link in document["links"]]
    assert "slow" in kinds[2] and "slow" not in kinds[0] + kinds[1]
    printed = capsys.readouterr().out
    assert f"watch: {page}/" in printed
    assert f"export PIPEMORPH_TOKEN_FILE={token}" in printed
    assert "SECRET" not in printed
    assert "observed: 4 stages, 4 microbatches, in the order of 1f1b; PipeMorph changes" in printed
    assert "\nlink 2 is slow by 19.9 ms one way" in printed
    assert "completed: observed 40 steps, 1 to 40, median 0.2" in printed
    assert not (tmp_path / "token.secret").exists()
    stored = read_page(ResultFolder(out))
    assert (stored.done, stored.live) == (41, False)
    assert {each.measured.iteration for each in stored.stored} <= set(range(1, 42))
    assert len(stored.stored) > 20 and main(["view", str(out)]) == 0
    assert f"view: {(out / 'page.html').as_uri()}" in capsys.readouterr().out
    assert main(["explain", str(out)]) == 0
    explained = capsys.readouterr().out
    assert "default/observed is Complete; 4 stages; 41 steps" in explained
    assert "link 2 (stage 2 to 3) was late by up to 20 ms, from iteration 15 until 3" in explained
    assert "PipeMorph observed the job, and changed nothing" in explained
    assert main(["diagnose", str(out)]) == 0
    diagnosed = capsys.readouterr().out
    assert "40 steps of 1 × 4 workers" in diagnosed
    adapting = json.loads((out / "report.json").read_text())["adapting"]
    assert adapting["gain"] > 0.05
    assert adapting["predicted"] == pytest.approx(adapting["seconds"] * (1 - adapting["gain"]))
    assert "to adapt" in explained
    assert "replace Schedule1F1B(stage, …) by pipemorph_trainer.torch.AdaptiveSchedule" in explained
    assert f"{adapting['gain']:.1%} ± " in explained
    for text in (printed, explained, str(document["explanation"])):
        assert not any(word in text for word in ("plan v0", "of 0", "loss -", "adaptation", "kept"))


def test_prometheus_finds_the_metrics_of_an_observed_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, found = free_port(), dict[str, float]()

    def look() -> bool:
        answer = HttpClient(f"http://127.0.0.1:{metrics}").request_blocking("/metrics", seconds=5.0)
        for family in text_string_to_metric_families(answer.body.decode()):
            for name, labels, value, *_ in family.samples:
                if {"namespace": "default", "name": "observed"}.items() <= labels.items():
                    label = labels.get("link", labels.get("cause", ""))
                    found[f"{name.removeprefix('pipemorph_job_')} {label}".strip()] = value
        return {"link_delay_seconds 2", "link_state 2", "slow_links"} <= found.keys()

    serve_while_ranks_report(tmp_path, STEPS + 1, look, "--metrics", f"127.0.0.1:{metrics}")
    assert f"metrics: http://127.0.0.1:{metrics}/metrics\n" in capsys.readouterr().out
    assert found["link_delay_seconds 2"] == pytest.approx(0.02, rel=0.1)
    assert "rails_healthy" not in found, "there are no ports"
    assert (found["slow_links"], found["link_state 2"]) == (1, 1)
    assert found["iteration_seconds"] == pytest.approx(0.24, abs=0.1)
    assert found["iteration"] >= STEPS
    assert sum(found[each] for each in found if each.startswith("idle_seconds_total ")) > 0
    assert time.time() - found["last_report_timestamp_seconds"] < 60
    assert found["wanted_plan_version"] == found["applied_plan_version"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["job.yaml", "--observe"], "--observe: does not go with JOB"),
        (["--observe", "--metrics", "7411"], "--metrics is '7411'; expected HOST:PORT"),
        (["--observe", "--metrics", "192.0.2.1:0"], "--metrics 192.0.2.1:0 cannot be used"),
        ([], "JOB is missing; name a PipeMorphJob manifest, or give --observe"),
    ],
)
def test_a_job_is_served_or_observed(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--listen", "127.0.0.1:0", "--token-file", str(tmp_path / "token")]
    assert main(["serve", *arguments, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
