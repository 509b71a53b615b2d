"""What the tests of several plugins share: a small DeepSeek V4, registries of its forms, and how long random tests run."""

import importlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.errors import InvalidArgument
from kvdock.startup import core_only
from small_dsv4 import of_ratios

COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
SHORT = settings(max_examples=15, stateful_step_count=25, **COMMON)

try:
    settings.get_profile("fuzz")
except InvalidArgument:  # the workspace's own is as long
    settings.register_profile("fuzz", settings(max_examples=300, stateful_step_count=100, **COMMON))


@pytest.fixture(scope="session")
def effort():
    """Return how long random tests run: short, unless ``--hypothesis-profile fuzz`` asks for more."""
    long = settings.get_profile("fuzz")
    return long if settings.default == long else SHORT


@pytest.fixture
def small():
    """Return the config of a small DeepSeek V4: a layer without compressed rows, two of ratio 4, one of 128."""
    return of_ratios(0, 4, 128, 4)


@pytest.fixture
def registries():
    """Return a function that gives what makes registries of a hardware: with DeepSeek V4 and, unless told otherwise, both's variant."""
    family = pytest.importorskip("kvdock_dsv4.hooks")

    def of(name):
        hooks = importlib.import_module(f"kvdock_{name}.hooks")
        variant = importlib.import_module(f"kvdock_{name}.variants.dsv4")

        def make(with_variant=True):
            found = core_only()
            found.add(hooks, name=name, tier="hardware")
            found.add(family, name="dsv4", tier="family")
            if with_variant:
                found.add(variant, name=f"{name}.dsv4", tier="variant")
            return found

        return make

    return of


@pytest.fixture
def widest(monkeypatch):
    """Let runs speculate as wide as their pools allow, and compare all tokens at each step; return the list of widths."""
    pytest.importorskip("torch")
    import random

    from kvdock.testing import driver, slots

    class Widest(random.Random):
        def randint(self, first, last):
            return last

    widths, verify = [], slots.Slots.verify

    def noted(self, request, part):
        widths.append(part.numel())
        verify(self, request, part)

    monkeypatch.setattr(driver.random, "Random", Widest)
    monkeypatch.setattr(driver, "SAMPLE_TOKENS", 2000)
    monkeypatch.setattr(slots.Slots, "verify", noted)
    return widths
