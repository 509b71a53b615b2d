"""A pool beside a second book of what each of its slots must hold."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvdock import dtypes
from kvdock.pools.grouped import group_of
from kvdock.testing.pool_rows import expected_rows, rows_of, wrong_rows
from kvdock.testing.refusing import refused

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kvdock.pools.base import Pool


SIDES = "key", "value"
"""The two parts of what a slot holds."""


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
        return rows_of(self.pool, layer)

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
                self._compare(layer, part, slots, found[part], expected, "holds something else than what was written")

    def check_equal(self, slots: list[int] | range, before: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Compare `slots` with a snapshot."""
        rows = [slot - self.page_size for slot in slots]
        for layer, parts in zip(self.layers, before, strict=True):
            for part, (now, then) in enumerate(zip(self.read(list(slots), layer), parts, strict=True)):
                self._compare(layer, part, list(slots), now, then[rows], "changed though nothing was written to it")

    def _compare(
        self, layer: int, part: int, slots: list[int], found: torch.Tensor, expected: torch.Tensor, what: str
    ) -> None:
        """Verify that rows are equal; name the layer, the side, the first slot that differs and how far off it is."""
        import torch

        expected = expected.to(found.device)
        if torch.equal(found, expected):
            return
        assert found.shape == expected.shape, f"layer {layer}: {SIDES[part]} of {found.shape}, not {expected.shape}"
        wrong = (found != expected).flatten(1).any(1).nonzero().flatten().tolist()
        off = (found[wrong].double() - expected[wrong].double()).abs()
        raise AssertionError(
            f"layer {layer}: the {SIDES[part]} of slot {slots[wrong[0]]} {what}; {len(wrong)} of {len(slots)} slots "
            f"differ, by {float(off.max()):g} at most"
        )


def verify_rows(pool: Pool, rng: random.Random) -> None:
    """Verify that a pool's rows are of the model's shape, and that it gives back what is written to random slots."""
    wrong = wrong_rows(pool)
    assert not wrong, "\n".join(wrong)
    group = pool.query.group
    for layer_id, layer in () if group is None else group.layers[:1]:
        expected = expected_rows(layer.params, pool.query.parallel)
        if expected:
            are_in_keys = len(expected) > 1 and rows_of(pool, layer_id) == expected[0]
            data = Data(pool, rng, are_in_keys)
            data.write(data.some_slots())
            data.check()
            _verify_readers(data)


def _verify_readers(data: Data) -> None:
    """Verify that layers which read another's KV find it, and that they cannot be written."""
    import torch

    loc = data.tensor(sorted(data.expected))
    for reader, owner in dict(group_of(data.pool.query).shared).items():
        for side, found, own in zip(SIDES, data.pool.read_kv(reader, loc), data.pool.read_kv(owner, loc), strict=True):
            assert torch.equal(found, own), (
                f"layer {reader} reads another {side} than layer {owner}, whose KV it shares"
            )
        why = f"it reads the KV of layer {owner} and owns none; look the layer up, and give refuse_write"
        with refused(f"set_kv_buffer of layer {reader}", why, f"layer {reader}"):
            data.pool.set_kv_buffer(reader, loc, *data.random(owner, len(loc)))
    data.check()


def assert_near(found: torch.Tensor, written: torch.Tensor, scale: float | None, dtype: str, where: str = "") -> None:
    """Verify that `found` is `written` but for the rounding to a format of floats, after a division by `scale`.

    A pool may choose scales of its own, for which the smallest numbers of the format are worth more. Compared in 64 bits.
    """
    import torch

    torch_dtype: torch.dtype = getattr(torch, dtypes.find(dtype).name)
    form, one = torch.finfo(torch_dtype), torch.ones(1, dtype=torch_dtype)
    # The distance from 1 to the next number: torch gives `eps` of one format as half of it.
    eps = float((one.view(torch.uint8) + 1).view(torch_dtype).float()) - 1 if one.element_size() == 1 else form.eps
    exact = written.double()
    unit = max(1.0 if scale is None else scale, float(exact.abs().max()) / form.max)
    # Scales are divided and multiplied in 32 bits.
    bound = (exact.abs() + form.smallest_normal * unit) * eps / 2 * (1 + 2**-16)
    error = (found.double() - exact).abs()
    assert (error <= bound).all(), (
        f"{where}off by {float(error.max()):g} with scale {scale}, where rounding to {dtype} is off by "
        f"{float(bound.flatten()[error.argmax()]):g} at most"
    )
