"""Attention and per-request states side by side: keys and values are found by layer, states beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.errors import SlotError
from kvdock.pools.routed import RoutedPool
from kvdock.pools.state import State, StatePool

if TYPE_CHECKING:
    import torch


class HybridLinearPool(RoutedPool):
    """What an engine sees of a worker with state layers.

    `layer_ids` are the layers with keys and values (or latents), and token slots address those alone. A state
    is addressed by its slot: `states_of_layer` has all that can be done with it, `get_state` what is read.
    """

    def states_of_layer(self, layer_id: int) -> StatePool:
        """Return the pool that keeps the state of a layer.

        Raises:
            SlotError: the layer keeps none.
        """
        for pool in self.state_pools:
            if layer_id in pool.layer_ids:
                return pool
        held = sorted(layer for pool in self.state_pools for layer in pool.layer_ids)
        raise SlotError(f"layer {layer_id} keeps no state; the layers {held} do")

    def get_state(self, layer_id: int) -> State:
        """Return the states of a layer, by slot."""
        return self.states_of_layer(layer_id).get_state(layer_id)

    def conv_states(self, layer_id: int, place: int = 0) -> torch.Tensor:
        """Return the inputs that one of a layer's convolutions still needs, by slot."""
        return self.states_of_layer(layer_id).conv_states(layer_id, place)

    def temporal_states(self, layer_id: int) -> torch.Tensor:
        """Return the temporal state of a layer, by slot."""
        return self.states_of_layer(layer_id).temporal_states(layer_id)
