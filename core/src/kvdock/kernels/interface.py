"""What a kernel set does: the only device work that pools, allocators and request pools ask for.

Buffers come as views ``[pages, page_size, *shape]`` with any strides for the first two dimensions; slots
are int64 or int32 and address ``(slot // page_size, slot % page_size)``. All offsets are 64-bit. No
method waits for the device: sizes that depend on data are given by the host.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from kvdock.dtypes import DType
from kvdock.errors import BuildError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvdock.cache import KVCache

    Ints = NDArray[np.int64]


class Kernels(abc.ABC):
    """One device's kernel set; `kvdock.kernels.reference` is the torch form that defines the results.

    The slots that one call writes are different ones, but for slot 0, the padding, whose bytes nobody reads. Of another
    slot that is named twice parts of either row may stay, since several programs write a row: no method looks for it,
    allocators hand out no slot twice, and a caller names slot 0 for what is not to be kept. Sources may repeat.
    """

    @abc.abstractmethod
    def store(self, view: torch.Tensor, loc: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values[i]`` to slot ``loc[i]`` of `view`.

        Raises:
            SlotError: another number of rows than of slots, or rows of another type or length than the view's.
        """

    @abc.abstractmethod
    def store_kv(
        self, k_view: torch.Tensor, v_view: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write keys and values of the same slots, in one launch where the device allows."""

    @abc.abstractmethod
    def store_mla(self, view: torch.Tensor, loc: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Write `latent` to the first columns and `rope` to the last ones of each slot of `view`."""

    @abc.abstractmethod
    def gather(self, view: torch.Tensor, loc: torch.Tensor) -> torch.Tensor:
        """Return ``[n, *shape]``, the rows of `view` at the slots `loc`."""

    def store_blocks(
        self,
        data: torch.Tensor,
        scales: torch.Tensor,
        loc: torch.Tensor,
        values: torch.Tensor,
        block_format: DType,
        global_scale: torch.Tensor | None = None,
    ) -> None:
        """Write floats ``values[i]`` to slot ``loc[i]``: elements to the view `data`, a scale a block to `scales`.

        `kvdock.kernels.microscaling` defines the bytes. A device that encodes and stores in one launch overrides this.
        """
        from kvdock.kernels import microscaling

        elements, steps = microscaling.encode(values, block_format, global_scale)
        self.store_kv(data, scales, loc, elements, steps)

    def load_blocks(
        self,
        data: torch.Tensor,
        scales: torch.Tensor,
        loc: torch.Tensor | None,
        block_format: DType,
        dtype: torch.dtype,
        global_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``[n, …, width]`` in `dtype`, the values of the slots `loc`; of every slot, in pages, without `loc`."""
        from kvdock.kernels import microscaling

        if loc is not None:
            data, scales = self.gather(data, loc), self.gather(scales, loc)
        return microscaling.decode(data, scales, block_format, dtype, global_scale)

    @abc.abstractmethod
    def move(self, views: Sequence[torch.Tensor], tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots within each view; every source is read before any target is written."""

    def clear(self, views: Sequence[torch.Tensor], loc: torch.Tensor) -> None:
        """Zero the slots `loc` of each view; a device that zeroes many views in one launch overrides this."""
        for view in views:
            self.store(view, loc, view.new_zeros((loc.shape[0], *view.shape[2:])))

    def store_step(self, view: torch.Tensor, rows: torch.Tensor, step: int, values: torch.Tensor) -> None:
        """Write ``values[i]`` to ``view[rows[i], step]``; `view` ``[rows, steps, *shape]`` may have any strides.

        Steps may lie over each other, as the windows of a convolution do.
        """
        self.store(view[:, step].unsqueeze(1), rows, values)

    def commit_steps(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rows: torch.Tensor,
        steps: torch.Tensor,
        loc: torch.Tensor,
    ) -> None:
        """For each pair copy ``source[rows[i], steps[i]]`` to slot ``loc[i]`` of the target.

        Sources are as in `store_step`; a device that copies all pairs in one launch overrides this.
        """
        row, step = rows.long(), steps.long()
        for source, target in pairs:
            self.store(target, loc, self.gather(source, row * source.shape[1] + step))

    @abc.abstractmethod
    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        new_pages: torch.Tensor,
        page_size: int,
        extend_num_tokens: int,
    ) -> torch.Tensor:
        """Return the int64 slots ``[extend_num_tokens]`` of an extend; `new_pages` are page numbers in order."""

    @abc.abstractmethod
    def alloc_decode(
        self, seq_lens: torch.Tensor, last_loc: torch.Tensor, new_pages: torch.Tensor, page_size: int
    ) -> torch.Tensor:
        """Return the int64 slot of each request's new token; the n-th request at a page bound takes page n."""

    @abc.abstractmethod
    def write_rows(self, table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, slots: torch.Tensor) -> None:
        """Write ``slots[i]`` to ``table[rows[i], columns[i]]``."""

    def write_spans(self, table: torch.Tensor, rows: Ints, starts: Ints, ends: Ints, slots: torch.Tensor) -> None:
        """Write `slots`, span after span, to ``table[rows[i], starts[i]:ends[i]]``; spans are numbers on the host.

        A device that writes all spans in one launch overrides this.
        """
        from kvdock.kernels import spans

        places = spans.places(rows, starts, ends, table.device)
        self.write_rows(table, *places, slots)

    def read_pages(self, table: torch.Tensor, rows: Ints, firsts: Ints, lasts: Ints, page_size: int) -> torch.Tensor:
        """Return the numbers of the pages ``firsts[i] … lasts[i]`` of each row, one after the other; int64.

        A page is known by the word of its first column; spans are numbers on the host. A device that reads all
        spans in one launch overrides this.
        """
        from kvdock.kernels import spans

        return spans.read_pages(table, rows, firsts, lasts, page_size)

    @abc.abstractmethod
    def translate(self, mapping: torch.Tensor, loc: torch.Tensor, page_size: int = 1) -> torch.Tensor:
        """Return ``mapping[loc // page_size] · page_size + loc % page_size`` as int64; a slot of −1 stays −1.

        `mapping` pairs pages, so a slot keeps its place in the page. Every slot of a page that maps to 0
        becomes slot 0.
        """

    @abc.abstractmethod
    def quantize_blocks(self, values: torch.Tensor, dtype: str, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `values` ``[…, dim]`` as bytes of `dtype`, and a scale for each `block` of the last dimension.

        Scales are float32 for 8-bit floats, and the bytes of powers of two for 4-bit ones. The last block may be short.

        Raises:
            SlotError: an odd number of 4-bit elements, which end inside a byte.
        """

    @abc.abstractmethod
    def dequantize_blocks(self, data: torch.Tensor, scales: torch.Tensor, dtype: str, block: int) -> torch.Tensor:
        """Return the float32 values of what `quantize_blocks` answered."""

    @abc.abstractmethod
    def copy_rows(
        self, tgt_view: torch.Tensor, tgt_loc: torch.Tensor, src_view: torch.Tensor, src_loc: torch.Tensor
    ) -> None:
        """Copy slots between two views of one shape and dtype; either may lie in pinned host memory."""

    def releasable(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context in which memory is taken that can be released and restored later (option `memory_saver`).

        Entered while building, once for each tensor; a device with the capability ``memory_saver`` overrides this.

        Raises:
            BuildError: this device has no such memory, or what brings it is not installed.
        """
        raise BuildError(
            f"memory_saver=true needs memory that can be released, and {type(self).__name__} takes none on {str(device)!r}; "
            "give memory_saver=false"
        )

    def warm_up(self, cache: KVCache) -> None:
        """Do once what the first calls would wait for, such as compiling and loading kernels; by default nothing.

        Called by `build` with the finished cache, on the device that was planned for. The cache is empty, and has to
        be empty again afterwards; what lies in padding may be written.
        """
        return
