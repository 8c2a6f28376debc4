"""The four runs of real processes that ``make test`` has: a link becomes slow, a rank is killed,
layers move, and ranks come from torchrun.

Nothing here depends on how fast the machine is: no test compares times, delays are many times what
a busy machine adds, and ranks wait for the host where a test needs its answer. Losses equal those
of one process to the bit; the other files of this folder have what else runs show.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import prepared_processes
import pytest
import torch
from gate import same_bits
from local_runs import Done, manifest, run
from served import Served, certificate, torchrun
from served import manifest as served_manifest
from test_served_runs import SCRIPT as SERVED
from torch import nn

from pipemorph.diagnose.diagnosis import diagnose
from pipemorph.diagnose.formats.registry import load_recording
from pipemorph.protocol import IterationSample

pytestmark = pytest.mark.timeout(400)

LAYERS, WIDTH, BATCH, MICROBATCHES = 6, 8, 8, 4
ITERATIONS, KILLED_AT, WAITS_FROM = 20, 5, 6
SLOW_FROM, SLOW_MS = 4, 250
ADAPTATION = {
    "plan_version", "detected_at", "applied_at_iteration", "reason", "links", "warmup_before",
    "warmup_after", "routes", "iteration_seconds_before", "iteration_seconds_after",
    "bubble_before", "bubble_after", "peak_memory_before", "peak_memory_after",
}  # fmt: skip
"""Least fields of a report about a change of the plan."""

SCRIPT = """
import json, os, signal, time
from collections import OrderedDict
from pathlib import Path
import torch
from torch import nn
from pipemorph.exits import drain_request_file_name
from pipemorph_trainer import EmulatedStage, Pipeline, TrainerContext

context = TrainerContext.from_env()
args, generation, here = context.args, context.generation, Path(__file__).parent
ITERATIONS = context.job.spec.trainer.iterations
memory = context.memory_dir

def layer(number):
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())

def build(part):
    numbers = list(part.layers(6))
    seen = {
        "secret": Path(os.environ["PIPEMORPH_SECRET_FILE"]).read_bytes().hex(),
        "memory": memory and str(memory), "mode": memory and oct(memory.stat().st_mode & 0o777),
        "attempt": context.attempt, "layers": numbers,
    }
    (here / f"seen-{generation}-{context.rank}.json").write_text(json.dumps(seen))
    # No two stages have one name: parts can change.
    return nn.Sequential(OrderedDict((f"layer{number}", layer(number)) for number in numbers))

def disturb(iteration):
    if generation:
        return
    if iteration == args.get("killed_at") and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # The agent hears of an iteration in the next one, so the ranks go on, slowly.
    if iteration >= args.get("waits_from", ITERATIONS):
        deadline = time.monotonic() + 15
        while not (memory / drain_request_file_name(0)).exists() and time.monotonic() < deadline:
            time.sleep(0.01)

with Pipeline(
    build, context=context, loss_fn=nn.functional.mse_loss,
    optimizer=lambda stage: torch.optim.Adam(stage.parameters(), 1e-2),
) as pipe:
    while pipe.iteration < ITERATIONS:
        disturb(pipe.iteration)
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(pipe.iteration))
        loss = pipe.step(batch, target=batch.flip(1))
        if context.rank == 0:
            with (here / "losses").open("a") as file:
                print(pipe.iteration - 1, float(loss).hex(), file=file)
        pipe.optimizer.step()
        pipe.optimizer.zero_grad()
"""

MOVES_LAYERS = """
import json, sys
from pathlib import Path
from pipemorph.control.decide.layouts import layout_changes
from pipemorph.control.decide.layouts.layout_search import LayoutProposal
from pipemorph.local import run

def search_for_change(self, network, cost, finished):
    if self.made_changes:
        return None
    layout = self.layout.with_layers([4, 2])
    proposal = LayoutProposal(layout, 2.0, 1.0, cost, network.iterations_remaining, 0.0)
    return layout_changes.LayoutChange("by order", proposal, self.layout)

layout_changes.LayoutChanges.search_for_change = search_for_change
sys.exit(run.run_job(sys.argv[1], Path(sys.argv[2])))
"""
"""The controller's decision depends on measured times, so the decision is given."""


def job(folder: Path, args: dict[str, Any], **spec: Any) -> dict[str, Any]:
    (folder / "train.py").write_text(SCRIPT)
    return manifest(
        **{
            "parallelism": {"stages": 2, "layers": LAYERS},
            "schedule": {"microbatches": MICROBATCHES},
            "trainer": {
                "command": ["python", str(folder / "train.py")],
                "iterations": ITERATIONS,
                "args": args,
            },
            "failurePolicy": {"maxRestarts": 2},
            "emulation": None,
        }
        | spec
    )


def expected_losses() -> list[float]:
    """The losses of :data:`SCRIPT` in one process, without a pipeline."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = nn.Sequential()
    for number in range(LAYERS):
        torch.manual_seed(number)
        model.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for iteration in range(ITERATIONS):
        draw = torch.Generator().manual_seed(iteration)
        batch = torch.randn(BATCH, WIDTH, generator=draw)
        total = 0.0
        for x, y in zip(batch.chunk(MICROBATCHES), batch.flip(1).chunk(MICROBATCHES), strict=True):
            loss = nn.functional.mse_loss(model(x), y)
            total += float(loss.detach())
            (loss / MICROBATCHES).backward()
        losses.append(float(torch.tensor(total / MICROBATCHES, dtype=torch.float32)))
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    return losses


def check_losses(folder: Path, done: Done) -> None:
    """Check that every iteration has the bits of one process, however often it ran."""
    expected = expected_losses()
    lines = [line.split() for line in (folder / "losses").read_text().splitlines()]
    assert {int(index) for index, _ in lines} == set(range(ITERATIONS)), done
    same_bits([float.fromhex(bits) for _, bits in lines], [expected[int(i)] for i, _ in lines])
    reported = {each["index"]: each["loss"] for each in done.report["iterations"]}
    assert ITERATIONS - 1 in reported, done
    for index, loss in reported.items():
        # The mean of the microbatches in float64, before it is rounded.
        assert float(torch.tensor(loss, dtype=torch.float32)) == expected[index], done


def seen(folder: Path, generation: int, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"seen-{generation}-{rank}.json").read_text())


def adaptations(report: dict[str, Any], link: int) -> list[dict[str, Any]]:
    """The changes of the plan for a slow link that have come into force."""
    return [
        each
        for each in report["adaptations"]
        if each["applied_at_iteration"] is not None
        and link in [row["link"] for row in each["links"] if row["health"] == "slow"]
    ]


def test_the_plan_changes_for_a_slow_link(tmp_path: Path) -> None:
    fault = {"link": 1, "fromIteration": SLOW_FROM, "toIteration": 1000, "delayMs": SLOW_MS}
    done = run(
        tmp_path,
        manifest(
            parallelism={"stages": 3},
            schedule={"microbatches": 8, "policy": "pipemorph"},
            trainer={
                "module": "pipemorph_trainer.examples.emulated", "iterations": ITERATIONS,
            },
            faults=[fault],
        ),
    )  # fmt: skip
    assert done.status == 0, done
    report = done.report
    assert report["completed"] is True and report["emulated"] is True
    assert "EMULATED" in done.output
    assert [each["index"] for each in report["iterations"]] == list(range(ITERATIONS))
    for each in report["iterations"]:
        assert each.keys() == IterationSample.model_fields.keys() and each["loss"] is not None
    held = {(each["rank"], each["direction"]) for each in report["faults"]}
    assert held == {(1, "forward"), (2, "backward")}
    for each in report["faults"]:
        assert each["messages_held"] > 0
        assert (each["first_iteration"], each["last_iteration"]) == (SLOW_FROM, ITERATIONS - 1)

    (adapted, *_) = adaptations(report, 1) or [None]
    assert adapted is not None, done
    assert all(each.keys() >= ADAPTATION for each in report["adaptations"])
    assert adapted["kind"] == "adapt" and "link 1 is slow by" in adapted["reason"]
    assert adapted["detected_at_iteration"] >= SLOW_FROM
    assert adapted["warmup_after"][1] > adapted["warmup_before"][1], "more forwards go ahead"
    versions = [each["plan_version"] for each in report["iterations"]]
    assert versions == sorted(versions)
    assert versions.index(adapted["plan_version"]) == adapted["applied_at_iteration"]

    trace = json.loads((done.out / "timeline.json").read_text())
    ops = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(ops) == ITERATIONS * 3 * 8 * 3
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in ops)
    assert trace["otherData"]["emulated"] is True
    marks = [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"]
    assert f"plan v{adapted['plan_version']} in force" in marks
    assert (done.out / "timeline.png").read_bytes().startswith(b"\x89PNG")

    causes = diagnose(load_recording([done.out])).causes
    assert ("slow link", 1, SLOW_FROM) in {(c.cause, c.link, c.since) for c in causes}, causes


def test_a_killed_rank_comes_back_and_no_loss_changes(tmp_path: Path) -> None:
    saved = {"directory": str(tmp_path / "checkpoints"), "every": 1}
    done = run(tmp_path, job(tmp_path, {"killed_at": KILLED_AT}, checkpoint=saved))
    assert done.status == 0, done
    report = done.report
    check_losses(tmp_path, done)
    assert [attempt["end"] for attempt in report["attempts"]] == ["completed"]
    (recovery,) = report["recoveries"]
    assert recovery["rank"] == 1 and recovery["coordinate"] == "rank 1 (stage 1)"
    assert recovery["cause"] == "rank 1 (stage 1) was killed by SIGKILL"
    assert (recovery["rung"], recovery["attempt"], recovery["generation"]) == ("generation", 0, 1)
    # An iteration is reported when the next one begins, and reaches the host some time later.
    assert recovery["iterations_done"] <= KILLED_AT
    assert recovery["repeated"] == 0
    assert f"went on with iteration {recovery['went_on_with']} after" in done.output
    goodput = report["status"]["goodput"]
    assert 0 < goodput < 1 and f"goodput {goodput:.0%}" in done.output

    first, second = seen(tmp_path, 0, 0), seen(tmp_path, 1, 0)
    assert first["secret"] != second["secret"]
    assert first["memory"] == second["memory"] and first["mode"] == "0o700"
    assert first["memory"].startswith("/dev/shm/") and not Path(first["memory"]).exists()


def test_layers_move_and_no_loss_changes(tmp_path: Path) -> None:
    made = job(tmp_path, {"waits_from": WAITS_FROM}, adaptation={"relayout": True})
    (tmp_path / "driver.py").write_text(MOVES_LAYERS)
    (tmp_path / "job.json").write_text(json.dumps(made))
    out = tmp_path / "out"
    command = [sys.executable, *(str(tmp_path / each) for each in ("driver.py", "job.json", "out"))]
    ended = prepared_processes.run(
        command, capture_output=True, text=True, timeout=380, check=False
    )
    done = Done(ended.returncode, ended.stdout + ended.stderr, out)
    assert done.status == 0, done
    report = done.report
    check_losses(tmp_path, done)
    (move,) = report["relayouts"]
    assert move["outcome"] == "moved", done
    assert (move["layers_before"], move["layers"], move["moved"]) == ([3, 3], [4, 2], [])
    assert move["iteration"] >= WAITS_FROM
    held = [
        [seen(tmp_path, generation, rank)["layers"] for rank in (0, 1)] for generation in (0, 1)
    ]
    assert held == [[[0, 1, 2], [3, 4, 5]], [[0, 1, 2, 3], [4, 5]]]
    assert report["recoveries"] == [] and len(report["attempts"]) == 1


def test_ranks_of_torchrun_are_served(tmp_path: Path) -> None:
    """The ranks connect over TLS, with a link that turns slow."""
    cert, key = certificate(tmp_path)
    fault = {"link": 0, "fromIteration": SLOW_FROM, "delayMs": SLOW_MS}
    host = Served(
        tmp_path,
        served_manifest(iterations=ITERATIONS, faults=[fault]),
        "--tls-cert", str(cert), "--tls-key", str(key), "--out", str(tmp_path / "out"),
    )  # fmt: skip
    try:
        environment = host.environment()
        assert environment["PIPEMORPH_INGEST_URL"].startswith("https://127.0.0.1:")
        status, output = torchrun(tmp_path, SERVED, environment)
        assert status == 0, output
        assert host.ended() == 0, host.output
    finally:
        host.stop()
    assert "all 2 ranks have joined" in host.output
    assert "link 0 +" in host.output and "in effect since iteration" in host.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["completed"] is True
    assert [each["index"] for each in report["iterations"]] == list(range(ITERATIONS))
    changed = adaptations(report, 0)
    assert changed, host.output
    versions = [each["plan_version"] for each in report["iterations"]]
    assert {each["plan_version"] for each in changed} <= set(versions)
    causes = diagnose(load_recording([tmp_path / "out"])).causes
    assert ("slow link", SLOW_FROM) in {(c.cause, c.since) for c in causes}, causes
