"""Builds the C++ suite of ``csrc`` and ``tests/engine``, and runs it."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from gate import AlwaysRed
from testbed.tools import cache_root, locked

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}
BUILDS = {
    "plain": ("engine-tests", "CMAKE_BUILD_TYPE=Release"),
    "asan": (
        "sanitize-asan",
        "PIPEMORPH_SANITIZE=address,undefined",
        "CMAKE_BUILD_TYPE=RelWithDebInfo",
    ),
    "tsan": ("sanitize-tsan", "PIPEMORPH_SANITIZE=thread", "CMAKE_BUILD_TYPE=RelWithDebInfo"),
}
"""The folder of each build, below ``build``, and CMake's settings."""
BUILD_DEADLINE = 1200.0
SIMULATION = "sim_"
"""The prefix of the simulation's tests. The simulation takes the longest and needs no clock; all
others have real threads, sockets and deadlines."""
TIMED = "timed_"
"""The prefix of the tests that compare times."""


def run(
    *command: object, env: dict[str, str] | None = None, cwd: pathlib.Path | None = None
) -> str:
    """Standard output of a command. Fails the test if the command fails."""
    done = subprocess.run(
        [str(c) for c in command], check=False, capture_output=True, text=True, env=env, cwd=cwd
    )
    if done.returncode != 0:
        said = f"{command}: {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        if done.returncode < 0:
            raise AlwaysRed(f"died of signal {-done.returncode}: {said}")
        pytest.fail(said)
    return done.stdout


def _tool(name: str) -> str | None:
    """A program of the machine, or of this Python's environment."""
    return shutil.which(name) or shutil.which(name, path=pathlib.Path(sys.executable).parent)


def compiler_cache() -> list[str]:
    """CMake's setting for ccache, if it is there: a new checkout then compiles only what is new."""
    if shutil.which("ccache") is None:
        return []
    os.environ.setdefault("CCACHE_DIR", str(cache_root() / "ccache"))
    # Compilations in two checkouts are the same but for the path of the checkout.
    os.environ |= {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
    return ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]


def build(name: str, *targets: str) -> pathlib.Path:
    """Builds a build of :data:`BUILDS`, or only targets of it, into a folder that remains between
    runs. Returns the folder."""
    subfolder, *settings = BUILDS[name]
    folder = ROOT / "build" / subfolder
    cmake = _tool("cmake")
    if cmake is None:
        pytest.fail("found no cmake, which builds the C++ suite: `make setup`", pytrace=False)
    ninja = _tool("ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    # Two parts of a run need the same builds.
    with locked(folder.with_suffix(".lock"), print, BUILD_DEADLINE):
        run(
            *(cmake, "-S", ROOT, "-B", folder, *generator),
            *("-DPIPEMORPH_MODULE=OFF", "-DPIPEMORPH_TESTS=ON", "-DPIPEMORPH_WERROR=ON"),
            *(f"-D{s}" for s in settings),
            *compiler_cache(),
        )
        chosen = ["--target", *targets] if targets else []
        run(cmake, "--build", folder, "--parallel", "2", *chosen)
    return folder


def build_and_run(name: str, *chosen: str, least: int = 1, **more: str) -> None:
    """Runs the tests of a build whose names contain each of ``chosen``, without the TEXT of each
    -TEXT; fails if they are fewer than ``least``. ``more``: variables, which those of this process
    override."""
    folder = build(name)
    # Run where it was compiled: through ccache the tests find their files by relative paths.
    env = more | os.environ | ENVIRONMENT
    said = run(folder / "engine_tests", *chosen, env=env, cwd=folder)
    ran = re.search(r"^(\d+) ran, 0 failed$", said, re.MULTILINE)
    assert ran and int(ran[1]) >= least, said[-2000:]


def play_schedules(name: str, schedules: int) -> None:
    """Runs the simulation of a build with random schedules: `PIPEMORPH_SIM_SCHEDULES` of them, by
    default ``schedules``."""
    build_and_run(name, SIMULATION, least=4, PIPEMORPH_SIM_SCHEDULES=str(schedules))
