"""The C++ suite, as the product is compiled. :mod:`test_engine_sanitizers` runs it instrumented."""

import pytest
import suite_build as suite

FEW, MANY = 10_000, 100_000
"""Random schedules. With ``MANY`` or more the simulation also tries each fault at every step of
four schedules, not at every eighth of one. `make soak` asks for far more by the variable that
:func:`suite_build.play_schedules` names."""


@pytest.mark.timeout(1800)
def test_simulation():
    suite.play_schedules("plain", FEW)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_simulation_of_many_schedules():
    suite.play_schedules("plain", MANY)


@pytest.mark.timeout(1800)
def test_all_but_the_simulation():
    suite.build_and_run("plain", f"-{suite.SIMULATION}", f"-{suite.TIMED}", least=200)


@pytest.mark.times
@pytest.mark.timeout(1800)
def test_links_answer_in_time():
    suite.build_and_run("plain", suite.TIMED, least=4)
