"""Calls that have to be refused: what did not raise, and what should be raised for which reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvdock.errors import KVDockError, SlotError


@contextmanager
def refused(what: str, why: str, names: str = "", error: type[KVDockError] = SlotError) -> Iterator[None]:
    """Verify that the block raises `error`, with a text that holds `names`; otherwise say `what` must be refused and `why`.

    Raises:
        AssertionError: the block goes through, raises another error, or one that does not say `names`.
    """
    advice = f"raise kvdock.errors.{error.__name__}{f' that says {names!r}' if names else ''}: {why}"
    try:
        yield
    except error as raised:
        if names not in str(raised):
            raise AssertionError(f"{what} is refused with {str(raised)!r}; {advice}") from raised
        return
    except Exception as raised:
        raise AssertionError(f"{what} raises {type(raised).__name__}({raised}); {advice}") from raised
    raise AssertionError(f"{what} is accepted; {advice}")
