"""``--help`` of ``pipemorph`` and of the plugin ``kubectl pipemorph``: which commands they list."""

from __future__ import annotations

import re

import pytest

from pipemorph.cli import COMMAND_GROUPS, COMMANDS, PLUGIN, main


def read_help(prog: str, capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"], prog=prog)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_commands_are_listed_below_the_heading_of_their_group(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = re.findall(r"(?m)^  ([a-z ]+):$|^    (\w+)\b", read_help("pipemorph", capsys))
    expected = [each for heading, group in COMMAND_GROUPS.items() for each in (heading, *group)]
    assert [heading or command for heading, command in listed] == expected


def test_the_plugin_lists_the_commands_that_read_jobs_of_a_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = read_help(PLUGIN, capsys)
    assert re.findall(r"(?m)^    (\w+)\b", text) == ["explain", "top", "watch", "timeline"]
    assert "train:" not in text
    assert "usage: kubectl pipemorph top" in read_help(PLUGIN, capsys, "top")


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"explain", "top", "watch", "timeline"}))
def test_the_plugin_names_the_program_of_other_commands(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"], prog=PLUGIN) == 2
    assert capsys.readouterr().err == (
        f"kubectl pipemorph {name}: reads no job of a cluster; use pipemorph {name}\n"
    )
