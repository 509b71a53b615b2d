"""The pytest plugin of the wheel: fixtures for tests of plugins, and a summary of the conformance suites of a run.

Everything is imported inside the functions, so that an installed kvdock costs other test suites nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdock.plugins.loading import Registry
    from kvdock.testing.mocks import MockPlugin


@pytest.fixture
def registry() -> Registry:
    """Give a fresh, empty registry: not even the core is in it."""
    from kvdock.plugins.loading import Registry

    return Registry()


@pytest.fixture
def mock_plugin() -> Callable[..., MockPlugin]:
    """Give the function that builds a plugin with just the answers that a test needs."""
    from kvdock.testing.mocks import mock_plugin

    return mock_plugin


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many suites ran, what their checks found, and why some were not made; nothing if none ran."""
    from kvdock.testing import summary

    checks = list(summary.checks_of(terminalreporter.stats))
    if checks:
        terminalreporter.section("kvdock conformance")
        for line in summary.lines(checks, terminalreporter.verbosity >= 0):
            terminalreporter.line(line)
