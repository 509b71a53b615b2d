"""How long random tests run: short, unless ``--hypothesis-profile fuzz`` asks for more."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.errors import InvalidArgument

COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
SHORT = settings(max_examples=15, stateful_step_count=25, **COMMON)

try:
    settings.get_profile("fuzz")
except InvalidArgument:  # the workspace's own is as long
    settings.register_profile("fuzz", settings(max_examples=300, stateful_step_count=100, **COMMON))


@pytest.fixture(scope="session")
def effort():
    long = settings.get_profile("fuzz")
    return long if settings.default == long else SHORT
