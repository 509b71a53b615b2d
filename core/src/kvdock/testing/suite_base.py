"""What the conformance suites share: the rule that no check goes missing, a plan, and its build."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import pytest

from kvdock.builder import build
from kvdock.cache import KVCache
from kvdock.device import DeviceInfo
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.options import Parallelism, make_options
from kvdock.planner import CachePlan, plan_from
from kvdock.startup import core_only
from kvdock.testing.summary import REASON_PROPERTY, SUITE_PROPERTY

SMALL_MODEL = ModelSpec(
    name="conformance",
    architecture="Conformance",
    layers=(LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=8, v_head_dim=8)),) * 3,
    context_length=256,
    dtype="bfloat16",
)
"""Three layers of two heads: small enough that every slot can be compared."""


def unsupported(reason: str) -> Callable[[Any], None]:
    """Return a replacement for a check that cannot hold; it is reported as skipped, with the reason.

    Raises:
        TypeError: the reason is empty.
    """
    if not reason.strip():
        raise TypeError("unsupported() needs the reason why the check cannot hold")

    def check(self: Any) -> None:
        pytest.skip(reason)

    check.reason = reason  # type: ignore[attr-defined]
    return check


def _checks(cls: type[Checks]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the original of every check that `cls` inherits from a suite of this package."""
    for base in cls.__mro__:
        if base.__module__.startswith(__package__) and base is not cls:
            yield from ((name, value) for name, value in vars(base).items() if name.startswith("test_"))


class Checks:
    """What all suites share: no check goes missing, and the summary of the run counts each."""

    seeds: ClassVar[tuple[int, ...]] = (1, 2)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, original in _checks(cls):
            found = getattr(cls, name, None)
            if found is not original and not getattr(found, "reason", None):
                raise TypeError(
                    f"{cls.__name__} replaces the check {name} without a reason; "
                    f"give one: {name} = unsupported('why it cannot hold')"
                )

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run what is random with each seed."""
        vary(metafunc, "seed", self.seeds)

    @pytest.fixture(autouse=True)
    def _counted(self, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
        """Note for the summary which suite a check belongs to, and the reason if it is replaced by one."""
        suite = next(base for base in type(self).__mro__ if base.__module__.startswith(__package__))
        record_property(SUITE_PROPERTY, [type(self).__name__, suite.__name__])
        reason = getattr(getattr(request, "function", None), "reason", "")
        if reason:
            record_property(REASON_PROPERTY, reason)


def vary(metafunc: pytest.Metafunc, name: str, values: Sequence[Any]) -> None:
    """Run a check that takes `name` with each of `values`."""
    if name in metafunc.fixturenames:
        metafunc.parametrize(name, values, ids=[f"{name}={value}" for value in values])


_PLANS: dict[tuple[type[Suite], int], CachePlan] = {}
"""The plan of each suite and page size."""


class Suite(Checks):
    """What suites of classes share: a plan of `model` for `device`, made by the core and `plugins`, and its build."""

    plugins: ClassVar[tuple[tuple[str, Any], ...]] = ()
    """Pairs of a name and a module or object with hooks, taken beside the core."""
    tier: ClassVar[str] = "hardware"
    """The tier of `plugins`."""
    device: ClassVar[DeviceInfo]
    """The profile to plan for."""
    torch_device: ClassVar[str] = "cpu"
    """Where the plan is built."""
    model: ClassVar[ModelSpec] = SMALL_MODEL
    options: ClassVar[Mapping[str, Any]] = {}
    page_sizes: ClassVar[tuple[int, ...]] = (16, 64)
    budget_bytes: ClassVar[int] = 2**20

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run what depends on pages with each page size, and what is random with each seed."""
        super().pytest_generate_tests(metafunc)
        vary(metafunc, "page_size", self.page_sizes)

    @pytest.fixture
    def plan(self, page_size: int) -> CachePlan:
        """Give the plan under test, which is made once."""
        key = type(self), page_size
        if key not in _PLANS:
            _PLANS[key] = self.planned(page_size)
        return _PLANS[key]

    def planned(self, page_size: int, times: int = 1, parallel: Parallelism | None = None, **more: Any) -> CachePlan:
        """Return a plan with pages of `page_size`, of `times` the memory, and with `more` options than the suite names."""
        registry = core_only()
        for name, plugin in self.plugins:
            registry.add(plugin, name=name, tier=self.tier)
        options = make_options({"page_size": page_size, **self.options, **more})
        budget = self.budget_bytes * times
        ranks, device = parallel or Parallelism(), self._device_of(times)
        return plan_from((self.model,), device, options, ranks, registry, budget_bytes=budget)

    def _device_of(self, times: int) -> DeviceInfo:
        """Return the profile, or one of `times` the memory."""
        sizes = ("total_bytes", "free_before_load_bytes", "free_bytes")
        return msgspec.structs.replace(self.device, **{size: getattr(self.device, size) * times for size in sizes})

    @pytest.fixture
    def with_torch(self) -> None:
        """Skip a check that builds where torch is not installed, before anything is planned for it."""
        pytest.importorskip("torch")

    @pytest.fixture
    def cache(self, with_torch: None, plan: CachePlan) -> KVCache:
        """Give what is built from the plan."""
        return build(plan, device=self.torch_device, debug=False)
