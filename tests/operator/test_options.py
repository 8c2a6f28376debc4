"""Options of both processes that say nothing without others are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from pipemorph_operator.__main__ import main as operator
from pipemorph_operator.ingest.__main__ import main as ingest


@pytest.mark.parametrize(
    ("main", "given"),
    [
        (operator, "--ingest-url=https://ingest --node-conditions"),
        (operator, "--ingest-url=https://ingest --node-taint=NoSchedule"),
        (ingest, "--plain-http --rack-label=rack"),
    ],
)
def test_marks_and_racks_need_the_memory_of_the_network(
    main: Callable[[], None],
    given: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--lease=a/b", *given.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith("--fabric-map")
