"""Builds what a release consists of into ``dist/``, and tries it: ``make dist``.

    python release/dist.py                    all of it
    python release/dist.py wheels check       some steps
    python release/dist.py --arch x86_64      wheels for one processor

Steps: sdist, wheels, check, try, chart, sbom. Wheels are for the Python that runs this, for Linux
with glibc 2.28 or newer, built from the sdist by ``zig c++`` (package ziglang): it brings the
headers of that glibc and its own C++ library, for both processors. Runs in the environment of
``make dist``, the extra ``dist``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from pathlib import Path

from sbom import write_sbom
from version import read_version

ROOT = Path(__file__).resolve().parents[1]
DIST, WORK = ROOT / "dist", ROOT / "build/dist"
VERSION = read_version()
GLIBC = (2, 28)
ARCHES = ("x86_64", "aarch64")
PROBLEM = ROOT / "examples/traces/problem.yaml"
IMPORTS = (
    "import pipemorph, pipemorph_trainer, pipemorph_operator\n"
    "from pipemorph.planning import _planner\n"
    "from pipemorph_trainer import _engine\n"
    "assert _engine.version == pipemorph.__version__, _engine.version\n"
    "print('engine', _engine.version, 'with', _engine.crypto_library())\n"
    "try:\n"
    "    _engine.Engine(job='j', rank=0, secret=bytes(32), host='nowhere.invalid')\n"
    "except _engine.EngineError as error:\n"
    "    print('it raises', error)\n"
    "else:\n"
    "    raise SystemExit('no error of an invalid host')"
)


def main() -> int:
    steps = {
        "sdist": build_sdist,
        "wheels": build_wheels,
        "check": check_packages,
        "try": try_wheel,
        "chart": package_chart,
        "sbom": make_sbom,
    }
    parser = argparse.ArgumentParser(
        prog="dist", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(steps))
    parser.add_argument("--arch", nargs="+", choices=ARCHES, default=list(ARCHES))
    arguments = parser.parse_args()
    if unknown := [step for step in arguments.steps if step not in steps]:
        parser.error(f"found {', '.join(unknown)}; expected some of {', '.join(steps)}")
    DIST.mkdir(exist_ok=True)
    try:
        for name in arguments.steps or steps:
            start = time.monotonic()
            steps[name](arguments.arch)
            print(f"dist: {name} took {time.monotonic() - start:.0f} s", flush=True)
    except subprocess.CalledProcessError as error:
        print(f"dist: FAILED ({error.returncode}): {error.cmd[0]}, see above", file=sys.stderr)
        return 1
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path.relative_to(ROOT)}")
    return 0


def run(*command: str | Path, **variables: str) -> None:
    """Run a command in the environment with more ``variables``, and this Python's on PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **variables}
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT, env=environment)


def sdist() -> Path:
    return DIST / f"pipemorph-{VERSION}.tar.gz"


def find_wheels(arch: str) -> list[Path]:
    """Find the wheel for ``arch`` and this Python."""
    interpreter = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return sorted(DIST.glob(f"pipemorph-{VERSION}-{interpreter}-*_{arch}.whl"))


def wheel(arch: str) -> Path:
    if not (found := find_wheels(arch)):
        raise SystemExit(f"dist: there is no wheel for {arch} in {DIST}: run the step wheels")
    return found[-1]


def build_sdist(_arches: list[str]) -> None:
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST, ROOT)


def build_wheels(arches: list[str]) -> None:
    """Build from the unpacked sdist, which so is known to be whole."""
    source = WORK / "source"
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(sdist()) as archive:
        archive.extractall(source, filter="data")
    for arch in arches:
        _build_wheel(arch, source / f"pipemorph-{VERSION}")


def _build_wheel(arch: str, source: Path) -> None:
    tools, built = _compiler(arch), WORK / f"built-{arch}"
    shutil.rmtree(built, ignore_errors=True)
    # The tag and the suffix of modules are those of the target. Headers are those of this Python:
    # both processors have the same sizes of types.
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX")).replace(os.uname().machine, arch)
    settings = {
        "build-dir": WORK / f"cmake-{arch}",
        # GNU's strip has one processor. The linker strips.
        "install.strip": "false",
        "cmake.define.CMAKE_AR": tools / "ar",
        "cmake.define.CMAKE_RANLIB": tools / "ranlib",
    }
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", source),
        *(f"--config-settings={name}={value}" for name, value in settings.items()),
        *("--wheel-dir", built),
        CC=str(tools / "cc"),
        CXX=str(tools / "c++"),
        _PYTHON_HOST_PLATFORM=f"linux-{arch}",
        SETUPTOOLS_EXT_SUFFIX=suffix,
    )
    _name_platform(arch, *built.glob("*.whl"))


def _name_platform(arch: str, plain: Path) -> None:
    """Have auditwheel name the oldest platform that a wheel fits, and refuse a newer glibc."""
    for old in find_wheels(arch):
        old.unlink()
    # It takes names of platforms for its own processor only.
    run("auditwheel", "repair", "--plat", "auto", "--wheel-dir", DIST, plain)
    newest = max(
        (int(major), int(minor))
        for major, minor in re.findall(r"manylinux_(\d+)_(\d+)_", wheel(arch).name)
    )
    if newest > GLIBC:
        raise SystemExit(
            f"dist: {wheel(arch).name} needs glibc {newest}; expected {GLIBC} or older"
        )


def _compiler(arch: str) -> Path:
    """Make the commands of zig's compiler for ``arch``, which CMake takes as single words."""
    folder = WORK / f"zig-{arch}"
    folder.mkdir(parents=True, exist_ok=True)
    target = f" -target {arch}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    for name, options in {"cc": target, "c++": target, "ar": "", "ranlib": ""}.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {name}{options} "$@"\n')
        script.chmod(0o755)
    return folder


def check_packages(arches: list[str]) -> None:
    for arch in arches:
        run("auditwheel", "show", wheel(arch))
        _check_modules(wheel(arch), arch)
    run("twine", "check", "--strict", sdist(), *(wheel(arch) for arch in arches))


def _check_modules(path: Path, arch: str) -> None:
    """Print what the compiled modules of a wheel are for and need, where readelf is installed."""
    if shutil.which("readelf") is None:
        return
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                module = archive.extract(name, WORK / f"modules-{arch}")
                said = subprocess.run(
                    ["readelf", "--file-header", "--dynamic", module],
                    check=True,
                    capture_output=True,
                    text=True,
                ).stdout
                lines = [
                    line.partition(":")[2].strip()
                    for line in said.splitlines()
                    if "Machine:" in line or "(NEEDED)" in line
                ]
                print(f"{name}: {Path(module).stat().st_size / 1e6:.2f} MB, {', '.join(lines)}")


def try_wheel(_arches: list[str]) -> None:
    """Install this machine's wheel into an empty environment, and use it there."""
    empty = WORK / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    run(sys.executable, "-m", "venv", empty)
    run(empty / "bin/pip", "install", "--quiet", wheel(os.uname().machine))
    run(empty / "bin/pip", "list")
    run(empty / "bin/pipemorph", "--version")
    run(empty / "bin/python", "-I", "-c", IMPORTS)
    run(empty / "bin/pipemorph", "plan", PROBLEM, "--out", WORK / "plan.json")


def package_chart(_arches: list[str]) -> None:
    helm = os.environ.get("HELM") or shutil.which("helm")
    if helm is None:
        raise SystemExit("dist: found no helm for the chart: install it, or set HELM to its path")
    chart = ROOT / "charts/pipemorph-operator"
    run(helm, "lint", "--strict", chart)
    run(helm, "package", chart, "--destination", DIST)


def make_sbom(_arches: list[str]) -> None:
    write_sbom(
        DIST / f"pipemorph-{VERSION}.spdx.json",
        VERSION,
        sorted([sdist(), *DIST.glob(f"pipemorph-{VERSION}-*.whl")]),
        {name: ROOT / f"release/locks/{name}.txt" for name in ("operator", "trainer-torch")},
    )


if __name__ == "__main__":
    sys.exit(main())
