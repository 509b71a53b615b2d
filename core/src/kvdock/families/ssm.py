"""Models with state-space layers (Mamba 1 and 2) or short convolutions between their attention layers."""

from __future__ import annotations

from functools import partial

from kvdock.families import hybrid
from kvdock.families.common import HEADS, HIDDEN, Family, Fields, Layers, LayersRead, state_dtype, translate
from kvdock.model import MAX_EXTENT, ConvBlock, ConvParams, StateParams

# One quantity goes by another name in each family.
SSM_HEADS = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
SSM_HEAD_DIM = ("mamba_d_head", "mamba_headdim")
GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
STATE_SIZE = ("ssm_state_size", "mamba_d_state")
KERNEL = ("conv_kernel", "mamba_d_conv")
WIDTH, EXPAND = "mamba_d_ssm", "mamba_expand"
SHORT_CONV = "conv_L_cache"
MIN_KERNEL = 2
"""A convolution of one tap keeps no earlier inputs."""

MTP_LETTERS, MTP_TYPES = "mtp_hybrid_override_pattern", "mtp_layers_block_type"


def read_mamba2(fields: Fields) -> StateParams:
    """Return the state of a Mamba 2 layer: one convolution over x, B and C, one matrix per head.

    Ranks beyond the number of groups keep a copy of one. Source: ``conv_dim = intermediate + 2 · groups · state``
    and ``[heads, head size, state]`` of the Mamba 2 mixers in transformers (Bamba, Falcon-H1, Nemotron-H, Zamba2).

    Raises:
        PlanError: a field is missing or wrong, or heads do not divide.
    """
    heads, groups, state = fields.needed(*SSM_HEADS), fields.needed(*GROUPS), fields.needed(*STATE_SIZE)
    if heads % groups:
        raise fields.error(f"{fields.first(*SSM_HEADS)}={heads} does not divide by {fields.first(*GROUPS)}={groups}")
    head_dim = fields.count("mamba_head_dim") or _head_dim(fields, heads)
    group = ConvBlock(heads=groups, head_dim=state, replicated=True)
    blocks = (ConvBlock(heads=heads, head_dim=head_dim), group, group)
    return StateParams(
        conv=(ConvParams(blocks=blocks, kernel=fields.needed(*KERNEL, low=MIN_KERNEL)),),
        temporal=(heads, head_dim, state),
        temporal_dtype=state_dtype(fields),
    )


def _head_dim(fields: Fields, heads: int) -> int:
    """Return the size of a state-space head: the width over the heads, which the config may repeat."""
    width = _width(fields)
    if width % heads:
        raise fields.error(f"{fields.first(*SSM_HEADS)}={heads} does not divide the {width} channels of the layer")
    name = fields.first(*SSM_HEAD_DIM)
    if name is not None and fields.raw(name) != "auto" and fields.needed(name) * heads != width:
        raise fields.error(f"{name}={fields.needed(name)} times {heads} heads is not the {width} channels of the layer")
    return width // heads


def _width(fields: Fields) -> int:
    """Return the channels of a state-space layer."""
    return fields.count(WIDTH) or fields.needed(EXPAND) * fields.needed(*HIDDEN)


def read_mamba1(fields: Fields) -> StateParams:
    """Return the state of a Mamba 1 layer: every channel has a convolution and a row of state of its own.

    Source: ``JambaMambaMixer`` in transformers: ``[expand · hidden, kernel]`` and ``[expand · hidden, state]``.

    Raises:
        PlanError: a field is missing or wrong.
    """
    width = _width(fields)
    if width > MAX_EXTENT:
        raise fields.error(f"{EXPAND}={fields.raw(EXPAND)} makes {width} channels; at most {MAX_EXTENT} can be planned")
    channels = ConvBlock(heads=width, head_dim=1)
    return StateParams(
        conv=(ConvParams(blocks=(channels,), kernel=fields.needed(*KERNEL, low=MIN_KERNEL)),),
        temporal=(width, fields.needed(*STATE_SIZE)),
        temporal_dtype=state_dtype(fields),
    )


def read_short_conv(fields: Fields) -> StateParams:
    """Return the state of a short convolution: its last inputs, and no temporal state.

    Source: ``Lfm2ShortConv`` in transformers; of its ``conv_L_cache`` taps the newest input is not kept.

    Raises:
        PlanError: a field is missing or wrong.
    """
    channels = ConvBlock(heads=fields.needed(*HIDDEN), head_dim=1)
    kernel = fields.needed(SHORT_CONV, low=MIN_KERNEL)
    return StateParams(conv=(ConvParams(blocks=(channels,), kernel=kernel),), temporal=())


def read_shared_attention(fields: Fields, family: Family) -> LayersRead:
    """Return the layers of Zamba 2, whose shared attention reads the hidden state beside the embedding.

    It is twice as wide as the model. Source: ``attention_head_dim = 2 · hidden_size / num_attention_heads`` of
    ``Zamba2Config`` in transformers; its ``kv_channels`` is not the size of a head.

    Raises:
        PlanError: a field is missing or wrong.
    """
    heads, hidden = fields.needed(*HEADS), fields.needed(*HIDDEN)
    if 2 * hidden % heads:
        raise fields.error(f"twice hidden_size={hidden} does not divide by num_attention_heads={heads}")
    section = {**fields.section, "head_dim": 2 * hidden // heads, "v_head_dim": None}
    wide = Fields(section, fields.outer, fields.where)
    return hybrid.read_layers(wide, family, read_state=read_mamba2, types=hybrid.MAMBA_TYPES)


def extra_by_pattern(fields: Fields, layers: Layers, count: int) -> Layers:
    """Return the layers that draft, each of them several of the model's: ``*E``, attention and experts, if not told.

    Source: ``mtp_layers_block_type`` of ``NemotronHConfig`` in transformers.

    Raises:
        PlanError: a kind of layer is not known.
    """
    if fields.has(MTP_LETTERS):
        kept = hybrid.read_letters(fields, MTP_LETTERS)
    else:
        entries = fields.list(MTP_TYPES)
        kept = translate(fields, MTP_TYPES, ["attention", "moe"] if entries is None else entries, hybrid.MAMBA_TYPES)
    if not kept:
        raise fields.error(f"{fields.first(MTP_LETTERS, MTP_TYPES)} is empty; leave it out for attention and experts")
    return hybrid.assemble(fields, kept * count, read_mamba2)


_MAMBA2 = partial(hybrid.read_layers, read_state=read_mamba2, types=hybrid.MAMBA_TYPES)

FAMILIES = (
    Family(
        name="nemotron-h",
        architectures=("NemotronHForCausalLM", "NemotronH_Nano_VL_V2"),
        reads=frozenset({"mamba_", "ssm_", "hybrid_override_pattern", "layers_block_type"}),
        read_layers=_MAMBA2,
        read_extra=extra_by_pattern,
    ),
    Family(
        name="bamba",
        architectures=("BambaForCausalLM",),
        reads=frozenset({"mamba_", "attn_layer_indices", "layers_block_type"}),
        read_layers=_MAMBA2,
    ),
    Family(
        name="granite-hybrid",
        architectures=("GraniteMoeHybridForCausalLM",),
        reads=frozenset({"mamba_", "layers_block_type"}),
        read_layers=_MAMBA2,
    ),
    Family(
        name="falcon-h1",
        architectures=("FalconH1ForCausalLM",),
        reads=frozenset({"mamba_", "ssm_"}),
        read_layers=partial(_MAMBA2, keeps="both"),
    ),
    Family(
        name="jamba",
        architectures=("JambaForCausalLM",),
        embedding=("JambaForSequenceClassification",),
        reads=frozenset({"mamba_", "attn_layer_period", "attn_layer_offset", "layers_block_type"}),
        read_layers=partial(hybrid.read_layers, read_state=read_mamba1, types=hybrid.MAMBA_TYPES),
    ),
    Family(
        name="zamba2",
        architectures=("Zamba2ForCausalLM",),
        reads=frozenset({"mamba_", "layers_block_type"}),
        read_layers=read_shared_attention,
    ),
    Family(
        name="lfm2",
        architectures=("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration"),
        reads=frozenset({SHORT_CONV, "full_attn_idxs"}),
        read_layers=partial(hybrid.read_layers, read_state=read_short_conv, types=hybrid.CONV_TYPES),
    ),
)
