"""How many bytes a cache may take, and which words say so."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import msgspec

from kvdock.device import DeviceInfo
from kvdock.errors import BudgetError, PlanError
from kvdock.options import CacheOptions, exact_ratio

GIB = 2**30


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes for everything that kvdock allocates on one device, and where they come from.

    `base` is ``given`` (the caller's number) or ``fraction``: ``free - slack`` with
    ``slack = memory free before loading · (1 - mem_fraction_static)``. `free_bytes` has the weights taken off.
    """

    nbytes: int
    base: Literal["given", "fraction"]
    free_bytes: int
    slack_bytes: int = 0
    weights_bytes: int = 0
    note: str = ""


def show_bytes(nbytes: int) -> str:
    """Return bytes for a person: ``1.50 GiB (1,610,612,736 bytes)``."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit} ({nbytes:,} bytes)"
    return f"{nbytes:,} bytes"


def find_budget(
    device: DeviceInfo, options: CacheOptions, budget_bytes: int | None, weights_bytes: int | None
) -> Budget:
    """Return the budget: `budget_bytes` if given, else the device's free memory less weights and slack.

    The result may be negative; whether anything fits is the solver's to say.

    Raises:
        BudgetError: a given budget is more than is free on the device.
        PlanError: a given number is negative, or weights are given beside a budget that they do not touch.
    """
    for name, value in (("budget_bytes", budget_bytes), ("weights_bytes", weights_bytes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63):
            raise PlanError(f"{name}={value!r} is no number of bytes; give a whole number from 0 to 2^63 - 1")
    if budget_bytes is not None:
        if budget_bytes > device.free_bytes:
            raise BudgetError(
                f"budget_bytes={budget_bytes} is more than the {device.free_bytes} bytes that are free on "
                f"{device.name}; give at most {device.free_bytes}, or leave it out for a share of that memory",
                needed_bytes=budget_bytes,
                budget_bytes=device.free_bytes,
            )
        if weights_bytes:
            raise PlanError("budget_bytes is what the cache may take, so weights_bytes has no effect; give one of them")
        return Budget(
            nbytes=budget_bytes, base="given", free_bytes=budget_bytes, note=f"{show_bytes(budget_bytes)}, as given"
        )
    return _fraction_budget(device, options, weights_bytes or 0)


def _fraction_budget(device: DeviceInfo, options: CacheOptions, weights_bytes: int) -> Budget:
    fraction = Fraction(*exact_ratio(options.mem_fraction_static or 1))
    slack = -int(-device.free_before_load_bytes * (1 - fraction) // 1)
    free = device.free_bytes - weights_bytes
    weights = f" - weights {show_bytes(weights_bytes)}" if weights_bytes else ""
    return Budget(
        nbytes=free - slack,
        base="fraction",
        free_bytes=free,
        slack_bytes=slack,
        weights_bytes=weights_bytes,
        note=(
            f"free {show_bytes(device.free_bytes)}{weights} - slack {show_bytes(slack)}, the slack being "
            f"{float(1 - fraction):.3g} (1 - mem_fraction_static) of the {show_bytes(device.free_before_load_bytes)} "
            f"free before loading"
        ),
    )


def refuse_budget(error: BudgetError, budget: Budget, device: DeviceInfo, options: CacheOptions) -> BudgetError:
    """Return `error` with the advice that fits the way in which the budget was found."""
    if budget.base == "given":
        advice = f"give at least {show_bytes(error.needed_bytes)}"
    else:
        advice = _fraction_advice(error.needed_bytes, budget, device, options.mem_fraction_static)
    if budget.base == "fraction" and options.max_total_tokens is not None:
        advice += (
            f", or fewer than max_total_tokens={options.max_total_tokens}, for which only "
            f"{show_bytes(max(0, budget.free_bytes))} are free"
        )
    return BudgetError(
        f"{error}; {advice}, or plan for less: {_less(options)}a shorter context_length, fewer max_running_requests, "
        "a narrower kv_cache_dtype",
        needed_bytes=error.needed_bytes,
        budget_bytes=error.budget_bytes,
    )


def _less(options: CacheOptions) -> str:
    """Return the options given outright that take memory of their own, as the first advice."""
    return "" if options.max_state_slots is None else f"fewer than max_state_slots={options.max_state_slots}, "


def _fraction_advice(needed: int, budget: Budget, device: DeviceInfo, fraction: float | None) -> str:
    spare = budget.free_bytes - needed
    if spare < 0:
        return (
            f"no mem_fraction_static helps, since only {show_bytes(max(0, budget.free_bytes))} are free "
            f"of weights on {device.name} (weights {show_bytes(budget.weights_bytes)}): use more ranks or a larger device"
        )
    least = 1 - Fraction(spare, device.free_before_load_bytes)
    rounded = -(-least * 1000 // 1) / 1000
    return (
        f"mem_fraction_static={fraction} leaves too little ({budget.note}); the smallest that works is "
        f"{float(rounded):.3f}"
    )
