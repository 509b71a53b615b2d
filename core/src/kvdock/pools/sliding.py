"""Full and sliding layers side by side: the engine knows full slots, sliding layers have their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvdock.errors import PluginError
from kvdock.planned import Parts
from kvdock.pools.routed import RoutedPool
from kvdock.queries import PoolQuery

if TYPE_CHECKING:
    import torch


@runtime_checkable
class MapsSliding(Protocol):
    """An allocator that knows the slots of sliding layers for those of requests."""

    def translate(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the sliding slots of the slots `loc` as int64: −1 for −1, 0 where it was given back."""


class SlidingPool(RoutedPool):
    """Takes the slots of requests for every layer and translates them for sliding ones.

    A slot whose sliding slot was given back translates to 0: what is written there lands in the padding
    page and what is read is of no meaning, which no layer that slides looks at.
    """

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        allocator = parts.allocator
        if allocator is None or not isinstance(allocator, MapsSliding):
            raise PluginError(
                f"{type(self).__name__} needs an allocator that translates full slots, "
                f"not {type(allocator).__name__}; claim SWAAllocator or a subclass for these spaces"
            )
        self._map: MapsSliding = allocator
        numbering = allocator.query.spaces[0].name
        self._translated = frozenset(name for name, pool in parts.pools.items() if pool.query.space.name != numbering)

    def slots_for(self, name: str, loc: torch.Tensor) -> torch.Tensor:
        """Return `loc` as it is for full layers, translated for sliding ones."""
        return self.translate_loc_from_full_to_swa(loc) if name in self._translated else loc

    def translate_loc_from_full_to_swa(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the sliding slots of the slots `loc` as int64: −1 for −1, 0 where it was given back."""
        return self._map.translate(loc)


class PureSlidingPool(RoutedPool):
    """What an engine sees where every layer slides: requests are numbered in sliding slots, so both are the same."""

    def translate_loc_from_full_to_swa(self, loc: torch.Tensor) -> torch.Tensor:
        """Return `loc` as int64: the slots of requests are the sliding slots."""
        import torch

        return loc.to(torch.int64)
