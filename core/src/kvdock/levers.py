"""What would make a plan fit, or hold more: options with values, each tried by planning again before it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from kvdock import dtypes
from kvdock.layout import REQUESTS
from kvdock.options import Parallelism
from kvdock.outline import Outline
from kvdock.sizing import largest

NARROWER = ("float8_e4m3fn", "float8_e4m3fnuz", "nvfp4", "float4_e2m1fn_x2")
"""Values of kv_cache_dtype that are tried in place of a wider one, the widest first."""
MOST_HALVINGS = 8


class Tried(Protocol):
    """What planning again shows of a plan."""

    @property
    def spaces(self) -> dict[str, int]:
        """Usable slots by space."""

    @property
    def max_total_num_tokens(self) -> int:
        """Tokens that are held."""

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request."""


Attempt = Callable[[dict[str, Any]], Tried | None]
"""Plans this rank again with options or parallel sizes changed, through all hooks; ``None`` where that is refused or
does not fit."""


def nothing(change: dict[str, Any]) -> None:
    """Try nothing: the `Attempt` of a plan whose messages nobody reads."""


def find_levers(outline: Outline, attempt: Attempt, requests_named: bool, tokens_count: bool) -> list[str]:
    """Return the options that make a cache fit which does not, each alone, as ``name=value``.

    `requests_named`: how many requests fit is said already; `tokens_count`: fewer stated tokens may help.
    """

    def fits(name: str, value: Any) -> bool:
        return attempt({name: value}) is not None

    given, workers, found = outline.given, outline.parallel.attn_dp_size, []
    counts = {"max_state_slots": 1, "max_running_requests": workers, "max_total_tokens": 1}
    left_out = {"max_running_requests"} if requests_named else set()
    left_out |= set() if tokens_count else {"max_total_tokens"}
    for name, step in counts.items():
        asked = getattr(given, name)
        if asked is None or name in left_out:
            continue
        most = _most(lambda count, name=name, step=step: fits(name, count * step), asked // step)  # type: ignore[misc]
        if most:
            found.append(f"{name}={most * step}")
    for name, values in _values(outline).items():
        value = next((value for value in values if fits(name, value)), None)
        if value is not None:
            found.append(f"{name}={value}")
    return found


def find_divisions(outline: Outline, attempt: Attempt, no_weights: bool) -> list[str]:
    """Return the parallel sizes that make a cache fit on as many ranks, each alone, as ``name=value with name=value``.

    `no_weights`: none count here; those of attention would take more of each rank where workers share the requests out.
    """
    found = []
    for divided in (token_divisions(outline.parallel), request_divisions(outline.parallel) if no_weights else ()):
        sizes = next((sizes for sizes in divided if attempt(sizes) is not None), None)
        if sizes is not None:
            found.append(" with ".join(f"{name}={_shown(value)}" for name, value in sizes.items()))
    return found


def token_divisions(parallel: Parallelism) -> Iterator[dict[str, Any]]:
    """Yield parallel sizes in which more of the same ranks share the tokens of a request, the fewest first."""
    for size in range(parallel.dcp_size * 2, parallel.attn_tp_size + 1, parallel.dcp_size):
        if parallel.attn_tp_size % size == 0:
            yield {"dcp_size": size}


def request_divisions(parallel: Parallelism) -> Iterator[dict[str, Any]]:
    """Yield parallel sizes in which more workers on the same ranks share the requests out, the fewest first.

    None where there are replicas: they share the requests out already.
    """
    if parallel.dp_size > parallel.attn_dp_size:
        return
    most = parallel.tp_size // parallel.cp_size // parallel.dcp_size
    for size in range(parallel.attn_dp_size * 2, most + 1, parallel.attn_dp_size):
        if most % size == 0:
            yield {"dp_size": size, "dp_attention": True}


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _values(outline: Outline) -> dict[str, Iterator[Any]]:
    """Return option → the values that are tried, the mildest first."""
    options, given = outline.options.values, outline.given
    ratio = given.swa_full_tokens_ratio or 1
    return {
        "page_size": _halves(options.page_size or 1),
        "swa_full_tokens_ratio": (min(1.0, round(ratio * 2**step, 6)) for step in range(1, MOST_HALVINGS) if ratio < 1),
        "context_length": _halves(options.context_length or outline.model.context_length),
        "kv_cache_dtype": narrower_dtypes(outline),
    }


def narrower_dtypes(outline: Outline) -> Iterator[str]:
    """Yield the data types that are narrower than that of keys and values, the widest first."""
    bits = dtypes.find(outline.request_pool.query.kv_dtype).bits
    return (name for name in NARROWER if dtypes.find(name).bits < bits)


def _halves(value: int) -> Iterator[int]:
    return (value >> step for step in range(1, MOST_HALVINGS + 1) if value >> step)


def _most(fits: Callable[[int], bool], asked: int) -> int:
    """Return the most below `asked` that fits, searched above the first of its halves that does; 0 if none does."""
    for half in _halves(asked):
        if fits(half):
            return largest(fits, half, min(asked - 1, 2 * half + 1))
    return 0


def most_requests(attempt: Attempt, guess: int, limit: int, workers: int) -> int:
    """Return requests of one worker that are served where as many are asked for: `guess` if they are, else the most below.

    What comes with requests may follow the number that is asked for, so a number counts as what was tried.
    """

    def serves(requests: int) -> bool:
        made = attempt({"max_running_requests": requests * workers})
        return made is not None and made.spaces[REQUESTS] >= requests

    if attempt is nothing or (guess and serves(guess)):
        return guess
    return largest(serves, 0, (guess or limit) - 1)


def roomier(attempt: Attempt, name: str, values: Iterator[Any], holds_more: Callable[[Tried], bool]) -> str | None:
    """Return the first of `values` of an option with which a plan `holds_more`, as ``name=value``; ``None``: none does."""
    for value in values:
        made = attempt({name: value})
        if made is not None and holds_more(made):
            return f"{name}={value}"
    return None


def roomier_dtype(outline: Outline, attempt: Attempt, holds_more: Callable[[Tried], bool]) -> str | None:
    """Return the widest narrower kv_cache_dtype with which a plan `holds_more`, as `roomier` does."""
    return roomier(attempt, "kv_cache_dtype", narrower_dtypes(outline), holds_more)


def lower_ratios(ratio: float) -> Iterator[float]:
    """Yield ratios below `ratio`, each half of the one before."""
    return (round(ratio / 2**step, 6) for step in range(1, MOST_HALVINGS) if ratio >= 2**step / 10**6)
