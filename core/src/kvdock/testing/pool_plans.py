"""What a KV pool promises in other plans than the first: other ranks and stages, other types, pages of all layers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from kvdock.builder import build
from kvdock.errors import KVDockError, UnsupportedCombination
from kvdock.options import Parallelism
from kvdock.testing.pool_data import SIDES, Data, assert_near
from kvdock.testing.pool_rows import wrong_rows
from kvdock.testing.refusing import refused
from kvdock.testing.suite_base import Suite

if TYPE_CHECKING:
    import torch

    from kvdock.cache import KVCache
    from kvdock.model import ModelSpec
    from kvdock.pools.base import Pool


class PlanChecks(Suite):
    """The part of `PoolSuite` that makes plans of its own."""

    pool_cls: ClassVar[type[Pool]]
    values_are_in_keys: ClassVar[bool] = False
    """True for pools (MLA) whose value of a slot is a part of its key."""
    fp8_dtypes: ClassVar[tuple[str, ...]] = ("fp8_e4m3", "fp8_e5m2")
    """Values of `kv_cache_dtype` that a class with the feature ``fp8`` is tried with."""
    plain_dtypes: ClassVar[tuple[str, ...]] = ("float16", "float32")
    """Values of `kv_cache_dtype` that need no feature: a class is tried with those that it gets."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run what is about types with each of them, and what is about ranks with each way to split."""
        super().pytest_generate_tests(metafunc)
        for name, values in (("fp8_dtype", self.fp8_dtypes), ("plain_dtype", self.plain_dtypes)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)
        if "ranks" in metafunc.fixturenames:
            found = tuple(rank_sizes(self.model))
            metafunc.parametrize("ranks", found, ids=[_shown(ranks) for ranks in found])

    def _pool_of(self, cache: KVCache) -> Pool:
        found = [pool for pool in cache.pools.values() if type(pool) is self.pool_cls]
        assert found, f"no group got {self.pool_cls.__name__}; the plan says why: {cache.plan.explain()}"
        return found[0]

    def _written(self, pool: Pool, seed: int) -> Data:
        """Return a model of a pool, with random values of random slots in both."""
        data = Data(pool, random.Random(seed), self.values_are_in_keys)
        data.write(data.some_slots())
        return data

    @pytest.fixture
    def fp8_pool(self, page_size: int, fp8_dtype: str) -> Pool:
        """Give the first pool of the class under test for a cache of 8-bit floats."""
        if "fp8" not in self.pool_cls.features:
            pytest.skip(f"{self.pool_cls.__name__} does not list the feature fp8")
        pytest.importorskip("torch")
        plan = self.planned(page_size, kv_cache_dtype=fp8_dtype)
        return self._pool_of(build(plan, device=self.torch_device, debug=False))

    @pytest.fixture
    def plain_pool(self, page_size: int, plain_dtype: str) -> Pool:
        """Give the same for a cache of a wider type; skip if another class serves it, or somebody objects."""
        pytest.importorskip("torch")
        try:
            plan = self.planned(page_size, kv_cache_dtype=plain_dtype)
        except KVDockError as error:
            pytest.skip(f"kv_cache_dtype={plain_dtype} is refused: {str(error).splitlines()[-1].strip()}")
        if self.pool_cls not in {choice.cls for choice in plan.outline.pools}:
            pytest.skip(f"kv_cache_dtype={plain_dtype} is not served by {self.pool_cls.__name__}")
        return self._pool_of(build(plan, device=self.torch_device, debug=False))

    def test_heads_are_split_over_the_ranks(self, page_size: int, seed: int, ranks: Parallelism) -> None:
        """A rank keeps its share of the heads, one where each is replicated, and latents whole."""
        pytest.importorskip("torch")
        plan = self.planned(page_size, parallel=ranks)
        pool = self._pool_of(build(plan, device=self.torch_device, debug=False))
        wrong = wrong_rows(pool)
        assert not wrong, "\n".join(wrong)
        self._written(pool, seed).check()

    def test_a_stage_names_its_layers_by_their_global_ids(self, page_size: int, seed: int) -> None:
        """The second half of a pipeline keeps the last layers, under the ids that they have in the whole model."""
        pytest.importorskip("torch")
        if len(self.model.layers) < 2 or any(layer.shares_kv_with is not None for layer in self.model.layers):
            pytest.skip("a pipeline needs two layers that keep KV of their own; give a model that has them")
        stage = Parallelism(pp_size=2, pp_rank=1)
        pool = self._pool_of(build(self.planned(page_size, parallel=stage), device=self.torch_device, debug=False))
        own = set(stage.stage_layers(len(self.model.layers)))
        assert set(pool.layer_ids) <= own, f"stage 1 holds the layers {sorted(own)}, the pool {list(pool.layer_ids)}"
        data = self._written(pool, seed)
        data.check()
        for read in (pool.get_key_buffer, pool.get_value_buffer):
            with refused(f"{read.__name__}(0)", "layer 0 is of another stage", "layer 0"):
                read(0)

    def test_values_of_the_models_type_fit_other_types(self, plain_pool: Pool, plain_dtype: str, seed: int) -> None:
        """With `kv_cache_dtype` wider or narrower than the model, values are converted when they are written and read."""
        import torch

        data = self._written(plain_pool, seed)
        data.check()
        slots = data.some_slots()
        for layer in data.layers:
            rows = data.normal(layer, len(slots))
            plain_pool.set_kv_buffer(layer, data.tensor(slots), *rows)
            found = plain_pool.read_kv(layer, data.tensor(slots), dtype=torch.float32)
            for side, now, written in zip(SIDES, found, rows, strict=True):
                assert_near(now, written, None, plain_dtype, f"layer {layer}, {side}: ")

    def test_scaled_reads_are_near_what_was_written(self, fp8_pool: Pool, seed: int) -> None:
        """What 8-bit floats give back, times the scale that divided it, is off by half a unit in the last place at most."""
        import torch

        data = Data(fp8_pool, random.Random(seed), self.values_are_in_keys)
        slots = data.some_slots()
        loc = data.tensor(slots)
        for scales in ((None, None), (0.5, 2.0), (4.0, 0.25)):
            by_side = scales if not self.values_are_in_keys else (scales[0], scales[0])
            for layer in data.layers:
                rows = data.normal(layer, len(slots))
                fp8_pool.set_kv_buffer(layer, loc, *rows, *by_side)
                found = fp8_pool.read_kv(layer, loc, *by_side, dtype=torch.float32)
                for side, now, written, scale in zip(SIDES, found, rows, by_side, strict=True):
                    assert_near(now, written, scale, fp8_pool.query.kv_dtype, f"layer {layer}, {side}: ")

    def test_pages_of_all_layers_hold_the_same(self, page_size: int, seed: int) -> None:
        """With `page_major`, where views have gaps, what is written, moved and copied is what is read."""
        if "page_major" not in self.pool_cls.features:
            pytest.skip(f"{self.pool_cls.__name__} does not list the feature page_major")
        pytest.importorskip("torch")
        try:
            plan = self.planned(page_size, page_major=True)
        except UnsupportedCombination as error:
            pytest.skip(f"page_major is refused here: {str(error).splitlines()[-1].strip()}")
        data = self._written(self._pool_of(build(plan, device=self.torch_device, debug=False)), seed)
        slots = sorted(data.expected)
        rotated = [*slots[1:], slots[0]]
        data.pool.move_kv_cache(data.tensor(rotated), data.tensor(slots))
        kept = {target: data.expected[source] for target, source in zip(rotated, slots, strict=True)}
        data.expected = dict(kept)
        data.check()
        copies = data.pool.get_cpu_copy(data.tensor(slots))
        data.write(slots)
        data.pool.load_cpu_copy(copies, data.tensor(slots))
        data.expected = kept
        data.check()

    def test_nothing_waits_for_the_device(self, page_size: int) -> None:
        """Writes, reads and moves run on the ``meta`` device, where no value can be read back; scales may be tensors."""
        pytest.importorskip("torch")
        plans = [self.planned(page_size)]
        if "fp8" in self.pool_cls.features:
            plans += [self.planned(page_size, kv_cache_dtype=dtype) for dtype in self.fp8_dtypes]
        for plan in plans:
            pool = self._pool_of(build(plan, device="meta", debug=False))
            for call in hot_calls(pool, self.values_are_in_keys):
                try:
                    call()
                except (RuntimeError, NotImplementedError) as error:
                    raise AssertionError(
                        f"{type(pool).__name__} waits for the device while it writes, reads or moves ({error}); read no "
                        "value back: no item(), tolist(), bool() or nonzero() of a tensor"
                    ) from error


def hot_calls(pool: Pool, values_are_in_keys: bool) -> Iterator[Callable[[], object]]:
    """Yield what an engine calls for each token, with tensors of the pool's device that hold no values."""
    import torch

    data = Data(pool, random.Random(0), values_are_in_keys)
    loc = torch.zeros(2 * data.page_size, dtype=torch.int64, device=pool.parts.device)
    scale = torch.ones(1, device=pool.parts.device)
    scales: tuple[Any, ...] = (scale, scale) if "fp8" in pool.features else ()
    for layer in data.layers:
        rows = data.random(layer, len(loc))
        yield from _calls_of_layer(pool, layer, loc, rows, scales)
    yield lambda: pool.move_kv_cache(loc, loc)


def _calls_of_layer(
    pool: Pool, layer: int, loc: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], scales: tuple[Any, ...]
) -> Iterator[Callable[[], object]]:
    yield lambda: pool.set_kv_buffer(layer, loc, *rows)
    yield lambda: pool.set_kv_buffer(layer, loc, *rows, *scales)
    yield lambda: pool.get_kv_buffer(layer)
    yield lambda: pool.read_kv(layer, loc, *scales)


def rank_sizes(model: ModelSpec) -> Iterator[Parallelism]:
    """Yield ways to split a model: heads over ranks, each head on two ranks, and ranks that share out requests as well."""
    heads = {count for layer in model.layers if (count := getattr(layer.params, "num_kv_heads", 0))}
    splits = [ranks for ranks in range(2, max(heads, default=0) + 1) if all(count % ranks == 0 for count in heads)]
    ranks = min(splits, default=1)
    if len(heads) == 1:
        yield Parallelism(tp_size=2 * max(heads))
    if ranks > 1 or not heads:
        yield Parallelism(tp_size=max(ranks, 2))
    yield Parallelism(tp_size=2, dp_size=2, dp_attention=True)


def _shown(ranks: Parallelism) -> str:
    return f"tp_size={ranks.tp_size}{f',dp_size={ranks.dp_size}' if ranks.dp_attention else ''}"
