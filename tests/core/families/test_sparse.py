"""Models whose attention reads what an indexer picks."""

import pytest
from kvdock.errors import PlanError
from kvdock.families import read_model
from kvdock.model import DSAParams, MHAParams, SparseParams
from kvdock.queries import ModelQuery

SPARSE = {
    "use_sparse_attention": True,
    "sparse_attention_freq": [0, 1, 1, 1],
    "sparse_index_dim": 128,
    "sparse_num_index_heads": 4,
    "sparse_disable_index_value": [0, 1, 1, 0],
}
M3 = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "torch_dtype": "bfloat16",
}


def read(sparse=None, role="target", **fields):
    config = M3 | {"sparse_attention_config": SPARSE | (sparse or {})} | fields
    return read_model(ModelQuery(config=config, name="m", role=role))


def indexer(*, value):
    return SparseParams(num_kv_heads=8, head_dim=128, v_head_dim=128, index_head_dim=128, index_value=value)


def test_each_layer_of_minimax_m3_has_the_indexer_that_is_listed(published):
    model = published("minimax-m3-synthetic")
    dense = MHAParams(num_kv_heads=8, head_dim=128, v_head_dim=128)
    assert [layer.params for layer in model.layers] == (
        [dense] * 3 + [indexer(value=False)] * 7 + [indexer(value=True)] * 6
    )
    assert [layer.kind for layer in model.layers] == ["mha"] * 3 + ["sparse"] * 13
    # 16 layers of keys and values, 7 of an index key alone, 6 of a key and a value, 16 bits each.
    assert (16 * 8 * 2 * 128 + 7 * 128 + 6 * 2 * 128) * 2 == 70_400
    assert (model.family, model.warnings) == ("minimax-sparse", ())


def test_the_text_model_of_a_larger_one_is_read():
    config = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "text_config": M3 | {"sparse_attention_config": SPARSE},
    }
    assert read_model(ModelQuery(config=config)).layers == read().layers


def test_without_a_list_every_indexer_keeps_a_value():
    model = read({"sparse_disable_index_value": None})
    assert [layer.params for layer in model.layers[1:]] == [indexer(value=True)] * 3


@pytest.mark.parametrize("sparse", [{"use_sparse_attention": False}, {"sparse_attention_freq": [0] * 4}])
def test_sparse_attention_that_is_off_is_plain_attention(sparse):
    assert {layer.kind for layer in read(sparse).layers} == {"mha"}


def test_layers_that_draft_are_like_the_last():
    assert read(role="mtp", num_nextn_predict_layers=2).layers == read().layers[-1:] * 2


@pytest.mark.parametrize(
    ("sparse", "said"),
    [
        ({"sparse_attention_freq": [0, 1]}, "sparse_attention_freq has 2 entries, but the model has 4 layers"),
        ({"sparse_disable_index_value": [1] * 5}, "sparse_disable_index_value has 5 entries"),
        ({"sparse_attention_freq": [0, 1, 2, 1]}, "sparse_attention_freq=2 is outside 0 … 1"),
        ({"sparse_attention_freq": None}, "the config has no sparse_attention_freq"),
        ({"sparse_index_dim": None}, "the config has no sparse_index_dim"),
        ({"sparse_index_dim": 0}, "sparse_index_dim=0 is outside 1"),
        ({"use_sparse_attention": "yes"}, "use_sparse_attention='yes' is not true or false"),
    ],
)
def test_a_wrong_field_is_named_with_its_section(sparse, said):
    with pytest.raises(PlanError, match=f"m: sparse_attention_config: {said}"):
        read(sparse)


def test_a_configuration_that_is_no_object_is_named():
    with pytest.raises(PlanError, match="sparse_attention_config=7 is not an object of fields"):
        read(sparse_attention_config=7)


def test_deepseek_v3_2_keeps_index_keys_in_every_layer(published):
    # S-04: 61 layers of a latent of 512 + 64 in 16 bits, an index key of 128 bytes and its scale of 4.
    layers = published("deepseek-v3.2").layers
    assert {layer.kind for layer in layers} == {"dsa"}
    latent = sum(layer.params.kv_lora_rank + layer.params.qk_rope_head_dim for layer in layers) * 2
    index = sum(layer.params.index_head_dim + layer.params.index_head_dim // 128 * 4 for layer in layers)
    assert (latent + index, index) == (78_324, 61 * 132)


def test_deepseek_v3_2_drafts_with_an_indexer_of_its_own(published):
    draft = published("deepseek-v3.2", role="mtp")
    params = DSAParams(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    assert [(layer.kind, layer.params) for layer in draft.layers] == [("dsa", params)]


GLM_5 = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_hidden_layers": 78,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 202752,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(("role", "layers"), [("target", 78), ("mtp", 1)])
def test_glm_with_sparse_attention_is_read_like_deepseek(role, layers):
    model = read_model(ModelQuery(config=GLM_5, role=role))
    assert [layer.kind for layer in model.layers] == ["dsa"] * layers


def test_minimax_m2_has_no_indexer(published):
    assert {layer.kind for layer in published("minimax-m2").layers} == {"mha"}
