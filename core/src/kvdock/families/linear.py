"""Models with linear attention: gated delta nets (Qwen3-Next, Qwen3.5) and Kimi's delta attention (Kimi-Linear)."""

from __future__ import annotations

from functools import partial

from kvdock.families import attention, hybrid
from kvdock.families.common import Family, Fields, LayersRead, state_dtype
from kvdock.model import ConvBlock, ConvParams, RingParams, StateParams

K_HEADS, K_DIM = "linear_num_key_heads", "linear_key_head_dim"
V_HEADS, V_DIM = "linear_num_value_heads", "linear_value_head_dim"
KERNEL = "linear_conv_kernel_dim"
MIN_KERNEL = 2
"""A convolution of one tap keeps no earlier inputs."""

DELTA_FIELDS = frozenset({K_HEADS, K_DIM, V_HEADS, V_DIM, KERNEL, hybrid.INTERVAL, "mamba_ssm_dtype"})
KDA = "linear_attn_config"
KDA_LAYERS, FULL_LAYERS = "kda_layers", "full_attn_layers"


def read_delta(fields: Fields) -> StateParams:
    """Return the state of a gated delta net: one convolution over q, k and v, one matrix per value head.

    Source: ``Qwen3NextGatedDeltaNet`` in transformers: ``conv_dim = 2 · key_dim + value_dim``, recurrent state
    ``[value heads, key size, value size]``.

    Raises:
        PlanError: a field is missing or wrong, or the value heads do not divide over the key heads.
    """
    k_heads, k_dim = fields.needed(K_HEADS), fields.needed(K_DIM)
    v_heads, v_dim = fields.needed(V_HEADS), fields.needed(V_DIM)
    if v_heads % k_heads:
        raise fields.error(f"{V_HEADS}={v_heads} does not divide by {K_HEADS}={k_heads}")
    keys = ConvBlock(heads=k_heads, head_dim=k_dim)
    values = ConvBlock(heads=v_heads, head_dim=v_dim)
    return StateParams(
        conv=(ConvParams(blocks=(keys, keys, values), kernel=fields.needed(KERNEL, low=MIN_KERNEL)),),
        temporal=(v_heads, k_dim, v_dim),
        temporal_dtype=state_dtype(fields),
        ring=RingParams(k_heads=k_heads, k_dim=k_dim, v_heads=v_heads, v_dim=v_dim),
    )


def read_kda(fields: Fields) -> StateParams:
    """Return the state of Kimi's delta attention: q, k and v convolved side by side, one matrix per head.

    Its decay is a number per key column, and its kernels read convolution inputs with channels last. Source:
    ``KimiDeltaAttention`` of the published model code.

    Raises:
        PlanError: a field is missing or wrong.
    """
    inner = fields.inner(KDA, fields.raw(KDA))
    heads, dim = inner.needed("num_heads"), inner.needed("head_dim")
    block = ConvBlock(heads=heads, head_dim=dim)
    kernel = inner.needed("short_conv_kernel_size", low=MIN_KERNEL)
    return StateParams(
        conv=(ConvParams(blocks=(block,) * 3, kernel=kernel, channels_last=True),),
        temporal=(heads, dim, dim),
        temporal_dtype=state_dtype(fields),
        dense_windows=True,
        ring=RingParams(k_heads=heads, k_dim=dim, v_heads=heads, v_dim=dim, decay_per_key=True),
    )


def read_kimi_layers(fields: Fields, family: Family) -> LayersRead:
    """Return the layers of a model that lists its full and its linear layers, counted from 1.

    Raises:
        PlanError: a field is missing or wrong, or a layer is in neither list or in both.
    """
    if not fields.has(KDA):
        return attention.read_layers(fields, family)
    inner = fields.inner(KDA, fields.raw(KDA))
    layers = attention.count_layers(fields)
    full, linear = (_counted_from_1(inner, name, layers) for name in (FULL_LAYERS, KDA_LAYERS))
    for layer in range(layers):
        if (layer in full) == (layer in linear):
            where = "both" if layer in full else "neither"
            raise inner.error(
                f"layer {layer + 1} is in {where} of {FULL_LAYERS} and {KDA_LAYERS}; list each of the {layers} layers "
                "once, counted from 1"
            )
    return hybrid.assemble(fields, ("kv" if layer in full else "state" for layer in range(layers)), read_kda), ()


def _counted_from_1(fields: Fields, name: str, layers: int) -> frozenset[int]:
    entries = fields.list(name)
    if entries is None:
        raise fields.error(f"the config has no {name}; add the field")
    return frozenset(fields.whole(name, entry, 1, layers) - 1 for entry in entries)


_DELTA = partial(hybrid.read_layers, read_state=read_delta, types=hybrid.DELTA_TYPES)

FAMILIES = (
    Family(
        name="qwen3-next",
        architectures=("Qwen3NextForCausalLM",),
        reads=DELTA_FIELDS,
        read_layers=_DELTA,
        extra_layers=1,  # its weights hold one layer to draft with, which the published config does not count
    ),
    Family(
        name="qwen3.5",
        architectures=(
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        reads=DELTA_FIELDS,
        read_layers=_DELTA,
    ),
    Family(
        name="kimi-linear",
        architectures=("KimiLinearForCausalLM",),
        reads=frozenset({KDA}),
        read_layers=read_kimi_layers,
    ),
)
