"""Configs in every role, and what of them is refused."""

import pytest
from kvdock.errors import PlanError
from kvdock.queries import ModelQuery
from kvdock_dsv4.model import DSV4Params, read_model

FULL_WIDTH = {"nope_dim": 448, "rope_dim": 64}


def read(config, role="target"):
    return read_model(ModelQuery(config=config, role=role, name="m"))


def test_flash_has_a_ratio_a_layer_and_an_indexer_where_it_is_4(flash):
    found = read(flash)
    assert (found.family, found.context_length, found.dtype) == ("deepseek_v4", 1048576, "bfloat16")
    assert [layer.params.compress_ratio for layer in found.layers] == flash["compress_ratios"]
    assert found.layers[2].params == DSV4Params(**FULL_WIDTH, compress_ratio=4, index_head_dim=128)
    assert found.layers[3].params == DSV4Params(**FULL_WIDTH, compress_ratio=128)
    assert {layer.window_tokens for layer in found.layers} == {128}


@pytest.mark.parametrize("role", ["draft", "mtp"])
def test_a_draft_is_one_layer_that_keeps_its_window_alone(flash, role):
    (layer,) = read(flash, role).layers
    assert layer.params == DSV4Params(**FULL_WIDTH)


def test_a_draft_of_its_own_has_one_layer_where_nothing_counts_them(flash):
    del flash["num_nextn_predict_layers"]
    flash["architectures"] = ["DeepseekV4ForCausalLMNextN"]
    assert len(read(flash, "draft").layers) == 1
    with pytest.raises(PlanError, match="no num_nextn_predict_layers, so the model brings no layers to draft with"):
        read(flash, "mtp")


def test_ratios_of_drafting_layers_are_no_layers_of_the_target(flash):
    flash["compress_ratios"] = [*flash["compress_ratios"], 0]
    assert len(read(flash).layers) == 43


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": None}, "no compress_ratios; add one of"),
        ({"compress_ratios": [0] * 42}, "compress_ratios has 42 entries, but the model has 43 layers"),
        ({"compress_ratios": [0] * 42 + [8]}, r"compress_ratios\[42\]=8 is none of"),
        ({"sliding_window": None}, "no sliding_window"),
        ({"index_head_dim": None}, "no index_head_dim"),
        ({"qk_rope_head_dim": 512}, "qk_rope_head_dim=512 leaves no columns of head_dim=512"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_by_field(flash, change, message):
    with pytest.raises(PlanError, match=message):
        read(flash | change)


def test_other_families_and_roles_are_left_to_others(flash):
    assert read({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}) is None
    assert read(flash, "encoder") is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compress_ratio": 8}, "compress_ratio=8 is none of"),
        ({"compress_ratio": 4}, "layers of ratio 4 have an indexer"),
        ({"nope_dim": 0}, "nope_dim=0 is outside"),
    ],
)
def test_shapes_that_no_layer_has_are_refused(fields, message):
    with pytest.raises(PlanError, match=message):
        DSV4Params(**{**FULL_WIDTH, **fields})
