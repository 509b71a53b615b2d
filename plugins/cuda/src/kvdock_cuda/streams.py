"""Values beside keys: of a small batch, each write leaves most of a device idle, so both run at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]

SMALL_BATCH = 256
"""Slots up to which values are written beside keys: rows of 2 KiB fill half a MiB, a fraction of a device's SMs."""


class SideStream:
    """Writes values on a stream beside the current one, in order with everything before and after.

    Only while a graph is captured: there two writes become branches that a replay runs side by side, while outside a
    launch takes the host longer than the device needs to write a small batch. `torch` is the module.
    """

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self._streams: dict[Any, Any] = {}

    def serves(self, loc: torch.Tensor) -> bool:
        """Return whether a write of the slots `loc` runs on two streams."""
        if loc.device.type != "cuda" or loc.shape[0] > SMALL_BATCH:
            return False
        self._beside(loc.device)  # a graph is warmed up before it is captured, and a capture makes no stream
        return bool(self._cuda.is_current_stream_capturing())

    def store_kv(
        self,
        store: Store,
        k_view: torch.Tensor,
        v_view: torch.Tensor,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Write keys on the current stream and values on the other one, and let the current one wait for both.

        Since the current stream waits, memory of `v` and `loc` may be reused on it right afterwards.
        """
        current, beside = self._cuda.current_stream(loc.device), self._beside(loc.device)
        beside.wait_stream(current)
        with self._cuda.stream(beside):
            store(v_view, loc, v)
        store(k_view, loc, k)
        current.wait_stream(beside)

    def _beside(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = self._cuda.Stream(device)
        return self._streams[device]
