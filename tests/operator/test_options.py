"""Options of both processes: values out of range, and those that require others, are refused."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable

import pytest

from pipemorph_operator.__main__ import build_parser as operator_parser
from pipemorph_operator.ingest.__main__ import build_parser as ingest_parser
from pipemorph_operator.ingest.__main__ import main as ingest

OPERATOR = operator_parser, ["--lease=a/b", "--ingest-url=https://ingest"]
INGEST = ingest_parser, ["--lease=a/b"]


@pytest.mark.parametrize(
    ("process", "option", "least", "most"),
    [
        (OPERATOR, "--lease-seconds", 1, 3600),
        (OPERATOR, "--metrics-port", 0, 65535),
        (OPERATOR, "--workers", 1, None),
        (INGEST, "--lease-seconds", 1, 3600),
        (INGEST, "--port", 0, 65535),
        (INGEST, "--metrics-port", 0, 65535),
        (INGEST, "--max-connections", 1, None),
        (INGEST, "--max-connections-per-source", 1, None),
        (INGEST, "--planners", 1, None),
    ],
)
def test_numbers_are_taken_within_their_range_alone(
    process: tuple[Callable[[], argparse.ArgumentParser], list[str]],
    option: str,
    least: int,
    most: int | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser, needed = process
    name = option.removeprefix("--").replace("-", "_")
    for number in (least, 10**6 if most is None else most):
        assert getattr(parser().parse_args([*needed, f"{option}={number}"]), name) == number
    expected = f"of at least {least}" if most is None else f"from {least} to {most}"
    for text in (str(least - 1), "" if most is None else str(most + 1), "two", "1.5", "9" * 5000):
        with pytest.raises(SystemExit) as ended:
            parser().parse_args([*needed, f"{option}={text}"])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert f"argument {option}: {text[:30]!r}"[:-1] in said
        assert f" is not a whole number {expected}" in said


@pytest.mark.parametrize("text", ["ab", "/b", "a/", "a/b/c", ""])
@pytest.mark.parametrize("process", [OPERATOR, INGEST])
def test_names_of_objects_are_a_namespace_and_a_name(
    process: tuple[Callable[[], argparse.ArgumentParser], list[str]],
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser, needed = process
    with pytest.raises(SystemExit):
        parser().parse_args([*needed, f"--lease={text}"])
    said = capsys.readouterr().err
    assert f"argument --lease: {text!r} is not of the form NAMESPACE/NAME" in said
    assert parser().parse_args(needed).lease == ("a", "b")


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[", '[{"a": 1}, null]'])
def test_who_may_read_metrics_is_a_list_of_objects(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser, needed = OPERATOR
    with pytest.raises(SystemExit):
        parser().parse_args([*needed, f"--metrics-from={text}"])
    assert f"{text!r} is not a JSON list of objects" in capsys.readouterr().err
    found = parser().parse_args([*needed, '--metrics-from=[{"podSelector": {}}]'])
    assert found.metrics_from == ({"podSelector": {}},)
    assert parser().parse_args(needed).metrics_from == ()


def test_what_is_not_given_has_a_default() -> None:
    """The default without a host is all addresses."""
    parser, needed = INGEST
    found = parser().parse_args(needed)
    assert (found.planners, found.host, found.pods) == (2, None, None)
    assert (found.lease_seconds, found.plain_http) == (6, False)
    parser, needed = OPERATOR
    found = parser().parse_args(needed)
    assert (found.ingest_ca, found.namespace) == (None, [])


@pytest.mark.parametrize("given", ["", "--tls-cert=c", "--tls-key=k"])
def test_the_ingest_serves_without_tls_only_by_option(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--lease=a/b", *given.split()])
    monkeypatch.setattr(asyncio, "run", lambda work: work.close())
    with pytest.raises(SystemExit):
        ingest()
    assert "give --tls-cert and --tls-key, or --plain-http" in capsys.readouterr().err
    for enough in (["--plain-http"], ["--tls-cert=c", "--tls-key=k"]):
        monkeypatch.setattr(sys, "argv", ["x", "--lease=a/b", *enough])
        ingest()
