"""Models whose local layers see a chunk, and layers that draft for models with windows."""

import pytest
from kvdock.errors import PlanError
from kvdock.model import MHAParams

LLAMA_4 = {"architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 8, "attention_chunk_size": 8192}


def full_ids(model):
    return [index for index, layer in enumerate(model.layers) if layer.window_tokens is None]


def test_every_fourth_layer_of_llama_4_sees_everything(published):
    model = published("llama-4-scout")
    assert full_ids(model) == [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47]
    # A chunk counts whole, although a token sees at most 8,191 earlier ones.
    assert {layer.window_tokens for layer in model.layers} == {None, 8192}
    assert {layer.params for layer in model.layers} == {MHAParams(num_kv_heads=8, head_dim=128, v_head_dim=128)}
    assert (model.family, model.context_length, model.warnings) == ("llama4", 1048576, ())


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({}, [3, 7]),
        ({"no_rope_layers": []}, [3, 7]),
        ({"no_rope_layer_interval": 2}, [1, 3, 5, 7]),
        ({"no_rope_layers": [1, 1, 0, 1, 1, 1, 1, 0]}, [2, 7]),
        ({"layer_types": ["chunked_attention"] * 7 + ["full_attention"], "no_rope_layers": [1] * 8}, [7]),
        ({"attention_chunk_size": None}, list(range(8))),
    ],
)
def test_the_first_list_that_is_there_says_which_layers_are_local(llama, fields, full):
    assert full_ids(llama(**LLAMA_4 | fields)) == full


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size=0 is outside 1"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries, but the model has 8 layers"),
        ({"no_rope_layers": [2] * 8}, "no_rope_layers=2 is outside 0 … 1"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 is outside 1"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types has 'sliding_attention', a kind of layer"),
        (
            {"layer_types": ["chunked_attention"] * 8, "attention_chunk_size": None},
            "layer_types has chunked layers, but the config has no attention_chunk_size",
        ),
        ({"cross_attention_layers": [3]}, "cross_attention_layers tells of a cache"),
    ],
)
def test_a_wrong_field_is_named(llama, fields, said):
    with pytest.raises(PlanError, match=said):
        llama(**LLAMA_4 | fields)


MIMO = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "sliding_window": 128,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "num_nextn_predict_layers": 3,
}


def test_mimo_drafts_with_sliding_layers(llama):
    draft = llama(role="mtp", **MIMO)
    assert [(layer.params.num_kv_heads, layer.window_tokens) for layer in draft.layers] == [(8, 127)] * 3


def test_a_mimo_without_sliding_layers_has_no_shape_to_draft_with(llama):
    with pytest.raises(PlanError, match="none of the model's layers does; give the draft's own config"):
        llama(role="mtp", **MIMO | {"hybrid_layer_pattern": [0] * 4})


def test_a_published_mimo_that_counts_no_drafting_layers_brings_none(published):
    with pytest.raises(PlanError, match="the model brings no layers to draft with"):
        published("mimo-v2-flash", role="mtp")
