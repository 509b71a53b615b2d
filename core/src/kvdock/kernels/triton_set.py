"""The kernel set in Triton, for every device that Triton serves: one launch where the torch form has several.

What its kernels cannot read as it lies (rows of runs within runs, tensors of the host) is left to the torch form.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvdock import dtypes
from kvdock.dtypes import DType
from kvdock.kernels import triton_slots
from kvdock.kernels.reference import ReferenceKernels, check_values
from kvdock.kernels.spans import Ints
from kvdock.kernels.triton_blocks import Format, Rows, launch_decode, launch_encode
from kvdock.kernels.triton_floats import ELEMENTS
from kvdock.kernels.triton_forms import ceil_div, is_interpreted
from kvdock.kernels.triton_rows import Side, dense, launch_copy, launch_pair, side_of
from kvdock.kernels.triton_tables import (
    MOVED_AT_ONCE,
    Tables,
    fits_scratch,
    launch_long_move,
    launch_move,
    launch_table,
)

_DECODED = frozenset({torch.float32, torch.bfloat16, torch.float16})


class TritonKernels(ReferenceKernels):
    """Stores, gathers, moves, block formats and page arithmetic as Triton launches.

    Slots must exist: unlike the torch form, nothing refuses one that does not. Moves, clearings and commits of the same
    views are told where they lie once, at the first call, which waits for the device.
    """

    def __init__(self) -> None:
        self._tables = Tables()

    def store(self, view: torch.Tensor, loc: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values[i]`` to slot ``loc[i]`` in one launch."""
        target, n = _side(view, loc), loc.shape[0]
        if target is None:
            super().store(view, loc, values)
        else:
            launch_copy(target, _checked(target, values, n), n, view)

    def store_kv(
        self, k_view: torch.Tensor, v_view: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write keys and values of the same slots in one launch."""
        keys, values = _side(k_view, loc), _side(v_view, loc)
        if keys is None or values is None:
            super().store_kv(k_view, v_view, loc, k, v)
        else:
            n = loc.shape[0]
            launch_pair((keys, _checked(keys, k, n)), (values, _checked(values, v, n)), n)

    def store_mla(self, view: torch.Tensor, loc: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Write `latent` to the first columns and `rope` to the last ones in one launch."""
        heads, lora, rest = view.shape[2:-1], latent.shape[-1], rope.shape[-1]
        first, last = view[..., :lora], view[..., view.shape[-1] - rest :]
        self.store_kv(first, last, loc, latent.reshape(-1, *heads, lora), rope.reshape(-1, *heads, rest))

    def gather(self, view: torch.Tensor, loc: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows at `loc`, in one launch."""
        source = _side(view, loc.reshape(-1))
        if source is None:
            return super().gather(view, loc)
        rows = torch.empty((loc.numel(), *view.shape[2:]), dtype=view.dtype, device=view.device)
        launch_copy(dense(rows), source, loc.numel(), view)
        return rows.view(*loc.shape, *view.shape[2:])

    def move(self, views: Sequence[torch.Tensor], tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots within each view in one launch; of very many slots in two for each 64 MiB.

        One launch holds all sources of some columns in registers, so it has room for so many; two go through memory.
        """
        table = self._tables.find(views, views) if _are_here(views) else None
        if table is None:
            super().move(views, tgt_loc, src_loc)
        elif tgt_loc.shape[0] <= MOVED_AT_ONCE:
            launch_move(table, tgt_loc.contiguous(), src_loc.contiguous())
        elif len(views) == 1 or fits_scratch(table, tgt_loc.shape[0]):
            launch_long_move(table, tgt_loc.contiguous(), src_loc.contiguous())
        else:
            half = len(views) // 2
            self.move(views[:half], tgt_loc, src_loc)
            self.move(views[half:], tgt_loc, src_loc)

    def clear(self, views: Sequence[torch.Tensor], loc: torch.Tensor) -> None:
        """Zero the slots `loc` of all views in one launch."""
        only = _side(views[0], loc) if len(views) == 1 else None
        table = self._tables.find(views, views) if only is None and _are_here(views) else None
        if only is not None:
            launch_copy(only, None, loc.shape[0], only.view)
        elif table is not None:
            launch_table(table, loc.shape[0], target_loc=loc.contiguous())
        else:
            super().clear(views, loc)

    def commit_steps(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rows: torch.Tensor,
        steps: torch.Tensor,
        loc: torch.Tensor,
    ) -> None:
        """Copy ``source[rows[i], steps[i]]`` to slot ``loc[i]`` of the target, for all pairs in one launch."""
        sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        table = self._tables.find(targets, sources) if _are_here([*sources, *targets]) else None
        if table is None:
            super().commit_steps(pairs, rows, steps, loc)
        else:
            places = {"source_loc": rows.contiguous(), "source_places": steps.contiguous()}
            launch_table(table, loc.shape[0], target_loc=loc.contiguous(), **places)

    def store_blocks(
        self,
        data: torch.Tensor,
        scales: torch.Tensor,
        loc: torch.Tensor,
        values: torch.Tensor,
        block_format: DType,
        global_scale: torch.Tensor | None = None,
    ) -> None:
        """Encode floats and store elements and scales in one launch."""
        sides, form = (_flat(data, loc), _flat(scales, loc)), _format(block_format)
        rows = Rows(values.shape[1:-1].numel(), values.shape[-1])
        fits = values.shape[0] == loc.shape[0] and rows.fit(form, data, scales)
        if sides[0] is None or sides[1] is None or not fits:
            super().store_blocks(data, scales, loc, values, block_format, global_scale)
        else:
            launch_encode(_flat_rows(values), rows, sides[0], sides[1], form, global_scale)

    def load_blocks(
        self,
        data: torch.Tensor,
        scales: torch.Tensor,
        loc: torch.Tensor | None,
        block_format: DType,
        dtype: torch.dtype,
        global_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read and decode the slots `loc`, or all, in one launch."""
        sides, form = (_flat(data, loc), _flat(scales, loc)), _format(block_format)
        rows = Rows(data.shape[2:-1].numel(), data.shape[-1] * 8 // block_format.bits)
        if sides[0] is None or sides[1] is None or not rows.fit(form, data, scales):
            return super().load_blocks(data, scales, loc, block_format, dtype, global_scale)
        lead = data.shape[:2] if loc is None else loc.shape
        direct = dtype if dtype in _DECODED else torch.float32
        out = torch.empty((lead.numel(), rows.heads * rows.width), dtype=direct, device=data.device)
        launch_decode(out, rows, sides[0], sides[1], form, global_scale)
        return out.view(*lead, *data.shape[2:-1], rows.width).to(dtype)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        new_pages: torch.Tensor,
        page_size: int,
        extend_num_tokens: int,
    ) -> torch.Tensor:
        """Return the slots of an extend, in one launch."""
        form = triton_slots.alloc_extend if _is_here(last_loc) else super().alloc_extend
        return form(prefix_lens, seq_lens, last_loc, new_pages, page_size, extend_num_tokens)

    def alloc_decode(
        self, seq_lens: torch.Tensor, last_loc: torch.Tensor, new_pages: torch.Tensor, page_size: int
    ) -> torch.Tensor:
        """Return each request's next slot, in one launch."""
        form = triton_slots.alloc_decode if _is_here(last_loc) else super().alloc_decode
        return form(seq_lens, last_loc, new_pages, page_size)

    def write_rows(self, table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, slots: torch.Tensor) -> None:
        """Write ``slots[i]`` to ``table[rows[i], columns[i]]`` in one launch."""
        form = triton_slots.write_rows if _is_here(table) else super().write_rows
        form(table, rows, columns, slots)

    def write_spans(self, table: torch.Tensor, rows: Ints, starts: Ints, ends: Ints, slots: torch.Tensor) -> None:
        """Write `slots`, span after span, to ``table[rows[i], starts[i]:ends[i]]`` in one launch."""
        form = triton_slots.write_spans if _is_here(table) else super().write_spans
        form(table, rows, starts, ends, slots)

    def read_pages(self, table: torch.Tensor, rows: Ints, firsts: Ints, lasts: Ints, page_size: int) -> torch.Tensor:
        """Return the numbers of the pages ``firsts[i] … lasts[i]`` of each row, in one launch."""
        form = triton_slots.read_pages if _is_here(table) else super().read_pages
        return form(table, rows, firsts, lasts, page_size)

    def translate(self, mapping: torch.Tensor, loc: torch.Tensor, page_size: int = 1) -> torch.Tensor:
        """Return the slots to which `mapping` sends `loc`, in one launch."""
        form = triton_slots.translate if _is_here(mapping) else super().translate
        return form(mapping, loc, page_size)

    def quantize_blocks(self, values: torch.Tensor, dtype: str, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bytes and scales, in one launch."""
        block_format = _quantised(dtype, block)
        if not _is_here(values) or block_format is None or values.shape[-1] % (8 // block_format.bits):
            return super().quantize_blocks(values, dtype, block)
        lead, rows = values.shape[:-1], Rows(1, values.shape[-1])
        width = rows.width * block_format.bits // 8
        data = torch.empty((lead.numel(), width), dtype=torch.uint8, device=values.device)
        blocks = ceil_div(rows.width, block)
        scales = data.new_empty((lead.numel(), blocks), dtype=block_format.scale_dtype)
        launch_encode(
            _flat_rows(values.reshape(lead.numel(), rows.width)), rows, dense(data), dense(scales), block_format, None
        )
        return data.view(*lead, width), scales.view(*lead, blocks)

    def dequantize_blocks(self, data: torch.Tensor, scales: torch.Tensor, dtype: str, block: int) -> torch.Tensor:
        """Return the values as float32, in one launch."""
        block_format = _quantised(dtype, block)
        if not _is_here(data) or block_format is None:
            return super().dequantize_blocks(data, scales, dtype, block)
        lead, width = data.shape[:-1], data.shape[-1] * 8 // block_format.bits
        out = torch.empty((lead.numel(), width), dtype=torch.float32, device=data.device)
        elements = dense(_flat_rows(data.reshape(lead.numel(), data.shape[-1])))
        factors = dense(_flat_rows(scales.reshape(lead.numel(), ceil_div(width, block))))
        launch_decode(out, Rows(1, width), elements, factors, block_format, None)
        return out.view(*lead, width)

    def copy_rows(
        self, tgt_view: torch.Tensor, tgt_loc: torch.Tensor, src_view: torch.Tensor, src_loc: torch.Tensor
    ) -> None:
        """Copy slots between two views in one launch, where one of them is on the device and the other is or is pinned."""
        home = tgt_view if _is_here(tgt_view) else src_view
        if not (_is_here(home) and _is_reachable(tgt_view, home) and _is_reachable(src_view, home)):
            super().copy_rows(tgt_view, tgt_loc, src_view, src_loc)
            return
        target, source = side_of(tgt_view, tgt_loc.to(home.device)), side_of(src_view, src_loc.to(home.device))
        if target is None or source is None:
            super().copy_rows(tgt_view, tgt_loc, src_view, src_loc)
        else:
            launch_copy(target, source, tgt_loc.shape[0], home)


def _is_here(tensor: torch.Tensor) -> bool:
    """Return whether kernels run where `tensor` is."""
    return tensor.device.type not in ("cpu", "meta") or (tensor.is_cpu and is_interpreted())


def _are_here(views: Sequence[torch.Tensor]) -> bool:
    return len(views) > 0 and all(map(_is_here, views))


def _is_reachable(view: torch.Tensor, home: torch.Tensor) -> bool:
    return view.device == home.device or (view.is_cpu and view.is_pinned())


def _side(view: torch.Tensor, loc: torch.Tensor) -> Side | None:
    return side_of(view, loc) if _is_here(view) else None


def _flat(view: torch.Tensor, loc: torch.Tensor | None) -> Side | None:
    """Return the slots `loc` of a view with contiguous rows, all slots in order without `loc`; else ``None``."""
    side = _side(view, view.new_empty(0) if loc is None else loc.reshape(-1))
    if side is None or not side.form.is_flat:
        return None
    return side._replace(loc=None) if loc is None else side


def _checked(target: Side, values: torch.Tensor, n: int) -> Side:
    """Return `values` as `n` dense rows for `target`; refuses what `check_values` refuses."""
    check_values(target.view, n, values)
    return dense(values)


def _flat_rows(values: torch.Tensor) -> torch.Tensor:
    """Return rows as ``[n, elements]``, each contiguous."""
    side = dense(values)
    flat = values if side.form.is_flat else values.contiguous()
    return flat.reshape(values.shape[0], values.shape[1:].numel())


def _format(block_format: DType) -> Format:
    return Format(block_format.bits, block_format.element, block_format.block, block_format.scale)


def _quantised(dtype: str, block: int) -> Format | None:
    """Return the format of `quantize_blocks` for a data type; ``None`` for one that the kernels have not."""
    found = dtypes.find(dtype)
    if found.bits == 4:  # a byte of two blocks would have two writers
        return None if block % 2 else Format(4, found.element, block, found.scale)
    return Format(8, found.name, block, "float32") if found.name in ELEMENTS else None
