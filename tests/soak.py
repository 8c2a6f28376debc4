"""Tests that need hours to be worth something: ``make soak``.

``make test`` plays some fault schedules, fuzzes for seconds and draws the same examples each time.
Here the same tests get far more of each, drawn anew, and tests marked ``soak`` run, which ``make
test`` skips. Run it before a change to anything it covers is called done. The table goes to
build/soak/table.md as well.

    python tests/soak.py                   everything, about three hours on two cores
    python tests/soak.py fuzz mutants      some of it
    PIPEMORPH_SOAK_FACTOR=8 make soak      eight times as much of what can be drawn
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time

from gate import parts

OUT = parts.ROOT / "build" / "soak"
PATIENT = ("-o", "timeout=3600")
FACTOR = float(os.environ.get("PIPEMORPH_SOAK_FACTOR", "1"))
FAULTS = "tests/trainer/runs/test_fault_hour.py"


def times(n: int) -> str:
    return str(max(1, round(n * FACTOR)))


PARTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "simulation": (
        ["tests/engine/test_engine_cpp.py", "-k", "test_simulation", "--tier", "full"],
        {"PIPEMORPH_SIM_SCHEDULES": times(1_000_000)},
    ),
    "sanitizers": (
        ["tests/engine/test_engine_sanitizers.py", "-k", "test_simulation"],
        {"PIPEMORPH_SIM_SCHEDULES": times(50_000)},
    ),
    "mutants": (
        ["tests/engine/test_engine_mutants.py"],
        {"PIPEMORPH_SIM_SCHEDULES": times(20_000)},
    ),
    "fuzz": (["tests/engine/test_engine_fuzz.py"], {"PIPEMORPH_FUZZ_SECONDS": times(300)}),
    "examples": (
        ["tests/core", "tests/operator", "--tier", "test"],
        {"PIPEMORPH_TEST_EXAMPLES": times(10)},
    ),
    "trainer examples": (
        ["tests/trainer", "-m", "hypothesis"],
        {"PIPEMORPH_TEST_EXAMPLES": times(10)},
    ),
    "faults": ([FAULTS, "--tier", "soak"], {"PIPEMORPH_FAULT_SECONDS": times(3600)}),
    "long tests": (["--tier", "soak", f"--ignore={FAULTS}"], {}),
}
"""Arguments of pytest for each part, and its amounts."""


def main(names: list[str]) -> int:
    if unknown := sorted(set(names) - set(PARTS)):
        print(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    ran = []
    for name in names or PARTS:
        selected, amounts = PARTS[name]
        print(f"{time.strftime('%H:%M:%S')} {name}: {' '.join(selected)} {amounts}", flush=True)
        part = parts.pytest(name, OUT, *selected, *PATIENT, shown=True, env=amounts)
        part.run()
        ran.append(part.result())
    verdict = parts.judge(ran, OUT, "make soak", *PATIENT)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=parts.ROOT,
        check=False,
        capture_output=True,
        text=True,
    ).stdout.strip()
    head = f"{time.strftime('%Y-%m-%d')}, {commit}, {os.cpu_count()} cores, {platform.machine()}"
    amounts = "\n".join(
        f"{name}: {', '.join(f'{k}={v}' for k, v in PARTS[name][1].items()) or 'tests marked soak'}"
        for name in names or PARTS
    )
    table = f"{head}\n\n{amounts}\n\n{verdict.table()}"
    (OUT / "table.md").write_text(f"```\n{table}\n```\n")
    print(f"\n{table}")
    return 0 if verdict.good else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
