"""Draft snapshots: the states after each draft token, so that the accepted one can be kept once it is known.

A snapshot belongs to a request row, not to a state slot: it lives from a verification to its `commit`. Along a
chain of drafts the inputs of a convolution overlap from step to step, so each is stored once; trees keep a
window of their own for each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.demand import decode_extra_rows, draft_tokens
from kvdock.errors import SlotError
from kvdock.layout import REQUESTS, Buffer
from kvdock.model import StateParams
from kvdock.planned import Parts
from kvdock.pools.grouped import group_of
from kvdock.pools.state_shapes import conv_shape, state_params, temporal_dtype, temporal_shape
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch

WINDOWS, TEMPORAL = "conv_windows", "temporal_snapshots"
ROLE = "snapshot"
"""Role of the buffers that hold them, for reports."""


class SnapshotViews(NamedTuple):
    """What is stored of one layer, by row, padding row included.

    `conv` has a tensor a convolution: ``[rows, channels, steps + kernel − 2]`` where windows overlap, else
    ``[rows, steps, channels, kernel − 1]``; with channels last the last two dimensions are swapped.
    `temporal` is ``[rows, steps, heads, …]``, or ``None`` for layers without a temporal state.
    """

    conv: tuple[torch.Tensor, ...]
    temporal: torch.Tensor | None


def windows_overlap(query: PoolQuery, params: StateParams) -> bool:
    """Return whether drafts form a chain and kernels read its windows from one row of inputs."""
    return (query.options.speculative_topk or 1) == 1 and not params.dense_windows


def numbered(name: str, place: int) -> str:
    """Return the buffer name of one of several convolutions: ``conv``, ``conv.1`` …"""
    return f"{name}.{place}" if place else name


def snapshot_buffers(query: PoolQuery, overlap: bool | None = None) -> tuple[Buffer, ...]:
    """Declare windows and temporal snapshots for each request row and draft token; none without speculation.

    `overlap` says how windows lie; by default as `windows_overlap` answers.

    Raises:
        PlanError: as for the states themselves.
    """
    steps, params = draft_tokens(query), state_params(query)
    if not steps:
        return ()
    chained = windows_overlap(query, params) if overlap is None else overlap
    shapes = {}
    for place, conv in enumerate(params.conv):
        chain = conv_shape(query, conv, steps + conv.kernel - 2)
        shapes[numbered(WINDOWS, place)] = chain if chained else (steps, *conv_shape(query, conv))
    found = [_buffer(query, name, shape, query.model_dtype) for name, shape in shapes.items()]
    if params.temporal:
        shape = (steps, *temporal_shape(query, params))
        found.append(_buffer(query, TEMPORAL, shape, temporal_dtype(query, params)))
    return tuple(found)


def _buffer(query: PoolQuery, name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
    return Buffer(
        name=name,
        role=ROLE,
        space=REQUESTS,
        shape=shape,
        dtype=dtype,
        guard=1 + decode_extra_rows(query),
        layers=group_of(query).layer_ids,
        stacked=True,
        worker=query.worker,
        is_kv=True,
    )


class Snapshots:
    """The snapshots of one state pool, addressed by request row and step, a draft token's place among its drafts."""

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        self.query = query
        self.parts = parts
        self.steps = draft_tokens(query)
        self._layers = group_of(query).layer_ids
        self._names = [name for name in parts.tensors.names if name.startswith(WINDOWS)]
        self._conv = {layer: [self._windows(layer, i) for i in range(len(self._names))] for layer in self._layers}
        self._temporal = {layer: self._row_view(TEMPORAL, layer) for layer in self._layers if self.has_temporal}

    @property
    def has_temporal(self) -> bool:
        """Whether layers have a temporal state."""
        return TEMPORAL in self.parts.tensors.names

    @property
    def rows(self) -> int:
        """Rows of each tensor, padding included."""
        name = next(name for name in (*self._names, TEMPORAL) if name in self.parts.tensors.names)
        return int(self._row_view(name, self._layers[0]).shape[0])

    def views(self, layer_id: int) -> SnapshotViews:
        """Return what is stored of a layer, as it lies."""
        conv = tuple(self._row_view(name, layer_id) for name in self._names)
        return SnapshotViews(conv=conv, temporal=self._temporal.get(layer_id))

    def write(
        self, layer_id: int, rows: torch.Tensor, step: int, windows: Sequence[torch.Tensor], temporal: Any
    ) -> None:
        """Write the states of `rows` after draft token `step`.

        Raises:
            SlotError: no such step, or values that do not fit; nothing is written.
        """
        self.check_step(step)
        values = [*windows] if temporal is None else [*windows, temporal]
        views = self._steps_of(layer_id)
        wanted = [[rows.shape[0], *view.shape[2:]] for view in views]
        if [list(value.shape) for value in values] != wanted:
            raise SlotError(
                f"layer {layer_id}: snapshots of shapes {[list(value.shape) for value in values]} for "
                f"{rows.shape[0]} rows; give {wanted}: a window a convolution"
                f"{', then the temporal state' if self.has_temporal else ''}"
            )
        for view, value in zip(views, values, strict=True):
            self.parts.kernels.store_step(view, rows, step, value.to(view.dtype))

    def window(self, layer_id: int, rows: torch.Tensor, step: int | torch.Tensor, place: int) -> torch.Tensor:
        """Return copies of the windows of `rows` at `step` (one, or one a row), as a conv state is shaped."""
        if isinstance(step, int):
            self.check_step(step)
            return self._conv[layer_id][place][:, step][rows.long()]
        return self._conv[layer_id][place][rows.long(), step.long()]

    def commit(
        self, rows: torch.Tensor, steps: torch.Tensor, slots: torch.Tensor, states: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Copy the snapshots ``(rows[i], steps[i])`` to the state slots ``slots[i]``.

        `states` are the paged views of each layer: its convolutions, then its temporal state.
        """
        pairs = [
            pair
            for layer_id, views in zip(self._layers, states, strict=True)
            for pair in zip(self._steps_of(layer_id), views, strict=True)
        ]
        self.parts.kernels.commit_steps(pairs, rows, steps, slots)

    def check_step(self, step: int) -> None:
        """Raise `SlotError` for a step that no draft token has."""
        if not 0 <= step < self.steps:
            raise SlotError(f"step {step} is outside 0 … {self.steps - 1}, the draft tokens that are verified at once")

    def _steps_of(self, layer_id: int) -> list[torch.Tensor]:
        """Return views ``[rows, steps, …]`` of all that is kept of a layer."""
        temporal = self._temporal.get(layer_id)
        return self._conv[layer_id] if temporal is None else [*self._conv[layer_id], temporal]

    def _row_view(self, name: str, layer_id: int) -> torch.Tensor:
        return self.parts.tensors.rows(name, layer_id)

    def _windows(self, layer_id: int, place: int) -> torch.Tensor:
        """Return ``[rows, steps, *conv shape]``; along a chain a step's window is a view that overlaps the next one's."""
        stored = self._row_view(self._names[place], layer_id)
        if stored.dim() == 4:
            return stored
        conv = state_params(self.query).conv[place]
        kept = conv.kernel - 1
        row, outer, inner = stored.stride()
        count, first, second = stored.shape
        shape, along = ((kept, second), outer) if conv.channels_last else ((first, kept), inner)
        strides = (row, along, outer, inner)
        return stored.as_strided((count, self.steps, *shape), strides, stored.storage_offset())
