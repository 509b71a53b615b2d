"""Fields of frozen structs hold what their annotations say, however the struct is made."""

from __future__ import annotations

import enum
import functools
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

from kvdock.errors import PlanError, nearest, printable

_SCALARS = {int: "a whole number", str: "text", bool: "true or false", float: "a number"}
_PLURALS = {int: "whole numbers", str: "texts", bool: "true or false", float: "numbers"}


class _Field(NamedTuple):
    """A field and the two ways to find that its value fits: by its exact type (quick), or by looking into it."""

    name: str
    annotation: Any
    exact: frozenset[type]
    fits: Callable[[Any], bool]


def check_fields(struct: msgspec.Struct, label: str) -> None:
    """Refuse a field whose value is not of the annotated type; lists become tuples, and 8.0 becomes 8.

    To be called first in ``__post_init__``; `label` names the struct in errors.

    Raises:
        PlanError: a value does not fit; names the struct, the field, its value and what fits.
    """
    for name, annotation, exact, fits in _fields(type(struct)):
        value = getattr(struct, name)
        if type(value) not in exact and not fits(value):
            msgspec.structs.force_setattr(struct, name, converted(f"{label} {name}", value, annotation))


def converted(what: str, value: Any, annotation: Any) -> Any:
    """Return `value` as the annotated type; `what` names it in errors.

    Raises:
        PlanError: it does not fit without losing or guessing something; says what fits.
    """
    fits = _fits(annotation)
    value = _plain(value, annotation)
    if isinstance(value, list) and fits(tuple(value)):
        return tuple(value)
    if fits(value):
        return value
    if not _holds_structs(annotation):
        try:
            return msgspec.convert(value, annotation)
        except (msgspec.ValidationError, RecursionError, UnicodeEncodeError):
            pass  # said below, in the words of the option
    raise PlanError(f"{what}={show(value)} does not fit: give {_wanted(annotation)}{_meant(value, annotation)}")


def show(value: Any) -> str:
    """Return a value for an error message: safe for a terminal, and short."""
    try:
        return printable(repr(value), 60)
    except (ValueError, RecursionError):  # a number of thousands of digits, or nesting without end
        return f"a {type(value).__name__} too large to show"
    except Exception:  # whatever a foreign __repr__ raises
        return f"a {type(value).__name__} that cannot be shown"


@functools.cache
def _fields(cls: type[msgspec.Struct]) -> tuple[_Field, ...]:
    return tuple(
        _Field(field.name, field.type, _exact(field.type), _fits(field.type)) for field in msgspec.structs.fields(cls)
    )


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _exact(annotation: Any) -> frozenset[type]:
    """Return the types whose values fit as they are. An int where a float belongs is still converted."""
    plain = (*_SCALARS, types.NoneType)
    return frozenset(m for m in _members(annotation) if m in plain or _is_class(m, msgspec.Struct, enum.Enum))


@functools.cache
def _fits(annotation: Any) -> Callable[[Any], bool]:
    """Return what says whether a value fits as it is, down to the entries of tuples."""
    exact = _exact(annotation)
    deeper = tuple(test for member in _members(annotation) if (test := _test(member)) is not None)
    if len(deeper) == 1 and not exact:
        return deeper[0]

    def fits(value: Any) -> bool:
        return type(value) in exact or any(test(value) for test in deeper)

    return fits


def _test(member: Any) -> Callable[[Any], bool] | None:
    origin, arguments = typing.get_origin(member), typing.get_args(member)
    if member is Any:
        return lambda _: True
    if origin is Literal:
        return lambda value: type(value) is str and value in arguments
    if _is_class(member, msgspec.Struct):
        return lambda value: isinstance(value, member)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        entry, quick = _fits(arguments[0]), _exact(arguments[0])
        return lambda value: type(value) is tuple and (quick.issuperset(map(type, value)) or all(map(entry, value)))
    if origin is tuple:
        entries = tuple(map(_fits, arguments))
        return lambda value: type(value) is tuple and len(value) == len(entries) and all(map(_call, entries, value))
    return None  # mappings and what plugins annotate are converted, which copies them


def _call(fits: Callable[[Any], bool], value: Any) -> bool:
    return fits(value)


def _is_class(annotation: Any, *bases: type) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, bases)


def _holds_structs(annotation: Any) -> bool:
    """Return whether data would be taken for a struct, whose kind the data does not tell."""
    return _is_class(annotation, msgspec.Struct) or any(map(_holds_structs, typing.get_args(annotation)))


def _plain(value: Any, annotation: Any) -> Any:
    """Turn 8.0 into 8 where a whole number is meant; 8.5 and booleans are left to be refused."""
    counts = int in _members(annotation) and float not in _members(annotation)
    whole = counts and isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if whole else value


def _wanted(annotation: Any) -> str:
    """Return in words what fits."""
    return " or ".join(_wanted_member(m) for m in _members(annotation) if m is not types.NoneType)


def _wanted_member(member: Any) -> str:
    origin, arguments = typing.get_origin(member), typing.get_args(member)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is tuple and len(arguments) == 2 and arguments[1] is not Ellipsis:
        return f"a pair of {' and '.join(dict.fromkeys(_plural(a) for a in arguments))}"
    if origin is tuple:
        return f"a list of {_plural(arguments[0])}"
    if origin is dict:
        return "names and values"
    return _SCALARS.get(member) or f"a {getattr(member, '__name__', member)}"


def _plural(member: Any) -> str:
    parts = _members(member)
    if len(parts) > 1:
        return " or ".join(map(_plural, parts))
    if typing.get_origin(member) is dict:
        return "names and values"
    return _PLURALS.get(member) or f"{getattr(member, '__name__', member)}s"


def _meant(value: Any, annotation: Any) -> str:
    """Return the choice that a text comes close to."""
    choices = [c for m in _members(annotation) if typing.get_origin(m) is Literal for c in typing.get_args(m)]
    return nearest(value, choices) if isinstance(value, str) else ""
