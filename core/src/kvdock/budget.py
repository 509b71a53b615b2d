"""How many bytes a cache may take, and which words say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

import msgspec

from kvdock.checked import show
from kvdock.demand import draft_tokens
from kvdock.device import GIVEN_BUDGET, DeviceInfo
from kvdock.errors import BudgetError, PlanError
from kvdock.layout import STATE
from kvdock.options import CacheOptions, exact_ratio
from kvdock.queries import RequestQuery

GIB, MIB = 2**30, 2**20
LARGE_DEVICE_BYTES = 60 * GIB
"""A device above this keeps 10 GiB free where states are backed late."""
LEAST_ACTIVATION_TOKENS = 2048


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes for everything that kvdock allocates on one device, and where they come from.

    `base` is ``given`` (the caller's number) or ``fraction``: ``free - weights - reserve - slack`` with
    ``slack = memory free before loading · (1 - mem_fraction_static)``, but at least `least_slack_bytes`.
    `free_bytes` is what tokens that a user states outright may take: all that is free but weights, reserve and
    the least slack. `weights_source` says where the weights were counted, unless the caller gave them.
    """

    nbytes: int
    base: Literal["given", "fraction"]
    free_bytes: int
    slack_bytes: int = 0
    least_slack_bytes: int = 0
    weights_bytes: int = 0
    weights_source: str = ""
    reserve_bytes: int = 0
    note: str = ""


def show_bytes(nbytes: int) -> str:
    """Return bytes for a person: ``1.50 GiB (1,610,612,736 bytes)``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit} ({nbytes:,} bytes)"
    return f"{nbytes:,} bytes"


def check_bytes(name: str, value: object) -> None:
    """Refuse what is no number of bytes.

    Raises:
        PlanError: names the argument and what fits.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise PlanError(f"{name}={show(value)} is no number of bytes; give a whole number from 0 to 2^63 - 1")


def find_budget(
    device: DeviceInfo,
    options: CacheOptions,
    budget_bytes: int | None,
    weights_bytes: int | None,
    *,
    weights_source: str = "",
    reserve_bytes: int | None = None,
    least_slack_bytes: int = 0,
) -> Budget:
    """Return the budget: `budget_bytes` if given, else the device's free memory less weights, reserve and slack.

    The result may be negative; whether anything fits is the solver's to say.

    Raises:
        BudgetError: a given budget, or the weights and the reserve, are more than is free on the device.
        PlanError: a given number is negative, or weights or a reserve are given beside a budget that they do not touch.
    """
    taken = {"weights_bytes": weights_bytes, "reserve_bytes": reserve_bytes}
    for name, value in {"budget_bytes": budget_bytes, **taken}.items():
        if value is not None:
            check_bytes(name, value)
    if budget_bytes is None:
        claims = Budget(
            nbytes=0,
            base="fraction",
            free_bytes=device.free_bytes - (weights_bytes or 0) - (reserve_bytes or 0) - least_slack_bytes,
            least_slack_bytes=least_slack_bytes,
            weights_bytes=weights_bytes or 0,
            weights_source=weights_source,
            reserve_bytes=reserve_bytes or 0,
        )
        return _fraction_budget(device, options, claims)
    if budget_bytes > device.free_bytes:
        raise BudgetError(
            f"budget_bytes={budget_bytes} is more than the {device.free_bytes} bytes that are free on "
            f"{device.name}; give at most {device.free_bytes}, or leave it out for a share of that memory",
            needed_bytes=budget_bytes,
            budget_bytes=device.free_bytes,
        )
    for name, value in taken.items():
        if value:
            raise PlanError(f"budget_bytes is what the cache may take, so {name} has no effect; give one of them")
    return Budget(
        nbytes=budget_bytes, base="given", free_bytes=budget_bytes, note=f"{show_bytes(budget_bytes)}, as given"
    )


def _fraction_budget(device: DeviceInfo, options: CacheOptions, claims: Budget) -> Budget:
    """Return the budget that a share of the device's memory leaves beside what else is claimed of it."""
    _refuse_claims(device, claims)
    fraction = Fraction(*exact_ratio(options.mem_fraction_static or 1))
    slack = _slack(device, fraction, claims.least_slack_bytes)
    text = f"free {show_bytes(device.free_bytes)}"
    if claims.weights_bytes:
        text += f" - weights {show_bytes(claims.weights_bytes)} {claims.weights_source}".rstrip()
    if claims.reserve_bytes:
        text += f" - reserve {show_bytes(claims.reserve_bytes)}"
    text += (
        f" - slack {show_bytes(slack)}, the slack being {float(1 - fraction):.3g} (1 - mem_fraction_static) of the "
        f"{show_bytes(device.free_before_load_bytes)} free before loading"
    )
    if slack > _slack(device, fraction, 0):
        text += ", raised to what late_backing keeps free for activations"
    return msgspec.structs.replace(
        claims,
        nbytes=device.free_bytes - claims.weights_bytes - claims.reserve_bytes - slack,
        slack_bytes=slack,
        note=text,
    )


def _refuse_claims(device: DeviceInfo, claims: Budget) -> None:
    """Refuse weights, or weights and a reserve, that the device does not hold.

    Raises:
        BudgetError: always then.
    """
    needed = claims.weights_bytes + claims.reserve_bytes
    if needed <= device.free_bytes:
        return
    what = f"the weights take {show_bytes(claims.weights_bytes)} {claims.weights_source}".rstrip()
    advice = "use more ranks (tp_size, pp_size) or a larger device"
    if claims.reserve_bytes:
        what += f" and reserve_bytes (--reserve) keeps {show_bytes(claims.reserve_bytes)}"
        advice = "give a smaller reserve, " + advice
    raise BudgetError(
        f"{what}, more than the {show_bytes(device.free_bytes)} that are free on {device.name}; {advice}",
        needed_bytes=needed,
        budget_bytes=device.free_bytes,
    )


def late_slack_bytes(query: RequestQuery) -> int:
    """Return the bytes that states backed late leave for activations, at least; 0 without such states.

    512 MiB, 1.5 MiB for each token of a batch and 1/8 GiB for each rank; 10 GiB at least on a large device.
    """
    if not query.options.late_backing or STATE not in query.spaces:
        return 0
    ranks = query.parallel.tp_size * query.parallel.pp_size
    least = 512 * MIB + activation_tokens(query) * 3 * MIB // 2 + ranks * GIB // 8
    return max(least, 10 * GIB) if query.device.total_bytes > LARGE_DEVICE_BYTES else least


def activation_tokens(query: RequestQuery) -> int:
    """Return the tokens of the largest batch that runs at once: a decode step's in role decode, else a prefill chunk's."""
    options = query.options
    if options.role == "decode":
        tokens = (options.max_running_requests or 1) * max(1, draft_tokens(query))
    else:
        tokens = options.chunked_prefill_size or options.max_prefill_tokens or 0
    return max(tokens, LEAST_ACTIVATION_TOKENS)


def refuse_budget(
    error: BudgetError,
    budget: Budget,
    device: DeviceInfo,
    options: CacheOptions,
    levers: Sequence[str],
    divisions: Sequence[str],
    works: Works,
) -> BudgetError:
    """Return `error` with the advice that fits the way in which the budget was found.

    Each of `levers` makes the need smaller, each of `divisions` that of one rank; `works` tells whether ``budget_bytes``
    or ``mem_fraction_static`` serves.
    """
    most = device.free_bytes if device.source != GIVEN_BUDGET else MOST_BYTES
    needed = _working_budget(error.needed_bytes, most, works) if budget.base == "given" else error.needed_bytes
    if budget.base == "given" and needed > most:
        advice = f"{device.name} has {show_bytes(device.free_bytes)} free, so use more ranks or a larger device"
    elif budget.base == "given":
        advice = f"give at least {show_bytes(needed)}"
    else:
        advice = _fraction_advice(error.needed_bytes, budget, device, options.mem_fraction_static, works)
    less = f", or plan for less: {' or '.join(levers)}" if levers else ""
    less += f", or divide it among the ranks: {' or '.join(divisions)}" if divisions else ""
    return BudgetError(
        f"{error}; {advice}{less}",
        needed_bytes=needed,
        budget_bytes=error.budget_bytes,
    )


Works = Callable[[str, float], bool]
"""Tells whether an input serves with a value."""
MOST_BYTES = 2**50
"""Largest budget that is suggested: a pebibyte."""


def _working_budget(needed: int, most: int, works: Works) -> int:
    """Return `needed`, or where that does not serve (`strict`: a warning is left), the first multiple of it that does.

    More than `most` where none serves.
    """
    nbytes = needed
    while nbytes <= most and not works("budget_bytes", nbytes):
        nbytes *= 2
    return nbytes


MOST_FRACTIONS = 20
"""Thousandths that are tried from the least share that leaves what is needed: more memory may serve less."""


def _fraction_advice(needed: int, budget: Budget, device: DeviceInfo, fraction: float | None, works: Works) -> str:
    """Return the smallest fraction that works and what it leaves, or that none does."""
    spare = budget.free_bytes + budget.least_slack_bytes - needed
    if spare < budget.least_slack_bytes:
        return (
            f"no mem_fraction_static helps, since only {show_bytes(max(0, budget.free_bytes))} of {device.name} are "
            f"free beside what else takes memory ({budget.note}): use more ranks or a larger device"
        )
    first = max(1, -(-(1 - Fraction(spare, device.free_before_load_bytes)) * 1000 // 1))
    alone = ": weights and what else is loaded exceed its share" if budget.nbytes <= 0 else ""
    few = f"mem_fraction_static={fraction} leaves too little{alone} ({budget.note})"
    shares = (Fraction(share, 1000) for share in range(first, min(1000, first + MOST_FRACTIONS) + 1))
    least = next((share for share in shares if works("mem_fraction_static", float(share))), None)
    if least is None:
        return f"{few}: use more ranks or a larger device"
    return (
        f"{few}; the smallest that works is {float(least):.3f}, with "
        f"{show_bytes(_slack(device, least, budget.least_slack_bytes))} left for activations"
    )


def _slack(device: DeviceInfo, fraction: Fraction, least_bytes: int) -> int:
    """Return what a fraction of the memory free before loading leaves, rounded up, but at least `least_bytes`."""
    return max(-int(-device.free_before_load_bytes * (1 - fraction) // 1), least_bytes)
