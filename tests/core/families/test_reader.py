"""What a published config says of its layers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvdock.errors import KVDockError, PlanError
from kvdock.families import architectures, read_model
from kvdock.families.reader import FAMILIES
from kvdock.model import DSAParams, MHAParams, MLAParams, ModelSpec
from kvdock.queries import ModelQuery

BF16 = 2


def token_bytes(layers):
    """Bytes that a token takes in these layers with one rank, in 16 bits."""
    return sum((layer.params.head_dim + layer.params.v_head_dim) * layer.params.num_kv_heads for layer in layers) * BF16


def owners(model):
    return [layer for layer in model.layers if layer.shares_kv_with is None]


@pytest.mark.parametrize(
    ("name", "layers", "bytes_per_token", "context"),
    [
        ("llama-3.1-8b", 32, 32 * 8 * 2 * 128 * 2, 131072),  # 131,072
        ("llama-3.1-70b", 80, 80 * 8 * 2 * 128 * 2, 131072),
        ("qwen3-8b", 36, 36 * 8 * 2 * 128 * 2, 40960),
        ("qwen3-235b-a22b", 94, 94 * 4 * 2 * 128 * 2, 40960),
        ("minimax-m2", 62, 62 * 8 * 2 * 128 * 2, 196608),
        ("mistral-7b-v0.3", 32, 131_072, 32768),
    ],
)
def test_plain_models_keep_kv_heads_in_every_layer(published, name, layers, bytes_per_token, context):
    model = published(name)
    assert len(model.layers) == layers
    assert {(layer.kind, layer.window_tokens) for layer in model.layers} == {("mha", None)}
    assert token_bytes(model.layers) == bytes_per_token
    assert (model.context_length, model.dtype, model.warnings) == (context, "bfloat16", ())


def test_the_reference_model_costs_131072_bytes_a_token(published):  # T-01
    assert token_bytes(published("llama-3.1-8b").layers) == 131_072


def test_the_head_size_of_the_config_wins_over_hidden_size_by_heads(llama):  # T-01
    # Qwen3-235B: 4096 / 64 = 64, but heads are 128 wide.
    model = llama(num_attention_heads=64, head_dim=128)
    assert model.layers[0].params == MHAParams(num_kv_heads=8, head_dim=128, v_head_dim=128)
    assert llama(num_attention_heads=64).layers[0].params.head_dim == 64


def test_deepseek_v3_keeps_one_latent_row_a_layer(published):
    model = published("deepseek-v3")
    assert {(layer.kind, layer.params) for layer in model.layers} == {
        ("mla", MLAParams(kv_lora_rank=512, qk_rope_head_dim=64))
    }
    assert len(model.layers) * (512 + 64) * BF16 == 70_272
    assert model.num_attention_heads == 128


def test_deepseek_v3_2_brings_an_indexer(published):
    model = published("deepseek-v3.2")
    params = DSAParams(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    assert [(layer.kind, layer.params) for layer in model.layers] == [("dsa", params)] * 61


def test_the_models_own_draft_layers_have_its_shape(published):
    model = published("deepseek-v3", role="mtp")
    assert model.role == "mtp"
    assert model.layers == published("deepseek-v3").layers[:1]


def test_a_model_without_draft_layers_says_so(published):
    with pytest.raises(PlanError, match=r"no num_nextn_predict_layers, so the model brings no layers to draft with"):
        published("llama-3.1-8b", role="mtp")


def test_draft_layers_of_a_mixed_model_are_not_guessed(llama):
    mixed = {"layer_types": ["full_attention", "sliding_attention"] * 16, "sliding_window": 512}
    with pytest.raises(PlanError, match="layers differ"):
        llama(role="mtp", num_nextn_predict_layers=1, **mixed)


def test_a_draft_with_its_own_config_is_read_like_any_model(llama):
    model = llama(role="draft", architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1)
    assert (model.role, len(model.layers), model.warnings) == ("draft", 1, ())


def test_other_roles_are_left_to_others(llama):
    assert llama(role="vision") is None


@pytest.mark.parametrize(
    ("name", "windows", "full_bytes", "sliding_bytes"),
    [
        ("gpt-oss-20b", {127, None}, 12 * 8 * 2 * 64 * 2, 12 * 8 * 2 * 64 * 2),
        ("gpt-oss-120b", {127, None}, 18 * 8 * 2 * 64 * 2, 18 * 8 * 2 * 64 * 2),
        ("gemma-2-9b", {4095, None}, 21 * 8 * 2 * 256 * 2, 21 * 8 * 2 * 256 * 2),
        ("gemma-4-style-hybrid", {1023, None}, 10 * 4 * 2 * 512 * 2, 50 * 16 * 2 * 256 * 2),
        ("mimo-v2-flash", {127, None}, 9 * 4 * (192 + 128) * 2, 39 * 8 * (192 + 128) * 2),
        ("mistral-7b-v0.1", {4095}, 0, 32 * 8 * 2 * 128 * 2),
    ],
)
def test_sliding_models_keep_their_own_heads_in_their_own_layers(published, name, windows, full_bytes, sliding_bytes):
    model = published(name)
    assert {layer.window_tokens for layer in model.layers} == windows
    assert token_bytes(layer for layer in model.layers if layer.window_tokens is None) == full_bytes
    assert token_bytes(layer for layer in model.layers if layer.window_tokens is not None) == sliding_bytes
    assert model.warnings == ()


def test_full_and_sliding_layers_are_priced_apart(llama):
    # S-13: 40 sliding layers of 8 x 256 and 8 full ones of 1 x 512.
    model = llama(
        architectures=["Gemma4ForCausalLM"],
        num_hidden_layers=48,
        num_key_value_heads=8,
        head_dim=256,
        num_global_key_value_heads=1,
        global_head_dim=512,
        sliding_window=1024,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 8,
    )
    full = token_bytes(layer for layer in model.layers if layer.window_tokens is None)
    sliding = token_bytes(layer for layer in model.layers if layer.window_tokens is not None)
    assert (full, sliding) == (16_384, 327_680)
    assert full * 65_536 + sliding * 1024 == 1.3125 * 2**30  # one request of 65,536 tokens


def test_swa_fields_give_keys_and_values_widths_of_their_own(llama):
    model = llama(
        architectures=["MiMoV2FlashForCausalLM"],
        num_hidden_layers=12,
        num_key_value_heads=4,
        head_dim=192,
        v_head_dim=128,
        swa_num_key_value_heads=8,
        swa_head_dim=128,
        swa_v_head_dim=64,
        sliding_window=128,
        hybrid_layer_pattern=[0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0],
    )
    full = token_bytes(layer for layer in model.layers if layer.window_tokens is None)
    sliding = token_bytes(layer for layer in model.layers if layer.window_tokens is not None)
    assert full + sliding * 0.8 == 29_798.4


def sliding_ids(model):
    return [index for index, layer in enumerate(model.layers) if layer.window_tokens is not None]


@pytest.mark.parametrize(
    ("fields", "slides"),
    [
        ({"architectures": ["Gemma2ForCausalLM"]}, [0, 2, 4, 6]),
        ({"architectures": ["Gemma3ForCausalLM"]}, [0, 1, 2, 3, 4, 6, 7]),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 3}, [0, 1, 3, 4, 6, 7]),
        ({"architectures": ["Cohere2ForCausalLM"]}, [0, 1, 2, 4, 5, 6]),
        ({"architectures": ["GptOssForCausalLM"]}, [0, 2, 4, 6]),
        ({"architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": "LLLG"}, [0, 1, 2, 4, 5, 6]),
        ({"architectures": ["MistralForCausalLM"]}, [0, 1, 2, 3, 4, 5, 6, 7]),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 6},
            [6, 7],
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "max_window_layers": 6}, []),
        ({"layer_types": ["full_attention", "sliding_attention"] * 4}, [1, 3, 5, 7]),
        ({"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 1, 0, 1, 1, 0, 1, 1]}, [0, 1, 3, 4, 6, 7]),
    ],
)
def test_the_layers_that_slide_follow_the_familys_rule(llama, fields, slides):
    model = llama(num_hidden_layers=8, sliding_window=512, **fields)
    assert sliding_ids(model) == slides
    assert {model.layers[index].window_tokens for index in slides} <= {511}
    assert model.warnings == ()


def test_a_window_that_nothing_assigns_is_not_used_and_said(llama):
    model = llama(sliding_window=512)
    assert sliding_ids(model) == []
    assert "sliding_window=512, but nothing says which layers slide" in model.warnings[0]


def test_sliding_layers_without_a_window_are_refused(llama):
    with pytest.raises(PlanError, match="no sliding_window; add the field"):
        llama(layer_types=["sliding_attention"] * 32)


def test_windows_that_no_layer_uses_do_not_exist(llama):
    # D-04: the pattern is longer than the model.
    model = llama(num_hidden_layers=1, sliding_window=[128, 32768])
    assert {layer.window_tokens for layer in model.layers} == {127}


def test_the_small_gemma_3_configs_leave_out_what_their_class_knows():
    text = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16", "text_config": text}
    model = read_model(ModelQuery(config=config))
    assert model.layers[5].params == MHAParams(num_kv_heads=4, head_dim=256, v_head_dim=256)
    assert (model.context_length, len(sliding_ids(model))) == (131072, 29)


def gemma_3n(shared, layers=35):
    types = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    return {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "num_hidden_layers": layers,
        "layer_types": types[:layers],
        "sliding_window": 512,
        "num_kv_shared_layers": shared,
    }


def test_the_last_layers_share_the_kv_of_the_last_owner_of_their_kind(llama):
    # S-14: 35 layers, of which 15 share.
    model = llama(**gemma_3n(15))
    assert len(owners(model)) == 20
    shared = {index: layer.shares_kv_with for index, layer in enumerate(model.layers) if index >= 20}
    assert shared == {index: 19 if (index + 1) % 5 == 0 else 18 for index in range(20, 35)}


def test_no_shared_layers_leave_every_layer_its_kv(llama):
    assert len(owners(llama(**gemma_3n(0, layers=30)))) == 30  # S-14


@pytest.mark.parametrize("shared", [35, 36, 1000])
def test_sharing_all_layers_is_an_error_and_not_no_layer(llama, shared):  # S-14
    with pytest.raises(PlanError, match=f"num_kv_shared_layers={shared} leaves none of the 35 layers"):
        llama(**gemma_3n(shared))


def test_sharing_without_an_owner_of_the_kind_is_an_error(llama):
    with pytest.raises(PlanError, match="layer 4 shares KV, but none of the first 4 layers is of its kind"):
        llama(**gemma_3n(31))


def test_a_sub_model_is_sized_by_its_own_section():
    # S-16: 20 layers inside a checkpoint of 48.
    text = {
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    }
    config = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 48, "dtype": "bfloat16", "text_config": text}
    model = read_model(ModelQuery(config=config))
    assert len(model.layers) == 20
    assert sum(layer.params.num_kv_heads * layer.params.head_dim for layer in model.layers) * BF16 == 10_240  # K side
    assert model.dtype == "bfloat16"  # of the larger model


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_layers": 48}, "num_hidden_layers=32, num_layers=48"),
        ({"n_layer": 31}, "num_hidden_layers=32, n_layer=31"),
        (
            {"layer_types": ["full_attention"] * 48},
            "num_hidden_layers=32, the length of layer_types=48",
        ),
        (
            {"is_hybrid_swa": True, "hybrid_layer_pattern": [0] * 3},
            "num_hidden_layers=32, the length of hybrid_layer_pattern=3",
        ),
    ],
)
def test_layer_counts_that_disagree_are_refused(llama, fields, said):  # S-16
    with pytest.raises(PlanError, match="the numbers of layers disagree: " + said):
        llama(**fields)


def test_models_with_other_caches_are_refused_by_the_field(published):
    with pytest.raises(PlanError, match="compress_ratios tells of a cache that no installed family reads"):
        published("deepseek-v4-flash")


@pytest.mark.parametrize(
    "fields",
    [
        {"linear_num_key_heads": 16},
        {"linear_attn_config": {"kda_layers": [1]}},
        {"full_attention_interval": 4},
        {"hybrid_override_pattern": "M-*-"},
        {"attention_chunk_size": 8192},
        {"sparse_attention_config": {"use_sparse_attention": True}},
        {"block_configs": [{"attention": {"no_op": True}}]},
        {"rwkv_head_size": 64},
        {"mamba_d_state": 16},
        {"ssm_state_size": 128},
        {"state_size": 16},
        {"attn_layer_period": 8},
        {"attn_type_list": [1, 0, 1]},
        {"hybrid_layer_pattern": [1, 0] * 16},
        {"is_encoder_decoder": True},
        {"cross_attention_layers": [3, 8]},
        {"index_head_dim": 128},
    ],
)
def test_one_foreign_field_is_enough_even_in_an_unknown_model(llama, fields):
    with pytest.raises(PlanError, match=f"m: {next(iter(fields))} tells of a cache"):
        llama(architectures=["NewForCausalLM"], **fields)


@pytest.mark.parametrize(
    "fields",
    [{"attention_chunk_size": None}, {"mamba_d_state": 0}, {"attn_type_list": [1, 1]}, {"is_encoder_decoder": False}],
)
def test_a_foreign_field_that_says_nothing_is_no_obstacle(llama, fields):
    assert len(llama(**fields).layers) == 32


def test_an_unknown_kind_of_layer_is_refused_by_name(llama):
    with pytest.raises(PlanError, match=r"layer_types has 'linear_attention'.*core reads full_attention"):
        llama(layer_types=["linear_attention"] * 32)


def test_an_unknown_architecture_is_planned_from_common_fields_with_a_warning(llama):
    model = llama(architectures=["NewForCausalLM"])
    assert token_bytes(model.layers) == 131_072
    assert model.warnings == (
        "m: no family lists the architecture 'NewForCausalLM'; its cache is planned from the common fields alone",
    )


def test_an_unknown_architecture_with_a_latent_is_no_plain_attention(llama):
    model = llama(architectures=["NewForCausalLM"], kv_lora_rank=256, qk_rope_head_dim=32)
    assert {layer.kind for layer in model.layers} == {"mla"}


def test_all_missing_fields_are_named_at_once():
    config = {"architectures": ["NewForCausalLM"], "vocab_size": 5}
    with pytest.raises(PlanError) as caught:
        read_model(ModelQuery(config=config, name="m"))
    message = str(caught.value)
    for field in ("num_hidden_layers", "max_position_embeddings", "num_attention_heads", "head_dim or hidden_size"):
        assert field in message


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_hidden_layers", True, "num_hidden_layers=True is not a whole number"),
        ("num_hidden_layers", "32", "num_hidden_layers='32' is not a whole number"),
        ("num_hidden_layers", 10_001, "num_hidden_layers=10001 is outside 1 … 10000"),
        ("num_hidden_layers", 0, "num_hidden_layers=0 is outside 1"),
        ("num_key_value_heads", 8.5, "num_key_value_heads=8.5 is not a whole number"),
        ("num_key_value_heads", -1, "num_key_value_heads=-1 is outside 1"),
        ("num_key_value_heads", "8", "num_key_value_heads='8' is not a whole number"),
        ("head_dim", 2**20 + 1, "head_dim=1048577 is outside 1 … 1048576"),
        pytest.param("head_dim", 10**5000, "head_dim=a int too large to show is outside", id="huge"),
        ("max_position_embeddings", 2**31 + 1, "max_position_embeddings=2147483649 is outside"),
        ("num_attention_heads", 3, "hidden_size=4096 does not divide by num_attention_heads=3; add head_dim"),
        ("torch_dtype", "bfloat61", "torch_dtype='bfloat61' is not a data type.*did you mean 'bfloat16'"),
        ("torch_dtype", 16, "torch_dtype=16 is no data type"),
        ("torch_dtype", "int8", "dtype='int8' is no floating-point type"),
        ("use_sliding_window", "no", "use_sliding_window='no' is not true or false"),
        ("text_config", "text", "text_config is not an object"),
        ("layer_types", "full", "layer_types='full' is not a list"),
    ],
)
def test_a_field_that_cannot_be_is_named_with_its_value(llama, field, value, said):
    with pytest.raises(PlanError, match=said):
        llama(**{field: value})


def test_whole_floats_count_and_null_is_absent(llama):
    model = llama(num_key_value_heads=8.0, head_dim=None, v_head_dim=None)
    assert model.layers[0].params == MHAParams(num_kv_heads=8, head_dim=128, v_head_dim=128)


def test_without_kv_heads_every_head_has_its_own(llama):
    assert llama(num_key_value_heads=None).layers[0].params.num_kv_heads == 32


def test_multi_query_models_have_one_kv_head(llama):
    falcon = {"architectures": ["FalconForCausalLM"], "num_key_value_heads": None, "multi_query": True}
    assert llama(**falcon, num_kv_heads=32).layers[0].params.num_kv_heads == 1
    grouped = llama(**falcon, num_kv_heads=8, new_decoder_architecture=True)
    assert grouped.layers[0].params.num_kv_heads == 8


def test_values_may_be_narrower_than_keys(llama):
    assert token_bytes(llama(num_hidden_layers=12, num_key_value_heads=4, v_head_dim=64).layers) == 18_432


def test_a_missing_data_type_is_assumed_and_said(llama):
    model = llama(torch_dtype=None)
    assert model.dtype == "bfloat16"
    assert "names no torch_dtype; bfloat16 is assumed" in model.warnings[0]


def test_older_names_of_the_common_fields_are_read():
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "n_positions": 1024,
        "torch_dtype": "float16",
    }
    model = read_model(ModelQuery(config=config))
    assert (token_bytes(model.layers), model.context_length, model.warnings) == (12 * 12 * 2 * 64 * 2, 1024, ())


def test_the_inner_architecture_says_what_a_wrapper_holds():
    inner = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64}
    inner |= {"sliding_window": 128, "max_position_embeddings": 8192}
    config = {"architectures": ["InternVLChatModel"], "torch_dtype": "bfloat16", "llm_config": inner}
    model = read_model(ModelQuery(config=config))
    assert (model.family, model.architecture, sliding_ids(model)) == ("gemma2", "InternVLChatModel", [0])


@pytest.mark.parametrize("name", ["MistralModel", "Qwen2ForRewardModel"])
def test_embedding_architectures_are_known_as_such(llama, name):
    assert llama(architectures=[name]).is_embedding
    assert not llama().is_embedding


def test_architectures_are_listed_once_with_their_family():
    listed = [name for family in FAMILIES for name in (*family.architectures, *family.embedding)]
    assert len(listed) == len(set(listed))
    found = architectures()
    assert sorted(listed) == list(found)
    assert (found["LlamaForCausalLM"], found["DeepseekV3ForCausalLM"], found["GptOssForCausalLM"]) == (
        "llama",
        "deepseek",
        "gpt-oss",
    )


NAMES = (
    "num_hidden_layers",
    "num_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "hidden_size",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "index_head_dim",
    "max_position_embeddings",
    "torch_dtype",
    "dtype",
    "sliding_window",
    "sliding_window_pattern",
    "layer_types",
    "hybrid_layer_pattern",
    "is_hybrid_swa",
    "use_sliding_window",
    "max_window_layers",
    "num_kv_shared_layers",
    "swa_head_dim",
    "global_head_dim",
    "multi_query",
    "num_nextn_predict_layers",
    "text_config",
    "architectures",
    "mamba_d_state",
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 40)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["full_attention", "sliding_attention", "bfloat16", "GptOssForCausalLM", "LLG"])
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=12,
)
ARCHITECTURES = st.sampled_from([*sorted(architectures()), "NewForCausalLM"]).map(lambda name: [name])


@settings(max_examples=150, deadline=None)
@given(
    config=st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=8),
    architecture=ARCHITECTURES,
    role=st.sampled_from(["target", "draft", "mtp"]),
    complete=st.booleans(),
)
def test_junk_gives_a_model_or_an_error_of_kvdock(config, architecture, role, complete):
    base = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64, "max_position_embeddings": 128}
    config = (base if complete else {}) | {"architectures": architecture} | config
    try:
        model = read_model(ModelQuery(config=config, role=role))
    except KVDockError as error:
        assert str(error).isprintable()
    else:
        assert isinstance(model, ModelSpec)
