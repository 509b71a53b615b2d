"""Models with state-space layers or short convolutions between their attention layers."""

import pytest
from kvdock.errors import PlanError
from kvdock.families import read_model
from kvdock.model import ConvBlock, ConvParams, MHAParams, NoParams, StateParams
from kvdock.queries import ModelQuery

COMMON = {"max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
NEMOTRON_3_NANO = COMMON | {
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 2688,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "expand": 2,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_ssm_cache_dtype": "float32",
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}
BAMBA = COMMON | {
    "architectures": ["BambaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
GRANITE_4_TINY = COMMON | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "hidden_size": 1536,
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
JAMBA = COMMON | {
    "architectures": ["JambaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 256,
    "sliding_window": None,
}
ZAMBA2 = COMMON | {
    "architectures": ["Zamba2ForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 38,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "attention_head_dim": 128,
    "kv_channels": 64,
    "layers_block_type": (["mamba"] * 5 + ["hybrid"]) * 6 + ["mamba"] * 2,
    "n_mamba_heads": 64,
    "mamba_headdim": 64,
    "mamba_ngroups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
LFM2 = COMMON | {
    "architectures": ["Lfm2ForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "conv_L_cache": 3,
}
ALL = {
    "nemotron-h": NEMOTRON_3_NANO,
    "bamba": BAMBA,
    "granite-hybrid": GRANITE_4_TINY,
    "jamba": JAMBA,
    "zamba2": ZAMBA2,
    "lfm2": LFM2,
}


def read(config, role="target", **fields):
    changed = {name: value for name, value in (config | fields).items() if value is not ...}
    return read_model(ModelQuery(config=changed, name="m", role=role))


def of_kind(model, kind):
    return [index for index, layer in enumerate(model.layers) if layer.kind == kind]


def the_state(model):
    """The one state that all layers of a model with a state have."""
    (params,) = {getattr(layer.params, "state", layer.params) for layer in model.layers if layer.kind != "mha"}
    return params


def mamba2(heads, head_dim, groups, state):
    group = ConvBlock(heads=groups, head_dim=state, replicated=True)
    conv = ConvParams(blocks=(ConvBlock(heads=heads, head_dim=head_dim), group, group), kernel=4)
    return StateParams(conv=(conv,), temporal=(heads, head_dim, state))


@pytest.mark.parametrize("family", ALL)
def test_each_family_is_known_and_says_nothing(family):
    model = read(ALL[family])
    assert (model.family, model.warnings) == (family, ())


def test_nemotron_h_spells_its_layers(published):
    model = published("nemotron-h-8b")
    assert of_kind(model, "mha") == [7, 18, 29, 40]
    assert len(of_kind(model, "state")) == 24
    assert len(of_kind(model, "none")) == 24
    assert {layer.params for layer in model.layers if layer.kind == "none"} == {NoParams()}
    assert model.layers[7].params == MHAParams(num_kv_heads=8, head_dim=128, v_head_dim=128)
    assert model.layers[0].params == mamba2(heads=128, head_dim=64, groups=8, state=128)


def test_experts_keep_nothing():
    model = read(NEMOTRON_3_NANO)
    assert (len(of_kind(model, "state")), len(of_kind(model, "none")), len(of_kind(model, "mha"))) == (23, 23, 6)
    assert model.layers[0].params == mamba2(heads=64, head_dim=64, groups=8, state=128)


@pytest.mark.parametrize("words", [("mamba", "attention"), ("linear_attention", "full_attention")])
def test_a_list_of_blocks_says_the_same_as_letters(words):
    names = {"M": words[0], "*": words[1], "E": "moe"}
    types = [names[letter] for letter in NEMOTRON_3_NANO["hybrid_override_pattern"]]
    listed = read(NEMOTRON_3_NANO, hybrid_override_pattern=..., num_hidden_layers=..., layers_block_type=types)
    assert listed.layers == read(NEMOTRON_3_NANO).layers


@pytest.mark.parametrize(
    "fields", [{"mtp_hybrid_override_pattern": "*E"}, {"mtp_layers_block_type": ["attention", "moe"]}, {}]
)
def test_nemotron_h_drafts_with_attention_and_experts(fields):
    draft = read(NEMOTRON_3_NANO, role="mtp", num_nextn_predict_layers=2, **fields)
    assert [layer.kind for layer in draft.layers] == ["mha", "none", "mha", "none"]
    assert draft.layers[0].params == MHAParams(num_kv_heads=2, head_dim=128, v_head_dim=128)


def test_bamba_names_its_attention_layers():
    model = read(BAMBA)
    assert of_kind(model, "mha") == [9, 18, 27]
    assert the_state(model) == mamba2(heads=128, head_dim=64, groups=1, state=128)


def test_granite_lists_its_layers():
    model = read(GRANITE_4_TINY)
    assert of_kind(model, "mha") == [5, 15, 25, 35]
    assert model.layers[5].params == MHAParams(num_kv_heads=4, head_dim=128, v_head_dim=128)
    assert the_state(model) == mamba2(heads=48, head_dim=64, groups=1, state=128)


def test_a_granite_without_states_needs_no_field_of_a_state():
    fields = {name: ... for name in GRANITE_4_TINY if name.startswith("mamba_")}
    model = read(GRANITE_4_TINY, layer_types=["attention"] * 40, **fields)
    assert {layer.kind for layer in model.layers} == {"mha"}


def test_jamba_has_one_attention_layer_in_eight_and_a_state_per_channel():
    model = read(JAMBA)
    assert of_kind(model, "mha") == [4, 12, 20, 28]
    channels = ConvBlock(heads=8192, head_dim=1)
    assert the_state(model) == StateParams(conv=(ConvParams(blocks=(channels,), kernel=4),), temporal=(8192, 16))


def test_the_shared_attention_of_zamba_2_is_twice_as_wide():
    model = read(ZAMBA2)
    assert of_kind(model, "hybrid") == [5, 11, 17, 23, 29, 35]
    params = model.layers[5].params
    assert (params.num_kv_heads, params.head_dim, params.v_head_dim) == (32, 128, 128)
    assert the_state(model) == mamba2(heads=64, head_dim=64, groups=1, state=128)


def test_lfm2_keeps_the_inputs_of_short_convolutions():
    model = read(LFM2)
    assert of_kind(model, "mha") == [2, 5, 8, 10, 12, 14]
    channels = ConvBlock(heads=2048, head_dim=1)
    assert the_state(model) == StateParams(conv=(ConvParams(blocks=(channels,), kernel=3),), temporal=())


def test_a_window_that_a_hybrid_does_not_use_is_said():
    assert "sliding_window=4096, but nothing says which layers slide" in read(JAMBA, sliding_window=4096).warnings[0]


@pytest.mark.parametrize(
    ("config", "fields", "said"),
    [
        (NEMOTRON_3_NANO, {"hybrid_override_pattern": "M" * 51 + "X"}, "hybrid_override_pattern has 'X', a kind of"),
        (
            NEMOTRON_3_NANO,
            {"hybrid_override_pattern": "M*-"},
            "num_hidden_layers=52, the length of hybrid_override_pattern=3",
        ),
        (NEMOTRON_3_NANO, {"hybrid_override_pattern": ["M"]}, r"hybrid_override_pattern=\['M'\] is not text"),
        (NEMOTRON_3_NANO, {"conv_kernel": 0}, "conv_kernel=0 is outside 2"),
        (NEMOTRON_3_NANO, {"n_groups": 7}, "mamba_num_heads=64 does not divide by n_groups=7"),
        (NEMOTRON_3_NANO, {"ssm_state_size": ...}, "no ssm_state_size or mamba_d_state; add the field"),
        (NEMOTRON_3_NANO, {"layers_block_type": ["mamba"] * 3}, "the length of layers_block_type=3"),
        (NEMOTRON_3_NANO, {"compress_ratios": [4]}, "compress_ratios tells of a cache"),
        (BAMBA, {"mamba_d_head": 65}, "mamba_d_head=65 times 128 heads is not the 8192 channels"),
        (BAMBA, {"mamba_n_heads": 100, "mamba_n_groups": 1}, "mamba_n_heads=100 does not divide the 8192 channels"),
        (BAMBA, {"attn_layer_indices": [9, 32]}, "attn_layer_indices=32 is outside 0 … 31"),
        (BAMBA, {"attn_layer_indices": ...}, "nothing says which layers keep a state"),
        (BAMBA, {"attn_layer_indices": 9}, "attn_layer_indices=9 is not a list"),
        (GRANITE_4_TINY, {"layer_types": ["mamba", "lstm"] * 20}, "layer_types has 'lstm', a kind of layer"),
        (JAMBA, {"attn_layer_offset": 8}, "attn_layer_offset=8 is outside 0 … 7"),
        (JAMBA, {"attn_layer_period": 0}, "attn_layer_period=0 is outside 1"),
        (JAMBA, {"mamba_expand": 1024}, "mamba_expand=1024 makes 4194304 channels"),
        (ZAMBA2, {"num_attention_heads": 48}, "twice hidden_size=2048 does not divide by num_attention_heads=48"),
        (LFM2, {"conv_L_cache": 0}, "conv_L_cache=0 is outside 2"),
        (LFM2, {"full_attn_idxs": [True]}, "full_attn_idxs=True is not a whole number"),
    ],
)
def test_a_wrong_field_is_named(config, fields, said):
    with pytest.raises(PlanError, match=said):
        read(config, **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mtp_hybrid_override_pattern": "*X"}, "mtp_hybrid_override_pattern has 'X'"),
        ({"mtp_hybrid_override_pattern": ""}, "mtp_hybrid_override_pattern is empty"),
        ({"mtp_layers_block_type": ["lstm"]}, "mtp_layers_block_type has 'lstm'"),
    ],
)
def test_a_wrong_pattern_of_drafting_layers_is_named(fields, said):
    with pytest.raises(PlanError, match=said):
        read(NEMOTRON_3_NANO, role="mtp", num_nextn_predict_layers=1, **fields)
