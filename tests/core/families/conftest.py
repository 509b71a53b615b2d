"""Configs that the tests of families share."""

from pathlib import Path

import pytest
from kvdock.families import read_model
from kvdock.families.config import load_config
from kvdock.queries import ModelQuery

MODELS = Path(__file__).parents[2] / "models"

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def llama():
    """Give the function that reads a small config, with fields changed; ``None`` leaves a field out."""

    def read(role="target", **fields):
        config = {name: value for name, value in (LLAMA | fields).items() if value is not ...}
        return read_model(ModelQuery(config=config, name="m", role=role))

    return read


@pytest.fixture
def published():
    """Give the function that reads one of the configs in ``tests/models`` by its file name."""

    def read(name, role="target"):
        found, config = load_config(MODELS / f"{name}.json")
        return read_model(ModelQuery(config=config, name=found, role=role))

    return read
