"""Plugins under observation: what each hook was asked and answered, and what an import brings along."""

from __future__ import annotations

import copy
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pluggy

from kvdock.allocators.base import Allocator
from kvdock.plugins.loading import Member, Registry
from kvdock.pools.base import Pool
from kvdock.requests.base import RequestPool

HEAVY = ("torch", "triton")
"""Modules that a plugin imports when it runs on a device, and not before."""

INTERFACES: Mapping[str, type[Any]] = {
    "get_pool_cls": Pool,
    "get_allocator_cls": Allocator,
    "get_request_pool_cls": RequestPool,
}
"""Hook that answers a class → the interface of that class."""


class Asked(NamedTuple):
    """One call of a hook of the plugin under test."""

    hook: str
    arguments: Mapping[str, Any]
    answer: Any
    function: Callable[..., Any]
    changed: str = ""
    """Names of the arguments that the call changed, though hooks change nothing."""

    @property
    def declines(self) -> bool:
        """Whether the answer claims nothing: ``None``, or no objection."""
        return self.answer is None or self.answer == ()


def environment_set_by(one: Asked) -> list[str]:
    """Return the variables that a hook sets when it is asked again in an empty environment."""
    kept = dict(os.environ)
    os.environ.clear()
    try:
        one.function(*one.arguments.values())
        return sorted(os.environ)
    finally:
        os.environ.clear()
        os.environ.update(kept)


class Watch(Registry):
    """A registry with the plugins of another, which keeps what one of them is asked and answers."""

    def __init__(self, members: Iterable[Member], watched: str) -> None:
        super().__init__()
        self.watched = watched
        self.asked: list[Asked] = []
        for member in members:
            self.add(
                member.plugin,
                name=member.name,
                tier=member.tier,
                distribution="" if member.tier == "core" else member.distribution,
                version=member.version,
            )

    @property
    def member(self) -> Member:
        """The plugin under test."""
        return next(member for member in self.members if member.name == self.watched)

    def hookimpls(self, hook_name: str, tier: str) -> tuple[tuple[Member, pluggy.HookImpl], ...]:
        """Return who implements a hook; what the watched plugin answers is kept."""
        kept: list[tuple[Member, Any]] = []
        for member, impl in super().hookimpls(hook_name, tier):
            kept.append((member, _Kept(hook_name, impl, self.asked) if member.name == self.watched else impl))
        return tuple(kept)


class _Kept:
    """An implementation of a hook whose calls are noted."""

    def __init__(self, hook: str, impl: Any, asked: list[Asked]) -> None:
        self.argnames: tuple[str, ...] = impl.argnames
        self._hook, self._impl, self._asked = hook, impl, asked

    def function(self, *values: Any) -> Any:
        arguments = dict(zip(self.argnames, values, strict=True))
        before = copy.deepcopy(arguments)
        answer = self._impl.function(*values)
        changed = [name for name, value in arguments.items() if value != before[name]]
        self._asked.append(Asked(self._hook, arguments, answer, self._impl.function, ", ".join(changed)))
        return answer


def lacks_of(cls: type[Any], base: type[Any]) -> list[str]:
    """Return what `cls` lacks of an interface: methods, and arguments that callers of the interface give."""
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    found = [f"{name}() is missing" for name in missing]
    for name, method in inspect.getmembers(base, callable):
        if name.startswith("_") or name in missing or not hasattr(method, "__code__"):
            continue
        own = getattr(cls, name, None)
        if not callable(own):
            found.append(f"{name} is {own!r}, not a method")
        elif why := _refuses(inspect.signature(method), inspect.signature(own)):
            found.append(f"{name}(): {why}")
    return found


def _refuses(promised: inspect.Signature, own: inspect.Signature) -> str:
    """Return why a method cannot be called as its interface says, or an empty string."""
    parameters = list(promised.parameters.values())
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    first = [None] if parameters and parameters[0].name == "self" else []
    named = {p.name: None for p in parameters[len(first) :] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    try:
        own.bind(*[None for _ in required])
        own.bind(*[None for _ in positional], **{p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY})
        own.bind(*first, **named)
    except TypeError as error:
        return f"{error}; the interface has {promised}"
    return ""


IMPORTS = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*[name for name in sys.argv[2:] if sys.modules.get(name)])
"""
ALL_MODULES = """
import importlib, pkgutil, sys
for name in sys.argv[2:]:
    sys.modules[name] = None
package = importlib.import_module(sys.argv[1].partition(".")[0])
names = [module.name for module in pkgutil.walk_packages(getattr(package, "__path__", ()), package.__name__ + ".")]
for name in names:
    if "kernels" in name.split(".") or name.endswith("__main__"):
        continue
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""
OTHER_CONTRACT = """
import sys, warnings
import kvdock.hookspecs
kvdock.hookspecs.CONTRACT = sys.argv[2]
from kvdock import PluginError
from kvdock.plugins import loading
from kvdock.builtin import BUILTINS
from kvdock.startup import candidates
name = sys.argv[1]
try:
    loading.load(candidates(), allow=(name, *name.split(".")[:2 * name.count(".")]), builtins=BUILTINS)
except PluginError as error:
    print(error)
"""
CHECK_PLUGINS = """
from kvdock.cli import main
main(["plugins", "--check", "--json"])
"""


def run_alone(code: str, *arguments: str) -> str:
    """Return what a fresh interpreter prints for `code`, with this one's path and none of kvdock's variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVDOCK_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def imported_with(module: str, heavy: Sequence[str]) -> str:
    """Return which of the modules `heavy` an import of `module` brings along, apart by spaces."""
    return run_alone(IMPORTS, module, *heavy)


def classes_of(asked: Iterable[Asked]) -> Iterator[tuple[str, type[Any]]]:
    """Yield each class that a hook answered, once, with the hook."""
    seen: set[tuple[str, Any]] = set()
    for one in asked:
        key = (one.hook, one.answer)
        if one.hook in INTERFACES and isinstance(one.answer, type) and key not in seen:
            seen.add(key)
            yield key
