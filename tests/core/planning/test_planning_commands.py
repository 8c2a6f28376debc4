"""`pipemorph plan` and `pipemorph simulate`: the contract, and every bad input in one line."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipemorph.cli import main

STAGE = "{forward: 10, backward_input: 10, backward_weight: 10}"
EXAMPLE = f"""
microbatches: 12
stages: [{", ".join([STAGE] * 4)}]
links: [{{delay: DELAY}}, {{delay: 0}}, {{delay: 0}}]
"""


@pytest.fixture
def example(tmp_path: Path) -> Any:
    def write(delay: float = 20) -> str:
        file = tmp_path / f"delay-{delay}.yaml"
        file.write_text(EXAMPLE.replace("DELAY", str(delay)))
        return str(file)

    return write


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_plan_prints_the_contracted_fields(example: Any, capsys: Any) -> None:
    began = time.perf_counter()
    found = output(capsys, "plan", example(20), "--output", "json")
    took_ms = (time.perf_counter() - began) * 1e3
    assert found["policy"] == "pipemorph"
    assert found["makespan"] == found["lower_bound"] == 410.0
    assert round(found["bubble_fraction"], 3) == 0.122
    assert found["warmup"] == [8, 5, 3, 1]
    assert found["slackness"] == [3, 2, 2]
    assert len(found["in_flight_peak"]) == 4
    assert 0 < found["planning_ms"] < took_ms
    assert found["stages"][0][0] == {"op": "F", "microbatch": 0, "start": 0.0, "end": 10.0}
    assert [len(stage) for stage in found["stages"]] == [36] * 4


def test_simulate_prints_the_same_fields(example: Any, capsys: Any, tmp_path: Path) -> None:
    planned = tmp_path / "plan.json"
    fixed = ("--policy", "zero-bubble", "--warmup", "7,5,3,1")
    plan = output(capsys, "plan", example(0), *fixed)
    assert main(["plan", example(0), *fixed, "--out", str(planned)]) == 0
    assert plan["makespan"] == 390.0
    for delay, dispatch, makespan in (
        (0, "static", 390.0),
        (10, "static", 400.0),
        (20, "static", 440.0),
        (0, "guided", 390.0),
        (20, "guided", 410.0),
    ):
        found = output(capsys, "simulate", str(planned), example(delay), "--dispatch", dispatch)
        assert found["makespan"] == makespan
        assert found["dispatch"] == dispatch
        assert found["policy"] == "zero-bubble"
        assert set(found) == set(plan)
    assert found["lower_bound"] == 410.0


def test_dispatch_is_a_choice_of_the_plan(example: Any, capsys: Any, tmp_path: Path) -> None:
    """`dispatch: guided` in the problem or on the command line; `simulate` keeps it."""
    file = tmp_path / "guided.yaml"
    file.write_text(EXAMPLE.replace("DELAY", "0") + "dispatch: guided\n")
    fixed = ("--policy", "zero-bubble", "--warmup", "7,5,3,1")
    guided = output(capsys, "plan", str(file), *fixed)
    assert guided["dispatch"] == "guided"
    assert output(capsys, "plan", example(0), *fixed, "--dispatch", "guided") | {
        "planning_ms": 0
    } == guided | {"planning_ms": 0}
    assert output(capsys, "plan", str(file), *fixed, "--dispatch", "static")["dispatch"] == "static"
    planned = tmp_path / "plan.json"
    planned.write_text(json.dumps(guided))
    assert output(capsys, "simulate", str(planned), example(20))["makespan"] == 410
    held = output(capsys, "simulate", str(planned), example(20), "--dispatch", "static")
    assert held["makespan"] == 440


def test_guided_dispatch_keeps_to_what_the_plan_waits_for(
    example: Any, capsys: Any, tmp_path: Path
) -> None:
    """The plan lets stages idle at a limit for ops that are about to arrive. `plan` says where, so
    that `simulate` under the same delays is the plan, and under others takes no longer."""
    tight, slow, planned = (tmp_path / name for name in ("tight.yaml", "slow.yaml", "plan.json"))
    limited = STAGE.replace("}", ", in_flight_limit: 3}")
    tight.write_text(EXAMPLE.replace("DELAY", "5").replace(STAGE, limited))
    slow.write_text(EXAMPLE.replace("DELAY", "35").replace(STAGE, limited))
    found = output(capsys, "plan", str(tight), "--dispatch", "guided")
    assert found["dispatch"] == "guided"
    assert any(found["waits"])
    planned.write_text(json.dumps(found))
    assert output(capsys, "simulate", str(planned), str(tight))["stages"] == found["stages"]
    late = output(capsys, "simulate", str(planned), str(slow))
    static = output(capsys, "simulate", str(planned), str(slow), "--dispatch", "static")
    assert (static["makespan"], late["makespan"]) == (840, 720)
    assert late["in_flight_peak"] <= found["in_flight_peak"]
    planned.write_text(json.dumps(found | {"waits": [[99], [], [], []]}))
    fails(capsys, "rank 0: waits has position 99; the rank has 36 ops", "simulate", str(planned),
          str(tight))  # fmt: skip


def test_fused_backwards_are_bw(example: Any, capsys: Any) -> None:
    found = output(capsys, "plan", example(0), "--policy", "1f1b")
    assert {op["op"] for op in found["stages"][0]} == {"F", "BW"}
    assert found["warmup"] == [4, 3, 2, 1]


def test_reads_standard_input(example: Any, capsys: Any, monkeypatch: Any) -> None:
    text = EXAMPLE.replace("DELAY", "20").encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert output(capsys, "plan", "-")["makespan"] == 410.0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a: \xff")))
    fails(capsys, "standard input: is not UTF-8 text (byte 3)", "plan", "-")
    monkeypatch.setattr(sys, "stdin", None)
    fails(capsys, "standard input: cannot be read: is closed", "plan", "-")


def test_text_and_png(example: Any, capsys: Any, tmp_path: Path) -> None:
    assert main(["plan", example(20), "--output", "text"]) == 0
    text = capsys.readouterr().out
    assert "410 ms simulated" in text and text.count("stage") == 4
    picture = tmp_path / "plan.png"
    assert main(["plan", example(20), "--output", "png", "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_name_of_the_file_selects_the_format(example: Any, capsys: Any, tmp_path: Path) -> None:
    for name, begins in (
        ("a.html", "<!doctype html>"),
        ("a.txt", "pipemorph: 410 ms"),
        ("a.json", '{"policy"'),
        ("a", '{"policy"'),
    ):
        assert main(["plan", example(20), "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text().startswith(begins)
    assert main(["plan", example(20), "--output", "text", "--out", str(tmp_path / "b.json")]) == 0
    assert (tmp_path / "b.json").read_text().startswith("pipemorph: 410 ms")
    assert capsys.readouterr().out == ""


def test_a_picture_is_not_printed_to_a_terminal(
    example: Any, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    words = "--output png needs --out FILE if stdout is a terminal"
    fails(capsys, words, "plan", example(), "--output", "png")


def test_idle_time_by_cause_adds_up(example: Any, capsys: Any) -> None:
    found = output(capsys, "plan", example(20))
    idle = sum(sum(per_stage) for per_stage in found["bubbles"].values())
    assert idle == pytest.approx(found["bubble_fraction"] * 4 * found["makespan"])
    assert set(found["bubbles"]) == {"fill", "drain", "dependency", "link", "cap", "order"}


def test_reads_json_numbers(tmp_path: Path, capsys: Any) -> None:
    """1e1 is a number in JSON, and a string in YAML 1.1."""
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(problem()).replace('"forward": 1', '"forward": 1e1'))
    assert output(capsys, "plan", str(file))["makespan"] > 40


def problem(**changes: Any) -> dict[str, Any]:
    stage = {"forward": 1, "backward_input": 1, "backward_weight": 1}
    base = {"microbatches": 4, "stages": [stage, dict(stage)], "links": [{"delay": 0}]}
    return base | changes


def stage_with(**changes: Any) -> dict[str, Any]:
    stage = {"forward": 1, "backward_input": 1, "backward_weight": 1}
    return problem(stages=[stage, stage | changes])


BAD_PROBLEMS = [
    (stage_with(forward=-1), "stages[1].forward: -1 is less than 0"),
    (stage_with(forward=True), "stages[1].forward: True is not a number"),
    (stage_with(forward="10"), "stages[1].forward: '10' is not a number"),
    (stage_with(forward=None), "stages[1].forward: None is not a number"),
    (stage_with(backward_weight=[1]), "stages[1].backward_weight: [1] is not a number"),
    (stage_with(forward=10**400), "stages[1].forward: is a number beyond 64 bits"),
    (stage_with(forward=1e300), "stages[1].forward: 1e+300 is more than 1e+12"),
    (stage_with(in_flight_limit=0), "stages[1].in_flight_limit: 0 is less than 1"),
    (stage_with(in_flight_limit=1.5), "stages[1].in_flight_limit: 1.5 is not a whole number"),
    (stage_with(in_flight_limit=True), "stages[1].in_flight_limit: True is not a whole number"),
    (
        stage_with(speed=3),
        "stages[1].speed: 3 is not a known field; known fields: forward, backward_input,",
    ),
    (problem(colour="red"), "colour: 'red' is not a known field; known fields: microbatches,"),
    (stage_with(inflight_limit=8), "8 is not a known field; did you mean in_flight_limit?"),
    (problem(kind="PipeMorphJob"), "is the manifest of a job, for pipemorph run; expected a"),
    (problem(microbatches=0), "microbatches: 0 is less than 1"),
    (problem(microbatches=-3), "microbatches: -3 is less than 1"),
    (problem(microbatches=True), "microbatches: True is not a whole number"),
    (problem(microbatches=2.5), "microbatches: 2.5 is not a whole number"),
    (problem(microbatches=10**9), "microbatches is 1000000000; at 2 stages at most 524288"),
    (problem(stages=[]), "stages: [] needs at least one entry"),
    (problem(stages={}), "stages: {} is not a list"),
    (problem(stages=[1, 2]), "stages[0]: 1 is not a mapping"),
    (problem(stages=None), "stages: None is not a list"),
    (problem(links=[]), "links has 0 entries; 2 stages need 1"),
    (problem(links=[{"delay": 0}] * 2), "links has 2 entries; 2 stages need 1"),
    (problem(links=[{"delay": -5}]), "links[0].delay: -5 is less than 0"),
    (problem(links=[{"lag": 5}]), "links[0].lag: 5 is not a known field"),
    (problem(links=[{"delay": 1, "queues": 0}]), "links[0].queues: 0 is less than 1"),
    (problem(links=[{"delay": 1, "queues": 10**7}]), "links[0].queues: 10000000 is more than"),
    (
        problem(links=[{"delay": 1, "outstanding": 10**12}]),
        "links[0].outstanding: 1000000000000 is",
    ),
    (
        stage_with(activation_bytes=10**400),
        "stages[1].activation_bytes: is a number beyond 64 bits",
    ),
    (problem(links=[{"delay": 1, "slots": 2}]), "links[0].slots was removed; leave it out"),
    (problem(dispatch="eager"), "dispatch: 'eager' is not one of static or guided"),
    (problem(links=[{"delay": 1, "outstanding": 0}]), "links[0].outstanding: 0 is less than 1"),
    (problem(policy="fastest"), "policy: 'fastest' is not one of gpipe, 1f1b"),
    (problem(warmup=[2]), "warmup is [2], 1 entry; 2 stages need 2"),
    (problem(warmup=[1, 2]), "warmup[1] is 2, more than warmup[0], 1"),
    (problem(warmup=[9, 1]), "warmup[0] is 9; there are 4 microbatches"),
    (problem(warmup=[2, 0]), "warmup[1]: 0 is less than 1"),
    (stage_with(in_flight_limit=1) | {"warmup": [2, 2]}, "in_flight_limit allows 1"),
    (
        stage_with(in_flight_limit=2) | {"policy": "gpipe"},
        "stages[1].in_flight_limit is 2; policy gpipe holds all 4",
    ),
    ({k: v for k, v in problem().items() if k != "stages"}, "stages is missing"),
    ({k: v for k, v in problem().items() if k != "microbatches"}, "microbatches is missing"),
    ([1, 2], "problem.json: is [1, 2]; expected the fields of a problem"),
    ("hello", "problem.json: is 'hello'; expected the fields of a problem"),
    (None, "problem.json: is empty"),
]


def fails(capsys: pytest.CaptureFixture[str], words: str, *arguments: str) -> None:
    """Exit 2, nothing on stdout, one line on stderr with ``words``."""
    status: object
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    found = capsys.readouterr()
    assert status == 2
    assert found.out == ""
    assert words in found.err
    assert found.err.count("\n") == 1 and found.err.endswith("\n")
    assert "Traceback" not in found.err
    assert found.err.startswith("pipemorph")


@pytest.mark.parametrize(("content", "words"), BAD_PROBLEMS)
def test_bad_problem(content: object, words: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(content))
    fails(capsys, words, "plan", str(file))


BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
)
"""A few hundred bytes that expand to more than memory holds."""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("microbatches: [1", "problem.yaml: is not YAML or JSON"),
        ("a: b: c", "problem.yaml: is not YAML or JSON"),
        ("\tx: 1", "problem.yaml: is not YAML or JSON"),
        ("x: \x00", "problem.yaml: is not YAML or JSON"),
        ("a: !!python/object:os.system {}", "problem.yaml: is not YAML or JSON"),
        ("[" * 5000, "problem.yaml: is not YAML or JSON"),
        ("when: 2024-99-99", "problem.yaml: is not YAML or JSON"),
        ("when: !!timestamp soon", "problem.yaml: is not YAML or JSON"),
        ("fast: !!bool maybe", "problem.yaml: is not YAML or JSON"),
        ('many: !!int ""', "problem.yaml: is not YAML or JSON"),
        (r'name: "\UFFFFFFFF"', "problem.yaml: is not YAML or JSON"),
        ("microbatches: 4\nmicrobatches: 8", "duplicate key 'microbatches' (line 2"),
        ('{"microbatches": 4, "microbatches": 8}', "duplicate key 'microbatches'"),
        ("a: 1\n---\nb: 2", "problem.yaml: has 2 documents; expected one"),
        (BOMB, "problem.yaml: has more than 1000000 values or 64 levels"),
        ("? [1, 2]\n: x", "problem.yaml: is not YAML or JSON"),
        ("1: 2", "problem.yaml: top: the key 1 is not text"),
        ("", "problem.yaml: is empty"),
        (EXAMPLE.replace("DELAY", ".nan"), "links[0].delay: is nan; expected a finite number"),
        (EXAMPLE.replace("DELAY", ".inf"), "links[0].delay: is inf; expected a finite number"),
        (EXAMPLE.replace("DELAY", "yes"), "links[0].delay: True is not a number"),
        (EXAMPLE.replace("DELAY", "20 ms"), "links[0].delay: '20 ms' is not a number"),
    ],
)
def test_bad_text(text: str, words: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "problem.yaml"
    file.write_text(text)
    fails(capsys, words, "plan", str(file))


def test_files_that_cannot_be_used(example: Any, tmp_path: Path, capsys: Any) -> None:
    missing = str(tmp_path / "missing.yaml")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    fails(capsys, f"{missing}: cannot be read: No such file", "plan", missing)
    fails(capsys, "Is a directory", "plan", str(tmp_path))
    fails(capsys, "a file with an empty name: cannot be read", "plan", "")
    fails(capsys, "two lines: cannot be read: No such file", "plan", "two\nlines")
    fails(capsys, "unrecognized arguments: two lines", "plan", example(), "two\nlines")
    job = str(Path(__file__).parents[3] / "examples" / "gpt.yaml")
    fails(capsys, "cannot be used: No such file", "run", job, "--out", "/proc/two\nlines")
    fails(capsys, "--out is empty; name a folder", "run", job, "--out", "")
    fails(capsys, "/dev/zero: is larger than 64 MiB", "plan", "/dev/zero")
    fails(capsys, "--out is empty", "plan", example(), "--out", "")
    fails(capsys, "is not UTF-8 text (byte 0)", "plan", str(binary))
    fails(capsys, "cannot write", "plan", example(), "--out", str(tmp_path / "no" / "x"))


def test_arguments_that_cannot_be_used(example: Any, capsys: Any) -> None:
    fails(capsys, "--warmup: 'x' in '7,x' is not", "plan", example(), "--warmup", "7,x")
    fails(capsys, "--warmup: '9999", "plan", example(), "--warmup", "9" * 5000)
    fails(capsys, "4 stages need 4", "plan", example(), "--warmup", "7")
    fails(capsys, "warmup[1] is 3, more than warmup[0]", "plan", example(), "--warmup", "1,3,1,1")
    fails(capsys, "invalid choice: 'best'", "plan", example(), "--policy", "best")
    fails(capsys, "'exact' was removed; use pipemorph", "plan", example(), "--policy", "exact")
    fails(capsys, "unrecognized arguments: --fast", "plan", example(), "--fast")
    fails(capsys, "required: PROBLEM", "plan")
    fails(capsys, "required: COMMAND")
    fails(capsys, "invalid choice: 'paln'", "paln")
    fails(capsys, "only one of PLAN and PROBLEM", "simulate", "-", "-")


def test_bad_plan_files(example: Any, tmp_path: Path, capsys: Any) -> None:
    good = output(capsys, "plan", example(20))
    swapped = json.loads(json.dumps(good))
    first, second = swapped["stages"][1][:2]
    swapped["stages"][1][:2] = [second, first]
    cases: list[tuple[object, str]] = [
        ("not json", "the plan is not JSON"),
        ([], "the plan is []"),
        ({}, "the plan: policy is missing"),
        (good | {"policy": "mine"}, "the plan: policy: 'mine' is not one of"),
        (good | {"stages": []}, "the plan: stages: [] needs at least one entry"),
        (good | {"stages": good["stages"][:2]}, "the plan has 2 stages, the problem 4"),
        (good | {"microbatches": 3}, "the plan has 3 microbatches, the problem 12"),
        (good | {"stages": [[{"op": "X", "microbatch": 0}]] * 4}, "stages[0][0].op: 'X'"),
        (good | {"stages": [[{"op": "F", "microbatch": -1}]] * 4}, "microbatch: -1"),
        (good | {"stages": [[{"op": "F"}]] * 4}, "stages[0][0].microbatch is missing"),
        (good | {"planning_ms": "long"}, "the plan: planning_ms"),
        (good | {"planning_ms": float("nan")}, "the plan: planning_ms: nan"),
        (good | {"planning_ms": float("inf")}, "the plan: planning_ms: inf"),
        (good | {"order": ["(" * 5000 + "0F0" + ")OVERLAP_F_B" * 5000]}, "rank 0, column 0"),
        (swapped, "stage 1, position 0: found F1; expected F0"),
    ]
    for number, (content, words) in enumerate(cases):
        file = tmp_path / f"{number}.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        fails(capsys, words, "simulate", str(file), example(20))


def test_a_plan_over_the_caps_of_a_problem(example: Any, tmp_path: Path, capsys: Any) -> None:
    planned = tmp_path / "plan.json"
    assert main(["plan", example(20), "--out", str(planned)]) == 0
    tight = tmp_path / "tight.yaml"
    limited = STAGE.replace("}", ", in_flight_limit: 2}")
    tight.write_text(EXAMPLE.replace("DELAY", "20").replace(STAGE, limited))
    fails(capsys, "in_flight_limit is 2", "simulate", str(planned), str(tight))
    fails(capsys, "'online' was removed; use guided", "simulate", str(planned), str(tight),
          "--dispatch", "online")  # fmt: skip


def test_a_plan_that_recomputes_records_it_and_is_read_back(
    example: Any, tmp_path: Path, capsys: Any
) -> None:
    tight, planned = tmp_path / "tight.yaml", tmp_path / "plan.json"
    limited = STAGE.replace("}", ", in_flight_limit: 4, recompute_limit: 12}")
    tight.write_text(EXAMPLE.replace("DELAY", "60").replace(STAGE, limited))
    found = output(capsys, "plan", str(tight), "--output", "json")
    assert found["recompute"][0] is True
    assert found["device_limit"][0] < 4 < found["in_flight_limit"][0]
    assert found["recomputed"][0] > 0
    assert found["offloaded"] == [0] * 4
    planned.write_text(json.dumps(found))
    for dispatch in ("static", "guided"):
        again = output(
            capsys, "simulate", str(planned), str(tight), "--dispatch", dispatch, "--output", "json"
        )
        assert again["recompute"] == found["recompute"]
        assert again["makespan"] == found["makespan"]
    fails(capsys, "stages[0].recompute_limit is None", "simulate", str(planned), example(20))


def test_pictures_without_matplotlib(example: Any, tmp_path: Path) -> None:
    """A request for a picture without matplotlib prints in one line which package to install."""
    code = (
        "import sys; sys.modules['matplotlib'] = None; "
        "from pipemorph.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["plan", example(), "--output", "png", "--out", str(tmp_path / "x.png")]
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert found.stderr == (
        "pipemorph plan: pictures need matplotlib, which is not installed:"
        f" {sys.executable} -m pip install 'matplotlib>=3.8'\n"
    )


@pytest.mark.parametrize(
    "command", ["plan", "advise", pytest.param("doctor", marks=pytest.mark.full)]
)
def test_a_stdout_that_takes_nothing_is_reported_in_one_line(command: str, example: Any) -> None:
    whole = [sys.executable, command, *([] if command == "doctor" else [example()])]
    for redirection, words in (
        (">/dev/full", f"pipemorph {command}: cannot write standard output: No space left"),
        (">&-", "pipemorph: standard output is closed"),
    ):
        found = subprocess.run(
            ["sh", "-c", f'"$0" -m pipemorph.cli "$@" {redirection}', *whole],
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 2
        assert found.stderr.startswith(words) and found.stderr.count("\n") == 1


def test_a_reader_that_stops_early_is_no_error(example: Any) -> None:
    command = f"{sys.executable} -m pipemorph.cli plan {example()} | head -c 10"
    found = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=300
    )
    assert found.stdout == '{"policy":'
    assert found.stderr == ""
