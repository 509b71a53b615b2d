"""JSON as files of others hold it: one object, no key twice, finite numbers, no bottomless nesting."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from kvdock.errors import PlanError, printable

MAX_DEPTH = 64
MAX_DIGITS = 64
"""Longest whole number that is read; a count of anything has fewer digits."""


def parse_object(raw: bytes, shown: str, advice: str, *, allow_infinity: bool = False) -> dict[str, Any]:
    """Return the JSON object in `raw`; `shown` names the file in errors, `advice` says what would do.

    `allow_infinity` takes the word ``Infinity``, which is no JSON but stands in published configs as an open limit.

    Raises:
        PlanError: not UTF-8, not JSON, cut short, too deep, NaN or infinite numbers, duplicate keys, or no object.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"{shown} is not UTF-8 text (byte {error.start}); save it as UTF-8, or {advice}") from error
    try:
        data = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_open_limit if allow_infinity else _no_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
    except RecursionError:
        raise PlanError(_too_deep(shown, advice)) from None
    except json.JSONDecodeError as error:
        raise PlanError(_not_json(text, error, shown, advice)) from error
    except _ContentError as error:
        raise PlanError(f"{shown}: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{shown} holds {kind_of(data)}, not an object of fields; {advice}")
    check_depth(data, shown, advice)
    return data


class _ContentError(ValueError):
    """What is wrong inside a file, before its name is known."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _ContentError(f"the key {printable(key)!r} is there twice in one object; keep one of them")
        seen.add(key)
    return found


def _no_constant(text: str) -> float:
    raise _ContentError(f"the number {text} is no JSON; give a finite number")


def _open_limit(text: str) -> float:
    return _no_constant(text) if text == "NaN" else float(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _ContentError(f"the number {printable(text)} is not finite; give a finite number")
    return value


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _ContentError(f"a number has {len(text)} digits; no field of a model needs more than {MAX_DIGITS}")
    return int(text)


def _not_json(text: str, error: json.JSONDecodeError, shown: str, advice: str) -> str:
    if not text.strip():
        return f"{shown} is empty; {advice}"
    cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
    what = "ends too early (a download cut short?)" if cut else f"is not JSON: {error.msg}"
    return f"{shown} {what} at line {error.lineno}, column {error.colno}; is the file complete? Else {advice}"


def check_depth(data: Any, shown: str, advice: str) -> None:
    """Refuse data that is nested deeper than any file of ours.

    Raises:
        PlanError: always then.
    """
    level = [data]
    for _ in range(MAX_DEPTH):
        # Each container once: data in hand may hold one twice, or itself.
        level = list({id(child): child for item in level for child in _children(item)}.values())
        if not level:
            return
    raise PlanError(_too_deep(shown, advice))


def _children(item: Any) -> list[Any]:
    values = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()
    return [value for value in values if isinstance(value, Mapping | list | tuple)]


def _too_deep(shown: str, advice: str) -> str:
    return f"{shown} is nested deeper than {MAX_DEPTH} levels; {advice}"


def kind_of(data: Any) -> str:
    """Return what a JSON value is, in words."""
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(data), "a number")
