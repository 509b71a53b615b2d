"""States per request as Ascend's kernels read them: channels last, and room for drafts behind a convolution's inputs."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import msgspec
from kvdock.demand import draft_tokens
from kvdock.layout import Buffer
from kvdock.model import LayerSpec, StateParams
from kvdock.planned import Parts
from kvdock.pools import StatePool
from kvdock.pools.grouped import group_of
from kvdock.pools.state import CONV, State
from kvdock.pools.state_shapes import conv_shape, state_params
from kvdock.queries import PoolQuery

from kvdock_ascend import settings
from kvdock_ascend.device import DEVICE_TYPE

if TYPE_CHECKING:
    import torch


class NpuStatePool(StatePool):
    """Convolution inputs ``[slots + 1, kernel - 1 + drafts - 1, channels]`` and temporal states.

    The first ``kernel - 1`` inputs are what the next token needs; behind them is room for those of the drafts that
    are verified at once. With speculation the last two dimensions of a temporal state are swapped, in its snapshots
    as well, and each draft token has a window of its own.
    """

    device_types: ClassVar[frozenset[str] | None] = frozenset({DEVICE_TYPE})
    features: ClassVar[frozenset[str]] = frozenset({"context_parallel"})
    options: ClassVar[frozenset[str]] = StatePool.options - {"replay_rings", "replay_ring_length"}

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(laid_out(query), parts)

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare convolutions, temporal states and draft snapshots of all layers, a tensor of each.

        Raises:
            PlanError: layers of different shapes, heads that do not split over the ranks, or a data type that
                cannot hold states.
        """
        return super().buffers(laid_out(query))

    @classmethod
    def state_buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare the convolutions, with room for drafts, then the temporal state."""
        params, align = state_params(query), settings.base_align(query)
        wide = {
            place: conv_shape(query, conv, conv.kernel - 1 + draft_room(query))
            for place, conv in enumerate(params.conv)
        }
        found = []
        for place, buffer in enumerate(super().state_buffers(query)):
            shape = wide[place] if buffer.role == CONV else buffer.shape
            found.append(msgspec.structs.replace(buffer, shape=shape, base_align=align))
        return tuple(found)

    def needed_state(self, layer_id: int) -> State:
        """Return of `get_state` what the next token needs, as views: without the room for drafts."""
        conv, temporal = self.get_state(layer_id)
        return State(tuple(view[:, :inputs] for view, inputs in zip(conv, self._kept, strict=True)), temporal)

    @property
    def _kept(self) -> list[int]:
        """Inputs of each convolution that the next token needs."""
        return [conv.kernel - 1 for conv in state_params(self.query).conv]

    @cached_property
    def _committed(self) -> list[list[torch.Tensor]]:
        """Paged views of each layer's states that a commit writes: of a convolution what the next token needs."""
        kept, found = self._kept, []
        for views in super()._committed:
            convolutions = [view[:, :, :inputs] for view, inputs in zip(views, kept, strict=False)]
            found.append([*convolutions, *views[len(kept) :]])
        return found


def draft_room(query: PoolQuery) -> int:
    """Return the inputs that a convolution keeps beside what the next token needs: of all drafts but the first."""
    return max(0, draft_tokens(query) - 1)


def laid_out(query: PoolQuery) -> PoolQuery:
    """Return the query with layers as they lie here."""
    group, swaps = group_of(query), draft_tokens(query) > 0
    layers = tuple((layer_id, _layer(layer, swaps)) for layer_id, layer in group.layers)
    return msgspec.structs.replace(query, group=msgspec.structs.replace(group, layers=layers))


def _layer(layer: LayerSpec, swaps: bool) -> LayerSpec:
    params = layer.params
    if not isinstance(params, StateParams):
        return layer
    temporal = params.temporal
    if swaps and len(temporal) > 2:
        temporal = (*temporal[:-2], temporal[-1], temporal[-2])
    conv = tuple(msgspec.structs.replace(one, channels_last=True) for one in params.conv)
    return msgspec.structs.replace(
        layer, params=msgspec.structs.replace(params, conv=conv, temporal=temporal, dense_windows=True)
    )
