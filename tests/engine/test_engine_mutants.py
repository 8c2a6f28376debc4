"""Mutants that the protocol simulation must fail: without what makes delivery exactly once, or long
links fast.

Each mutant is the real source with one rule removed, linked with the objects of the suite that
:mod:`suite_build` builds.
"""

import functools
import os
import pathlib
import re
import shlex
import subprocess
from dataclasses import dataclass

import pytest
import suite_build as suite
from gate import AlwaysRed, always_red

CSRC = suite.ROOT / "csrc"
COMPILER = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++20"]
SCHEDULES = 20_000
"""A run ends at the first schedule that notices: 1,375 for the mutant that lives the longest."""
ALIVE_SCHEDULES = 2_000
"""Schedules of the unchanged source: `test_engine_cpp.py` plays all of them."""

pytestmark = pytest.mark.full


@dataclass(frozen=True)
class Mutant:
    unit: str
    """Unit that is compiled again, below csrc/."""
    changed: str
    """File that is edited: the unit itself or a header that it includes."""
    edits: tuple[tuple[str, str], ...]
    noticed: str
    """Failure that the simulation must print."""
    test: str = "sim_random"
    """Test that notices."""


INBOX, BITMAP = "protocol/inbox.cpp", "wire/bitmap.hpp"
CORE, PATHS, PATH = "protocol/link_core.cpp", "protocol/path_set.cpp", "protocol/path_state.cpp"
FLOW, WATCHDOG = "protocol/flow.cpp", "protocol/watchdog.cpp"
PEER = "protocol/peer_watch.cpp"
NOT_TWICE = "another content|fits no slot|became whole twice|now at grant|not the sender's"


def core(old: str, new: str, noticed: str, unit: str = CORE, test: str = "sim_random") -> Mutant:
    return Mutant(unit, unit, ((old, new),), noticed, test)


def slow(old: str, new: str, unit: str = CORE) -> Mutant:
    """A long link does not reach its rate, or has more under way than is good for it."""
    return core(old, new, r"then >= 0\.9|longer >= 0\.9|slot_bytes", unit, "sim_long")


def peer(old: str, new: str = "") -> Mutant:
    """A peer is given up too early or too late, or sought too often."""
    return core(old, new, "peer_watch_test", PEER, "peer_")


def stuck(old: str, new: str = "", unit: str = CORE) -> Mutant:
    """A link that gets nothing through goes on for ever."""
    return core(old, new, "the link is not dead|no progress", unit, "sim_faults")


MUTANTS = {
    "link_core: what gets nothing through is no reason to end": stuck(
        "if (stuck && (without_path", "if (false && (without_path"
    ),
    "link_core: to have no path is no reason to end": stuck(
        "clock - carried_ns_ > give_up_ns_;", "false;"
    ),
    "outbox: to send a chunk again is progress": stuck(
        "    m->watched_ns = clock_ns;\n    ChunkTask task;",
        "    m->watched_ns = clock_ns;\n    m->losses = 0;\n    ChunkTask task;",
        "protocol/outbox.cpp",
    ),
    "outbox: what was lost last counts alone": stuck(
        "if (m->losses++ == 0) m->first_loss_ns",
        "m->losses++; m->first_loss_ns",
        "protocol/outbox.cpp",
    ),
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
        "released twice|granted while it was granted",
    ),
    "inbox: sizes that grow for ever add up": Mutant(
        INBOX,
        INBOX,
        (("std::max(bytes, places[i].together)", "bytes"),),
        "four times the requested memory",
    ),
    "outbox: what the receiver lacks is not sent again": Mutant(
        "protocol/outbox.cpp",
        "protocol/outbox.cpp",
        (("            resend_queue_.emplace_back(m, i);\n            ++m->resend_count;\n", ""),),
        "no progress",
    ),
    "outbox: a report is taken for every epoch of its path": Mutant(
        "protocol/outbox.cpp",
        "protocol/outbox.cpp",
        (("c.epoch != report.epoch || ", ""),),
        "fits no slot|now at grant|another content",
    ),
    "fence: answered while its own connection may still write": core(
        "(p.current && p.machine.epoch() <= fence.epoch) ||", "", NOT_TWICE, PATHS
    ),
    "fence: what is missing moves before the receiver has answered": core(
        "        send(fence);\n",
        "        BitmapFrame guess{path, epoch, {}};\n"
        "        for (const uint64_t id : fence.messages) guess.reports.push_back({id, 0, {}});\n"
        "        out_.fenced(guess);\n        send(fence);\n",
        NOT_TWICE,
    ),
    "fence: not answered where nothing remains to report": core(
        "    // Sent also without reports: the peer waits for it before it dials again.\n"
        "    send(answer);",
        "    if (!answer.reports.empty()) send(answer);",
        "no progress|nothing comes to rest",
    ),
    "fence: the peer's is forgotten, so a late connection is taken": core(
        "fenced_ = std::max(fenced_, epoch);",
        "(void)epoch;",
        "has given up is taken|does not carry",
        PATH,
    ),
    "paths: a replaced connection is not retired": core(
        "if (const auto before = paths_.replace(path)) actions_.retire",
        "if (const auto before = paths_.replace(path); before && false) actions_.retire",
        "no progress|nothing comes to rest",
    ),
    "paths: a replaced connection is not fenced": core(
        "if (paths_.forget_replaced(path, epoch))\n            send_fence(path, epoch);",
        "if (paths_.forget_replaced(path, epoch))\n            continue;",
        "no progress",
    ),
    "paths: a lost one is not fenced": core(
        "    lose(path, why, now);\n    send_fence(path, epoch);\n    actions_.dial",
        "    lose(path, why, now);\n    actions_.dial",
        "no progress",
    ),
    "sockets: all of a thread carry": core(
        "    return !is_standby(path);", "    return true;", "stands by", PATHS
    ),
    "rails: sockets carry along with them": core(
        "if (without_rail_since_ns_ == 0) return false;", "", "while a rail carries", PATHS
    ),
    "rails: sockets never carry in their place": core(
        "return fell_back_ || now - without_rail_since_ns_ > kHeadStart;",
        "(void)now;\n    return false;",
        "no progress",
        PATHS,
    ),
    "rails: a suspect one carries": core(
        "if (suspicious && state_ == PathState::up)",
        "if (suspicious && false)",
        "does not carry",
        PATH,
    ),
    "paths: one that the peer has given up carries until it is retired": core(
        "if (!is_current(path, epoch) || !carries(p)) return false;",
        "if (!is_current(path, epoch) || !p.machine.carries()) return false;",
        "does not carry",
        PATHS,
    ),
    "rails: a barred one carries until its thread knows": core(
        "? quarantined(p) || defers_to_faster_rails",
        "? defers_to_faster_rails",
        "does not carry",
        PATHS,
    ),
    "rails: a barred one counts as carrying": core(
        "return carries(p) && !quarantined(p); });",
        "return carries(p); });",
        "counts as carrying",
        PATHS,
    ),
    "rails: a barred one is not given up": core(
        "actions_.fail.push_back({i, why});", "", "still connected"
    ),
    "rails: an offer without an answer stands for ever": core(
        "now - paths_[i].offered_ns >= kConnectLimitNs",
        "now - paths_[i].offered_ns < 0",
        "an offer stands",
        PATHS,
    ),
    "rails: one that the peer gave up meanwhile is connected": core(
        'return paths_[path].machine.is_fenced(epoch) ? "given up by the peer" : "";',
        "(void)epoch;\n    return {};",
        "has given up is taken",
    ),
    "lease: a message may take the slot as well": core(
        "    found->second.free.pop_back();\n",
        "",
        "another content|fits no slot|released twice|no progress|was leased that is not",
        "protocol/outbox.cpp",
    ),
    "lease: of the last slot": core(
        "c.second.free.size() > c.second.promised + 1;",
        "c.second.free.size() > c.second.promised;",
        "no progress",
        "protocol/outbox.cpp",
    ),
    "lease: what is not sent stays leased": core(
        "    out_.granted(slot);\n    if (out_.has",
        "    (void)slot;\n    if (out_.has",
        "credits|nothing comes to rest",
    ),
    "shared memory: a segment is shown once": core(
        "    if (path == 0) segments_to_offer_.assign("
        "unmapped_segments_.begin(), unmapped_segments_.end());",
        "",
        "no progress|nothing comes to rest|credits",
    ),
    "window: it does not grow with what was delivered": slow(
        "peaks_[0] = std::max(peaks_[0], rate);", "", FLOW
    ),
    "window: a rate that was once is believed for ever": slow(
        "peaks_ = {0.0, peaks_[0]};", "", FLOW
    ),
    "window: a round trip that was once is believed for ever": slow(
        "|| (draining_ && chunk.quiet)) {", ") {", FLOW
    ),
    "window: a longer way is noticed late": slow(
        "draining_ = draining_ || recent_rtt_ns_ > kFarBeyond * least_rtt_ns_;", "", FLOW
    ),
    "window: larger than the memory for it": core(
        "const uint64_t most = std::max<uint64_t>(kLeastChunks, most_ / chunk_bytes_);",
        "const uint64_t most = uint64_t{1} << 40;",
        "more is under way",
        FLOW,
    ),
    "window: what was delivered still counts": core(
        "    in_flight_ -= chunk.bytes;\n", "", "no progress", FLOW
    ),
    "window: what a lost connection had under way still counts": core(
        "    p.flow = Flow(chunk_bytes_, share_of_rail());\n",
        "    if (p.machine.times_up() == 0) p.flow = Flow(chunk_bytes_, share_of_rail());\n",
        "no progress",
        PATHS,
    ),
    "window: rails do not share": slow(
        "(!defers_to_emptier_rails(p) && p.flow.has_room(now));", "p.flow.has_room(now);", PATHS
    ),
    "watchdog: nothing is ever late": core(
        "if (clock_ns - m->watched_ns > patience) out.push_back(m);",
        "(void)patience;\n        (void)clock_ns;",
        "no progress",
        "protocol/outbox.cpp",
    ),
    "watchdog: only one path is ever checked for a message": core(
        "    message.watched_ns = watchdog_.clock_ns();\n    paths_.give_up",
        "    message.watched_ns = int64_t{1} << 60;\n    paths_.give_up",
        "no progress",
    ),
    "watchdog: time does not pass": core(
        "clock_ns_ += std::clamp<int64_t>(now - last_frame_ns_, 0, kMostSilence);",
        "(void)kMostSilence;",
        "no progress",
        WATCHDOG,
    ),
    "peers: a connection works before anything has come": peer("    works_ = false;\n}", "}"),
    "peers: no connection works before something new comes": peer(
        "is_new || now - since_ns_ >= kSecond", "is_new"
    ),
    "peers: one that came back is missed as long as before": peer("    down_since_ns_ = 0;\n"),
    "peers: each loss begins anew": peer("if (down_since_ns_ == 0) down", "down"),
    "peers: one that cuts is dialled at once": peer("    if (!works_) back_off(now);\n"),
    "peers: pauses between dials stay the same": peer("backoff_ns_ * 2", "backoff_ns_"),
    "peers: pauses between dials stay long": peer("    backoff_ns_ = 0;\n"),
    "peers: one is sought twice": peer("    if (reconnecting_) return false;\n"),
    "peers: one that listens again may be gone": peer(
        "        refused_since_ns_ = 0;\n    else", "        (void)0;\n    else"
    ),
    "peers: one that was found again may be gone": peer(
        "    refused_since_ns_ = 0;\n    works_", "    works_"
    ),
    "peers: a pause counts": peer(
        "{&last_frame_ns_, &down_since_ns_, &refused_since_ns_}", "{&last_frame_ns_}"
    ),
    "slots: none are added": slow(
        "    t.growing = static_cast<uint32_t>(slots);\n", "    return;\n"
    ),
    "slots: more are added than there is memory for": core(
        "2 * have.bytes, flight_bytes_,", "2 * have.bytes,", "beyond the memory"
    ),
    "control: a report overtakes the acknowledgement of what it lacks": core(
        "    collect();\n    stream_.send(frame);",
        "    stream_.send(frame);",
        "chunks wait to be sent|" + NOT_TWICE,
    ),
    "control: frames that were lost with the connection stay lost": Mutant(
        "protocol/reliable.cpp",
        "protocol/reliable.cpp",
        (("    next_to_write_ = 0;\n    return true;", "    return true;"),),
        "a gap in the frames|no progress|nothing comes to rest",
    ),
}


@dataclass(frozen=True)
class Simulation:
    """Objects that mutants are linked with."""

    objects: tuple[pathlib.Path, ...]
    """Objects of the tests without sockets, as the plain suite is built."""
    library: pathlib.Path
    folder: pathlib.Path
    """Folder of objects that are compiled once for all mutants."""

    @functools.cached_property
    def headers(self) -> tuple[str, ...]:
        """Options that include the headers of all units, compiled once."""
        header = self.folder / "units.hpp"
        header.write_text("".join(f"#include {name}\n" for name in HEADERS))
        precompiled = f"{header}.gch"
        suite.run(*COMPILER, "-O0", f"-I{CSRC}", "-x", "c++-header", header, "-o", precompiled)
        return ("-include", str(header))


HEADERS = ("<algorithm>", '"protocol/link_core.hpp"', '"protocol/peer_watch.hpp"')


@pytest.fixture(scope="module")
def simulation(tmp_path_factory) -> Simulation:
    build = suite.build("plain")
    folder = build / "CMakeFiles/engine_tests.dir/tests/engine"
    alone = [folder / f"{name}.cpp.o" for name in ("main", "peer_watch_test")]
    found = [*alone, *sorted(folder.glob("sim_*.cpp.o"))]
    assert len(found) > 4, f"no objects of the simulation in {folder}"
    return Simulation(tuple(found), build / "libengine_core.a", tmp_path_factory.mktemp("headers"))


def build_mutant(mutant: Mutant, simulation: Simulation, folder: pathlib.Path) -> pathlib.Path:
    """The simulation with a mutant in it."""
    source = (CSRC / mutant.changed).read_text()
    for old, new in mutant.edits:
        if source.count(old) != 1:
            raise AlwaysRed(
                f"{mutant.changed} has {source.count(old)} times, expected once: {old!r}; "
                "edit it in MUTANTS as the source was edited"
            )
        source = source.replace(old, new)
    changed = folder / mutant.changed
    changed.parent.mkdir(parents=True)
    changed.write_text(source)
    compiled, program = folder / "unit.o", folder / "simulation"
    if mutant.unit == mutant.changed:
        # Inline code comes from the objects of the suite, which are optimised.
        options, linked = ("-O0", *simulation.headers), [*simulation.objects, compiled]
        unit = changed
    else:
        options, linked = ("-O1",), [compiled, *simulation.objects]
        unit = CSRC / mutant.unit
    suite.run(*COMPILER, *options, f"-I{folder}", f"-I{CSRC}", "-c", unit, "-o", compiled)
    # What is compiled here stands before the library, so the linker takes it from here.
    suite.run(*COMPILER, *linked, simulation.library, "-lpthread", "-ldl", "-o", program)
    return program


def run_simulation(program: pathlib.Path, test: str, schedules: int) -> tuple[int, str]:
    """Exit status and output of the tests whose names contain ``test``."""
    done = subprocess.run(
        [program, test],
        env={"PIPEMORPH_SIM_SCHEDULES": str(schedules)} | os.environ,
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    return done.returncode, done.stdout


@pytest.mark.timeout(1800)
def test_the_unchanged_source_passes(simulation, tmp_path):
    """Compiled and linked as mutants are."""
    program = build_mutant(Mutant(INBOX, INBOX, (), ""), simulation, tmp_path)
    for test in sorted({mutant.test for mutant in MUTANTS.values()}):
        status, said = run_simulation(program, test, ALIVE_SCHEDULES)
        assert status == 0, said


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_notices(name, simulation, tmp_path):
    mutant = MUTANTS[name]
    program = build_mutant(mutant, simulation, tmp_path)
    status, said = run_simulation(program, mutant.test, SCHEDULES)
    with always_red():
        assert status == 1, f"the mutant lives: {SCHEDULES} schedules\n{said}"
        where = r"schedule \d+: .*" if mutant.test == "sim_random" else ""
        assert re.search(rf"FAILED  {mutant.test}.*{where}({mutant.noticed})", said), said
