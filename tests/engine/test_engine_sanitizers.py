"""The C++ suite under the sanitizers: AddressSanitizer with UBSan, and ThreadSanitizer.

What a schedule of the simulation does depends on its number alone, so the plain build checks all
of the protocol's rules (:mod:`test_engine_cpp`). The sanitizers play the first of the same
schedules again, at twice the cost, for what rules do not show; from a few thousand on, more
schedules reach no line or branch more. ThreadSanitizer sees only whether the threads of the
simulation, each of which plays schedules of its own, share anything.
"""

import pytest
import suite_build as suite

SCHEDULES = {"asan": 10_000, "tsan": 500}

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_simulation(name):
    suite.play_schedules(name, SCHEDULES[name])


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_but_the_simulation(name):
    suite.build_and_run(name, f"-{suite.SIMULATION}", f"-{suite.TIMED}", least=200)
