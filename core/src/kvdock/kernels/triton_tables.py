# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Slots of many views in one launch: cleared, moved within each view, or copied from one view to its partner.

A kernel learns where views lie from a table in device memory, a line a view. It is written once for a tuple of views
and kept as long as they live, so that nothing waits for the device but the first call.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvdock.kernels.triton_forms import Form, ceil_div, form_of, launch, power_of_two, shared_unit, steps, tile
from kvdock.kernels.triton_rows import in_row

MOVED_AT_ONCE = 1024
"""Slots of a move of which one program holds some columns in registers, at least `_LEAST_WORDS`: a sector of memory."""
_HELD_WORDS, _LEAST_WORDS = 2048, 4
_SCRATCH_NBYTES = 64 << 20
_LINE = tl.constexpr(16)
_UNITS, _UNIT, _BEFORE, _PADDED = tl.constexpr(12), tl.constexpr(13), tl.constexpr(14), tl.constexpr(15)


@triton.jit
def _places(line, loc, places, i, inside, element, WORD: tl.constexpr, UNIT: tl.constexpr, FLAT: tl.constexpr):
    """Addresses of the words of slots: of the pages ``loc[i]`` and `places` in them, or of the slots ``loc[i]``."""
    STEPS: tl.constexpr = 2 if UNIT == 16 else 1
    base = tl.multiple_of(tl.load(line).to(tl.pointer_type(WORD)), UNIT)
    page_size = tl.load(line + 3)
    slot = tl.load(loc + i, mask=inside, other=0).to(tl.int64)
    if places is None:
        page, place = slot // page_size, slot % page_size
    else:
        page, place = slot, tl.load(places + i, mask=inside, other=0).to(tl.int64)
    at = page * (tl.load(line + 1) * STEPS) + place * (tl.load(line + 2) * STEPS)
    within = in_row(element, tl.load(line + 4), tl.load(line + 5), STEPS, FLAT)
    return base + (at[:, None] + within[None, :])


@triton.jit
def _scratch_places(line, scratch, n, i, element, WORD: tl.constexpr, UNIT: tl.constexpr):
    """Addresses of the words of rows that lie in `scratch`, view after view."""
    PER_16: tl.constexpr = 2 if UNIT == 16 else 16 // UNIT
    base = tl.multiple_of(scratch.to(tl.pointer_type(WORD), bitcast=True), 16)
    at = (tl.load(line + _BEFORE) * n + i * tl.load(line + _PADDED)) * PER_16
    return base + (at[:, None] + element[None, :])


@triton.jit
def _copy_view(
    line, target_loc, source_loc, source_places, scratch, n, parts,
    WORD: tl.constexpr, UNIT: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy one tile of one view."""
    STEPS: tl.constexpr = 2 if UNIT == 16 else 1
    tile_number = tl.program_id(0).to(tl.int64)
    i = tile_number // parts * ROWS + tl.arange(0, ROWS)
    element = tile_number % parts * WIDTH + tl.arange(0, WIDTH)
    mask = (i < n)[:, None] & (element < tl.load(line + _UNITS) * STEPS)[None, :]
    if source_loc is not None:
        source = _places(line + 6, source_loc, source_places, i, i < n, element, WORD, UNIT, FLAT)
        rows = tl.load(source, mask=mask, other=0)
    elif scratch is not None:
        rows = tl.load(_scratch_places(line, scratch, n, i, element, WORD, UNIT), mask=mask, other=0)
    else:
        rows = tl.zeros([ROWS, WIDTH], WORD)
    # One program may write what another thread of it reads.
    tl.debug_barrier()
    if target_loc is not None:
        tl.store(_places(line, target_loc, None, i, i < n, element, WORD, UNIT, FLAT), rows, mask=mask)
    else:
        tl.store(_scratch_places(line, scratch, n, i, element, WORD, UNIT), rows, mask=mask)


@triton.jit(do_not_specialize=["n", "parts"])
def views_kernel(
    table, target_loc, source_loc, source_places, scratch, n, parts,
    UNITS: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy the slots of each view of `table`: from its partner, from `scratch` or zeros; to itself or `scratch`."""
    line = table + tl.program_id(1) * _LINE
    unit = tl.load(line + _UNIT)
    if UNITS & 16:  # noqa: SIM102 - settled when compiling
        if unit == 16:
            _copy_view(line, target_loc, source_loc, source_places, scratch, n, parts, tl.int64, 16, FLAT, ROWS, WIDTH)
    if UNITS & 8:  # noqa: SIM102 - settled when compiling
        if unit == 8:
            _copy_view(line, target_loc, source_loc, source_places, scratch, n, parts, tl.int64, 8, FLAT, ROWS, WIDTH)
    if UNITS & 4:  # noqa: SIM102 - settled when compiling
        if unit == 4:
            _copy_view(line, target_loc, source_loc, source_places, scratch, n, parts, tl.int32, 4, FLAT, ROWS, WIDTH)
    if UNITS & 2:  # noqa: SIM102 - settled when compiling
        if unit == 2:
            _copy_view(line, target_loc, source_loc, source_places, scratch, n, parts, tl.int16, 2, FLAT, ROWS, WIDTH)
    if UNITS & 1:  # noqa: SIM102 - settled when compiling
        if unit == 1:
            _copy_view(line, target_loc, source_loc, source_places, scratch, n, parts, tl.int8, 1, FLAT, ROWS, WIDTH)


class Table(NamedTuple):
    """Where views and their partners lie: `lines` in device memory, and what a launch must know of all."""

    lines: torch.Tensor
    units: int
    """The units that occur, added."""
    is_flat: bool
    words: int
    """Words of the longest row."""
    padded_nbytes: int
    """Bytes of a slot's rows in scratch."""


class Tables:
    """The tables of tuples of views, each kept as long as its views live and lie where they did."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], tuple[Table, tuple[weakref.ref[torch.Tensor], ...], list[int]]] = {}

    def find(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Table | None:
        """Return the table of views and their partners; ``None`` where rows of one lie as no kernel here reads them."""
        views = (*targets, *sources)
        key = tuple(map(id, views))
        kept = self._kept.get(key)
        if kept is not None:
            table, alive, addresses = kept
            if all(ref() is view for ref, view in zip(alive, views, strict=True)) and addresses == _addresses(views):
                return table
        found = _table(targets, sources)
        if found is not None:
            forget = lambda _, kept=self._kept: kept.pop(key, None)  # noqa: E731
            self._kept[key] = found, tuple(weakref.ref(view, forget) for view in views), _addresses(views)
        return found


def _addresses(views: Sequence[torch.Tensor]) -> list[int]:
    return [view.data_ptr() for view in views]


def _table(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Table | None:
    forms = [(form_of(target), form_of(source)) for target, source in zip(targets, sources, strict=True)]
    found = [(form, partner) for form, partner in forms if form is not None and partner is not None]
    if len(found) < len(forms):
        return None
    lines, before, words, units = [], 0, 0, 0
    for target, source, (form, partner) in zip(targets, sources, found, strict=True):
        unit = shared_unit([(target, form), (source, partner)])
        padded = ceil_div(form.nbytes, 16)
        count = form.nbytes // unit
        lines.append([*_line(target, form, unit), *_line(source, partner, unit), count, unit, before, padded])
        before, words, units = before + padded, max(words, count * steps(unit)), units | unit
    flat = all(form.is_flat and partner.is_flat for form, partner in found)
    return Table(torch.tensor(lines, dtype=torch.int64).to(targets[0].device), units, flat, words, 16 * before)


def _line(view: torch.Tensor, form: Form, unit: int) -> tuple[int, ...]:
    page_stride, slot_stride, run, run_stride = form.distances(unit)
    return view.data_ptr(), page_stride, slot_stride, form.page_size, max(run, 1), run_stride


def launch_table(
    table: Table,
    n: int,
    *,
    target_loc: torch.Tensor | None = None,
    source_loc: torch.Tensor | None = None,
    source_places: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> None:
    """Copy `n` slots of every view of a table in one launch; targets that are sources too are not safe."""
    if n and table.words:
        _launch(table, n, tile(table.words), target_loc, source_loc, source_places, scratch)


def launch_move(table: Table, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
    """Copy at most `MOVED_AT_ONCE` slots within every view in one launch.

    A program owns some columns of one view and holds them of all sources before it writes the first target.
    """
    n = tgt_loc.shape[0]
    if n and table.words:
        _launch(table, n, move_tile(n, table.words), tgt_loc, src_loc, None, None)


def move_tile(n: int, words: int) -> tuple[int, int]:
    """Return the rows, not below `n`, and the words a row that a program of a move holds at once."""
    height = power_of_two(n)
    return height, min(power_of_two(words), max(_HELD_WORDS // max(height, 4), _LEAST_WORDS))


def fits_scratch(table: Table, n: int) -> bool:
    """Return whether `n` slots of every view take little memory while they are moved."""
    return n * table.padded_nbytes <= _SCRATCH_NBYTES


def launch_long_move(table: Table, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
    """Copy any number of slots within every view in two launches, through memory as large as what is moved."""
    n = tgt_loc.shape[0]
    scratch = table.lines.new_empty(n * table.padded_nbytes // 8)
    launch_table(table, n, source_loc=src_loc, scratch=scratch)
    launch_table(table, n, target_loc=tgt_loc, scratch=scratch)


def _launch(table: Table, n: int, shape: tuple[int, int], *arguments: torch.Tensor | None) -> None:
    height, width = shape
    parts = ceil_div(table.words, width)
    # Only the first of a grid's numbers may be above 65,535, and a move of long states has more parts of rows.
    grid = ceil_div(n, height) * parts, table.lines.shape[0]
    launch(
        views_kernel, grid, table.lines, table.lines, *arguments, n, parts,
        UNITS=table.units, FLAT=table.is_flat, ROWS=height, WIDTH=width,
    )  # fmt: skip
