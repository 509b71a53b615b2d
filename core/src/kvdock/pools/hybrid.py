"""Attention and per-request states side by side: keys and values are found by layer, states beside them."""

from __future__ import annotations

from kvdock.pools.routed import RoutedPool


class HybridLinearPool(RoutedPool):
    """What an engine sees of a worker with state layers.

    `layer_ids` are the layers with keys and values (or latents), and token slots address those alone. A state
    is addressed by its slot: `states_of_layer` has all that can be done with it, `get_state` what is read.
    """
