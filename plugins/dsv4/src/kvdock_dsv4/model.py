"""What a DeepSeek V4 config says of its cache: one compress ratio a layer, and the widths of a latent row."""

from __future__ import annotations

from collections.abc import Iterable

from kvdock.checked import check_fields
from kvdock.errors import PlanError
from kvdock.families.common import (
    LAYERS,
    Fields,
    context_length,
    model_dtype,
    open_fields,
)
from kvdock.model import MAX_LAYERS, LayerParams, LayerSpec, ModelSpec
from kvdock.queries import ModelQuery

FAMILY = "deepseek_v4"
"""Family of the models that this distribution reads; also their published ``model_type``."""
ARCHITECTURES = frozenset({"DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMNextN"})
KIND = "dsv4"
"""Kind of every layer, and of the pools of its latent rows."""
RATIOS = (0, 4, 128)
"""Tokens that a compressed row stands for; 0: the layer keeps its window alone."""
COMPRESSED = tuple(ratio for ratio in RATIOS if ratio)
DRAFTS = ("target", "draft", "mtp")

_RATIOS = "compress_ratios"
_EXTRA = "num_nextn_predict_layers"
_MOST_EXTRA = 1024


class DSV4Params(LayerParams, frozen=True, kw_only=True):
    """A latent row per token of the window and, unless `compress_ratio` is 0, one for each so many tokens.

    Keys and values are one row for all heads: `nope_dim` columns without and `rope_dim` with a position.
    Layers of ratio 4 have an indexer with one key of `index_head_dim` for each compressed row; others have none.
    """

    nope_dim: int
    rope_dim: int
    compress_ratio: int = 0
    index_head_dim: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, type(self).__name__)
        if self.compress_ratio not in RATIOS:
            raise PlanError(f"DSV4Params: compress_ratio={self.compress_ratio} is none of {RATIOS}")
        for field in ("nope_dim", "rope_dim", "index_head_dim"):
            value = getattr(self, field)
            if value is not None and not 0 < value <= 2**20:
                raise PlanError(f"DSV4Params: {field}={value} is outside 1 … 2^20")
        if (self.index_head_dim is not None) != (self.compress_ratio == 4):
            raise PlanError(f"DSV4Params: layers of ratio 4 have an indexer and no others do, not {self}")

    @property
    def row_dim(self) -> int:
        """Columns of a latent row."""
        return self.nope_dim + self.rope_dim


def params_of(layers: Iterable[tuple[int, LayerSpec]]) -> DSV4Params:
    """Return the shape of the layers of one group; they differ at most in their ratio.

    Raises:
        PlanError: a layer is none of this family, or two have rows of different widths.
    """
    found: DSV4Params | None = None
    for layer_id, layer in layers:
        own = layer.params
        if not isinstance(own, DSV4Params):
            raise PlanError(f"layer {layer_id} is of kind {layer.kind!r}, which keeps no rows of DeepSeek V4")
        if found is not None and (own.nope_dim, own.rope_dim) != (found.nope_dim, found.rope_dim):
            raise PlanError(f"layer {layer_id} has rows of another width than the layers before it")
        found = found or own
    if found is None:
        raise PlanError("a group of no layers has no rows")
    return found


def is_ours(query: ModelQuery) -> bool:
    """Return whether a config is of this family, by its ``model_type`` or its architecture."""
    inner = ModelQuery(config=open_fields(query).section)
    return bool({query.model_type, inner.model_type} & {FAMILY}) or bool(
        {query.architecture, inner.architecture} & ARCHITECTURES
    )


def read_model(query: ModelQuery) -> ModelSpec | None:
    """Return the model of a config in its role, or ``None`` for a config of another family.

    Both a draft of this family and the target's own extra layers keep their window alone (ratio 0).

    Raises:
        PlanError: a field is missing or wrong, or there is not one ratio a layer.
    """
    if query.role not in DRAFTS or not is_ours(query):
        return None
    fields = open_fields(query)
    layers = _target_layers(fields) if query.role == "target" else _draft_layers(fields, query.role)
    dtype, warnings = model_dtype(fields)
    return ModelSpec(
        name=query.name or query.architecture or FAMILY,
        architecture=query.architecture,
        layers=layers,
        context_length=context_length(fields),
        dtype=dtype,
        role=query.role,
        family=FAMILY,
        num_attention_heads=fields.count("num_attention_heads"),
        warnings=warnings,
    )


def _target_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    count = fields.needed(*LAYERS, high=MAX_LAYERS)
    entries = fields.list(_RATIOS)
    if entries is None:
        raise fields.error(f"the config has no {_RATIOS}; add one of {RATIOS} for each layer")
    extra = fields.count(_EXTRA, low=0, high=_MOST_EXTRA) or 0
    if len(entries) not in (count, count + extra):
        raise fields.error(
            f"{_RATIOS} has {len(entries)} entries, but the model has {count} layers; give one per layer"
        )
    return tuple(_layer(fields, _ratio(fields, place, entry)) for place, entry in enumerate(entries[:count]))


def _draft_layers(fields: Fields, role: str) -> tuple[LayerSpec, ...]:
    count = fields.count(_EXTRA, low=0, high=_MOST_EXTRA)
    if count is None and role == "draft":
        count = 1
    if not count:
        raise fields.error(f"the config has no {_EXTRA}, so the model brings no layers to draft with")
    return (_layer(fields, 0),) * count


def _ratio(fields: Fields, place: int, entry: object) -> int:
    ratio = fields.whole(f"{_RATIOS}[{place}]", entry, 0, max(RATIOS))
    if ratio not in RATIOS:
        raise fields.error(f"{_RATIOS}[{place}]={ratio} is none of {RATIOS}, the ratios that are known")
    return ratio


def _layer(fields: Fields, ratio: int) -> LayerSpec:
    """Return a layer of one ratio; its sliding rows are those of the last ``sliding_window`` tokens before each."""
    width, rope = fields.needed("head_dim"), fields.needed("qk_rope_head_dim")
    if rope >= width:
        raise fields.error(f"qk_rope_head_dim={rope} leaves no columns of head_dim={width} without a position")
    index = fields.needed("index_head_dim") if ratio == 4 else None
    params = DSV4Params(nope_dim=width - rope, rope_dim=rope, compress_ratio=ratio, index_head_dim=index)
    return LayerSpec(kind=KIND, params=params, window_tokens=fields.needed("sliding_window"))
