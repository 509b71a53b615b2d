"""What a kernel set does: the only device work that pools, allocators and request pools ask for.

Buffers come as views ``[pages, page_size, *shape]`` with any strides for the first two dimensions; slots
are int64 or int32 and address ``(slot // page_size, slot % page_size)``. All offsets are 64-bit. No
method waits for the device: sizes that depend on data are given by the host.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Kernels(abc.ABC):
    """One device's kernel set; `kvdock.kernels.reference` is the torch form that defines the results."""

    @abc.abstractmethod
    def store(self, view: torch.Tensor, loc: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values[i]`` to slot ``loc[i]`` of `view`; `values` are of the view's dtype."""

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

    @abc.abstractmethod
    def move(self, views: Sequence[torch.Tensor], tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots within each view; every source is read before any target is written."""

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

    @abc.abstractmethod
    def translate(self, mapping: torch.Tensor, loc: torch.Tensor) -> torch.Tensor:
        """Return ``mapping[loc]`` as int64, where a slot of −1 stays −1."""
