"""Candidates → a registry: import what may matter, check it, register it or set it aside with the reason."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import importlib_metadata
import msgspec
import pluggy

from kvdock import __version__
from kvdock.errors import PluginError, nearest, printable
from kvdock.hookspecs import CONTRACT, PROJECT, TIERS, KVDockSpecs
from kvdock.model import CORE_KINDS, CORE_PARAMS, LayerParams
from kvdock.plugins.discovery import Candidate, refuse_name

_STDOUT = threading.RLock()
"""Redirecting is not safe in two threads at once: each would restore what the other had set."""


class PluginWarning(UserWarning):
    """A plugin was found, could not be used, and was left out; the text says which and why."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A registered plugin: its name and tier, where it comes from, and whether it was asked for by name.

    `same_as` names the member that this one is another name of; only that one is asked.
    """

    name: str
    tier: str
    plugin: Any
    distribution: str = ""
    version: str = ""
    module: str = ""
    requested: bool = False
    same_as: str = ""

    @property
    def origin(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".strip() or "no distribution"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin that is not used: `status` is ``failed``, ``conflict``, ``inactive`` or ``denied``."""

    name: str
    tier: str
    distribution: str
    version: str
    reason: str
    status: str

    @property
    def origin(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".strip() or "no distribution"


class Registry:
    """The plugins of one plan; a fresh one is empty.

    Nothing in it is shared with another registry. What was added stays; a plugin that is refused leaves
    no trace.
    """

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(KVDockSpecs)
        self._members: list[Member] = []
        self._asked: dict[str, Member] = {}
        self._problems: list[Problem] = []
        self._idle: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The name of every plugin that was found, used or not, sorted."""
        return tuple(sorted({*self._idle, *(p.name for p in self._problems), *(m.name for m in self._members)}))

    @property
    def members(self) -> tuple[Member, ...]:
        """Every registered plugin, from the least to the most specific tier, then by name."""
        return tuple(sorted(self._members, key=lambda m: (TIERS.index(m.tier), m.name)))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Every plugin that was found and is not used, with the reason."""
        return tuple(self._problems)

    def add(
        self,
        plugin: Any,
        *,
        name: str | None = None,
        tier: str | None = None,
        distribution: str = "",
        version: str = "",
        requested: bool = False,
    ) -> None:
        """Check a plugin and register it; name and tier default to its ``kvdock_name`` and ``kvdock_tier``.

        A plugin that is in already gets another name and is still asked once. Without any tier it is
        ``core``, which need not state a contract and comes with kvdock unless a distribution is given.

        Raises:
            PluginError: the plugin breaks the contract, or its name is taken; the registry is unchanged.
        """
        is_own = not distribution and (tier or getattr(plugin, "kvdock_tier", "core")) == "core"
        member = Member(
            name=str(name or getattr(plugin, "kvdock_name", "")),
            tier=str(tier or getattr(plugin, "kvdock_tier", "core")),
            plugin=plugin,
            distribution="kvdock" if is_own else distribution,
            version=__version__ if is_own else version,
            module=getattr(plugin, "__name__", type(plugin).__module__),
            requested=requested,
        )
        self._check_name(member)
        twin = next((m.name for m in self._asked.values() if m.plugin is plugin), "")
        if twin:
            member = msgspec.structs.replace(member, same_as=twin)
        else:
            self._check(member)
            self._register(member)
            self._asked[member.name] = member
        self._members.append(member)

    def set_aside(self, problem: Problem) -> None:
        """Keep a plugin that is not used, so that listings and errors can name it."""
        self._problems.append(problem)

    def leave_idle(self, name: str) -> None:
        """Keep the name of hardware that is installed and that this plan has no use for."""
        self._idle.append(name)

    def hookimpls(self, hook_name: str, tier: str) -> tuple[tuple[Member, pluggy.HookImpl], ...]:
        """Return who in `tier` implements a hook, sorted by name: registration order never matters."""
        impls = getattr(self._manager.hook, hook_name).get_hookimpls()
        pairs = [(self._asked[impl.plugin_name], impl) for impl in impls]
        return tuple(sorted((pair for pair in pairs if pair[0].tier == tier), key=lambda pair: pair[0].name))

    def hooks_of(self, member: Member) -> tuple[str, ...]:
        """Return the names of the hooks that a member implements, sorted."""
        callers = self._manager.get_hookcallers(member.plugin) or []
        return tuple(sorted(caller.name for caller in callers))

    def layer_params(self) -> dict[str, type[LayerParams]]:
        """Return the shape struct of each layer kind: the core's, and those that plugins invented."""
        kinds = dict(CORE_PARAMS)
        for member in self.members:
            kinds.update(getattr(member.plugin, "layer_params", {}))
        return kinds

    def inventor(self, kind: str) -> str:
        """Return the name of the plugin whose ``layer_params`` define a layer kind, or an empty string."""
        return next((m.name for m in self.members if kind in getattr(m.plugin, "layer_params", {})), "")

    def _check_name(self, member: Member) -> None:
        if member.tier not in TIERS:
            raise PluginError(f"{member.tier!r} is no tier of plugins; give one of {', '.join(TIERS)}")
        refusal = refuse_name(member.name, member.tier)
        if refusal:
            raise PluginError(refusal)
        for taken in self._members:
            if taken.name != member.name or (taken.plugin is member.plugin and taken.tier != member.tier):
                continue
            raise PluginError(
                f"the name {member.name!r} is taken by the {taken.tier} plugin of {taken.origin} ({taken.module}); "
                f"rename the {member.tier} plugin of {member.origin} ({member.module})"
            )

    def _check(self, member: Member) -> None:
        if isinstance(member.plugin, type):
            raise PluginError(f"plugin {member.name!r} is the class {member.plugin.__name__}; register an instance")
        _check_contract(member)
        hooks = [
            _check_hook(member, attribute, options)
            for attribute in dir(member.plugin)
            if (options := self._manager.parse_hookimpl_opts(member.plugin, attribute)) is not None
        ]
        if not hooks and member.tier != "core":
            raise PluginError(
                f"plugin {member.name!r} ({member.origin}) implements no hook; mark its functions with kvdock.hookimpl"
            )
        for name in set(hook_names()) - set(hooks):
            if callable(getattr(member.plugin, name, None)):
                raise PluginError(
                    f"plugin {member.name!r} ({member.origin}): {name} is a hook's name but is not marked, so it would "
                    "never be asked; add @kvdock.hookimpl"
                )
        self._check_layer_params(member)

    def _check_layer_params(self, member: Member) -> None:
        offered = getattr(member.plugin, "layer_params", {})
        where = f"plugin {member.name!r} ({member.origin}): layer_params"
        if not isinstance(offered, Mapping):
            raise PluginError(f"{where} is {offered!r}; give a mapping of layer kind to LayerParams subclass")
        known = self.layer_params()
        for kind, params in offered.items():
            if not isinstance(kind, str) or not (isinstance(params, type) and issubclass(params, LayerParams)):
                raise PluginError(f"{where}[{kind!r}] is {params!r}, which is no subclass of LayerParams")
            if member.tier != "core" and kind in CORE_KINDS:
                raise PluginError(f"{where} redefines the kind {kind!r}, which belongs to the core; use another name")
            if kind in known and known[kind] is not params:
                raise PluginError(
                    f"{where} redefines the kind {kind!r}, which another plugin defines; use another name"
                )

    def _register(self, member: Member) -> None:
        try:
            self._manager.register(member.plugin, name=member.name)
        except Exception as error:
            # Some releases of pluggy leave a plugin that fails validation half in.
            if self._manager.has_plugin(member.name):
                self._manager.unregister(name=member.name)
            raise PluginError(f"plugin {member.name!r} ({member.origin}) cannot be registered: {error}") from error


def _check_contract(member: Member) -> None:
    if member.tier == "core":
        return
    stated = getattr(member.plugin, "kvdock_contract", None)
    if stated is None:
        raise PluginError(
            f"plugin {member.name!r} ({member.origin}) states no contract; "
            f'add kvdock_contract = "{CONTRACT}" to {member.module}'
        )
    if stated != CONTRACT:
        raise PluginError(
            f"plugin {member.name!r} ({member.origin}) was written for contract {stated!r}, this kvdock has "
            f"{CONTRACT!r}; install a release of {member.distribution or member.name} for contract {CONTRACT}"
        )


def hook_names() -> tuple[str, ...]:
    """Return the names of all hooks of the contract, sorted."""
    return tuple(sorted(name for name in vars(KVDockSpecs) if not name.startswith("_")))


def _check_hook(member: Member, attribute: str, options: Mapping[str, Any]) -> str:
    """Return the hook that a marked function implements, after checking that it can be asked."""
    hook = options.get("specname") or attribute
    where = f"plugin {member.name!r} ({member.origin}): {hook}"
    if hook not in hook_names():
        if options.get("optionalhook"):
            return hook
        raise PluginError(f"{where} is no hook of kvdock{nearest(hook, hook_names())}")
    if options.get("wrapper") or options.get("hookwrapper"):
        raise PluginError(f"{where} is a wrapper; hooks answer for themselves, so return an answer or None")
    allowed = tuple(inspect.signature(getattr(KVDockSpecs, hook)).parameters)[1:]
    for argument in inspect.signature(getattr(member.plugin, attribute)).parameters.values():
        if argument.kind is not argument.POSITIONAL_OR_KEYWORD or argument.name not in allowed:
            given = ", ".join(allowed) or "no argument"
            raise PluginError(f"{where} asks for {str(argument)!r}, but the hook gives {given}")
        if argument.default is not argument.empty:
            raise PluginError(f"{where}: the argument {argument.name!r} has a default, which is never used; remove it")
    return hook


def load(
    candidates: Sequence[Candidate],
    *,
    allow: Collection[str] | None = None,
    deny: Collection[str] = (),
    hardware: Collection[str] | None = None,
    requested: Collection[str] = (),
    strict: bool = False,
    builtins: Sequence[tuple[str, Any]] = (),
) -> Registry:
    """Return a registry with the built-in plugins and every candidate that may matter.

    `allow` and `deny` are names (`allow` ``None``: everything, empty: the core alone); a variant comes
    along when both its parts are allowed. `hardware` are the hardware plugins to import beside those that
    are asked for by name (``None``: all). A candidate that fails is set aside with its reason and a
    `PluginWarning`; names in `allow` and `requested` must load, and with `strict` all must.

    Raises:
        PluginError: a name is unknown or in two lists that exclude each other, or a plugin that was asked
            for by name (any plugin, if `strict`) cannot be used.
    """
    registry = Registry()
    for name, plugin in builtins:
        registry.add(plugin, name=name, tier="core")
    choice = _Choice(candidates, allow, deny, hardware, requested, strict, [name for name, _ in builtins])
    for tier in TIERS[1:]:
        for candidate in sorted((c for c in candidates if c.tier == tier), key=lambda c: (c.name, c.value)):
            _admit(registry, candidate, choice)
    return registry


class _Choice:
    """Which candidates are wanted: the lists of the user, checked against what was found."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        allow: Collection[str] | None,
        deny: Collection[str],
        hardware: Collection[str] | None,
        requested: Collection[str],
        strict: bool,
        builtins: Sequence[str],
    ) -> None:
        lists = {"plugins": allow, "no_plugins": deny, "hardware": hardware, "plugin": requested}
        check_names(candidates, lists, builtins)
        self.allow = None if allow is None else frozenset(allow)
        self.deny = frozenset(deny)
        self.hardware = None if hardware is None else frozenset(hardware)
        self.requested = frozenset(requested)
        self.named = self.requested.union(allow or ())
        self.strict = strict
        self.builtins = frozenset(builtins)

    def denial(self, candidate: Candidate) -> str:
        """Return why the user's lists leave a candidate out, or an empty string."""
        if candidate.name in self.deny:
            return "left out by no_plugins"
        if self.allow is None or candidate.name in self.allow:
            return ""
        if candidate.needs and self.allow.union(self.builtins).issuperset(candidate.needs) and self.allow:
            return ""
        if not self.allow:
            return f"plugins is empty, which leaves the core alone; add {candidate.name}"
        return f"not among plugins={','.join(sorted(self.allow))}; add {candidate.name}"

    def is_idle(self, candidate: Candidate) -> bool:
        """Tell whether this is hardware that nobody asked for."""
        if candidate.tier != "hardware" or self.hardware is None:
            return False
        return candidate.name not in self.hardware | self.named

    def must_work(self, candidate: Candidate) -> bool:
        """Tell whether a failure of this candidate stops the run."""
        return self.strict or candidate.name in self.named


def check_names(
    candidates: Sequence[Candidate], lists: Mapping[str, Collection[str] | None], builtins: Sequence[str]
) -> None:
    """Check the user's lists of names, by option: ``plugins``, ``no_plugins``, ``hardware``, ``plugin``.

    Raises:
        PluginError: nothing installed has a name, or it is asked for and left out at once.
    """
    found = sorted({candidate.name for candidate in candidates})
    for option, names in lists.items():
        _check_known(option, names or (), found, builtins)
    denied = {*(lists.get("no_plugins") or ())}
    for name in sorted(denied & {*builtins}):
        raise PluginError(f"no_plugins: {name!r} is built in and cannot be left out")
    for name in sorted(denied & {*(lists.get("plugins") or ()), *(lists.get("plugin") or ())}):
        raise PluginError(f"plugin {name!r} is asked for and left out by no_plugins at once; drop one of the two")


def _check_known(option: str, names: Iterable[str], found: Sequence[str], builtins: Sequence[str]) -> None:
    known = sorted({*found, *builtins})
    for name in names:
        if name not in known:
            listed = f"found: {', '.join(known)}" if known else "no plugin is installed"
            raise PluginError(f"{option}: no plugin is called {name!r}{nearest(name, known)} ({listed})")


def _admit(registry: Registry, candidate: Candidate, choice: _Choice) -> None:
    """Register a candidate, or set it aside."""
    denial = choice.denial(candidate)
    if denial:
        if candidate.name in choice.requested:
            raise PluginError(f"plugin {candidate.name!r} ({_origin(candidate)}) is asked for, but {denial}")
        registry.set_aside(_problem(candidate, "denied", denial))
        return
    if choice.is_idle(candidate):
        registry.leave_idle(candidate.name)
        return
    missing = _missing_parts(registry, candidate)
    if candidate.status == "found" and missing:
        if candidate.name in choice.named:
            raise PluginError(f"plugin {candidate.name!r} ({_origin(candidate)}) {missing}")
        registry.set_aside(_problem(candidate, "inactive", missing))
        return
    try:
        _import_and_add(registry, candidate, requested=candidate.name in choice.named)
    except PluginError as error:
        if choice.must_work(candidate):
            raise
        status = "conflict" if candidate.status == "conflict" else "failed"
        registry.set_aside(_problem(candidate, status, str(error)))
        warnings.warn(f"{error}; it is left out", PluginWarning, stacklevel=3)


def _missing_parts(registry: Registry, candidate: Candidate) -> str:
    """Return what a variant waits for, or an empty string."""
    loaded = {member.name for member in registry.members}
    tiers = ("hardware", "family")
    missing = [f"{name} ({tier})" for name, tier in zip(candidate.needs, tiers, strict=False) if name not in loaded]
    verb = "is" if len(missing) == 1 else "are"
    return f"waits for {' and '.join(missing)}, which {verb} not loaded" if missing else ""


def _import_and_add(registry: Registry, candidate: Candidate, *, requested: bool) -> None:
    where = f"plugin {candidate.name!r} ({_origin(candidate)})"
    if candidate.status != "found":
        raise PluginError(f"{where}: {candidate.reason}")
    point = importlib_metadata.EntryPoint(name=candidate.name, value=candidate.value, group=candidate.group)
    with stdout_to_stderr():
        try:
            plugin = point.load()
        except (Exception, SystemExit) as error:
            raise PluginError(f"{where} failed to load from {candidate.value}: {describe(error)}") from error
        try:
            registry.add(
                plugin,
                name=candidate.name,
                tier=candidate.tier,
                distribution=candidate.distribution,
                version=candidate.version,
                requested=requested,
            )
        except PluginError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(f"{where} failed to register: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Return the type and text of an error in one line."""
    text = " ".join(_text(str, error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shown(value: Any) -> str:
    """Return what a plugin gave as one printable line, even if its own ``repr`` fails."""
    return printable(_text(repr, value))


def _text(render: Callable[[Any], str], value: Any) -> str:
    try:
        return render(value)
    except (Exception, SystemExit) as error:
        return f"<{type(value).__name__} whose {render.__name__}() raises {type(error).__name__}>"


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what plugins print to standard error: standard output belongs to the command's result."""
    with _STDOUT, contextlib.redirect_stdout(sys.stderr):
        yield


def _origin(candidate: Candidate) -> str:
    return f"{candidate.distribution} {candidate.version}".strip() or "no distribution"


def _problem(candidate: Candidate, status: str, reason: str) -> Problem:
    return Problem(
        name=candidate.name,
        tier=candidate.tier,
        distribution=candidate.distribution,
        version=candidate.version,
        reason=reason,
        status=status,
    )
