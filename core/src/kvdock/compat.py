"""What two sides that hand KV to each other must agree on, and in what they do not.

A prefill worker and a decode worker are planned apart, each for its own memory. Whether the bytes that one sends are
those that the other keeps follows from a few facts of each plan, its `Fingerprint`: pages, formats, windows and how
rows are split over the ranks, by role and global layer id. Pool sizes, addresses, context lengths, limits and the
split of layers over pipeline stages are each side's own affair.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from kvdock.abilities import TakesTails
from kvdock.differences import Difference
from kvdock.dtypes import packed_nbytes
from kvdock.errors import PlanError, PluginError
from kvdock.layout import REQUESTS, STATE, TARGET, Buffer, Space
from kvdock.outline import PoolChoice
from kvdock.planner import CachePlan
from kvdock.queries import PoolQuery

SCHEMA = "kvdock.layout/1"
"""Version of the fingerprint: what of two layouts is compared."""

Carried = Literal["whole", "tail", "state"]
"""What of a request a buffer holds for the other side: all tokens, its window's in whole pages, or a state."""

_Key = tuple[str, int, str, str]


class BufferLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one layer's rows of one role lie on a rank, as both sides of a transfer must know it.

    `shape` and `row_nbytes` are those of one row, a slot's or a page's as `unit` says, of which each has `rows` (more than
    one where a request keeps a row for each draft token as well). `part` is the buffer's name
    where a layer has several of one role, else empty. `kv_heads` counts the heads of the whole model where rows are
    split by them, `ranks` those over which rows are split (1: every rank keeps all of a row).
    """

    worker: str
    layer: int | None
    role: str
    part: str
    unit: Literal["slot", "page"]
    dtype: str
    shape: tuple[int, ...]
    row_nbytes: int
    rows: int
    page_size: int
    carries: Carried
    window_tokens: int | None
    arrangement: Literal["layer-major", "page-major"]
    kv_heads: int | None
    heads_per_rank: int | None
    ranks: int

    @property
    def key(self) -> _Key:
        """What pairs the buffers of two sides: worker, global layer id (-1: none), role and part."""
        return self.worker, -1 if self.layer is None else self.layer, self.role, self.part

    @property
    def row_padding_bytes(self) -> int:
        """Bytes of a row behind its elements."""
        return self.row_nbytes - packed_nbytes(math.prod(self.shape), self.dtype)

    @property
    def shape_of_head(self) -> tuple[int, ...]:
        """The shape without its heads where they come first, else all of it."""
        return self.shape[1:] if self._heads_first else self.shape

    @property
    def _heads_first(self) -> bool:
        return self.heads_per_rank is not None and self.shape[:1] == (self.heads_per_rank,)


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that two sides that exchange KV must agree on, as data: plain enough to be sent to the other side as JSON."""

    schema: str = SCHEMA
    dcp_size: int
    buffers: tuple[BufferLayout, ...]

    @property
    def digest(self) -> str:
        """The sha256 of this as JSON with sorted names, in hexadecimal: equal where `compatible` finds nothing."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


Side = CachePlan | Sequence[CachePlan] | Fingerprint
"""One side of a transfer: a plan, the plans of its pipeline stages in any order, or the fingerprint of either."""


def layout_fingerprint(side: Side) -> Fingerprint:
    """Return what the other side of a transfer must agree on: of one plan, or of all stages of a pipeline together.

    Raises:
        PlanError: no plan, the same layer in two of the plans, or stages with different dcp_size.
        PluginError: a plan whose pool classes give two buffers of a layer one role.
    """
    if isinstance(side, Fingerprint):
        return side
    plans = _plans(side)
    sizes = sorted({plan.parallel.dcp_size for plan in plans})
    if len(sizes) > 1:
        raise PlanError(f"the plans of one side have dcp_size {sizes[0]} and {sizes[-1]}; plan its stages with one")
    return Fingerprint(dcp_size=sizes[0], buffers=_merged(plans))


def compatible(a: Side, b: Side) -> tuple[Difference, ...]:
    """Return all in which two sides that exchange KV disagree, each with what to change; empty if they fit.

    A side is a plan, the plans of its pipeline stages, or what `layout_fingerprint` returned of either.

    Raises:
        PlanError, PluginError: as `layout_fingerprint`.
    """
    left, right = layout_fingerprint(a), layout_fingerprint(b)
    ours, theirs = ({entry.key: entry for entry in side.buffers} for side in (left, right))
    pairs = [(entry, theirs[key]) for key, entry in ours.items() if key in theirs]
    unpaired: list[tuple[BufferLayout | None, BufferLayout | None]] = []
    unpaired += [(entry, None) for key, entry in ours.items() if key not in theirs]
    unpaired += [(None, entry) for key, entry in theirs.items() if key not in ours]
    return (*_of_sides(left, right), *_of_pairs(pairs), *_of_unpaired(unpaired))


def _plans(side: Any) -> list[CachePlan]:
    plans = [side] if isinstance(side, CachePlan) else list(side) if isinstance(side, list | tuple) else []
    if not plans or not all(isinstance(plan, CachePlan) for plan in plans):
        raise PlanError(
            f"{type(side).__name__} is no side of a transfer; give a plan, a list of the plans of all pipeline "
            "stages, or what layout_fingerprint returned"
        )
    return plans


def _merged(plans: Sequence[CachePlan]) -> tuple[BufferLayout, ...]:
    """Return the layouts of all stages, ordered by what pairs them."""
    found: dict[_Key, BufferLayout] = {}
    for key, entry in (pair for plan in plans for pair in _told_apart(plan).items()):
        other = found.setdefault(key, entry)
        # What belongs to no layer is part of every stage, and the same in all of them.
        if other is not entry and (entry.layer is not None or other != entry):
            raise PlanError(
                f"layer {entry.layer} has its {_title(entry)} in two of the {len(plans)} plans of one side; "
                "give one plan for each pipeline stage, with the same parallel sizes and its own pp_rank"
            )
    return tuple(found[key] for key in sorted(found))


def _told_apart(plan: CachePlan) -> dict[_Key, BufferLayout]:
    """Return the layouts of one plan by what pairs them."""
    found: dict[_Key, BufferLayout] = {}
    for entry in _entries(plan):
        if entry.key in found:
            raise PluginError(
                f"layer {entry.layer} keeps {_title(entry)!r} twice ({found[entry.key].shape} and {entry.shape} "
                f"{entry.dtype}), which the other side of a transfer cannot tell apart; the pool classes of its groups "
                "must give each buffer a role of its own"
            )
        found[entry.key] = entry
    return found


def _entries(plan: CachePlan) -> Iterator[BufferLayout]:
    """Yield the layout of everything that a plan's pools keep for a request, layer by layer.

    Rows of a host tier have the format of those on the device, and what lies over others' memory has no content of its
    own: neither is told.
    """
    for choice in plan.outline.pools:
        kept = [buffer for buffer in choice.buffers if _is_exchanged(buffer)]
        roles = Counter(buffer.role for buffer in kept)
        for buffer in kept:
            part = buffer.name if roles[buffer.role] > 1 else ""
            for layer_id in buffer.layers or (None,):
                yield _entry(plan, choice, buffer, layer_id, part)


def _is_exchanged(buffer: Buffer) -> bool:
    per_slot = buffer.space is not None and buffer.space != REQUESTS
    return buffer.is_kv and per_slot and buffer.memory == "device" and not buffer.overlay


def _entry(plan: CachePlan, choice: PoolChoice, buffer: Buffer, layer_id: int | None, part: str) -> BufferLayout:
    space = plan.outline.spaces[str(buffer.space)]
    heads, per_rank, ranks = _split(choice.query, layer_id, space)
    carries = _carried(plan, space)
    return BufferLayout(
        worker=buffer.worker,
        layer=layer_id,
        role=buffer.role,
        part=part,
        unit=buffer.unit.value,
        dtype=buffer.element or buffer.dtype,
        shape=buffer.shape,
        row_nbytes=buffer.row_nbytes,
        rows=max(1, buffer.widen // (1 if choice.query.shares_tokens else plan.parallel.dcp_size)),
        page_size=space.page_size,
        carries=carries,
        window_tokens=space.window_tokens if carries == "tail" else None,
        arrangement="page-major" if buffer.storage else "layer-major",
        kv_heads=heads,
        heads_per_rank=per_rank,
        ranks=ranks,
    )


def _carried(plan: CachePlan, space: Space) -> Carried:
    """Return what of a request lies in a space; a window's tail only where the allocator can give slots to it alone."""
    if space.name == STATE:
        return "state"
    allocators = plan.outline.allocators
    takes_tails = bool(allocators) and issubclass(allocators[-1].cls, TakesTails)
    return "tail" if space.window_tokens is not None and takes_tails else "whole"


def _split(query: PoolQuery, layer_id: int | None, space: Space) -> tuple[int | None, int | None, int]:
    """Return the heads of the model and of a rank, and the ranks that share a row; latents and index keys are whole."""
    ranks, group = query.parallel.attn_tp_size, query.group
    if space.name == STATE:
        return None, None, ranks
    layers = dict(group.layers) if group is not None else {}
    heads = getattr(layers[layer_id].params, "num_kv_heads", None) if layer_id in layers else None
    if not isinstance(heads, int):
        return None, None, 1
    return heads, query.parallel.kv_heads_per_rank(heads), ranks


class _Aspect(msgspec.Struct, frozen=True):
    """One thing to compare of two buffers: `of` a buffer; `when` both are given, whether it says anything new."""

    name: str
    of: Callable[[BufferLayout], Any]
    change: Callable[[BufferLayout], str]
    by_role: bool = False
    severity: Literal["incompatible", "resplit"] = "incompatible"
    when: Callable[[BufferLayout, BufferLayout], bool] = lambda a, b: True


def _same(what: str) -> Callable[[BufferLayout], str]:
    return lambda entry: f"give both sides the same {what}"


def _dtype_advice(entry: BufferLayout) -> str:
    """Return what to do about data types: each option follows the model's where it is ``auto``."""
    if entry.carries == "state":
        option = "state_dtype"
    else:
        option = "index_dtype" if entry.role.startswith("index") else "kv_cache_dtype"
    return f"give both sides the same {option} and model_dtype"


def _shape_advice(entry: BufferLayout) -> str:
    if entry.carries == "state":
        return "plan both sides for the same model, over as many ranks of attention (tp_size / dp_size / cp_size)"
    return f"plan both sides for the same model, and {_dtype_advice(entry)}"


_CARRIES = (
    "give both sides the same hybrid_swa; a window slides only where it is shorter than context_length, and its tail "
    "is sent only to an allocator that takes tails"
)
_POOL = "pool classes: name the plugin on both with prefer"
_RANKS = "the same tp_size, dp_attention and cp_size"

_ASPECTS = (
    _Aspect("page_size", lambda e: e.page_size, _same("page_size")),
    _Aspect("carries", lambda e: e.carries, lambda e: _CARRIES),
    _Aspect("window_tokens", lambda e: e.window_tokens, _same("model"), when=lambda a, b: a.carries == b.carries),
    _Aspect("arrangement", lambda e: e.arrangement, _same("page_major")),
    _Aspect(
        "attn_tp_size",
        lambda e: e.ranks,
        lambda e: f"give both sides {_RANKS}: states are split over the ranks and cannot be split anew",
        when=lambda a, b: "state" in (a.carries, b.carries),
    ),
    _Aspect("kv_heads", lambda e: e.kv_heads, _same("model")),
    _Aspect(
        "heads_per_rank",
        lambda e: e.heads_per_rank,
        lambda e: f"use a transfer that splits heads anew, or give both sides {_RANKS}",
        severity="resplit",
        when=lambda a, b: a.kv_heads == b.kv_heads,
    ),
    _Aspect(
        "attn_tp_size",
        lambda e: e.ranks,
        lambda e: f"use a transfer that knows which rank has which copy of a head, or give both sides {_RANKS}",
        severity="resplit",
        when=lambda a, b: "state" not in (a.carries, b.carries) and a.heads_per_rank == b.heads_per_rank,
    ),
    _Aspect("unit", lambda e: e.unit, _same(_POOL), by_role=True),
    _Aspect("dtype", lambda e: e.dtype, _dtype_advice, by_role=True),
    _Aspect("shape", lambda e: e.shape_of_head, _shape_advice, by_role=True),
    _Aspect(
        "rows",
        lambda e: e.rows,
        lambda e: f"give both sides the same speculative options: what a {e.unit} holds has rows for draft tokens",
        by_role=True,
    ),
    _Aspect("row_padding_bytes", lambda e: e.row_padding_bytes, _same(_POOL), by_role=True),
)
"""What is compared of the buffers that both sides have, in the order of the report."""


def _of_sides(a: Fingerprint, b: Fingerprint) -> Iterator[Difference]:
    changes = {
        "schema": "run the same version of kvdock on both sides",
        "dcp_size": "give both sides the same dcp_size: it decides which rank keeps a token",
    }
    for name, change in changes.items():
        left, right = getattr(a, name), getattr(b, name)
        if left != right:
            yield Difference(name=name, a=left, b=right, severity="incompatible", change=change)


def _of_pairs(pairs: Sequence[tuple[BufferLayout, BufferLayout]]) -> Iterator[Difference]:
    """Yield each aspect in which buffers differ, once for all layers with the same two values."""
    for aspect in _ASPECTS:
        layers: dict[Difference, set[int]] = {}
        for a, b in pairs:
            left, right = aspect.of(a), aspect.of(b)
            if left == right or not aspect.when(a, b):
                continue
            found = Difference(
                name=f"{_title(a)}.{aspect.name}" if aspect.by_role else aspect.name,
                a=left,
                b=right,
                worker=a.worker,
                severity=aspect.severity,
                change=aspect.change(a),
            )
            layers.setdefault(found, set()).update(() if a.layer is None else (a.layer,))
        yield from _with_layers(layers)


def _of_unpaired(pairs: Iterable[tuple[BufferLayout | None, BufferLayout | None]]) -> Iterator[Difference]:
    """Yield what one side alone keeps."""
    layers: dict[Difference, set[int]] = {}
    for a, b in pairs:
        entry = a or b
        if entry is None:
            continue
        found = Difference(
            name=_title(entry),
            a=a and _summary(a),
            b=b and _summary(b),
            worker=entry.worker,
            severity="incompatible",
            change=_missing_advice(entry),
        )
        layers.setdefault(found, set()).update(() if entry.layer is None else (entry.layer,))
    yield from _with_layers(layers)


def _with_layers(found: dict[Difference, set[int]]) -> Iterator[Difference]:
    for difference, layers in found.items():
        yield msgspec.structs.replace(difference, layers=tuple(sorted(layers)))


def _missing_advice(entry: BufferLayout) -> str:
    if entry.worker != TARGET:
        return "plan both sides with the same speculative_algorithm and draft: the draft's KV is exchanged as well"
    return (
        "plan both sides for the same model with the same formats and features, and give the plans of all pipeline "
        "stages of each"
    )


def _title(entry: BufferLayout) -> str:
    return entry.part or entry.role


def _summary(entry: BufferLayout) -> str:
    return f"{entry.dtype} [{', '.join(str(extent) for extent in entry.shape)}] a {entry.unit}"
