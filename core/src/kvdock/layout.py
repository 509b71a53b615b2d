"""Buffers, spaces and layer groups: the single description from which every size follows.

A `Space` numbers slots; a `Buffer` is a tensor whose rows are counted in slots or pages of one space;
a `LayerGroup` is the set of layers that keep the same kind of buffers in one space. Sizing, building,
transfer and the report all read these structs and nothing else.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from kvdock import dtypes
from kvdock.checked import check_fields, show
from kvdock.errors import PlanError
from kvdock.model import LayerSpec

TOKENS = "tokens"
"""What a rule's `of` names when it follows the number of tokens that is being solved for."""

FULL, SWA, STATE, REQUESTS = "full", "swa", "state", "requests"
"""The spaces that the core declares: token slots, sliding token slots, per-request states, request rows."""

DEVICE, HOST = "device", "host"
"""With a host tier: slots whose rows are on the device, and slots of rows in host memory; ``full`` numbers them all."""

TARGET = "target"
"""The worker that is not a draft."""

SCRATCH_ROLES = frozenset({"workspace", "scratch"})
"""Roles of buffers that are written anew before each read."""

MAX_SLOTS = 2**31 - 1
"""Slot numbers are stored as int32 in request tables."""

Ratio = tuple[int, int]
"""An exact non-negative factor, numerator and denominator: 0.8 is ``(4, 5)``."""


@enum.unique
class Unit(enum.Enum):
    """What one row of a buffer stands for."""

    SLOT = "slot"
    PAGE = "page"


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def _check_ratio(owner: str, field: str, ratio: Ratio) -> None:
    if ratio[0] < 0 or ratio[1] < 1:
        raise PlanError(f"{owner}: {field}={ratio} is not a factor; give (numerator >= 0, denominator >= 1)")


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A share of the budget that a space may take with its device buffers.

    `counts` says which of them: all, those that layers read (``kv``: states, rings) or ``bookkeeping`` (tables).
    `beside` names spaces whose counted buffers are paid from the same share, at ``size · factor`` rows.
    """

    of_budget: Ratio
    counts: Literal["all", "kv", "bookkeeping"] = "all"
    beside: tuple[tuple[str, Ratio], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "share:")
        _check_ratio("share", "of_budget", self.of_budget)
        if self.of_budget[0] > self.of_budget[1]:
            raise PlanError(f"share: of_budget={self.of_budget} is more than the whole budget")
        for _, ratio in self.beside:
            _check_ratio("share", "beside", ratio)

    def covers(self, buffer: Buffer, space: str) -> bool:
        """Return whether the share of `space` pays for a buffer."""
        names = (space, *(name for name, _ in self.beside))
        counted = self.counts == "all" or buffer.is_kv == (self.counts == "kv")
        return buffer.space in names and buffer.memory == "device" and counted


class SizeRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many usable slots a space has, as data.

    ``size = min(at_most, caps, max(at_least, round(per_token · of + per_request · requests + fixed)))``

    `of` is ``"tokens"`` or another space; `per_request` multiplies the size of the space ``requests``.
    `at_most_of` caps the size at factors of other spaces (or of the tokens); `shares` cap it
    at the largest size whose buffers stay within each share of the budget (never below `needs`).
    All factors are exact and non-negative, so sizes never
    shrink when the tokens grow. `needs` is the smallest size that is of any use: a plan with less is refused.
    """

    per_token: Ratio = (0, 1)
    of: str = TOKENS
    per_request: Ratio = (0, 1)
    fixed: int = 0
    at_least: int = 0
    at_most: int | None = None
    at_most_of: tuple[tuple[str, Ratio], ...] = ()
    shares: tuple[Share, ...] = ()
    round: Literal["down", "up"] = "down"
    round_to: int = 1
    needs: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "size rule:")
        _check_ratio("size rule", "per_token", self.per_token)
        _check_ratio("size rule", "per_request", self.per_request)
        for _, ratio in self.at_most_of:
            _check_ratio("size rule", "at_most_of", ratio)
        for field in ("fixed", "at_least", "needs"):
            if getattr(self, field) < 0:
                raise PlanError(f"size rule: {field}={getattr(self, field)} is negative")
        if self.round_to < 1:
            raise PlanError(f"size rule: round_to={self.round_to} is not positive")

    def follows(self) -> frozenset[str]:
        """Return the spaces whose sizes this rule reads (``"tokens"`` is no space)."""
        names = set()
        if self.per_token[0]:
            names.add(self.of)
        if self.per_request[0]:
            names.add(REQUESTS)
        names.update(of for of, _ in self.at_most_of)
        return frozenset(names - {TOKENS})


class Space(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A numbering of slots with one capacity; slot 0 (page 0) is padding and not counted.

    `issued_by` says who hands the slots out: a token allocator, the request pool, or nobody, because
    the slot is computed from another space's (``derived``). `window_tokens` counts the *earlier*
    tokens that a layer of a sliding space sees. `options` names the options that its rule was made of.
    """

    name: str
    rule: SizeRule
    page_size: int = 1
    window_tokens: int | None = None
    issued_by: Literal["allocator", "request_pool", "derived"] = "allocator"
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, f"space {show(self.name)}:")
        if not self.name or self.name == TOKENS:
            raise PlanError(f"a space cannot be called {self.name!r}")
        if self.page_size < 1:
            raise PlanError(f"space {self.name!r}: page_size={self.page_size} is not positive")
        if self.window_tokens is not None and self.window_tokens < 0:
            raise PlanError(f"space {self.name!r}: window_tokens={self.window_tokens} is negative")
        if self.rule.per_token[0] and self.rule.of == self.name:
            raise PlanError(f"space {self.name!r} follows itself; its rule must name another space or 'tokens'")


@functools.lru_cache(maxsize=1024)
def _row_nbytes(shape: tuple[int, ...], dtype: str, align: int) -> int:
    """Return the bytes of one row; asked for at every step of the solver, so remembered."""
    return round_up(dtypes.packed_nbytes(math.prod(shape), dtype), align)


class Buffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor whose rows are counted in slots or pages of one space, or fixed.

    ``rows = round_up((units + guard) · widen, round_rows_to)`` with `units` the slots or pages of the space (0
    without a space), and a row takes ``round_up(prod(shape) · bits / 8, row_bytes_align)`` bytes.
    `guard` counts what is beyond the usable units: the padding page (page_size slots, or one page),
    a ring, a sentinel row. `widen` counts the rows of each unit: a buffer that every decode-context-parallel rank
    keeps whole has as many as there are ranks. `layers` are global layer ids, one tensor each, or one
    ``[layers, rows, …]`` tensor when `stacked`; none means one tensor that belongs to no layer.
    `base_align` asks for an aligned address, which takes up to that many more bytes a tensor.
    `max_tensor_bytes` is the largest tensor that the kernels can address.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    space: str | None = None
    unit: Unit = Unit.SLOT
    layers: tuple[int, ...] = ()
    guard: int = 1
    widen: int = 1
    round_rows_to: int = 1
    row_bytes_align: int = 1
    base_align: int = 1
    stacked: bool = False
    memory: Literal["device", "host", "pinned"] = "device"
    owner: str = ""
    worker: str = TARGET
    max_tensor_bytes: int | None = None
    storage: str = ""
    """Byte buffer that it shares, page by page, with its owner's other buffers of that name; set by the plan."""
    overlay: str = ""
    """Name under which buffers of several owners lie over each other: memory for the largest alone."""
    element: str = ""
    """Format of the 8-bit floats in a buffer of bytes that holds scales as well; empty where `dtype` says it all."""
    is_kv: bool = False
    """True for what layers read (keys, values, latents, scales, index keys, states); False for bookkeeping."""

    def __post_init__(self) -> None:
        check_fields(self, f"buffer {show(self.name)}:")
        if any(extent < 0 for extent in self.shape):
            raise PlanError(f"buffer {self.name!r}: shape {self.shape} has a negative extent")
        dtypes.find(self.dtype, option=f"buffer {self.name!r}: dtype")
        for field in ("widen", "round_rows_to", "row_bytes_align", "base_align"):
            if getattr(self, field) < 1:
                raise PlanError(f"buffer {self.name!r}: {field}={getattr(self, field)} is not positive")
        if self.guard < 0:
            raise PlanError(f"buffer {self.name!r}: guard={self.guard} is negative")
        if len(set(self.layers)) != len(self.layers):
            raise PlanError(f"buffer {self.name!r}: layers {self.layers} name one layer twice")
        if self.stacked and not self.layers:
            raise PlanError(f"buffer {self.name!r} is stacked over no layer; list its layers")
        if self.overlay and (self.storage or self.tensors > 1):
            raise PlanError(f"buffer {self.name!r} lies over others as {self.overlay!r}; give it one tensor of its own")

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of one layer."""
        return _row_nbytes(self.shape, self.dtype, self.row_bytes_align)

    @property
    def tensors(self) -> int:
        """How many tensors of their own this buffer has."""
        return 1 if self.stacked else max(1, len(self.layers))

    @property
    def layers_per_tensor(self) -> int:
        """How many layers share one tensor: all of them when stacked, else one."""
        return len(self.layers) if self.stacked else 1

    def units_in(self, spaces: Mapping[str, Space], sizes: Mapping[str, int]) -> int:
        """Return the usable slots or pages that the rows are counted in; 0 without a space."""
        if self.space is None:
            return 0
        size = sizes[self.space]
        return size if self.unit is Unit.SLOT else -(-size // spaces[self.space].page_size)

    @property
    def is_releasable(self) -> bool:
        """Whether its device memory may come and go while the cache lives: what slots own, and scratch.

        Bookkeeping and what is set once for a layer have to stay.
        """
        is_refilled = self.is_kv or self.role in SCRATCH_ROLES
        return self.memory == "device" and self.space is not None and is_refilled

    def rows(self, units: int) -> int:
        """Return the rows of one layer for `units` usable slots or pages, guard included."""
        return round_up((units + self.guard) * self.widen, self.round_rows_to)

    def tensor_nbytes(self, units: int) -> int:
        """Return the bytes of one tensor, room for an aligned base included."""
        room = self.base_align if self.base_align > 1 else 0
        return self.layers_per_tensor * self.rows(units) * self.row_nbytes + room


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of one worker that keep the same kind of buffers in one space.

    `layers` pairs the global id of each layer that *owns* buffers with its spec; `shared` maps the id of
    a layer without buffers of its own to the owner whose buffers it reads.
    """

    name: str
    kind: str
    space: str
    layers: tuple[tuple[int, LayerSpec], ...]
    shared: tuple[tuple[int, int], ...] = ()
    worker: str = TARGET

    def __post_init__(self) -> None:
        check_fields(self, f"layer group {show(self.name)}:")
        if not self.layers:
            raise PlanError(f"layer group {self.name!r} has no layer; leave the group out")

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global ids of the layers that own buffers, in order."""
        return tuple(layer_id for layer_id, _ in self.layers)
