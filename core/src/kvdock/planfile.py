"""Plan files: a plan as JSON data, and back by planning again and comparing.

A file holds the inputs of a plan (models, device, options, parallel sizes, budget), the plugins that
answered, and the results. Loading asks the hooks again with the stored inputs and compares every
result, so an edited file, another plugin version or another contract is an error that names the
field. Nothing is ever imported by a name that a file holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvdock.device import DeviceInfo
from kvdock.errors import PlanError, nearest
from kvdock.hookspecs import CONTRACT
from kvdock.model import model_from_builtins, model_to_builtins
from kvdock.options import make_options, make_parallelism
from kvdock.startup import installed

if TYPE_CHECKING:
    from kvdock.planner import CachePlan
    from kvdock.plugins.loading import Registry

SCHEMA = "kvdock.plan/1"
MAX_FILE_BYTES = 2**24
RESULTS = (
    "max_total_num_tokens",
    "max_running_requests",
    "max_request_tokens",
    "spaces",
    "bytes_per_token",
    "total_bytes",
    "host_bytes",
    "bound",
    "allocator_cls",
    "request_pool_cls",
    "costs",
    "limits",
    "groups",
    "tables",
    "warnings",
)
"""Fields of a plan that a file repeats, in the order in which they are compared."""


def dump(plan: CachePlan) -> str:
    """Return the plan as JSON."""
    outline = plan.outline
    budget = msgspec.to_builtins(plan.asked_budget)
    data = {
        "schema": SCHEMA,
        "contract": CONTRACT,
        "plugins": plugin_versions(plan),
        "inputs": {
            "models": [model_to_builtins(model) for model in outline.models],
            "device": msgspec.to_builtins(outline.device),
            "options": _given(outline.given),
            "parallel": msgspec.to_builtins(outline.parallel),
            "budget": budget,
            "cap_tokens": plan.cap_tokens,
        },
        "options": msgspec.to_builtins(outline.options.sources),
        **{name: msgspec.to_builtins(getattr(plan, name)) for name in RESULTS},
    }
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()


def plugin_versions(plan: CachePlan) -> dict[str, str]:
    """Return name → version of every plugin that decided something in `plan`."""
    decided = {
        answer.plugin
        for decision in (*plan.read_by, *plan.outline.decisions)
        for answer in decision.answers
        if answer.outcome == "claimed"
    }
    return {member.name: member.version for member in plan.outline.registry.members if member.name in decided}


def _given(options: Any) -> dict[str, Any]:
    data = msgspec.to_builtins(options)
    return {name: value for name, value in data.items() if value is not None}


def load(text: str | bytes, registry: Registry | None = None) -> CachePlan:
    """Read what `dump` wrote; see `CachePlan.from_json`."""
    data = _parse(text)
    inputs = _section(data, "inputs")
    options = make_options(_section(inputs, "options"))
    registry = registry if registry is not None else installed(options)
    _compare_plugins(_section(data, "plugins"), registry)
    plan = _plan_again(inputs, options, registry)
    written = msgspec.json.decode(dump(plan))
    for name in ("options", *RESULTS):
        if name not in data:
            raise PlanError(f"plan file: field {name!r} is missing; plan again")
        _compare(name, data[name], written[name])
    return plan


def _parse(text: str | bytes) -> dict[str, Any]:
    if len(text) > MAX_FILE_BYTES:
        raise PlanError(f"plan file: more than {MAX_FILE_BYTES} bytes; this is no plan of kvdock")
    try:
        data = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PlanError(f"plan file: not valid JSON ({error})") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise PlanError(f"plan file: schema is {found!r}, but this version reads {SCHEMA!r}; plan again")
    if data.get("contract") != CONTRACT:
        raise PlanError(f"plan file: contract is {data.get('contract')!r}, but this is {CONTRACT!r}; plan again")
    known = {"schema", "contract", "plugins", "inputs", "options", *RESULTS}
    for name in data:
        if name not in known:
            raise PlanError(f"plan file: no field is called {name!r}{nearest(name, known)}")
    return data


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name)
    if not isinstance(section, dict):
        raise PlanError(f"plan file: {name!r} is not an object; plan again")
    return section


def _plan_again(inputs: dict[str, Any], options: Any, registry: Registry) -> CachePlan:
    from kvdock.budget import Budget
    from kvdock.planner import plan_with

    models = inputs.get("models")
    if not isinstance(models, list) or not models:
        raise PlanError("plan file: 'inputs.models' is no list of models; plan again")
    try:
        device = msgspec.convert(inputs.get("device"), DeviceInfo)
        budget = msgspec.convert(inputs.get("budget"), Budget)
        cap_tokens = msgspec.convert(inputs.get("cap_tokens"), int | None)
    except msgspec.ValidationError as error:
        raise PlanError(f"plan file: inputs: {error}") from error
    return plan_with(
        tuple(model_from_builtins(model, registry.layer_params()) for model in models),
        device,
        options,
        make_parallelism(_section(inputs, "parallel")),
        registry,
        budget=budget,
        cap_tokens=cap_tokens,
    )


def _compare_plugins(written: dict[str, Any], registry: Registry) -> None:
    """Refuse other versions of the plugins that decided; what others would decide shows in the results."""
    now = {member.name: member.version for member in registry.members}
    for name, version in sorted(written.items()):
        if version != now.get(name):
            raise PlanError(
                f"plan file: plugins.{name} was {version!r} when the plan was made and is {now.get(name, 'absent')!r} "
                "now; plan again, or install what was there"
            )


def _compare(field: str, was: Any, now: Any) -> None:
    """Raise for the first place in which two JSON values differ, naming it."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            _compare(f"{field}.{key}", was.get(key), now.get(key))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (left, right) in enumerate(zip(was, now, strict=True)):
            _compare(f"{field}[{index}]", left, right)
    elif was != now or isinstance(was, bool) != isinstance(now, bool):
        raise PlanError(f"plan file: {field} is {was!r}, but planning again gives {now!r}; the file was edited")
