"""Models whose layers have head counts of their own."""

import pytest
from kvdock.errors import PlanError
from kvdock.families import read_model
from kvdock.model import NoParams
from kvdock.queries import ModelQuery

OPENELM = {
    "architectures": ["OpenELMForCausalLM"],
    "num_transformer_layers": 16,
    "model_dim": 1280,
    "head_dim": 64,
    "num_query_heads": [12] * 5 + [16] * 7 + [20] * 4,
    "num_kv_heads": [3] * 5 + [4] * 7 + [5] * 4,
    "max_context_length": 2048,
    "torch_dtype": "bfloat16",
}


def block(**attention):
    return {"attention": {"n_heads_in_group": None, "no_op": False, "replace_with_linear": False} | attention}


NAS = {
    "architectures": ["DeciLMForCausalLM"],
    "model_type": "nemotron-nas",
    "hidden_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "block_configs": [
        block(n_heads_in_group=8),
        block(no_op=True),
        block(replace_with_linear=True),
        block(n_heads_in_group=16),
    ],
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def read(config, **fields):
    return read_model(ModelQuery(config=config | fields, name="m"))


def kv_heads(model):
    return [layer.params.num_kv_heads for layer in model.layers]


def test_openelm_lists_the_heads_of_each_layer():
    model = read(OPENELM)
    assert kv_heads(model) == OPENELM["num_kv_heads"]
    assert {(layer.params.head_dim, layer.params.v_head_dim) for layer in model.layers} == {(64, 64)}
    assert sum(kv_heads(model)) * 2 * 64 * 2 == 16_128  # bytes of a token: 63 heads, keys and values, 16 bits
    assert (model.family, model.context_length, model.num_attention_heads, model.warnings) == ("openelm", 2048, 20, ())


def test_any_family_may_list_its_heads(llama):
    assert kv_heads(llama(num_hidden_layers=4, num_key_value_heads=[8, 8, 4, 2])) == [8, 8, 4, 2]


def test_decilm_may_list_its_heads_under_a_name_of_its_own(llama):
    fields = {"num_key_value_heads": None, "num_key_value_heads_per_layer": [4, 1]}
    assert kv_heads(llama(architectures=["DeciLMForCausalLM"], num_hidden_layers=2, **fields)) == [4, 1]


def test_pruned_blocks_have_heads_of_their_own_or_keep_nothing():
    model = read(NAS)
    assert [layer.kind for layer in model.layers] == ["mha", "none", "none", "mha"]
    assert (model.layers[0].params.num_kv_heads, model.layers[3].params.num_kv_heads) == (8, 4)
    assert model.layers[0].params.head_dim == 128
    assert model.layers[1].params == NoParams()
    assert (model.family, model.num_attention_heads, model.warnings) == ("decilm", 64, ())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_kv_heads": [3] * 15}, "num_kv_heads has 15 entries, but the model has 16 layers; give one per layer"),
        ({"num_query_heads": [12] * 17}, "num_query_heads has 17 entries, but the model has 16 layers"),
        ({"num_kv_heads": [0] * 16}, "num_kv_heads=0 is outside 1"),
        ({"num_kv_heads": ["3"] * 16}, "num_kv_heads='3' is not a whole number"),
        ({"num_kv_heads": [13] * 16}, "13 KV heads .* are more than the 12 query heads"),
    ],
)
def test_a_wrong_list_of_heads_is_named(fields, said):
    with pytest.raises(PlanError, match=said):
        read(OPENELM, **fields)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (block(n_heads_in_group=24), r"block_configs\[1\]: attention: n_heads_in_group=24 does not divide num_att"),
        (block(n_heads_in_group=0), r"block_configs\[1\]: attention: n_heads_in_group=0 is outside 1"),
        (block(), r"block_configs\[1\]: attention: the config has no n_heads_in_group"),
        (block(n_heads_in_group=8, window_length=4096), r"window_length tells of a cache that no installed family"),
        (block(no_op="yes"), r"no_op='yes' is not true or false"),
        ({"ffn": {}}, r"block_configs\[1\]: attention=None is not an object of fields"),
        (7, r"block_configs\[1\]=7 is not an object of fields"),
    ],
)
def test_a_wrong_block_is_named_with_its_place(second, said):
    blocks = [block(n_heads_in_group=8), second, *NAS["block_configs"][2:]]
    with pytest.raises(PlanError, match=said):
        read(NAS, block_configs=blocks)


def test_as_many_blocks_as_layers_are_needed():
    with pytest.raises(PlanError, match="num_hidden_layers=4, the length of block_configs=3"):
        read(NAS, block_configs=NAS["block_configs"][:3])
