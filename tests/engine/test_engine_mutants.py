"""What the protocol simulation is worth: take out what makes delivery exactly once, and it fails.

Each mutant is the real source with one rule removed, linked with the objects of the suite that
:mod:`test_engine_cpp` builds. (The fence's rules are the paths' and not a class's: `sim_test.cpp`
takes them away in the model.)
"""

import os
import pathlib
import re
import subprocess
from dataclasses import dataclass

import pytest
import test_engine_cpp as suite
from gate import always_red

BUILD = suite.ROOT / "build" / "engine-tests"
COMPILER = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1"]
SCHEDULES = 2_000

pytestmark = [pytest.mark.slow, pytest.mark.untimed]


@dataclass(frozen=True)
class Mutant:
    unit: str
    """What is compiled anew, below csrc/."""
    changed: str
    """What is edited: the unit itself or a header that it includes."""
    edits: tuple[tuple[str, str], ...]
    noticed: str
    """What the simulation must say."""


INBOX, BITMAP = "protocol/inbox.cpp", "wire/bitmap.hpp"
MUTANTS = {
    "as it is": Mutant(INBOX, INBOX, (), ""),
    "bitmap: every chunk counts as the first": Mutant(
        INBOX,
        BITMAP,
        (
            ("if (byte & mask) return false;", ""),
            ("return bits_[i / 8] >> (i % 8) & 1;", "(void)i; return false;"),
        ),
        "another content|became whole twice|now at grant|no progress",
    ),
    "inbox: chunks of an earlier use of the slot are taken": Mutant(
        INBOX,
        INBOX,
        (
            ("if (h.serial < s.serial) {", "if (false) {"),
            ("h.serial != s.serial || s.direction", "s.direction"),
        ),
        "another content|fits no slot|became whole twice|now at grant|slot is still in use",
    ),
    "inbox: a slot can be released twice": Mutant(
        INBOX,
        INBOX,
        (("if (s.serial != serial || s.state != State::held) return std::nullopt;", ""),),
        "released twice",
    ),
    "inbox: sizes that grow for ever add up": Mutant(
        INBOX,
        INBOX,
        (("std::max(bytes, places[i].together)", "bytes"),),
        "four times the memory",
    ),
    "outbox: what the receiver lacks is not sent again": Mutant(
        "protocol/outbox.cpp",
        "protocol/outbox.cpp",
        (("if (!r.has(i)) again_.emplace_back(m, i);", ""),),
        "no progress",
    ),
    "outbox: a report is taken for every epoch of its path": Mutant(
        "protocol/outbox.cpp",
        "protocol/outbox.cpp",
        (("c.epoch != report.epoch || ", ""),),
        "fits no slot|now at grant|another content",
    ),
    "control: frames that were lost with the connection stay lost": Mutant(
        "protocol/reliable.cpp",
        "protocol/reliable.cpp",
        (("    next_to_write_ = 0;\n    return true;", "    return true;"),),
        "a gap in the frames|no progress|nothing comes to rest",
    ),
}


@pytest.fixture(scope="module")
def objects() -> list[pathlib.Path]:
    """The simulation's objects and the library, as the plain suite is built."""
    suite.build(*suite.BUILDS["plain"])
    folder = BUILD / "CMakeFiles/engine_tests.dir/tests/engine"
    found = [folder / "main.cpp.o", *sorted(folder.glob("sim_*.cpp.o"))]
    assert len(found) > 3, f"no objects of the simulation in {folder}"
    return [*found, BUILD / "libengine_core.a"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_notices(name, objects, tmp_path):
    mutant = MUTANTS[name]
    source = (suite.ROOT / "csrc" / mutant.changed).read_text()
    for old, new in mutant.edits:
        assert source.count(old) == 1, f"{mutant.changed} has no longer exactly one {old!r}"
        source = source.replace(old, new)
    changed = tmp_path / mutant.changed
    changed.parent.mkdir(parents=True)
    changed.write_text(source)
    unit = changed if mutant.unit == mutant.changed else suite.ROOT / "csrc" / mutant.unit
    # What is compiled here stands before the library, so the linker takes it from here.
    suite.run(
        *(*COMPILER, f"-I{tmp_path}", f"-I{suite.ROOT / 'csrc'}", unit, *objects),
        *("-lpthread", "-o", tmp_path / "simulation"),
    )
    done = subprocess.run(
        [tmp_path / "simulation", "sim_random"],
        env={"PIPEMORPH_SIM_SCHEDULES": str(SCHEDULES)} | os.environ,
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    with always_red():
        if not mutant.edits:
            assert done.returncode == 0, done.stdout
            return
        assert done.returncode == 1, f"the mutant lives: {SCHEDULES} schedules\n{done.stdout}"
        assert re.search(rf"FAILED  sim_random.*schedule \d+: .*({mutant.noticed})", done.stdout), (
            done.stdout
        )
