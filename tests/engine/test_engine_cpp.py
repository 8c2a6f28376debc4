"""Builds the C++ suite and runs it: plainly, and under the sanitizers.

In two parts. The protocol's simulation takes the longest and knows no clock; everything else has
real threads, sockets and deadlines.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from gate import AlwaysRed
from pairs import have_libfabric
from testbed import packages
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
BUILD_DEADLINE = 1200.0
SIMULATION = "sim_"
"""What the names of the simulation's tests begin with."""
SCHEDULES = {"plain": 100_000, "asan": 10_000, "tsan": 2_000}
"""Random ones. What a schedule does depends on its number alone, so all of the protocol's rules are
held by the plain build. The sanitizers play the first of the same ones again, at twice the cost,
for what rules do not show; from a few thousand on, more schedules reach no line or branch more.
`make soak` asks for far more by the variable of `sim_test.cpp`."""


def run(
    *command: object, env: dict[str, str] | None = None, cwd: pathlib.Path | None = None
) -> str:
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
    """CMake's setting for ccache, so that a new checkout compiles only what is new. Installed where
    root on Debian can install it; anywhere else it is used if it is there."""
    if shutil.which("ccache") is None and packages.can_install():
        packages.install(["ccache"], print)
    if shutil.which("ccache") is None:
        return []
    os.environ.setdefault("CCACHE_DIR", str(cache_root() / "ccache"))
    # Compilations in two checkouts are the same but for the path of the checkout.
    os.environ |= {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
    return ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]


def build(name: str, *settings: str) -> pathlib.Path:
    """Builds the suite into a folder that is kept between runs, and returns the folder."""
    folder = ROOT / "build" / name
    have_libfabric()
    cmake = _tool("cmake")
    if cmake is None:
        pytest.fail("found no cmake, which builds the C++ suite: `make setup`", pytrace=False)
    ninja = _tool("ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    # Two parts of `make test` need the same builds.
    with locked(folder.with_suffix(".lock"), print, BUILD_DEADLINE):
        run(
            *(cmake, "-S", ROOT, "-B", folder, *generator),
            *("-DPIPEMORPH_MODULE=OFF", "-DPIPEMORPH_TESTS=ON", "-DPIPEMORPH_WERROR=ON"),
            *(f"-D{s}" for s in settings),
            *compiler_cache(),
        )
        run(cmake, "--build", folder, "--parallel", "2")
    return folder


def build_and_run(name: str, which: str, least: int = 5, **more: str) -> None:
    folder = build(*BUILDS[name])
    # From where it was compiled: through ccache the tests find their files by relative paths.
    env = more | os.environ | ENVIRONMENT
    said = run(folder / "engine_tests", which, env=env, cwd=folder)
    ran = re.search(r"^(\d+) ran, 0 failed$", said, re.MULTILINE)
    assert ran and int(ran[1]) >= least, said[-2000:]


MARKED = [
    "plain",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("asan", "tsan")),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MARKED)
def test_simulation(name):
    build_and_run(name, SIMULATION, 2, PIPEMORPH_SIM_SCHEDULES=str(SCHEDULES[name]))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MARKED)
def test_all_but_the_simulation(name):
    build_and_run(name, f"-{SIMULATION}")
