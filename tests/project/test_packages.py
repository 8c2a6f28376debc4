"""A user's install: the sdist of this source, a wheel of it, and a command in an empty environment.

``make dist`` also compiles by zig for older glibc and for aarch64, and runs auditwheel and twine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import pipemorph

ROOT = Path(__file__).resolve().parents[2]
SDIST = "import sys; from scikit_build_core import build; build.build_sdist(sys.argv[1])"
USE = """\
import pipemorph, pipemorph_trainer, pipemorph_operator
from pipemorph.planning import _planner
from pipemorph_trainer import _engine
print(pipemorph.__file__, _engine.version, pipemorph.__version__)
"""


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    done = subprocess.run(
        [str(each) for each in command], cwd=cwd, env=os.environ | variables,
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{command[0]}: {(done.stdout + done.stderr)[-3000:]}"
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_wheel_of_the_sdist_works_in_an_empty_environment(tmp_path: Path) -> None:
    run(sys.executable, "-c", SDIST, tmp_path)
    (archive,) = tmp_path.glob("pipemorph-*.tar.gz")
    with tarfile.open(archive) as found:
        found.extractall(tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    # Objects that `make setup` has compiled are found again: paths are the same below the source.
    cached = {"CCACHE_BASEDIR": str(source), "CCACHE_NOHASHDIR": "1"}
    if shutil.which("ccache"):
        cached["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = ("--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path)
    run(sys.executable, "-m", "pip", "wheel", *options, source, PATH=path, **cached)
    (wheel,) = tmp_path.glob("pipemorph-*.whl")
    empty = tmp_path / "empty"
    run(sys.executable, "-m", "venv", "--without-pip", empty)
    uv = Path(sys.executable).with_name("uv")
    run(uv, "pip", "install", "--python", empty / "bin/python", wheel)
    used = run(empty / "bin/python", "-I", "-c", USE, cwd=tmp_path).split()
    assert used[0].startswith(str(empty))
    assert used[1:] == [pipemorph.__version__] * 2
    command, plan = empty / "bin/pipemorph", tmp_path / "plan.json"
    assert pipemorph.__version__ in run(command, "--version", cwd=tmp_path)
    run(command, "plan", ROOT / "examples/traces/problem.yaml", "--out", plan, cwd=tmp_path)
    assert plan.stat().st_size > 1000
