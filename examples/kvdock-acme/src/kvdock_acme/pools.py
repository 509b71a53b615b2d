"""Keys and values as acme reads them: each page holds its keys, then its values."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvdock.layout import Buffer, Unit
from kvdock.model import MHAParams
from kvdock.planned import Parts
from kvdock.pools.grouped import GroupedPool, check_kv_dtype, group_of
from kvdock.pools.mha import common_params
from kvdock.queries import PoolQuery

from kvdock_acme.device import DEVICE_TYPE

if TYPE_CHECKING:
    import torch

KEYS, VALUES = 0, 1


class AcmePool(GroupedPool):
    """One tensor ``[pages, 2, page_size, heads, head_dim]`` a layer; page 0 is padding."""

    device_types: ClassVar[frozenset[str] | None] = frozenset({DEVICE_TYPE})

    def __init__(self, query: PoolQuery, parts: Parts) -> None:
        super().__init__(query, parts)
        self._pages = {layer_id: parts.tensors.rows("kv", layer_id) for layer_id in self.group.layer_ids}

    @classmethod
    def fits(cls, query: PoolQuery) -> bool:
        """Tell whether keys and values are of one size, so that both fit a page of this layout."""
        shapes = [layer.params for _, layer in group_of(query).layers]
        return all(isinstance(shape, MHAParams) and shape.head_dim == shape.v_head_dim for shape in shapes)

    @classmethod
    def buffers(cls, query: PoolQuery) -> tuple[Buffer, ...]:
        """Declare one buffer, counted in pages, with a padding page in front."""
        group, params = group_of(query), common_params(query)
        heads = query.parallel.kv_heads_per_rank(params.num_kv_heads)
        pages = Buffer(
            name="kv",
            role="key_value",
            space=group.space,
            unit=Unit.PAGE,
            shape=(2, query.space.page_size, heads, params.head_dim),
            dtype=check_kv_dtype(query),
            layers=group.layer_ids,
            guard=1,
            is_kv=True,
        )
        return (pages,)

    def slot_views(self) -> list[torch.Tensor]:
        """Return the keys and the values of each layer: all that a slot owns."""
        return [pages[:, part] for pages in self._pages.values() for part in (KEYS, VALUES)]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the keys of a layer; pages are apart by the values between them."""
        return self._pages[self.owner_for_read(layer_id)][:, KEYS]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the values of a layer."""
        return self._pages[self.owner_for_read(layer_id)][:, VALUES]

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write keys and values of the slots `loc`; acme stores them as they are and uses no scales.

        Raises:
            SlotError: the layer owns no buffer here, or the shapes do not fit; nothing is written.
        """
        pages = self._pages.get(layer_id)
        if pages is None:
            raise self.refuse_write(layer_id)
        keys, values = pages[:, KEYS], pages[:, VALUES]
        self.check_write(layer_id, keys, loc, k)
        self.check_write(layer_id, values, loc, v)
        self.parts.kernels.store_kv(keys, values, loc, self.codec.encode(k), self.codec.encode(v))
