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
from kvdock.fitting import Agreement, replay
from kvdock.hookspecs import CONTRACT
from kvdock.model import model_from_builtins, model_to_builtins
from kvdock.options import CacheOptions, make_options, make_parallelism
from kvdock.plugins.resolve import Decision
from kvdock.startup import installed
from kvdock.strictjson import parse_object

if TYPE_CHECKING:
    from kvdock.planner import CachePlan
    from kvdock.plugins.loading import Registry

SCHEMA = "kvdock.plan/1"
MAX_FILE_BYTES = 2**24
RESULTS = (
    "budget",
    "max_total_num_tokens",
    "max_running_requests",
    "max_request_tokens",
    "spaces",
    "bytes_per_token",
    "total_bytes",
    "host_bytes",
    "bound",
    "agreement",
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
    outline, asked = plan.outline, plan.asked_budget
    data = {
        "schema": SCHEMA,
        "contract": CONTRACT,
        "plugins": plugin_versions(plan),
        "inputs": {
            "models": [model_to_builtins(model) for model in outline.models],
            "device": msgspec.to_builtins(outline.device),
            "options": _given(outline.given),
            "parallel": msgspec.to_builtins(outline.parallel),
            "budget_bytes": asked.nbytes if asked.base == "given" else None,
            "weights_bytes": asked.weights_bytes,
            "weights_source": asked.weights_source,
            "reserve_bytes": asked.reserve_bytes,
            "cap_tokens": plan.cap_tokens,
        },
        "read_by": msgspec.to_builtins(plan.read_by),
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
    agreement = _converted("agreement", data["agreement"], Agreement)
    if not 0 <= agreement.rank < agreement.ranks:
        raise PlanError(f"plan file: agreement: rank {agreement.rank} is none of {agreement.ranks} ranks; plan again")
    plan = _plan_again(inputs, agreement, options, registry)
    plan = msgspec.structs.replace(plan, read_by=_converted("read_by", data["read_by"], tuple[Decision, ...]))
    written = msgspec.json.decode(dump(plan))
    for name in ("plugins", "inputs", "options", *RESULTS):
        _compare(name, data[name], written[name])
    return plan


def _converted(name: str, value: Any, type_: Any) -> Any:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise PlanError(f"plan file: {name}: {error}") from error


INPUTS = (
    "models",
    "device",
    "options",
    "parallel",
    "budget_bytes",
    "weights_bytes",
    "weights_source",
    "reserve_bytes",
    "cap_tokens",
)


def _parse(text: str | bytes) -> dict[str, Any]:
    if not isinstance(text, (str, bytes)):
        raise PlanError(f"plan file: {type(text).__name__} is no text; give what to_json returned")
    if len(text) > MAX_FILE_BYTES:
        raise PlanError(f"plan file: more than {MAX_FILE_BYTES} bytes; this is no plan of kvdock")
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    data = parse_object(raw, "plan file", "give what to_json returned")
    if data.get("schema") != SCHEMA:
        raise PlanError(f"plan file: schema is {data.get('schema')!r}, but this version reads {SCHEMA!r}; plan again")
    if data.get("contract") != CONTRACT:
        raise PlanError(f"plan file: contract is {data.get('contract')!r}, but this is {CONTRACT!r}; plan again")
    _check_fields("", data, ("schema", "contract", "plugins", "inputs", "read_by", "options", *RESULTS))
    _check_fields("inputs.", _section(data, "inputs"), INPUTS)
    return data


def _check_fields(where: str, data: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in data:
        if name not in known:
            raise PlanError(f"plan file: no field is called {where + name!r}{nearest(name, known)}")
    for name in known:
        if name not in data:
            raise PlanError(f"plan file: field {where + name!r} is missing; plan again")


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name)
    if not isinstance(section, dict):
        raise PlanError(f"plan file: {name!r} is not an object; plan again")
    return section


def _plan_again(inputs: dict[str, Any], agreement: Agreement, options: CacheOptions, registry: Registry) -> CachePlan:
    """Plan with the stored inputs, with what the ranks agreed on where there were others."""
    from kvdock.planner import Asked, plan_steps

    models = inputs["models"]
    if not isinstance(models, list) or not models:
        raise PlanError("plan file: 'inputs.models' is no list of models; plan again")
    asked = Asked(
        budget_bytes=_converted("inputs.budget_bytes", inputs["budget_bytes"], int | None),
        weights_bytes=_converted("inputs.weights_bytes", inputs["weights_bytes"], int | None),
        weights_source=_converted("inputs.weights_source", inputs["weights_source"], str),
        reserve_bytes=_converted("inputs.reserve_bytes", inputs["reserve_bytes"], int | None),
        cap_tokens=_converted("inputs.cap_tokens", inputs["cap_tokens"], int | None),
        rank=agreement.rank,
        ranks=agreement.ranks,
    )
    steps = plan_steps(
        tuple(model_from_builtins(model, registry.layer_params()) for model in models),
        _converted("inputs.device", inputs["device"], DeviceInfo),
        options,
        make_parallelism(_section(inputs, "parallel")),
        registry,
        asked,
    )
    return replay(steps, agreement.vectors if agreement.ranks > 1 else ())


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
