"""The kernels of rows, tables and block formats as caches of usual models launch them, for compiling ahead of time."""

from collections.abc import Iterator
from typing import Any

from kvdock import dtypes
from kvdock.kernels.triton_blocks import Format, Rows, decode_kernel, encode_kernel
from kvdock.kernels.triton_floats import ELEMENTS
from kvdock.kernels.triton_forms import WORDS, ceil_div, steps, tile
from kvdock.kernels.triton_rows import copy_kernel, pair_kernel
from kvdock.kernels.triton_specimens import Specimen
from kvdock.kernels.triton_tables import MOVED_AT_ONCE, move_tile, views_kernel

_POINTERS = {1: "*i8", 2: "*i16", 4: "*i32", 8: "*i64", 16: "*i64"}
_ROWS = {"8 heads of 128 in bf16": (2048, 16), "latents": (1152, 16), "656-byte rows": (656, 16), "odd bytes": (3, 1)}
"""Bytes of a row and of its unit."""
_PAIRS = {
    "keys and values": ((2048, 16), (2048, 16)),
    "latents of 512 and 64": ((1024, 16), (128, 16)),
    "index keys and scales": ((128, 16), (4, 4)),
}


def _sides(*names: str) -> dict[str, str]:
    return {f"{name}_{distance}": "i32" for name in names for distance in ("page_stride", "slot_stride")}


def _copies() -> Iterator[Specimen]:
    for what, (nbytes, unit) in _ROWS.items():
        height, width = tile(nbytes // unit * steps(unit))
        pointer = _POINTERS[unit]
        signature = {"target": pointer, "n": "i32", "units": "i32", **_sides("t", "s")}
        pages = {"T_PAGE_SIZE": 64, "S_PAGE_SIZE": 64, "STEPS": steps(unit), "ROWS": height, "WIDTH": width}
        flat = dict.fromkeys(("t_run", "t_run_stride", "s_run", "s_run_stride"), 0) | {"T_FLAT": True, "S_FLAT": True}
        both = {**signature, "source": pointer, "target_loc": "*i64", "source_loc": "*i32"}
        yield Specimen(f"copy {what}", copy_kernel, both, {**pages, **flat})
        store = {**pages, **flat, "source_loc": None, "S_PAGE_SIZE": 1}
        yield Specimen(f"store {what}", copy_kernel, {k: v for k, v in both.items() if k != "source_loc"}, store)
        gather = {**pages, **flat, "target_loc": None, "T_PAGE_SIZE": 1}
        yield Specimen(f"gather {what}", copy_kernel, {k: v for k, v in both.items() if k != "target_loc"}, gather)
        clear = {**pages, **flat, "source": None, "source_loc": None}
        yield Specimen(f"clear {what}", copy_kernel, {**signature, "target_loc": "*i64"}, clear)
        runs = {"t_run": "i32", "t_run_stride": "i32", "s_run": "i32", "s_run_stride": "i32"}
        yield Specimen(
            f"copy runs of {what}", copy_kernel, {**both, **runs}, {**pages, "T_FLAT": False, "S_FLAT": False}
        )


def _pairs() -> Iterator[Specimen]:
    for what, halves in _PAIRS.items():
        signature, constants = {"loc": "*i64", "n": "i32"}, dict[str, Any]()
        words = [nbytes // unit * steps(unit) for nbytes, unit in halves]
        for name, (_, unit), count in zip("ab", halves, words, strict=True):
            pointer = _POINTERS[unit]
            signature |= {f"{name}_view": pointer, f"{name}_rows": pointer, f"{name}_units": "i32"}
            signature |= {**_sides(name), f"{name}_row_stride": "i32"}
            constants |= dict.fromkeys((f"{name}_run", f"{name}_run_stride"), 0)
            constants |= dict.fromkeys((f"{name}_row_run", f"{name}_row_run_stride"), 0)
            of_half = {"PAGE_SIZE": 64, "FLAT": True, "ROW_FLAT": True, "STEPS": steps(unit), "WIDTH": tile(count)[1]}
            constants |= {f"{name.upper()}_{key}": value for key, value in of_half.items()}
        shared = {"A_PARTS": ceil_div(words[0], tile(words[0])[1]), "ROWS": min(tile(count)[0] for count in words)}
        yield Specimen(f"store {what}", pair_kernel, signature, {**constants, **shared})


def _tables() -> Iterator[Specimen]:
    all_units = sum(WORDS)
    rows = {"keys and values": (16, 128, True), "states": (16, 512, True), "all units": (all_units, 128, False)}
    for what, (units, words, flat) in rows.items():
        constants: dict[str, Any] = {"UNITS": units, "FLAT": flat}
        none = dict.fromkeys(("target_loc", "source_loc", "source_places", "scratch"))
        for name, given in {
            "clear": {"target_loc": "*i64"},
            "commit": {"target_loc": "*i64", "source_loc": "*i64", "source_places": "*i32"},
            "collect": {"source_loc": "*i64", "scratch": "*i64"},
            "spread": {"target_loc": "*i64", "scratch": "*i64"},
        }.items():
            absent = {key: value for key, value in none.items() if key not in given}
            yield _table(f"{name} {what}", given, {**constants, **absent}, tile(words))
        for n in (1, 64, MOVED_AT_ONCE):
            given, absent = {"target_loc": "*i64", "source_loc": "*i64"}, {"source_places": None, "scratch": None}
            yield _table(f"move {n} slots of {what}", given, {**constants, **absent}, move_tile(n, words))


def _table(name: str, given: dict[str, str], constants: dict[str, Any], shape: tuple[int, int]) -> Specimen:
    signature = {"table": "*i64", **given, "n": "i32", "parts": "i32"}
    return Specimen(name, views_kernel, signature, {**constants, "ROWS": shape[0], "WIDTH": shape[1]})


def _formats() -> Iterator[tuple[str, Format, Rows]]:
    for name in ("float4_e2m1fn_x2", "nvfp4", "mxfp8"):
        found = dtypes.find(name)
        block_format = Format(found.bits, found.element, found.block, found.scale)
        yield f"{name} heads of 128", block_format, Rows(8, 128)
        yield f"{name} latents", block_format, Rows(1, 576)
    for name in ELEMENTS:
        yield f"{name} index keys", Format(8, name, 128, "float32"), Rows(1, 128)
    yield "rows with a short last block", Format(8, "float8_e4m3fn", 128, "float32"), Rows(1, 192)
    yield "4-bit index keys", Format(4, "float4_e2m1fn_x2", 32, "float8_e8m0fnu"), Rows(1, 128)


def _blocks() -> Iterator[Specimen]:
    for what, block_format, rows in _formats():
        wide_scale = block_format.scale == "float32"
        shared = {"data": "*i8", "scales": "*fp32" if wide_scale else "*i8", "n": "i32", **_sides("d", "s")}
        constants: dict[str, Any] = {**rows.constants, **block_format.constants(), "IS_BF16": True}
        places = {"data_loc": "*i64", "scales_loc": "*i64"}
        if wide_scale:
            places, alone = {}, {"data_loc": None, "scales_loc": None, "D_PAGE_SIZE": 1, "S_PAGE_SIZE": 1}
            constants |= alone
        else:
            constants |= {"D_PAGE_SIZE": 64, "S_PAGE_SIZE": 64}
        factor = {"global_scale": "*fp32"} if block_format.scale == "float8_e4m3fn" else {}
        constants |= {} if factor else {"global_scale": None}
        common = {**shared, **places, **factor}
        encoded = {**common, "values": "*i16", "value_stride": "i32"}
        yield Specimen(f"encode {what}", encode_kernel, encoded, {**constants, **block_format.encoder()})
        yield Specimen(f"decode {what}", decode_kernel, {**common, "out": "*i16"}, constants)


ROW_SPECIMENS = (*_copies(), *_pairs(), *_tables())
"""The kernels of `kvdock.kernels.triton_rows` and `kvdock.kernels.triton_tables`."""
BLOCK_SPECIMENS = tuple(_blocks())
"""The kernels of `kvdock.kernels.triton_blocks`."""
