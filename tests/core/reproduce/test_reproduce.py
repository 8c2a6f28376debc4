"""The paper's figures beside ours: what agrees, what is explained, and what the command writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from pipemorph.cli import main
from pipemorph.reproduce import explanations
from pipemorph.reproduce.compared_figure import Reason, RunForm, compare
from pipemorph.reproduce.comparison import summarize_rows
from pipemorph.reproduce.emulated_runs import FailedRunError, build_job, run_job
from pipemorph.reproduce.experiments import emulated_experiments, planner_experiments
from pipemorph.reproduce.experiments.experiment_list import EXPERIMENTS
from pipemorph.reproduce.experiments.replica_experiments import explain_unused_wire, propose_layout
from pipemorph.reproduce.experiments.trace_experiments import draw_delay, draw_delays, fit_exponent
from pipemorph.reproduce.explanations import explain_blocked_stage, explain_copying
from pipemorph.reproduce.pipeline_simulation import simulate_way
from pipemorph.reproduce.published import WAYS, Spread, list_iterations, load_model
from pipemorph.reproduce.trace_training import build_trace, summarize_times, train
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.layout import Layout

REASON = Reason("busy", "The machine was busy.", "twice as long")


def test_a_figure_agrees_within_a_tenth_of_the_published_spread() -> None:
    published = Spread(100, 90, 110)
    assert compare("", "", published, 121).agrees
    assert not compare("", "", published, 121.1).agrees
    assert compare("", "", published, Spread(130, 120, 140)).agrees
    assert not compare("", "", published, 80.9).agrees
    assert compare("", "", published, 1, limit=True).agrees
    assert not compare("", "", published, Spread(122, 1, 200), limit=True).agrees
    assert compare("", "", None, 7).agrees


def test_only_a_figure_that_differs_has_a_reason() -> None:
    assert compare("", "", 100, 100, reasons=[lambda: REASON]).reason is None
    assert compare("", "", 100, 200, reasons=[lambda: None, lambda: REASON]).reason == REASON
    unknown = compare("", "", 100, 200, reasons=[lambda: None])
    assert unknown.reason is None and not unknown.explained
    known = compare("", "", 100, 200, reasons=[lambda: REASON])
    assert summarize_rows([known, unknown, compare("", "", 1, 1), compare("", "", None, 1)]) == (
        "1 of 3 published figures agree, 1 differs for a reason that the figures show, 1 differs"
        " for no reason found"
    )


def test_a_reason_holds_only_if_the_figures_show_it() -> None:
    found = next(each for each in list_iterations("models", "14B") if each.delays == {0: 30})
    reason = explain_blocked_stage(found, "zero-bubble")
    assert reason is not None
    assert reason.check.startswith("stage 0: 24 × (26 + 2 × 30) ms = 2064 ms")
    other = found._replace(times={"zero-bubble": Spread(1700, 1690, 1710)})
    assert explain_blocked_stage(other, "zero-bubble") is None


def test_copying_is_fitted_to_the_other_runs_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [each for each in list_iterations("models", "60B") if set(each.delays) == {0}]
    reason = explain_copying(runs[0], "adapted", runs)
    assert reason is not None and "in 3 other runs" in reason.check
    assert explain_copying(runs[0], "adapted", runs[:0]) is None
    monkeypatch.setattr(explanations, "fit_copying", lambda *_: 1.0)
    assert explain_copying(runs[0], "adapted", runs) is None


def test_models_have_the_ops_of_all_stages() -> None:
    for name in ("7B", "14B", "30B", "60B", "140B"):
        model = load_model(name)
        ops = (model.forward, model.backward_input, model.backward_weight)
        assert {len(each) for each in ops} == {model.stages}
    assert load_model("30B").parallelism == "tensor 2, replicas 4, stages 8"


def test_redrawn_delays_begin_after_the_healthy_iterations() -> None:
    model = load_model("7B")
    states = draw_delays(model, 50, "seed", 4)
    first, second, *_ = list(states)[1:]
    assert not states[0.0] and first > 2.7 and 0.05 <= second - first <= 0.1
    assert states == draw_delays(model, 50, "seed", 4) != draw_delays(model, 50, "other", 4)
    times = {way: train(model, way, build_trace(states, by_seconds=True), 9) for way in WAYS}
    healthy = {way: simulate_way(model, way, {}) for way in WAYS}
    for way in WAYS:
        assert times[way][:6] == pytest.approx([healthy[way]] * 6)
        assert times[way][8] > 1.1 * healthy[way]


def test_drawn_delays_have_the_published_quantiles() -> None:
    exponent = fit_exponent()
    found = [draw_delay((k + 0.5) / 1000, exponent) for k in range(1000)]
    assert median(found) == pytest.approx(13.0, abs=0.1)
    assert fmean(found) == pytest.approx(22.3, abs=0.1)
    assert found[989] == pytest.approx(79.3, abs=0.5)


def test_a_spread_of_iterations_is_that_of_means_in_a_row() -> None:
    assert summarize_times([1, 3, 5, 3]) == Spread(3, 1, 5)
    assert summarize_times([1, 3, 5, 3], together=2) == Spread(3, 2, 4)


def test_the_search_for_places_leaves_the_slow_link_unused() -> None:
    model = load_model("7B")._replace(replicas=2)
    layout, seconds = propose_layout(model, 30.0, 3000.0)
    reason = explain_unused_wire(layout)
    assert reason is not None and "move" in reason.check
    assert 1e3 * seconds == pytest.approx(simulate_way(model, "zero-bubble", {}), rel=0.01)
    assert explain_unused_wire(Layout.build_first(layout.mesh)) is None


def test_plans_of_random_problems_are_proven_near_the_optimum() -> None:
    gap, time = planner_experiments.run_planner(RunForm())
    assert gap.agrees and gap.measured.most < 1
    assert time.unit == "ms" and time.limit


def found_summary(folder: Path) -> str:
    return str(json.loads((folder / "reproduce.json").read_text())["summary"])


def test_the_command_writes_a_page_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "paper"
    arguments = ["--only", "example", "--only", "delays", "--out", str(folder)]
    assert main(["reproduce", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "3 of 3 published figures agree" in printed
    assert printed.endswith("In all: " + found_summary(folder) + ".\n")
    assert "no overlap: stage 6: 24 × (26 + 2 × 10) ms" in printed
    found = json.loads((folder / "reproduce.json").read_text())
    assert [each["name"] for each in found["experiments"]] == ["example", "delays"]
    rows = [row for each in found["experiments"] for row in each["rows"]]
    assert all(row["agrees"] or row["reason"] for row in rows)
    example = [row["measured"]["mean"] for row in rows if row["way"].endswith("no delay")]
    assert example == [390, 400, 440]
    assert {row["at"] for row in rows if row["unit"] == "ms" and row["way"] == "1F1B"} == {
        10.0 * k for k in range(7)
    }
    page = (folder / "reproduce.html").read_text()
    data = page.split('type="application/json">')[1].split("</script>", maxsplit=1)[0]
    assert json.loads(data) == found


def test_an_emulated_job_is_the_published_model() -> None:
    job = build_job("name", load_model("7B"), "1f1b", 9, route="direct", duplex="half")
    spec = PipeMorphJob.model_validate(job).spec
    assert (spec.parallelism.stages, spec.schedule.microbatches, spec.trainer.iterations) == (
        4, 12, 9,
    )  # fmt: skip
    assert [stage.forward for stage in spec.emulation.stage_times] == [8, 9, 9, 9]  # type: ignore[union-attr]


def test_emulated_iterations_are_taken_where_the_delay_has_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = []

    def run(job: dict[str, Any]) -> list[float]:
        jobs.append(job["spec"])
        return [float(k) for k in range(job["spec"]["trainer"]["iterations"])]

    monkeypatch.setattr(emulated_experiments, "run_iterations", run)
    times = emulated_experiments.run_phases(load_model("7B"), "zero-bubble", (0.0, 60.0))
    assert times == {0.0: Spread(5.5, 4, 7), 60.0: Spread(13.5, 12, 15)}
    (spec,) = jobs
    assert spec["faults"] == [{"link": 2, "fromIteration": 8, "toIteration": 16, "delayMs": 60.0}]
    assert spec["trainer"]["args"] == {"direct_duplex": "half"}
    jobs.clear()
    rows = list(emulated_experiments.run_delegation(RunForm()))
    assert [job["transport"]["route"] for job in jobs] == ["direct", "delegated"]
    assert list(rows[0].measured) == pytest.approx([0, -70.4, 70.4], abs=0.1)


def test_a_failed_run_ends_only_its_experiment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = build_job("broken", load_model("7B"), "1f1b", 9)
    job["spec"]["parallelism"]["stages"] = 3
    with pytest.raises(FailedRunError, match=r"broken: exit 2\n.*stageTimes"):
        run_job(tmp_path, job)

    def fail(*_: object) -> list[float]:
        raise FailedRunError("broken: exit 2\nthe reason")

    monkeypatch.setattr(emulated_experiments, "run_iterations", fail)
    arguments = ["--only", "delegation", "--only", "example", "--out", str(tmp_path)]
    assert main(["reproduce", *arguments]) == 1
    printed = capsys.readouterr().out
    assert "Not run: broken: exit 2\nthe reason" in printed
    assert "3 of 3 published figures agree" in printed
    failed = json.loads((tmp_path / "reproduce.json").read_text())["experiments"][1]
    assert failed["summary"] == "not run" and "the reason" in failed["failure"]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_short_form_has_a_reason_for_every_figure_that_differs(tmp_path: Path) -> None:
    arguments = ["reproduce", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pipemorph.cli", *arguments], capture_output=True, text=True,
        check=False, timeout=1100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    found = json.loads((tmp_path / "reproduce.json").read_text())["experiments"]
    assert [each["name"] for each in found] == [each.name for each in EXPERIMENTS]
    rows = [(each["name"], row) for each in found for row in each["rows"]]
    # Emulated times depend on the machine and its load.
    unknown = [
        (name, row)
        for name, row in rows
        if not row["agrees"] and not row["reason"] and row["method"] == "simulated"
    ]
    assert not unknown


def test_a_folder_that_cannot_be_made_is_an_input_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for name, said in ((f"{tmp_path}/file/x", "cannot make"), ("", "is empty")):
        assert main(["reproduce", "--only", "example", "--out", name]) == 2
        assert said in capsys.readouterr().err
