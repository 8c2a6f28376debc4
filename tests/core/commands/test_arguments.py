"""Numbers of the command line: each argument refuses what is outside its range in one line."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipemorph.cli import main
from pipemorph_operator import selftest
from pipemorph_trainer import preflight
from pipemorph_trainer.launcher import __main__ as launcher

ROOT = Path(__file__).resolve().parents[3]
NO_NUMBER = [
    "nan", "inf", "-inf", "-1", "-0.5", "1e999", "9" * 5000, "", "x", " 1", "1_0", "\u0661",
]  # fmt: skip
COMMANDS = [
    (["bench", "link", "--port"], ["0", "65536"]),
    (["bench", "link", "--window"], ["0"]),
    (["bench", "link", "--rounds"], ["0"]),
    (["bench", "link", "--pings"], ["0"]),
    (["bench", "link", "--wait"], ["0"]),
    (["bench", "link", "--gid-index"], ["256"]),
    (["bench", "link", "--traffic-class"], ["256"]),
    (["bench", "link", "--service-level"], ["16"]),
    (["replay", "trace", "problem", "--iterations"], ["0"]),
    (["replay", "trace", "problem", "--delegation"], ["1000.1"]),
    (["replay", "trace", "problem", "--replicas"], ["0", "1025"]),
    (["replay", "trace", "problem", "--seed"], ["0.5", str(2**128)]),
    (["top", "--every"], ["0.5", "3601"]),
    (["timeline", "gpt", "--out", "x", "--seconds"], ["0", "601"]),
    (["timeline", "gpt", "--out", "x", "--column"], ["0.5"]),
    (["watch", "gpt", "--port"], ["65536"]),
    (["run", "job.yaml", "--out", "out", "--watch"], ["65536"]),
]


def refusal(run: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "outside"), COMMANDS, ids=[f"{c[0]}{c[-1]}" for c, _ in COMMANDS]
)
def test_commands(
    arguments: list[str], outside: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    *command, option = arguments
    for text in [*NO_NUMBER, *outside]:
        said = refusal(lambda text=text: main([*command, f"{option}={text}"]), capsys)
        assert f"argument {option}: {text[:30]!r}"[:-1] in said and " number " in said, text
        assert said.count("\n") == 1 and len(said) < 1200


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (selftest, ["--ingest-url=https://127.0.0.1:1", "--ingest-ca=x", "--wait"]),
        (launcher, ["--grace"]),
        (preflight, ["--shm"]),
    ],
)
def test_programs_of_the_cluster(
    module: object,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    *before, option = arguments
    for text in NO_NUMBER:
        monkeypatch.setattr(sys, "argv", ["x", *before, f"{option}={text}", "--", "true"])
        said = refusal(module.main, capsys)  # type: ignore[attr-defined]
        assert f"argument {option}: " in said and " number " in said, text


def test_every_number_has_a_range() -> None:
    """``int`` takes -1 as a number of processes, ``float`` takes ``nan`` as a time limit."""
    files = [
        path
        for folder in ("pipemorph", "trainer", "operator")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 200
    calls = [
        (path.relative_to(ROOT), node.lineno)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "add_argument"
        and any(
            word.arg == "type"
            and isinstance(word.value, ast.Name)
            and word.value.id in ("int", "float")
            for word in node.keywords
        )
    ]
    assert calls == []


def test_an_argument_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "required: --out" in refusal(lambda: main(["run", "job.yaml"]), capsys)
