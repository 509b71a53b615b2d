"""Models that keep a state per request in some layers: which layers, and what state."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvdock.device import DeviceInfo
from kvdock.errors import KVDockError, PlanError
from kvdock.families import groups, read_model
from kvdock.model import (
    ConvBlock,
    ConvParams,
    HybridParams,
    MHAParams,
    MLAParams,
    ModelSpec,
    RingParams,
    StateParams,
    model_from_builtins,
    model_to_builtins,
)
from kvdock.options import DEFAULTS, CacheOptions, Parallelism
from kvdock.queries import GroupQuery, ModelQuery, StateQuery

DEVICE = DeviceInfo(device_type="cpu", name="test", total_bytes=2**40, free_before_load_bytes=2**40, free_bytes=2**40)
FLOAT32, BF16 = 4, 2

QWEN3_5_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
    },
}


def read(config, role="target"):
    return read_model(ModelQuery(config=config, name="m", role=role))


def qwen(**fields):
    """Read Qwen3.5 with fields of its text model changed; ``...`` leaves one out."""
    text = {name: value for name, value in (QWEN3_5_27B["text_config"] | fields).items() if value is not ...}
    return read(QWEN3_5_27B | {"text_config": text})


def of_kind(model, kind):
    return [index for index, layer in enumerate(model.layers) if layer.kind == kind]


def the_state(model):
    """The one state that all state layers of a model have."""
    (params,) = {layer.params for layer in model.layers if layer.kind == "state"}
    return params


def conv_channels(conv, tp=1):
    """Channels of a rank: whole heads over the ranks, or one copy where there are fewer groups than ranks."""
    return sum(max(block.heads // tp, 1) * block.head_dim for block in conv.blocks)


def state_bytes(params, tp=1):
    """Bytes of one request in one layer: inputs of the convolutions in 16 bits, the temporal state in 32."""
    conv = sum(conv_channels(conv, tp) * (conv.kernel - 1) for conv in params.conv)
    heads, *rest = params.temporal
    temporal = heads // tp
    for extent in rest:
        temporal *= extent
    return conv * BF16 + temporal * FLOAT32


def group_query(model):
    options = CacheOptions(**dict(DEFAULTS))
    layers = tuple(enumerate(model.layers))
    return GroupQuery(model=model, options=options, parallel=Parallelism(), device=DEVICE, layers=layers, target=model)


def group_ids(model):
    return {group.name: (group.kind, group.layer_ids) for group in groups.group_layers(group_query(model))}


def test_every_fourth_layer_of_qwen3_next_is_attention(published):
    model = published("qwen3-next-80b-a3b")
    assert of_kind(model, "mha") == list(range(3, 48, 4))
    assert len(of_kind(model, "state")) == 36
    assert model.layers[3].params == MHAParams(num_kv_heads=2, head_dim=256, v_head_dim=256)
    assert (model.family, model.warnings) == ("qwen3-next", ())


def test_a_gated_delta_net_convolves_queries_keys_and_values(published):
    keys, values = ConvBlock(heads=16, head_dim=128), ConvBlock(heads=32, head_dim=128)
    assert the_state(published("qwen3-next-80b-a3b")) == StateParams(
        conv=(ConvParams(blocks=(keys, keys, values), kernel=4),),
        temporal=(32, 128, 128),
        temporal_dtype="float32",
        ring=RingParams(k_heads=16, k_dim=128, v_heads=32, v_dim=128),
    )


@pytest.mark.parametrize(
    ("name", "tp", "channels", "temporal_heads", "layers", "bytes_per_request"),
    [
        ("qwen3-next-80b-a3b", 1, 8192, 32, 36, 77_266_944),
        ("qwen3-next-80b-a3b", 4, 2048, 8, 36, 19_316_736),
        ("nemotron-h-8b", 1, 10_240, 128, 24, 102_137_856),
        ("kimi-linear-48b-a3b", 1, 12_288, 32, 20, 43_417_600),
    ],
)
def test_states_cost_what_an_engine_allocates(published, name, tp, channels, temporal_heads, layers, bytes_per_request):
    model = published(name)
    params = the_state(model)
    assert [(conv_channels(conv, tp), conv.kernel - 1) for conv in params.conv] == [(channels, 3)]
    assert params.temporal[0] // tp == temporal_heads
    assert len(of_kind(model, "state")) == layers
    assert layers * state_bytes(params, tp) == bytes_per_request


def test_only_attention_layers_cost_bytes_per_token():
    # T-03: 64 layers, of which 16 are full: 4 MiB for a block of 64 tokens and not 16.
    model = read(QWEN3_5_27B)
    full = [model.layers[index].params for index in of_kind(model, "mha")]
    assert sum(p.num_kv_heads * (p.head_dim + p.v_head_dim) * BF16 * 64 for p in full) == 4 * 2**20
    # Beside it a constant per request: (2 · 16 + 48) · 128 channels of 3 inputs, 48 matrices of 128 · 128.
    assert 48 * state_bytes(the_state(model)) == 48 * (10_240 * 3 * 2 + 48 * 128 * 128 * 4)


def test_the_temporal_state_has_the_published_type():
    (index, *_) = of_kind(qwen(mamba_ssm_dtype="bfloat16"), "state")
    assert qwen(mamba_ssm_dtype="bfloat16").layers[index].params.temporal_dtype == "bfloat16"
    assert the_state(qwen(mamba_ssm_dtype=...)).temporal_dtype == "float32"


def test_an_interval_says_the_same_as_a_list():
    assert qwen(layer_types=...).layers == qwen().layers


@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_text_models_of_the_same_generation_are_read_alike(name):
    assert read(QWEN3_5_27B["text_config"] | {"architectures": [name]}).layers == qwen().layers


@pytest.mark.parametrize("config", [QWEN3_5_27B, "qwen3-next-80b-a3b"])
def test_a_hybrid_drafts_with_one_attention_layer(published, config):
    target, draft = (
        (published(config), published(config, role="mtp"))
        if isinstance(config, str)
        else (read(config), read(config, role="mtp"))
    )
    assert draft.layers == (target.layers[3],)
    assert draft.layers[0].kind == "mha"


def test_layers_that_draft_and_are_not_counted_are_not_invented():
    text = QWEN3_5_27B["text_config"] | {"mtp_num_hidden_layers": 0}
    with pytest.raises(PlanError, match="the model brings no layers to draft with"):
        read(QWEN3_5_27B | {"text_config": text}, role="mtp")


def test_a_head_that_drafts_for_a_hybrid_is_plain_attention(llama):
    model = llama(role="draft", architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, head_dim=256)
    assert [layer.kind for layer in model.layers] == ["mha"]


def test_kimi_linear_counts_its_layers_from_one(published):
    # P-12: 27 layers, full at 3, 7, … 23 and 26, counted from 0.
    full = (3, 7, 11, 15, 19, 23, 26)
    model = published("kimi-linear-48b-a3b")
    found = group_ids(model)
    assert found["full"] == ("mla", full)
    assert found["full"][1].index(26) == 6
    assert 0 not in full
    assert found["state"] == ("state", tuple(layer for layer in range(27) if layer not in full))
    assert model.layers[26].params == MLAParams(kv_lora_rank=512, qk_rope_head_dim=64)


def test_kimis_delta_attention_keeps_channels_last_and_a_decay_per_key(published):
    block = ConvBlock(heads=32, head_dim=128)
    assert the_state(published("kimi-linear-48b-a3b")) == StateParams(
        conv=(ConvParams(blocks=(block, block, block), kernel=4, channels_last=True),),
        temporal=(32, 128, 128),
        dense_windows=True,
        ring=RingParams(k_heads=32, k_dim=128, v_heads=32, v_dim=128, decay_per_key=True),
    )


KIMI = {
    "architectures": ["KimiLinearForCausalLM"],
    "num_hidden_layers": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "model_max_length": 1024,
    "torch_dtype": "bfloat16",
}
KDA = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}


def test_kimi_without_linear_layers_is_plain_latent_attention():
    assert {layer.kind for layer in read(KIMI).layers} == {"mla"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"full_attn_layers": [4, 5]}, r"full_attn_layers=5 is outside 1 … 4"),
        ({"kda_layers": [0, 1, 2]}, r"kda_layers=0 is outside 1 … 4"),
        ({"kda_layers": [1, 2]}, r"layer 3 is in neither of full_attn_layers and kda_layers"),
        ({"kda_layers": [1, 2, 3, 4]}, r"layer 4 is in both of full_attn_layers and kda_layers"),
        ({"kda_layers": None}, r"linear_attn_config: the config has no kda_layers"),
        ({"short_conv_kernel_size": 0}, r"linear_attn_config: short_conv_kernel_size=0 is outside 2"),
        ({"num_heads": None}, r"linear_attn_config: the config has no num_heads"),
    ],
)
def test_a_wrong_list_of_linear_layers_is_named(changed, said):
    with pytest.raises(PlanError, match=said):
        read(KIMI | {"linear_attn_config": KDA | changed})


def test_a_linear_configuration_is_an_object():
    with pytest.raises(PlanError, match=r"linear_attn_config=\[1\] is not an object of fields"):
        read(KIMI | {"linear_attn_config": [1]})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0 is outside 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1 is outside 2"),
        ({"linear_num_value_heads": 40}, "linear_num_value_heads=40 does not divide by linear_num_key_heads=16"),
        ({"linear_key_head_dim": ...}, "the config has no linear_key_head_dim; add the field"),
        ({"layer_types": ["linear_attention"] * 3}, "num_hidden_layers=64, the length of layer_types=3"),
        ({"layer_types": ["sliding_attention"] * 64}, "layer_types has 'sliding_attention', a kind of layer"),
        ({"layer_types": ["mamba"] * 64}, "layer_types has 'mamba', a kind of layer"),
        ({"layer_types": ..., "full_attention_interval": ...}, "nothing says which layers keep a state; add one of"),
        ({"full_attention_interval": 0, "layer_types": ...}, "full_attention_interval=0 is outside 1"),
        ({"mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype='int8' is no floating-point type"),
        ({"mamba_ssm_dtype": "float33"}, "mamba_ssm_dtype='float33' is not a data type"),
        ({"num_key_value_heads": 25}, "25 KV heads .* are more than the 24 query heads"),
        ({"compress_ratios": [4]}, "compress_ratios tells of a cache"),
        ({"rwkv_head_size": 64}, "rwkv_head_size tells of a cache"),
        ({"hybrid_override_pattern": "M*"}, "hybrid_override_pattern tells of a cache"),
    ],
)
def test_a_wrong_field_of_a_delta_net_is_named(fields, said):
    with pytest.raises(PlanError, match=f"m: text_config: .*{said}"):
        qwen(**fields)


FALCON_H1 = {
    "architectures": ["FalconH1ForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_d_ssm": 1536,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 128,
    "ssm_in_multiplier": 1.25,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
}


def test_every_layer_of_falcon_h1_has_attention_and_a_state():
    model = read(FALCON_H1)
    group = ConvBlock(heads=1, head_dim=128, replicated=True)
    state = StateParams(
        conv=(ConvParams(blocks=(ConvBlock(heads=24, head_dim=64), group, group), kernel=4),), temporal=(24, 64, 128)
    )
    params = HybridParams(num_kv_heads=2, head_dim=64, v_head_dim=64, state=state)
    assert {(layer.kind, layer.params) for layer in model.layers} == {("hybrid", params)}
    assert conv_channels(state.conv[0]) == 1536 + 2 * 128


def test_a_layer_with_both_belongs_to_two_groups():
    model = read(FALCON_H1)
    every = tuple(range(36))
    assert group_ids(model) == {"full": ("mha", every), "state": ("state", every)}
    query = group_query(model)
    state_query = StateQuery(
        model=model,
        options=query.options,
        parallel=query.parallel,
        device=DEVICE,
        groups=groups.group_layers(query),
        all_groups=groups.group_layers(query),
    )
    assert {"full", "state", "requests"} <= set(groups.spaces(state_query))


def test_a_layer_with_both_survives_json():
    model = read(FALCON_H1)
    assert model_from_builtins(model_to_builtins(model)) == model


NAMES = sorted(
    {*QWEN3_5_27B["text_config"], *FALCON_H1, *KIMI, *KDA, "linear_attn_config", "block_configs", "no_rope_layers"}
    | {
        "attention_chunk_size",
        "sparse_attention_config",
        "sparse_attention_freq",
        "hybrid_override_pattern",
        "n_groups",
    }
    | {"mamba_num_heads", "ssm_state_size", "conv_kernel", "attn_layer_period", "attn_layer_offset", "conv_L_cache"}
    | {"num_kv_heads", "num_query_heads", "mtp_hybrid_override_pattern", "layers_block_type", "attn_layer_indices"}
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2**40)
    | st.integers(0, 16)
    | st.floats()
    | st.sampled_from(["M*-E", "mamba", "full_attention", "linear_attention", "hybrid", "auto", "float32", ""])
)
JUNK = SCALARS | st.lists(SCALARS, max_size=5) | st.dictionaries(st.sampled_from(NAMES), SCALARS, max_size=5)
ARCHITECTURES = st.sampled_from(
    [
        "Qwen3NextForCausalLM",
        "KimiLinearForCausalLM",
        "NemotronHForCausalLM",
        "FalconH1ForCausalLM",
        "JambaForCausalLM",
        "Zamba2ForCausalLM",
        "Lfm2ForCausalLM",
        "BambaForCausalLM",
        "DeciLMForCausalLM",
        "OpenELMForCausalLM",
        "Llama4ForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        "MiMoV2FlashForCausalLM",
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    config=st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=6),
    architecture=ARCHITECTURES,
    role=st.sampled_from(["target", "mtp"]),
    base=st.sampled_from([{}, FALCON_H1, KIMI | {"linear_attn_config": KDA}, QWEN3_5_27B["text_config"]]),
)
def test_junk_gives_a_model_or_an_error_of_kvdock(config, architecture, role, base):
    try:
        model = read(base | config | {"architectures": [architecture]}, role)
    except KVDockError as error:
        assert str(error).isprintable()
    else:
        assert isinstance(model, ModelSpec)
