"""Commands where optional packages are missing: one line names the package to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pipemorph_trainer
from pipemorph.errors import InputError
from pipemorph.extras import MIN_TORCH
from pipemorph_trainer.context import TrainerContext

ROOT = Path(__file__).resolve().parents[3]
PROBLEM = str(ROOT / "examples/traces/problem.yaml")
TRACE = str(ROOT / "examples/traces/congestion.jsonl")
HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""
PACKAGES = ("torch", "numpy", "matplotlib", "shtab", "prometheus_client", "kubernetes", "kopf")


def job(**trainer: object) -> str:
    spec = {
        "parallelism": {"stages": 2},
        "schedule": {"microbatches": 2},
        "trainer": {"iterations": 1, **trainer},
    }
    head = {"apiVersion": "pipemorph.io/v1alpha1", "kind": "PipeMorphJob"}
    return json.dumps({**head, "metadata": {"name": "job"}, "spec": spec})


def command(folder: Path, *arguments: str, lacks: tuple[str, ...] = PACKAGES) -> tuple[int, str]:
    """Exit status and standard error of a command that cannot import the packages of ``lacks``."""
    hidden = folder / "hidden"
    hidden.mkdir(exist_ok=True)
    (hidden / "sitecustomize.py").write_text(HIDE.format(packages=lacks))
    (folder / "module.yaml").write_text(job(module="pipemorph_trainer.examples.gpt"))
    (folder / "script.yaml").write_text(job(command=["python", "train.py"]))
    (folder / "train.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "pipemorph.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(hidden)},
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "lacks", "extra"),
    [
        (["bench", "link"], ("torch",), "torch>=2.11"),
        (["bench", "link", "--connect", "127.0.0.1"], ("numpy",), "numpy>=1.26"),
        (["run", "module.yaml", "--out", "out"], ("torch",), "torch>=2.11"),
        (["run", "script.yaml", "--out", "out"], ("numpy",), "torch>=2.11"),
        (["plan", PROBLEM, "--out", "x.png"], ("matplotlib",), "matplotlib>=3.8"),
        (
            ["serve", "--observe", "--listen", "127.0.0.1:0", "--token-file", "token",
             "--metrics", "127.0.0.1:0", "--out", "out"],
            ("prometheus_client",), "prometheus-client>=0.20",
        ),
        (["completion", "zsh"], ("shtab",), "shtab>=1.13"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, arguments: list[str], lacks: tuple[str, ...], extra: str
) -> None:
    status, said = command(tmp_path, *arguments, lacks=lacks)
    assert status == 2, said
    package = lacks[0].replace("_", "-")
    assert f"need {package}, which" in said or f"needs {package}, which" in said
    assert f"not installed: {sys.executable} -m pip install " in said and f"'{extra}'" in said
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()


def make_old_torch(folder: Path) -> None:
    (folder / "torch-2.10.1+cpu.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.10.1+cpu\n"
    (folder / "torch-2.10.1+cpu.dist-info/METADATA").write_text(metadata)


@pytest.mark.parametrize("arguments", [["run", "script.yaml", "--out", "out"], ["bench", "link"]])
def test_an_old_torch_is_refused_in_one_line(tmp_path: Path, arguments: list[str]) -> None:
    make_old_torch(tmp_path / "hidden")
    status, said = command(tmp_path, *arguments, lacks=())
    assert status == 2, said
    assert "torch 2.10.1+cpu is installed, the trainer needs 2.11 or newer: " in said
    assert f"{sys.executable} -m pip install 'torch>=2.11'" in said
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_rank_refuses_an_old_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_old_torch(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for attempt in (lambda: pipemorph_trainer.Pipeline, lambda: TrainerContext.from_env({})):
        with pytest.raises(InputError, match=r"^torch 2\.10\.1\+cpu is installed"):
            attempt()


def test_the_least_torch_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = ".".join(map(str, MIN_TORCH))
    assert f"torch>={least}" in project["optional-dependencies"]["trainer"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", PROBLEM, "--out", "x.html"],
        ["advise", PROBLEM],
        ["replay", TRACE, PROBLEM, "--iterations", "3"],
        ["doctor"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_other_commands_need_none_of_them(tmp_path: Path, arguments: list[str]) -> None:
    assert command(tmp_path, *arguments) == (0, "")


def test_a_missing_script_is_reported_before_ranks_start(tmp_path: Path) -> None:
    command(tmp_path, "doctor", "--help")
    (tmp_path / "train.py").unlink()
    (tmp_path / "lost.yaml").write_text(job(command=["python", "lost.py"]))
    status, said = command(tmp_path, "run", "lost.yaml", "--out", "out", lacks=())
    assert (status, said.count("\n")) == (2, 1)
    assert f'spec.trainer.command: there is no script "lost.py" in {tmp_path}' in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["plan", PROBLEM, "--out", "x.pdf"],
            ".json, .txt, .html, .htm, .png, .svg, .csv, or give",
        ),
        (["plan", PROBLEM, "--out", "x.JSON.gz"], "x.JSON.gz is no format of this command"),
        (["advise", PROBLEM, "--out", "x.html"], "use one of .json, .txt, or give --output"),
        (["replay", TRACE, PROBLEM, "--out", "x.svg"], "use one of .json, .txt, .html, .htm, or"),
    ],
    ids=lambda found: found[0] if isinstance(found, list) else "",
)
def test_a_file_name_of_no_format_is_refused(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    status, said = command(tmp_path, *arguments, lacks=())
    assert status == 2 and expected in said and said.count("\n") == 1, said
    assert not list(tmp_path.glob("x.*"))
