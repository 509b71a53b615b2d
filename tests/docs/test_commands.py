"""Every documented command runs, and prints what its page says that it prints."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvdock.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COLUMNS = "110"
"""Width at which the drawings of the pages were made."""
LEFT_OUT = "…"
"""A line of a page that stands for any number of lines."""


def steps(text):
    """Return (command, lines that it prints) of all console blocks; other tools' commands are left out."""
    found = []
    for block in BLOCK.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.replace("\\\n", " ").splitlines()
            command = command.partition("    #")[0].strip()
            if command.startswith("kvdock ") and not command.startswith("kvdock run"):
                found.append((command, [line.rstrip() for line in lines if line.strip()]))
    return found


def run(command):
    """Run a command as a shell would: arguments, and output to a file."""
    arguments, _, target = command.partition(" > ")
    result = CliRunner().invoke(main, shlex.split(arguments)[1:], env={"COLUMNS": COLUMNS})
    assert result.exit_code in (0, 1), result.stderr
    assert result.exit_code == 0 or arguments.startswith("kvdock diff")
    if target:
        Path(target.strip()).write_text(result.stdout)
        return []
    return [line.rstrip() for line in result.stdout.splitlines() if line.strip()]


def matches(printed, said):
    """Return whether the lines are those of the page, ``…`` standing for any of them."""
    if LEFT_OUT not in said:
        return printed == said
    pieces = "\n".join(said).split(LEFT_OUT)
    pattern = ".*".join(re.escape(piece.strip("\n")) for piece in pieces)
    return re.fullmatch(pattern, "\n".join(printed), re.DOTALL) is not None


@pytest.mark.parametrize("page", [p for p in PAGES if steps(p.read_text("utf-8"))], ids=lambda p: p.name)
def test_the_commands_of_a_page_print_what_it_says(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    for command, said in steps(page.read_text("utf-8")):
        printed = run(command)
        if said:
            assert matches(printed, said), f"$ {command}\n" + "\n".join(printed)


def test_commands_are_found_with_what_they_print():
    text = "```console\n$ make\n$ kvdock plan a \\\n    --tp 8    # why\none\n\ntwo\n$ kvdock diff a b > c\n```\n"
    assert steps(text) == [("kvdock plan a      --tp 8", ["one", "two"]), ("kvdock diff a b > c", [])]


def test_lines_may_be_left_out():
    assert matches(["a", "b", "c"], ["a", LEFT_OUT, "c"])
    assert matches(["a", "b"], [LEFT_OUT])
    assert not matches(["a", "b"], ["a"])
    assert not matches(["a", "b"], [LEFT_OUT, "c"])
