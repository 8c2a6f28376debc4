"""``pipemorph completion``: what a shell completes with its script."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pipemorph.cli import COMMANDS, main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_has_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True, timeout=100)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["pipemorph", "ex"], {"explain"}),
        (["pipemorph", "top", "--o"], {"--once"}),
        (["pipemorph", "run", "job."], {"job.yaml"}),
        (["pipemorph", "completion", ""], {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], completed: set[str]
) -> None:
    (tmp_path / "job.yaml").write_text("")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    quoted = " ".join(f"'{word}'" for word in words)
    code = (
        f"source ./script; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1};"
        f" _shtab_pipemorph pipemorph '{words[-1]}' '{words[-2]}';"
        " printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    assert completed <= set(done.stdout.split()) and "plan" not in done.stdout.split()


def test_kubectl_keeps_its_own_completion(capsys: pytest.CaptureFixture[str]) -> None:
    """The script would be in place of it: it is for the first word."""
    assert main(["completion", "bash"], prog="kubectl pipemorph") == 2
    assert "use pipemorph completion" in capsys.readouterr().err
