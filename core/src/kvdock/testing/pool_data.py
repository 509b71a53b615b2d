"""A pool beside a second book of what each of its slots must hold."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvdock import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kvdock.pools.base import Pool


class Arrival:
    """A transfer that notes which layers are waited for, and brings them the first time."""

    def __init__(self, bring: Callable[[], None] | None = None) -> None:
        self.waited: list[int] = []
        self._bring = bring

    def wait_until(self, layer_id: int) -> None:
        """Note the layer, and bring it."""
        self.waited.append(layer_id)
        bring, self._bring = self._bring, None
        if bring is not None:
            bring()


class Data:
    """A pool beside a dictionary of what each slot must hold, layer by layer."""

    def __init__(self, pool: Pool, rng: random.Random, values_are_in_keys: bool) -> None:
        import torch

        self.pool = pool
        self.rng = rng
        self.values_are_in_keys = values_are_in_keys
        self.float = torch.float32
        self.model_dtype: torch.dtype = getattr(torch, pool.query.model_dtype)
        self.page_size = pool.query.space.page_size
        self.slots = range(self.page_size, self.page_size + pool.parts.sizes[pool.query.space.name])
        assert pool.query.group is not None
        self.layers = pool.query.group.layer_ids
        self.expected: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def some_slots(self) -> list[int]:
        """Return random usable slots, each once, over several pages."""
        return self.rng.sample(self.slots, k=min(len(self.slots), 3 * self.page_size // 2))

    def tensor(self, slots: list[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return slots as a tensor on the pool's device."""
        import torch

        return torch.tensor(slots, dtype=dtype or torch.int64, device=self.pool.parts.device)

    def write(self, slots: list[int], dtype: torch.dtype | None = None) -> None:
        """Write random small whole numbers, which every format holds exactly, to `slots` of every layer."""
        written: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {slot: [] for slot in slots}
        for layer in self.layers:
            k, v = self.random(layer, len(slots))
            self.pool.set_kv_buffer(layer, self.tensor(slots, dtype), k, v)
            for row, slot in enumerate(slots):
                written[slot].append((k[row].to(self.float), v[row].to(self.float)))
        self.expected.update(written)

    def random(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of small whole numbers for `count` slots of a layer."""
        import torch

        return self._drawn(layer, lambda shape, of: torch.randint(-8, 9, (count, *shape), generator=of))

    def normal(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values that are normally distributed, with some that are very small."""
        import torch

        def numbers(shape: tuple[int, ...], of: torch.Generator) -> torch.Tensor:
            wide = torch.randn((count, *shape), generator=of) * 8
            return wide * 2.0 ** -torch.randint(0, 12, wide.shape, generator=of)

        return self._drawn(layer, numbers)

    def _drawn(
        self, layer: int, draw: Callable[[tuple[int, ...], torch.Generator], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        keys, values = self.row_shapes(layer)
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        k = draw(keys, generator).to(self.model_dtype).to(self.pool.parts.device)
        if self.values_are_in_keys:
            return k, k[..., : values[-1]]
        return k, draw(values, generator).to(self.model_dtype).to(self.pool.parts.device)

    def row_shapes(self, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a slot's key and value, as they are read."""
        keys, values = self.pool.read_kv(layer, self.tensor([]))
        return tuple(keys.shape[1:]), tuple(values.shape[1:])

    def read(self, slots: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the pool holds for `slots` of one layer."""
        index = self.tensor(slots)
        keys, values = self.pool.get_kv_buffer(layer)
        page, offset = index // self.page_size, index % self.page_size
        return keys[page, offset].to(self.float), values[page, offset].to(self.float)

    def snapshot(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what every usable slot holds now, layer by layer."""
        return [self.read(list(self.slots), layer) for layer in self.layers]

    def check(self) -> None:
        """Compare every slot that was written with what it must hold."""
        import torch

        slots = list(self.expected)
        for place, layer in enumerate(self.layers):
            found = self.read(slots, layer)
            for part in (0, 1):
                expected = torch.stack([self.expected[slot][place][part] for slot in slots])
                assert torch.equal(found[part], expected.to(found[part].device)), f"layer {layer} differs"

    def check_equal(self, slots: list[int] | range, before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Compare `slots` with a snapshot."""
        import torch

        rows = [slot - self.page_size for slot in slots]
        for layer, parts in zip(self.layers, before, strict=True):
            for now, then in zip(self.read(list(slots), layer), parts, strict=True):
                assert torch.equal(now, then[rows]), f"layer {layer} changed"


def assert_near(found: torch.Tensor, written: torch.Tensor, scale: float | None, dtype: str) -> None:
    """Verify that `found` is `written` but for the rounding to a format of floats, after a division by `scale`.

    A pool may choose scales of its own, for which the smallest numbers of the format are worth more.
    """
    import torch

    torch_dtype: torch.dtype = getattr(torch, dtypes.find(dtype).name)
    form, one = torch.finfo(torch_dtype), torch.ones(1, dtype=torch_dtype)
    # The distance from 1 to the next number: torch gives `eps` of one format as half of it.
    eps = float((one.view(torch.uint8) + 1).view(torch_dtype).float()) - 1 if one.element_size() == 1 else form.eps
    exact = written.to(torch.float32)
    unit = max(1.0 if scale is None else scale, float(exact.abs().max()) / form.max)
    bound = (exact.abs() + form.smallest_normal * unit) * eps / 2
    # Scales are divided and multiplied in 32 bits.
    error = (found - exact).abs()
    assert (error <= bound * (1 + 2**-16)).all(), f"off by {float(error.max())} with scale {scale}"
