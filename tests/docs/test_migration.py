"""What the pages for users of other engines name on kvdock's side is there, under that name and with that value."""

import importlib
import inspect
import re
from pathlib import Path

import click
import kvdock
import pytest
from kvdock.cli import main
from kvdock.cli.inputs import read_options
from kvdock.errors import KVDockError
from kvdock.options import CacheOptions, Parallelism

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
PAGES = ("from-sglang.md", "from-vllm.md")
NAME = re.compile(r"`([^`]+)`")
PLAN = main.get_command(click.Context(main), "plan")
FLAGS = {flag: parameter.name for parameter in PLAN.params for flag in parameter.opts if flag.startswith("--")}
ARGUMENTS = frozenset(inspect.signature(kvdock.plan).parameters)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 1,
    "max_position_embeddings": 64,
}
OF_FLAGS = {"memory": "budget_bytes", "weights": "weights_bytes", "reserve": "reserve_bytes"}
"""Flags whose argument of `kvdock.plan` has a name of its own."""


def rows(text):
    """Return (heading of the section, cells) of every table with a column ``kvdock``, the second of three."""
    found, heading, in_table = [], "", False
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if len(cells) > 1 and cells[1] == "kvdock":
            in_table = True
        elif not cells:
            in_table = False
        elif in_table and set(line) - set("|-"):
            found.append((heading, cells))
    return found


def named(page, heading):
    """Return the names in the column ``kvdock`` of the tables under a heading."""
    cells = [cells[1] for under, cells in rows((HOW_TO / page).read_text("utf-8")) if under == heading]
    return [name for cell in cells for name in NAME.findall(cell)]


def stands_for(name):
    """Return what an option, a parallel size, an argument of `kvdock.plan` or a flag is called; ``None``: nothing is."""
    option, equals, value = name.partition("=")
    if name.startswith("--"):
        return FLAGS.get(name)
    if option in CacheOptions.__struct_fields__:
        if equals:
            read_options({"option": (f"{option}={value}",)})
        return option
    return name if name in Parallelism.__struct_fields__ or name in ARGUMENTS else None


def public(name, modules, made=None):
    """Return whether a dotted name is a public one of kvdock or its packages; `made`: instances, by class name."""
    first, *rest = name.removeprefix("kvdock.").split(".")
    home = next((module for module in modules if first in module.__all__), None)
    if home is None:
        return False
    here = (made or {}).get(first, getattr(home, first))
    for part in rest:
        if part.startswith("_") or not (hasattr(here, part) or part in getattr(here, "__annotations__", {})):
            return False
        here = getattr(here, part, None)
    return True


def is_api(name):
    return name.startswith("kvdock.") or name[0].isupper() or name == "hookimpl"


@pytest.mark.parametrize("page", PAGES)
def test_every_option_and_flag_of_the_tables_exists(page):
    names = [name for name in named(page, "Options") if not is_api(name)]
    assert len(set(names)) > 40
    assert [name for name in names if stands_for(name) is None] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_class_and_method_of_the_tables_is_public(page):
    pytest.importorskip("torch")
    modules = [kvdock, *(importlib.import_module(f"kvdock.{name}") for name in ("pools", "allocators", "requests"))]
    names = [name for heading in ("Options", "Terms", "Classes") for name in named(page, heading) if is_api(name)]
    assert len(set(names)) > 25
    cache = kvdock.build(kvdock.plan(LLAMA, budget_bytes=2**20, options={"context_length": 64}))
    assert [name for name in names if not public(name, modules, {"KVCache": cache})] == []
    assert [name for heading in ("Terms", "Classes") for name in named(page, heading) if not is_api(name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_an_option_and_the_flag_beside_it_are_one(page):
    for heading, cells in rows((HOW_TO / page).read_text("utf-8")):
        names = [name for name in NAME.findall(cells[1]) if heading == "Options" and not is_api(name)]
        flags = [stands_for(name).removeprefix("no_") for name in names if name.startswith("--")]
        options = [stands_for(name) for name in names if not name.startswith("--")]
        if flags:
            assert {OF_FLAGS.get(flag, flag) for flag in flags} <= {*options, "max_length"}, cells[1]


@pytest.mark.parametrize("page", PAGES)
def test_every_row_says_something_on_each_side(page):
    found = rows((HOW_TO / page).read_text("utf-8"))
    assert [cells for _, cells in found if len(cells) != 3 or not cells[0] or not cells[1]] == []
    assert [cells for _, cells in found if cells[1] != "–" and not NAME.search(cells[1])] == []


def test_a_name_that_is_not_there_is_found():
    assert stands_for("mem_fraction") is None
    assert stands_for("--mem-fraction-static") is None
    assert stands_for("--mem-fraction") == stands_for("mem_fraction_static") == "mem_fraction_static"
    with pytest.raises(KVDockError):
        stands_for("hybrid_swa=never")
    assert public("CachePlan.limits", [kvdock])
    assert not public("CachePlan.limit", [kvdock])
    assert not public("BlockPoolOfOthers", [kvdock])


def test_rows_are_those_of_tables_with_our_column():
    text = (
        "## A\n\n| X | kvdock | differs |\n|---|---|---|\n| `a`, b | `c` | |\n\n| one | two |\n|---|---|\n| 1 | 2 |\n"
    )
    assert rows(text) == [("A", ["`a`, b", "`c`", ""])]
