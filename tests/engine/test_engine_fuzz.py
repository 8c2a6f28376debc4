r"""Fuzzes the handshake and the control decoder with libFuzzer, from the stored corpus.

Replaying the corpus needs no libFuzzer and is part of the C++ suite (`fuzz_test.cpp`). To renew the
corpus after the wire format has changed, fuzz for longer and keep the smallest set of inputs that
covers as much:

    PIPEMORPH_FUZZ_SECONDS=600 PIPEMORPH_FUZZ_KEEP=1 \
        python -m pytest tests/engine/test_engine_fuzz.py
"""

import os
import pathlib
import re
import shutil
import subprocess

import pytest
import suite_build as suite
from testbed import catalog

SECONDS = int(os.environ.get("PIPEMORPH_FUZZ_SECONDS", "10"))
KEEP = bool(os.environ.get("PIPEMORPH_FUZZ_KEEP"))
CORPUS = suite.ROOT / "tests" / "engine" / "fuzz" / "corpus"
TESTBEDS = ("compilers",)
SOURCES = (
    *("csrc/crypto/*.cpp", "csrc/os/copy.cpp", "csrc/wire/*.cpp"),
    "csrc/protocol/reliable.cpp",
    *("tests/engine/fuzz_targets.cpp", "tests/engine/fuzz/libfuzzer.cpp"),
)
MAX_INPUT = 600

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def compiler() -> str:
    """A clang++ with libFuzzer."""
    found = catalog.find_clang()
    if found is None:
        pytest.fail("found no clang++ with libFuzzer: run `make testbeds`", pytrace=False)
    return found


@pytest.fixture(scope="module")
def fuzzer() -> pathlib.Path:
    """The fuzzer under ASan and UBSan; rebuilt when a source is newer."""
    clang = compiler()
    program = suite.ROOT / "build" / "fuzz" / "fuzzer"
    program.parent.mkdir(parents=True, exist_ok=True)
    sources = [path for pattern in SOURCES for path in sorted(suite.ROOT.glob(pattern))]
    inputs = [*sources, *suite.ROOT.glob("csrc/*/*.hpp"), *suite.ROOT.glob("tests/engine/*.hpp")]
    newest = max(path.stat().st_mtime for path in inputs)
    if not program.exists() or program.stat().st_mtime < newest:
        suite.run(
            *(clang, "-std=c++20", "-O1", "-g", "-Wall", "-Wextra"),
            *("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"),
            *(f"-I{suite.ROOT / folder}" for folder in ("csrc", "tests/engine")),
            *(*sources, "-o", program),
        )
    return program


def fuzz(program: pathlib.Path, target: str, *arguments: object, env: dict[str, str]) -> str:
    done = subprocess.run(
        [str(a) for a in (program, *arguments)],
        env=os.environ | suite.ENVIRONMENT | env | {"PIPEMORPH_FUZZ_TARGET": target},
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS + 300,
    )
    assert done.returncode == 0, f"{target}: {done.returncode}\n{done.stderr[-6000:]}"
    return done.stderr


@pytest.mark.parametrize("target", ["handshake", "control"])
def test_nothing_is_found(fuzzer, target, tmp_path):
    found, artifacts = tmp_path / "found", tmp_path / "artifacts"
    found.mkdir()
    artifacts.mkdir()
    # New inputs go to the first folder; a crash prints its bytes and writes them to `artifacts`.
    said = fuzz(
        fuzzer,
        target,
        f"-max_total_time={SECONDS}",
        # No limit of resident size: its peak outlives exec, so libFuzzer would see that of pytest.
        *(f"-max_len={MAX_INPUT}", "-timeout=60", "-rss_limit_mb=0", "-malloc_limit_mb=64"),
        f"-artifact_prefix={artifacts}/",
        *(found, CORPUS / target),
        env={},
    )
    runs = re.search(r"Done (\d+) runs", said)
    assert runs, said[-2000:]
    assert int(runs[1]) > 500
    if KEEP:
        smallest = tmp_path / "smallest"
        smallest.mkdir()
        fuzz(fuzzer, target, "-merge=1", smallest, CORPUS / target, found, env={})
        shutil.rmtree(CORPUS / target)
        shutil.copytree(smallest, CORPUS / target)
        return
    # The stored corpus is worth something: most of what can be covered is from the start.
    # What is said before all of it has been read, by a slow machine, does not count.
    first = re.search(r"INITED\s+cov: (\d+)", said)
    assert first, said[-2000:]
    initial, covered = int(first[1]), int(re.findall(r"cov: (\d+)", said)[-1])
    assert initial >= 0.9 * covered, f"{target}: {initial} at first, {covered} now"


def test_a_target_that_there_is_not_is_refused(fuzzer):
    done = subprocess.run(
        [fuzzer],
        env=os.environ | {"PIPEMORPH_FUZZ_TARGET": "handshakes"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "handshakes, expected handshake or control" in done.stderr
