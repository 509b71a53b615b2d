"""Arguments that commands share: sizes, options, parallel sizes, and what `kvdock.plan` gets of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from kvdock.errors import PlanError, nearest
from kvdock.options import CacheOptions, make_options

if TYPE_CHECKING:
    from kvdock.planner import CachePlan

MAX_BYTES = 2**63 - 1
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{ending}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for ending, base in (("b", 1000), ("ib", 1024))
}
_LISTS = frozenset({"plugins", "no_plugins", "prefer"})
F = TypeVar("F", bound=Callable[..., Any])


def parse_size(text: str) -> int:
    """Return the bytes that `text` states: ``40GiB``, ``80GB``, ``1.5 TiB``, ``1073741824``.

    Raises:
        PlanError: no number, no unit that is known, or more than 2^63 - 1 bytes.
    """
    found = re.fullmatch(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)", text.strip())
    factor = _UNITS.get(found[2].lower()) if found else None
    if found is None or factor is None:
        raise PlanError(f"{text!r} is no size; write it as 40GiB, 80GB, 512MiB or plain bytes")
    nbytes = int(Decimal(found[1]) * factor)
    if nbytes > MAX_BYTES:
        raise PlanError(f"{text!r} is more than any device has (2^63 - 1 bytes); write it as 40GiB or 80GB")
    return nbytes


Bytes = int | tuple[int, ...] | None
"""What ``--memory``, ``--weights`` and ``--reserve`` state: nothing, one size, or one for each rank."""


def read_bytes(context: click.Context, parameter: click.Parameter, text: str | None) -> Bytes:
    """Return the bytes of an argument, those of each rank where it lists several, or ``None`` without one."""
    if text is None:
        return None
    try:
        sizes = tuple(map(parse_size, text.split(",")))
    except PlanError as error:
        raise click.BadParameter(str(error), context, parameter) from error
    return sizes if len(sizes) > 1 else sizes[0]


def read_memory(context: click.Context, parameter: click.Parameter, text: str | None) -> Bytes:
    """Return the bytes of an argument that cannot be nothing."""
    nbytes = read_bytes(context, parameter, text)
    if nbytes == 0 or (isinstance(nbytes, tuple) and 0 in nbytes):
        raise click.BadParameter(f"{text!r} is no memory at all; write it as 40GiB or 80GB", context, parameter)
    return nbytes


def read_whole(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Return a whole number (8.0 is one), or ``None`` without one; its range is checked where it is used."""
    if text is None:
        return None
    if not re.fullmatch(r"[+-]?[0-9]{1,40}(\.0*)?", text.strip()):
        raise click.BadParameter(f"{text!r} is no whole number; give one such as 8", context, parameter)
    return int(text.strip().partition(".")[0])


def read_layers(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Return the layers of each pipeline stage (``30,31``), or ``None`` without them."""
    if text is None:
        return None
    if not re.fullmatch(r"\s*[0-9]{1,18}\s*(,\s*[0-9]{1,18}\s*)*", text):
        raise click.BadParameter(
            f"{text!r} does not list layers; give one number a stage, as 30,31", context, parameter
        )
    return tuple(int(part) for part in text.split(","))


def once(
    *names: str, callback: Callable[..., Any] | None = None, default: Any = None, **settings: Any
) -> Callable[[F], F]:
    """Return a click option that is refused when it is given twice, instead of the last one winning.

    `callback` reads the one value, as that of a plain option does.
    """

    def read_one(context: click.Context, parameter: click.Parameter, values: tuple[Any, ...]) -> Any:
        if len(values) > 1:
            raise click.UsageError(f"{parameter.opts[0]} is given twice; give it once", context)
        value = values[0] if values else None
        return value if callback is None else callback(context, parameter, value)

    defaults = [] if default is None else [default]
    return click.option(*names, multiple=True, callback=read_one, default=defaults, **settings)


_OPTION_FLAGS = (
    once("--page-size", "page_size", callback=read_whole, metavar="N", help="Tokens a page."),
    once("--kv-cache-dtype", "kv_cache_dtype", metavar="DTYPE", help="auto, bfloat16, fp8_e4m3 …"),
    once("--context", "context_length", callback=read_whole, metavar="N", help="Longest request in tokens."),
    once("--max-requests", "max_running_requests", callback=read_whole, metavar="N", help="Requests at the same time."),
    once("--max-tokens", "max_total_tokens", callback=read_whole, metavar="N", help="Tokens to plan for, per rank."),
    once("--mem-fraction", "mem_fraction_static", type=float, help="Share of the memory for weights and cache."),
    once("--hybrid-swa", "hybrid_swa", type=click.Choice(["auto", "on", "off"]), help="Pool of sliding layers."),
    once("--swa-ratio", "swa_full_tokens_ratio", type=float, help="Sliding slots per full slot."),
    once(
        "--chunked-prefill-size",
        "chunked_prefill_size",
        callback=read_whole,
        metavar="N",
        help="Tokens of a prefill chunk.",
    ),
    click.option("--unified", "unified_memory", is_flag=True, help="One byte buffer for all spaces of a hybrid model."),
    click.option("--no-prefix-cache", "no_prefix_cache", is_flag=True, help="Keep no prefixes for later requests."),
    click.option("--prefer", "prefer", multiple=True, metavar="HOOK=PLUGIN", help="Settle a tie; repeatable."),
    click.option("--option", "option", multiple=True, metavar="NAME=VALUE", help="Any other option; repeatable."),
)
_PLUGIN_FLAGS = (
    click.option("--plugin", "plugins", multiple=True, metavar="NAME", help="Allow this plugin only; repeatable."),
    click.option("--no-plugin", "no_plugins", multiple=True, metavar="NAME", help="Leave a plugin out; repeatable."),
    click.option("--strict", "strict", is_flag=True, help="Warnings are errors."),
)
_PARALLEL_FLAGS = (
    once("--tp", "tp_size", callback=read_whole, metavar="N", help="Tensor-parallel ranks."),
    once("--pp", "pp_size", callback=read_whole, metavar="N", help="Pipeline stages."),
    once("--pp-rank", "pp_rank", callback=read_whole, metavar="N", help="Stage to plan."),
    once(
        "--pp-layers",
        "pp_layers",
        callback=read_layers,
        metavar="N,N",
        help="Layers of each stage, where uneven: 30,31.",
    ),
    once("--dp", "dp_size", callback=read_whole, metavar="N", help="Data-parallel workers."),
    click.option("--dp-attention", "dp_attention", is_flag=True, help="Attention is data-parallel."),
    once("--dcp", "dcp_size", callback=read_whole, metavar="N", help="Decode-context-parallel ranks."),
    once("--dcp-rank", "dcp_rank", callback=read_whole, metavar="N", help="Decode-context-parallel rank to plan."),
    once("--cp", "cp_size", callback=read_whole, metavar="N", help="Context-parallel ranks."),
    once("--cp-rank", "cp_rank", callback=read_whole, metavar="N", help="Context-parallel rank to plan."),
)
_PLACE_FLAGS = (
    click.argument("model"),
    once("--device", help="h200, cuda:h200, cpu, cuda:0 …; see kvdock devices."),
    once(
        "--memory",
        callback=read_memory,
        metavar="SIZE",
        help="Bytes for all that kvdock allocates: 40GiB, 80GB; with --ranks also one each: 70GiB,41GiB.",
    ),
    once("--weights", callback=read_bytes, metavar="SIZE", help="Bytes of the weights on this rank: 16GiB."),
    once(
        "--reserve",
        "reserve",
        callback=read_bytes,
        metavar="SIZE",
        help="Bytes of a device to leave for activations and graphs.",
    ),
)
_PARALLEL_NAMES = (
    "tp_size",
    "pp_size",
    "pp_rank",
    "pp_layers",
    "dp_size",
    "dp_attention",
    "dcp_size",
    "dcp_rank",
    "cp_size",
    "cp_rank",
)
_NOT_OPTIONS = frozenset({*_PARALLEL_NAMES, "reserve", "option", "no_prefix_cache"})


def _decorate(flags: Iterable[Callable[[Any], Any]], command: F) -> F:
    return reduce(lambda decorated, flag: flag(decorated), reversed(tuple(flags)), command)


def plan_arguments(command: F) -> F:
    """Give a command the arguments that make a plan."""
    return _decorate((*_PLACE_FLAGS, *_PARALLEL_FLAGS, *_OPTION_FLAGS, *_PLUGIN_FLAGS), command)


def plugin_arguments(command: F) -> F:
    """Give a command the flags that allow and deny plugins."""
    return _decorate(_PLUGIN_FLAGS, command)


def make_plan(model: str, device: str | None, memory: Bytes, weights: Bytes, values: Mapping[str, Any]) -> CachePlan:
    """Return the plan for a command's arguments; `values` are the reserve, options and parallel sizes.

    Raises:
        KVDockError: what cannot be served, and what would work.
    """
    from kvdock import edge

    inputs = read_inputs(device, memory, weights, values)
    one_rank(inputs)
    return edge.plan(model, **inputs)


def read_inputs(device: str | None, memory: Bytes, weights: Bytes, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a command's arguments as those of `kvdock.plan` and of what plans like it.

    Raises:
        PlanError: an option that does not fit, or a flag that would have no effect.
    """
    if values["dp_attention"] and (values["dp_size"] or 1) == 1:
        raise PlanError(
            "--dp-attention shares requests out over the workers of --dp, and there is 1; give --dp 2 or more, or "
            "leave --dp-attention out"
        )
    return {
        "device": device,
        "options": read_options(values),
        "parallel": {name: values[name] for name in _PARALLEL_NAMES},
        "budget_bytes": memory,
        "weights_bytes": weights,
        "reserve_bytes": values["reserve"],
    }


def one_rank(inputs: Mapping[str, Any]) -> None:
    """Refuse lists with a size for each rank where one rank is planned.

    Raises:
        PlanError: names the flag.
    """
    for flag, name in _SIZES.items():
        if isinstance(inputs[name], tuple):
            raise PlanError(
                f"{flag} lists {len(inputs[name])} sizes, one for each rank, but one rank is planned; give one size, or "
                "plan every rank with kvdock plan --ranks"
            )


_SIZES = {"--memory": "budget_bytes", "--weights": "weights_bytes", "--reserve": "reserve_bytes"}


def read_options(values: Mapping[str, Any]) -> CacheOptions:
    """Return the options that flags and ``--option NAME=VALUE`` state.

    Raises:
        PlanError: an unknown name, a value that does not fit, or an option that is given twice.
    """
    options = {name: value for name, value in values.items() if name not in _NOT_OPTIONS and is_given(value)}
    if values.get("no_prefix_cache"):
        options["prefix_cache"] = False
    for pair in values.get("option", ()):
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise PlanError(f"--option {pair!r} has no value; write it as --option page_size=16")
        if name not in CacheOptions.__struct_fields__:
            raise PlanError(f"no option is called {name!r}{nearest(name, CacheOptions.__struct_fields__)}")
        if name in options:
            raise PlanError(f"{name} is given twice; give it once")
        options[name] = _value(name, text.strip())
    return make_options(options)


_AXES = {
    "tp": "tp_size",
    "pp": "pp_size",
    "dp": "dp_size",
    "dcp": "dcp_size",
    "cp": "cp_size",
    "context": "context_length",
    "max_requests": "max_running_requests",
    "max_tokens": "max_total_tokens",
    "mem_fraction": "mem_fraction_static",
    "swa_ratio": "swa_full_tokens_ratio",
    **{flag.removeprefix("--"): name for flag, name in _SIZES.items()},
}
"""Names of flags, without dashes, that stand for an input of another name."""


def read_axes(pairs: Iterable[str], flags: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return input → values of ``--compare KEY=V1,V2``; `flags` are the inputs that are given beside.

    Raises:
        PlanError: no values, a key twice, or a key that a flag states as well.
    """
    axes: dict[str, list[Any]] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        name = key.strip().removeprefix("--").replace("-", "_")
        name = _AXES.get(name, name)
        values = [part.strip() for part in text.split(",")]
        if not equals or not all(values):
            raise PlanError(
                f"--compare {pair!r} lists no values; write it as --compare kv_cache_dtype=bfloat16,fp8_e4m3"
            )
        if name in axes:
            raise PlanError(f"--compare {name} is given twice; list all its values once")
        if is_given(flags.get(name)):
            raise PlanError(f"{name} is compared and given beside it; list the value in --compare {name}=… alone")
        axes[name] = [_axis_value(name, value) for value in values]
    return axes


def _axis_value(name: str, text: str) -> Any:
    if name in _SIZES.values():
        return parse_size(text)
    return text if name == "device" else _value(name, text)


def is_given(value: Any) -> bool:
    """Return whether a flag was used."""
    return value is not None and value is not False and value != ()


def _value(name: str, text: str) -> Any:
    """Return what `text` says: a number, true, a list … as in JSON, else the text itself."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        value = text
    if name in _LISTS and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if value is None:
        raise PlanError(f"{name}={text} states nothing; leave the option out")
    return value
