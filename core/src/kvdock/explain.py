"""`CachePlan` → text: every decision with who claimed and who declined, every size, every byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvdock.budget import show_bytes
from kvdock.errors import one_line
from kvdock.options import CacheOptions

if TYPE_CHECKING:
    from kvdock.layout import Ratio, Space
    from kvdock.planner import CachePlan
    from kvdock.plugins.resolve import Decision


def explain(plan: CachePlan) -> str:
    """Return the report of a plan as plain text, one fact a line.

    Names and reasons of others cannot add lines of their own, nor steer a terminal.
    """
    sections = (
        ("Model", _model(plan)),
        ("Device and budget", _budget(plan)),
        ("Options", _options(plan)),
        ("Plugins", _plugins(plan)),
        ("Decisions", _decisions(plan)),
        ("Spaces", _spaces(plan)),
        ("Buffers", _buffers(plan)),
        ("Costs", _costs(plan)),
        ("Limits", _limits(plan)),
        ("Warnings", (warning for warning in plan.warnings)),
    )
    lines: list[str] = []
    for title, body in sections:
        content = [f"  {_indent(line)}{one_line(line)}" for line in body]
        if content:
            lines += [title, *content, ""]
    return "\n".join(lines).rstrip() + "\n"


def _indent(line: str) -> str:
    return " " * (len(line) - len(line.lstrip(" ")))


def _model(plan: CachePlan) -> Iterator[str]:
    for model in plan.outline.models:
        owners = sum(layer.shares_kv_with is None and layer.kind not in ("none", "state") for layer in model.layers)
        states = sum(layer.kind in ("state", "hybrid") for layer in model.layers)
        kept = f"{owners} own KV" + (f", {states} keep a state" if states else "")
        yield (
            f"{model.name} ({model.architecture}, {model.role}): {len(model.layers)} layers, {kept}, "
            f"context {model.context_length}, {model.dtype}"
        )
    parallel = plan.parallel
    yield (
        f"rank: pipeline stage {parallel.pp_rank} of {parallel.pp_size}, attention over "
        f"{parallel.attn_tp_size} ranks (tp {parallel.tp_size}){_token_share(plan)}"
    )
    yield f"policy: {window_policy(plan)}"


def _token_share(plan: CachePlan) -> str:
    parallel = plan.parallel
    if parallel.dcp_size == 1:
        return ""
    return f", rank {parallel.dcp_rank} of {parallel.dcp_size} that share the tokens"


def window_policy(plan: CachePlan) -> str:
    """Return one sentence on how layers with a window are kept."""
    sliding = [space for space in plan.outline.spaces.values() if space.window_tokens is not None]
    windows = any(layer.window_tokens is not None for layer in plan.model.layers)
    if sliding:
        space = sliding[0]
        return f"layers with a window keep {space.window_tokens} earlier tokens in the space {space.name!r}"
    if windows:
        why = "hybrid_swa=off" if plan.options.values.hybrid_swa == "off" else "no window is shorter than the context"
        return f"every layer with KV keeps the whole request ({why})"
    return "every layer with KV keeps the whole request"


def _budget(plan: CachePlan) -> Iterator[str]:
    device = plan.device
    yield f"{device.name} ({device.device_type}), {show_bytes(device.total_bytes)}; {device.source}"
    yield f"budget {show_bytes(plan.budget_bytes)}: {plan.budget.note}"
    left = plan.budget_bytes - plan.total_bytes
    yield f"planned {show_bytes(plan.total_bytes)}, left over {show_bytes(left)}; bound by {plan.bound}"
    if plan.host_bytes:
        yield f"host memory beside it: {show_bytes(plan.host_bytes)}"


def _options(plan: CachePlan) -> Iterator[str]:
    defaults = []
    for name in CacheOptions.__struct_fields__:
        source = plan.options.sources.get(name)
        text = f"{name} = {getattr(plan.options.values, name)}"
        if source == "default":
            defaults.append(text)
        elif source is not None:
            yield f"{text} ({source})"
    yield f"defaults: {', '.join(defaults)}"


def _plugins(plan: CachePlan) -> Iterator[str]:
    """Yield who could answer, then who could not and why."""
    registry = plan.outline.registry
    for member in registry.members:
        yield f"{member.name} ({member.tier}): loaded, {member.origin}"
    for problem in registry.problems:
        yield f"{problem.name} ({problem.tier}): {problem.status}, {problem.origin}: {problem.reason}"


def _decisions(plan: CachePlan) -> Iterator[str]:
    for decision in (*plan.read_by, *plan.outline.decisions):
        yield from decision_lines(decision)


def decision_lines(decision: Decision) -> Iterator[str]:
    """Yield a decision and, indented, what each plugin answered."""
    chosen = f"{decision.name} of {decision.plugin}" if decision.plugin else "nobody"
    yield f"{decision.hook}: {decision.subject}: {chosen}"
    for answer in decision.answers:
        detail = f": {answer.detail}" if answer.detail else ""
        yield f"  {answer.plugin} ({answer.tier}) {answer.outcome}{detail}"


def _spaces(plan: CachePlan) -> Iterator[str]:
    for name, space in plan.outline.spaces.items():
        window = f", window {space.window_tokens}" if space.window_tokens is not None else ""
        yield (
            f"{name}: {plan.spaces[name]:,} slots in pages of {space.page_size}{window}, issued by "
            f"{space.issued_by.replace('_', ' ')}; size = {rule_text(space)}"
        )


_COUNTED = {"kv": "states", "bookkeeping": "tables"}


def rule_text(space: Space) -> str:
    """Return the size rule of a space as a formula."""
    rule = space.rule
    terms = []
    if rule.per_token[0]:
        terms.append(_factor(rule.per_token, rule.of))
    if rule.per_request[0]:
        terms.append(_factor(rule.per_request, "requests"))
    if rule.fixed or not terms:
        terms.append(f"{rule.fixed:,}")
    text = " + ".join(terms)
    if rule.round_to > 1:
        text += f", rounded {rule.round} to {rule.round_to}"
    if rule.at_least:
        text += f", at least {rule.at_least:,}"
    if rule.at_most is not None:
        text += f", at most {rule.at_most:,}"
    for of, ratio in rule.at_most_of:
        text += f", at most {_factor(ratio, of)}"
    for share in rule.shares:
        what = "" if share.counts == "all" else f" for its {_COUNTED[share.counts]}"
        beside = "".join(f" with those of {_factor(ratio, space.name)} {name}" for name, ratio in share.beside)
        text += f", within {share.of_budget[0]}/{share.of_budget[1]} of the budget{what}{beside}"
    if rule.needs:
        text += f", of use from {rule.needs:,}"
    return text


def _factor(ratio: Ratio, of: str) -> str:
    numerator, denominator = ratio
    if denominator == 1:
        return of if numerator == 1 else f"{numerator:,} · {of}"
    return f"{of} / {denominator:,}" if numerator == 1 else f"{of} · {numerator:,} / {denominator:,}"


def _buffers(plan: CachePlan) -> Iterator[str]:
    whole = {(buffer.owner, buffer.name): buffer.widen for buffer in plan.outline.buffers if buffer.widen > 1}
    shared = shared_pages(plan)
    for buffer in plan.buffers:
        tensors = f"{buffer.tensors} x " if buffer.tensors > 1 else ""
        memory = "" if buffer.memory == "device" else f", {buffer.memory}"
        memory += f", in {buffer.storage}" if buffer.storage else ""
        ranks = whole.get((buffer.owner, buffer.name))
        memory += f", the tokens of {ranks} ranks" if ranks else ""
        held = f"{buffer.nbytes:,} bytes{memory}"
        if buffer.space in shared and buffer.storage:
            held = f"inside the shared buffer, of which a page of {buffer.space} takes {shared[buffer.space]:,} bytes"
        yield f"{buffer.owner}: {buffer.name} ({buffer.role}): {tensors}{list(buffer.shape)} {buffer.dtype}, {held}"
    yield f"total on the device: {plan.total_bytes:,} bytes"


def shared_pages(plan: CachePlan) -> dict[str, int]:
    """Return the bytes of a page of each space whose KV lies in the byte buffer that the last space is charged with."""
    return dict(list(plan.costs.shared_pages.items())[:-1])


def _costs(plan: CachePlan) -> Iterator[str]:
    yield f"fixed (padding and tables of no size): {plan.costs.fixed_bytes:,} bytes"
    shared = shared_pages(plan)
    for name, cost in plan.costs.per_slot.items():
        kv = f"{cost.kv:,} bytes of KV"
        if name in shared:
            kv = f"{shared[name] // plan.outline.spaces[name].page_size:,} bytes of KV, of the shared buffer"
        yield f"per slot of {name}: {kv} + {cost.bookkeeping:,} of bookkeeping"
    yield f"per token: {plan.bytes_per_token.kv:,} bytes of KV + {plan.bytes_per_token.bookkeeping:,} of bookkeeping"


def _limits(plan: CachePlan) -> Iterator[str]:
    for limit in plan.limits:
        asked = f", {limit.requested:,} asked for" if limit.requested is not None else ""
        yield f"{limit.name}: {limit.effective:,}{asked}; bound by {limit.factor}; raised by {', '.join(limit.raised_by)}"
