"""The README names every flag that there is and every one that is refused, and no command that isn't there."""

from __future__ import annotations

import re
from argparse import ArgumentParser

from megatron_asyncpp.__main__ import COMMANDS
from megatron_asyncpp.arguments import add_arguments
from megatron_asyncpp.refusals import REFUSALS
from tests.harness.forkserver import ROOT

README = (ROOT / "README.md").read_text()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_every_refusal_is_listed() -> None:
    assert [row.flag for row in REFUSALS if row.flag not in flat(README)] == []


def test_every_flag_has_a_row() -> None:
    parser = add_arguments(ArgumentParser(add_help=False))
    rows = re.findall(r"^\| `(--asyncpp-[a-z-]+)", README, re.MULTILINE)
    assert sorted(rows) == sorted(action.option_strings[0] for action in parser._actions)


def test_every_command_is_shown_and_every_picture_is_there() -> None:
    shown = set(re.findall(r"-m megatron_asyncpp ([a-z]+)", README))
    assert shown == COMMANDS.keys() - {"study"}  # the quickstart calls it
    for picture in re.findall(r"!\[[^]]*\]\(([^)]*)\)", README):
        assert (ROOT / picture).is_file()
