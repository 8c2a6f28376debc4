"""Builds the C++ suite and runs it: plainly, and under the sanitizers."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")


def run(*command: object, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(c) for c in command], check=False, timeout=900, capture_output=True, text=True, env=env
    )
    if done.returncode != 0:
        pytest.fail(f"{command}: {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    return done.stdout


def build(name: str, *settings: str) -> pathlib.Path:
    """Builds the suite into a folder that is kept between runs, and returns the folder."""
    folder = ROOT / "build" / name
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run(
        *("cmake", "-S", ROOT, "-B", folder, *generator),
        *("-DPIPEMORPH_MODULE=OFF", "-DPIPEMORPH_TESTS=ON", "-DPIPEMORPH_WERROR=ON"),
        *(f"-D{s}" for s in settings),
    )
    run("cmake", "--build", folder, "--parallel", "2")
    return folder


def build_and_run(name: str, *settings: str) -> None:
    folder = build(name, *settings)
    assert " 0 failed" in run(folder / "engine_tests", env=os.environ | ENVIRONMENT)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cpp_suite():
    build_and_run("engine-tests", "CMAKE_BUILD_TYPE=Release")


@pytest.mark.sanitizer
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "sanitizers"), [("asan", "address,undefined"), ("tsan", "thread")]
)
def test_cpp_suite_under(name, sanitizers):
    build_and_run(
        f"sanitize-{name}", f"PIPEMORPH_SANITIZE={sanitizers}", "CMAKE_BUILD_TYPE=RelWithDebInfo"
    )
