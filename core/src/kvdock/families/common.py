"""Typed reading of configs: the names that fields go by, their limits, and the section that describes the text model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kvdock import dtypes
from kvdock.checked import show as show
from kvdock.errors import PlanError, printable
from kvdock.model import MAX_CONTEXT, MAX_EXTENT, MAX_LAYERS, LayerSpec
from kvdock.queries import ModelQuery

LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_query_heads")
KV_HEADS = ("num_key_value_heads_per_layer", "num_key_value_heads", "num_kv_heads", "n_head_kv")
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
CONTEXT = (
    "max_position_embeddings",
    "model_max_length",
    "n_positions",
    "seq_length",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "n_ctx",
    "max_context_length",
)
DTYPE = ("torch_dtype", "dtype")
STATE_DTYPE = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
LAYER_LISTS = ("layer_types", "hybrid_layer_pattern", "layers_block_type", "block_configs")
"""Fields that hold one entry per layer."""
LAYER_LETTERS = "hybrid_override_pattern"
"""A text with one letter per layer."""
SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Fields that hold the text model of a larger one."""

FALLBACK_DTYPE = "bfloat16"

Layers = tuple[LayerSpec, ...]
LayersRead = tuple[Layers, tuple[str, ...]]
"""What a reader of layers gives: the layers, and warnings."""
T = TypeVar("T")


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Architectures that are read alike.

    `full_every` says which layers see everything where the config has a window but no list: every N-th,
    or none at all (0); ``None``: the window is not used. `reads` are fields that other families refuse (one
    that ends in ``_`` stands for all that begin so); `defaults` are values that the published configs leave
    to the model's own class.

    `read_layers` reads layers that the common fields do not tell. `read_extra` gives the layers that draft, from
    the model's own and their number (``None``: all alike); `extra_layers` is their number in the published
    weights where no config counts them.
    """

    name: str
    architectures: tuple[str, ...] = ()
    embedding: tuple[str, ...] = ()
    full_every: int | None = None
    reads: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = {}
    read_layers: Callable[[Fields, Family], LayersRead] | None = None
    read_extra: Callable[[Fields, Layers, int], Layers] | None = None
    extra_layers: int | None = None


class Fields:
    """The fields of one text model; ``null`` counts as absent. `where` names the config in errors."""

    def __init__(self, section: Mapping[str, Any], outer: Mapping[str, Any], where: str) -> None:
        self.section = section
        self.outer = outer
        self.where = where

    def has(self, *names: str) -> bool:
        """Return whether any of these fields is there."""
        return self.first(*names) is not None

    def first(self, *names: str) -> str | None:
        """Return the first of these fields that is there."""
        return next((name for name in names if self.section.get(name) is not None), None)

    def raw(self, name: str) -> Any:
        """Return a field as it is, or ``None``."""
        return self.section.get(name)

    def count(self, *names: str, low: int = 1, high: int = MAX_EXTENT) -> int | None:
        """Return the first of these fields as a whole number (8.0 counts), or ``None`` if all are absent.

        Raises:
            PlanError: not a whole number from `low` to `high`.
        """
        name = self.first(*names)
        return None if name is None else self.whole(name, self.section[name], low, high)

    def whole(self, name: str, value: Any, low: int, high: int) -> int:
        """Return `value`, which stands at the field `name`, as a whole number.

        Raises:
            PlanError: it is none, or outside `low` … `high`.
        """
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{name}={show(value)} is not a whole number; give one from {low} to {high}")
        if not low <= value <= high:
            raise self.error(f"{name}={show(value)} is outside {low} … {high}")
        return value

    def needed(self, *names: str, low: int = 1, high: int = MAX_EXTENT) -> int:
        """Return the first of these fields as a whole number.

        Raises:
            PlanError: all are absent, or it is not from `low` to `high`.
        """
        value = self.count(*names, low=low, high=high)
        if value is None:
            raise self.error(f"the config has no {' or '.join(names[:2])}; add the field")
        return value

    def flag(self, name: str) -> bool | None:
        """Return a field as true or false, or ``None`` if it is absent.

        Raises:
            PlanError: it is neither.
        """
        value = self.section.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{name}={show(value)} is not true or false")
        return value

    def list(self, name: str) -> list[Any] | None:
        """Return a field as a list, or ``None`` if it is absent.

        Raises:
            PlanError: it is no list.
        """
        value = self.section.get(name)
        if value is not None and not isinstance(value, list | tuple):
            raise self.error(f"{name}={show(value)} is not a list")
        return None if value is None else list(value)

    def entries(self, name: str, layers: int) -> Sequence[Any] | None:
        """Return a field as a list with one entry per layer, or ``None`` if it is absent.

        Raises:
            PlanError: it is no list, or its length is another.
        """
        values = self.list(name)
        if values is not None and len(values) != layers:
            raise self.error(f"{name} has {len(values)} entries, but the model has {layers} layers; give one per layer")
        return values

    def text(self, name: str) -> str | None:
        """Return a field as text, or ``None`` if it is absent.

        Raises:
            PlanError: it is no text.
        """
        value = self.section.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{name}={show(value)} is not text")
        return value

    def inner(self, name: str, value: Any) -> Fields:
        """Return the fields of an object that stands at the field `name`.

        Raises:
            PlanError: it is no object.
        """
        if not isinstance(value, Mapping):
            raise self.error(f"{name}={show(value)} is not an object of fields")
        return Fields(value, self.outer, f"{self.where}: {name}")

    def error(self, message: str) -> PlanError:
        """Return an error that names the config."""
        return PlanError(f"{self.where}: {printable(message, 400)}")


def open_fields(query: ModelQuery) -> Fields:
    """Return the fields of the text model that a config describes, found once for all readers.

    Raises:
        PlanError: a section is no object.
    """
    where = printable(query.name or query.architecture or "config")
    section: Mapping[str, Any] = query.config
    for _ in range(len(SECTIONS)):
        name = next((name for name in SECTIONS if section.get(name) is not None), None)
        if name is None:
            break
        if not isinstance(section[name], Mapping):
            raise PlanError(f"{where}: {name} is not an object of fields; give the model's own config")
        section, where = section[name], f"{where}: {name}"
    return Fields(section, query.config, where)


def with_defaults(fields: Fields, family: Family) -> Fields:
    """Return the fields with the values that the family's published configs leave out."""
    if not family.defaults:
        return fields
    given = {name: value for name, value in fields.section.items() if value is not None}
    return Fields({**family.defaults, **given}, fields.outer, fields.where)


def check_common(fields: Fields, *, latent: bool) -> None:
    """Refuse a config without the fields that every model needs; names all that are missing.

    Raises:
        PlanError: one or more are missing.
    """
    needs = {"num_hidden_layers": (*LAYERS, *LAYER_LISTS, LAYER_LETTERS), "max_position_embeddings": CONTEXT}
    if not latent:
        needs["num_attention_heads"] = HEADS
        needs["head_dim or hidden_size"] = (*HEAD_DIM, *HIDDEN)
    missing = [name for name, aliases in needs.items() if not fields.has(*aliases)]
    if missing:
        raise fields.error(
            f"the config has no {', '.join(missing)}, so its cache cannot be planned; "
            "give a complete config, or install the plugin of its family"
        )


def layer_count(fields: Fields) -> int:
    """Return the number of layers: every field that counts or lists them must agree.

    Raises:
        PlanError: two fields disagree; names both.
    """
    counts = {name: fields.count(name, high=MAX_LAYERS) for name in LAYERS}
    for name in LAYER_LISTS:
        entries = fields.list(name)
        if entries is not None:
            counts[f"the length of {name}"] = fields.whole(f"the length of {name}", len(entries), 1, MAX_LAYERS)
    letters = fields.text(LAYER_LETTERS)
    if letters is not None:
        name = f"the length of {LAYER_LETTERS}"
        counts[name] = fields.whole(name, len(letters), 1, MAX_LAYERS)
    given = {name: count for name, count in counts.items() if count is not None}
    if len(set(given.values())) > 1:
        shown = ", ".join(f"{name}={count}" for name, count in given.items())
        raise fields.error(f"the numbers of layers disagree: {shown}; correct the config")
    return next(iter(given.values()))


def translate(fields: Fields, name: str, entries: Iterable[Any], known: Mapping[str, T]) -> tuple[T, ...]:
    """Return what each entry of the field `name` stands for.

    Raises:
        PlanError: an entry is not known; names it and those that are.
    """
    found = []
    for entry in entries:
        if not isinstance(entry, str) or entry not in known:
            raise fields.error(
                f"{name} has {show(entry)}, a kind of layer that no installed family reads; core reads "
                f"{', '.join(known)}"
            )
        found.append(known[entry])
    return tuple(found)


def context_length(fields: Fields) -> int:
    """Return the longest request in tokens."""
    return fields.needed(*CONTEXT, high=MAX_CONTEXT)


def model_dtype(fields: Fields) -> tuple[str, tuple[str, ...]]:
    """Return the model's data type, the text model's own before the larger one's, and a warning where there is none.

    Raises:
        PlanError: no data type goes by that name.
    """
    for config in (fields.section, fields.outer):
        for name in DTYPE:
            found = _dtype(fields, name, config.get(name))
            if found is not None:
                return found, ()
    return FALLBACK_DTYPE, (
        f"{fields.where}: the config names no torch_dtype; {FALLBACK_DTYPE} is assumed, model_dtype sets another",
    )


def state_dtype(fields: Fields) -> str:
    """Return the data type of temporal states: float32 unless the config names another.

    Source: ``mamba_ssm_cache_dtype`` of the configuration of Nemotron-H in transformers, ``mamba_ssm_dtype`` of
    the published configs of Qwen3.5.

    Raises:
        PlanError: no floating-point type goes by that name.
    """
    for name in STATE_DTYPE:
        found = _dtype(fields, name, fields.raw(name))
        if found is not None:
            if not dtypes.find(found).is_float:
                raise fields.error(f"{name}={found!r} is no floating-point type; give for example float32")
            return found
    return "float32"


def _dtype(fields: Fields, name: str, value: Any) -> str | None:
    """Return the full name of the data type at a field, or ``None`` where it names none."""
    if value is None or value == "auto":
        return None
    if not isinstance(value, str):
        raise fields.error(f"{name}={show(value)} is no data type; give for example bfloat16")
    try:
        return dtypes.find(value, option=name).name
    except PlanError as error:
        raise fields.error(str(error)) from error
