"""Kernels as they are launched, for compiling ahead of time: types of the arguments and values of the constants."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvdock.kernels import triton_slots


class Specimen(NamedTuple):
    """One form of a kernel: `signature` types the arguments (``*i64``, ``i32``), `constants` gives the rest values.

    An argument of which a constant is given has no type, whether the kernel calls it a constant or specialises on it. What
    is no argument of the kernel is an option of the compiler (``num_warps``).
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]


def all_specimens() -> tuple[Specimen, ...]:
    """Return the specimens of all kernels."""
    from kvdock.kernels import triton_specimens_rows as rows

    return (*SLOT_SPECIMENS, *rows.ROW_SPECIMENS, *rows.BLOCK_SPECIMENS)


def _extends() -> Iterator[Specimen]:
    arguments = ("prefix_lens", "seq_lens", "last_loc", "new_pages")
    for lens, page_size in (("*i64", 1), ("*i64", 3), ("*i64", 64), ("*i32", 128)):
        signature = {**dict.fromkeys(arguments, lens), "out": "*i64", "count": "i32", "total": "i32"}
        constants = {"PAGE_SIZE": page_size, "CHUNK": triton_slots.CHUNK}
        yield Specimen(f"extend {lens} page {page_size}", triton_slots.extend_kernel, signature, constants)


def _decodes() -> Iterator[Specimen]:
    arguments = ("seq_lens", "last_loc", "new_pages")
    for lens, page_size in (("*i64", 1), ("*i64", 3), ("*i32", 64)):
        signature = {**dict.fromkeys(arguments, lens), "out": "*i64", "batch": "i32", "count": "i32"}
        constants = {"PAGE_SIZE": page_size, "CHUNK": triton_slots.CHUNK}
        yield Specimen(f"decode {lens} page {page_size}", triton_slots.decode_kernel, signature, constants)


def _tables() -> Iterator[Specimen]:
    dense = {"column_stride": 1, "CHUNK": triton_slots.CHUNK}
    table = {"table": "*i32", "row_stride": "i32"}
    places = {"rows": "*i64", "columns": "*i64", "slots": "*i64", "n": "i32"}
    yield Specimen("write_rows", triton_slots.write_rows_kernel, {**table, **places}, dense)
    spans = {**table, "spans": "*i64"}
    yield Specimen("write_spans", triton_slots.write_spans_kernel, {**spans, "slots": "*i64"}, dense)
    for page_size in (1, 3, 64):
        signature, constants = {**spans, "out": "*i64"}, {**dense, "PAGE_SIZE": page_size}
        yield Specimen(f"read_pages page {page_size}", triton_slots.read_pages_kernel, signature, constants)


def _translations() -> Iterator[Specimen]:
    for loc, page_size in (("*i64", 1), ("*i64", 3), ("*i32", 64)):
        signature = {"mapping": "*i64", "loc": loc, "out": "*i64", "pages": "i32", "n": "i32"}
        constants = {"stride": 1, "PAGE_SIZE": page_size, "CHUNK": triton_slots.CHUNK}
        yield Specimen(f"translate {loc} page {page_size}", triton_slots.translate_kernel, signature, constants)


SLOT_SPECIMENS = (*_extends(), *_decodes(), *_tables(), *_translations())
"""The kernels of `kvdock.kernels.triton_slots`."""
