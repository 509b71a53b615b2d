"""What the weights of a model folder take on a rank, counted from safetensors headers that the tests write."""

import json
import math
import os

import kvdock
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from kvdock.cli import main
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError
from kvdock.families.config import load_config
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.options import Parallelism
from kvdock.startup import core_only
from kvdock.weights import BITS, MAX_HEADER_BYTES, holds_weights, weight_bytes

GIB = 2**30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
    "vocab_size": 100,
}
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
SHAPES = {
    EMBEDDING: [100, 64],
    **{f"model.layers.{i}.self_attn.q_proj.weight": [64, 64] for i in range(4)},
    **{f"model.layers.{i}.mlp.up_proj.weight": [128, 64] for i in range(4)},
    **{f"model.layers.{i}.input_layernorm.weight": [64] for i in range(4)},
    FINAL_NORM: [64],
    HEAD: [100, 64],
}
EMBEDDING_BYTES, ATTENTION_BYTES, MLP_BYTES, NORM_BYTES = 100 * 64 * 2, 64 * 64 * 2, 128 * 64 * 2, 64 * 2
LAYER_BYTES = ATTENTION_BYTES + MLP_BYTES + NORM_BYTES
ALL_BYTES = 2 * EMBEDDING_BYTES + 4 * LAYER_BYTES + NORM_BYTES


def model(layers=4):
    layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=16, v_head_dim=16))
    return ModelSpec(name="small", architecture="Small", layers=(layer,) * layers, context_length=256, dtype="bfloat16")


def described(shapes, dtype="BF16"):
    """Return the header of tensors that lie one behind the other, and the bytes of their data."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return header, end


def write_file(path, header, data_bytes):
    """Write a safetensors file whose data is a hole in the file."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + data_bytes)


def write_shards(folder, shards):
    """Write files of tensors by name → shape, and the index that finds them; return the index's map."""
    for name, shapes in shards.items():
        write_file(folder / name, *described(shapes))
    homes = {tensor: name for name, shapes in shards.items() for tensor in shapes}
    write_index(folder, homes)
    return homes


def write_index(folder, homes):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))


@pytest.fixture
def folder(tmp_path):
    """A model folder with a config and one file of weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_file(tmp_path / "model.safetensors", *described(SHAPES))
    return tmp_path


def halves():
    names = list(SHAPES)
    return {
        "model-00001-of-00002.safetensors": {name: SHAPES[name] for name in names[:6]},
        "model-00002-of-00002.safetensors": {name: SHAPES[name] for name in names[6:]},
    }


def test_one_rank_holds_the_bytes_of_one_file(folder):
    found = weight_bytes(folder, model(), Parallelism())
    assert (found.nbytes, found.exact) == (ALL_BYTES, True)
    assert found.source == "from the headers of 1 safetensors file"


def test_shards_are_summed(tmp_path):
    write_shards(tmp_path, halves())
    found = weight_bytes(tmp_path, model(), Parallelism())
    assert (found.nbytes, found.exact) == (ALL_BYTES, True)
    assert found.source == "from the headers of 2 safetensors files"


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("F4", 96), ("F6_E2M3", 144), ("F8_E4M3", 192), ("I16", 384), ("F32", 768), ("F64", 1536)]
)
def test_each_data_type_has_its_width(tmp_path, dtype, nbytes):
    write_file(tmp_path / "model.safetensors", *described({"a.weight": [12, 16]}, dtype))
    assert weight_bytes(tmp_path, model(), Parallelism()).nbytes == nbytes


def test_scalars_and_empty_tensors_are_counted(tmp_path):
    write_file(tmp_path / "model.safetensors", *described({"empty": [0, 5], "scale": [], "other": [0]}))
    assert weight_bytes(tmp_path, model(), Parallelism()).nbytes == 2


def test_the_order_of_a_header_is_of_no_weight(tmp_path):
    header, end = described(SHAPES)
    write_file(tmp_path / "model.safetensors", dict(reversed(header.items())), end)
    assert weight_bytes(tmp_path, model(), Parallelism()).nbytes == ALL_BYTES


def test_a_padded_header_is_read(tmp_path):
    header, end = described({"a": [4]})
    write_file(tmp_path / "model.safetensors", json.dumps(header).encode() + b"     ", end)
    assert weight_bytes(tmp_path, model(), Parallelism()).nbytes == 8


# Shares of ranks.


def test_tensor_ranks_split_what_has_two_dimensions(folder):
    found = weight_bytes(folder, model(), Parallelism(tp_size=4))
    split = (2 * EMBEDDING_BYTES + 4 * (ATTENTION_BYTES + MLP_BYTES)) // 4
    assert found.nbytes == split + 5 * NORM_BYTES
    assert not found.exact
    assert "estimated for one of 4 ranks" in found.source


def test_a_share_is_rounded_up(tmp_path):
    write_file(tmp_path / "model.safetensors", *described({"a.weight": [5, 5]}))
    assert weight_bytes(tmp_path, model(), Parallelism(tp_size=4)).nbytes == 13  # 50 / 4 = 12.5


def test_attention_is_whole_on_each_data_parallel_worker(folder):
    parallel = Parallelism(tp_size=4, dp_size=4, dp_attention=True)
    split = (2 * EMBEDDING_BYTES + 4 * MLP_BYTES) // 4
    assert weight_bytes(folder, model(), parallel).nbytes == split + 4 * ATTENTION_BYTES + 5 * NORM_BYTES


def test_stages_hold_their_own_layers(folder):
    first, last = (weight_bytes(folder, model(), Parallelism(pp_size=2, pp_rank=rank)).nbytes for rank in (0, 1))
    assert first == EMBEDDING_BYTES + 2 * LAYER_BYTES
    assert last == EMBEDDING_BYTES + 2 * LAYER_BYTES + NORM_BYTES
    assert first + last == ALL_BYTES


def test_uneven_stages_follow_the_list(folder):
    stages = [Parallelism(pp_size=3, pp_rank=rank, pp_layers=(1, 2, 1)) for rank in range(3)]
    assert [weight_bytes(folder, model(), stage).nbytes for stage in stages] == [
        EMBEDDING_BYTES + LAYER_BYTES,
        2 * LAYER_BYTES,
        EMBEDDING_BYTES + LAYER_BYTES + NORM_BYTES,
    ]


def test_tied_embeddings_are_on_both_ends(tmp_path):
    write_file(tmp_path / "model.safetensors", *described({k: v for k, v in SHAPES.items() if k != HEAD}))
    stages = [weight_bytes(tmp_path, model(), Parallelism(pp_size=4, pp_rank=rank)).nbytes for rank in range(4)]
    assert stages == [EMBEDDING_BYTES + LAYER_BYTES, LAYER_BYTES, LAYER_BYTES, EMBEDDING_BYTES + LAYER_BYTES + 128]
    assert weight_bytes(tmp_path, model(), Parallelism()).nbytes == ALL_BYTES - EMBEDDING_BYTES


@pytest.mark.parametrize("name", ["model.layers.4.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight"])
def test_layers_beyond_the_models_are_on_the_last_stage(tmp_path, name):
    write_file(tmp_path / "model.safetensors", *described({**SHAPES, name: [128, 64]}))
    stages = [weight_bytes(tmp_path, model(), Parallelism(pp_size=2, pp_rank=rank)).nbytes for rank in (0, 1)]
    assert stages[0] == EMBEDDING_BYTES + 2 * LAYER_BYTES
    assert stages[1] == EMBEDDING_BYTES + 2 * LAYER_BYTES + NORM_BYTES + MLP_BYTES


@pytest.mark.parametrize("name", ["visual.blocks.3.attn.qkv.weight", "vision_tower.encoder.layers.0.fc.weight", "x.y"])
def test_what_belongs_to_no_stage_is_on_each(tmp_path, name):
    write_file(tmp_path / "model.safetensors", *described({**SHAPES, name: [10, 10]}))
    stages = [weight_bytes(tmp_path, model(), Parallelism(pp_size=2, pp_rank=rank)).nbytes for rank in (0, 1)]
    assert sum(stages) == ALL_BYTES + 2 * 200


# What is refused.


def test_a_folder_without_weights_is_refused_with_what_works(tmp_path):
    assert not holds_weights(tmp_path)
    with pytest.raises(PlanError, match=r"neither model\.safetensors nor .*give weights_bytes"):
        weight_bytes(tmp_path, model(), Parallelism())


def one_tensor(**changes):
    """Return a header of one tensor of 8 bytes with changed fields."""
    return {"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8], **changes}}


BAD_HEADERS = {
    "another width": (one_tensor(dtype="F32"), r"takes 8 bytes by its data_offsets, but F32 x \[4\] makes 16"),
    "another shape": (one_tensor(shape=[3]), r"BF16 x \[3\] makes 6"),
    "half a byte": (one_tensor(dtype="F4", shape=[17]), r"makes 8\.5"),
    "an unknown dtype": (one_tensor(dtype="F3"), "dtype 'F3', which is not known"),
    "a dtype that is no text": (one_tensor(dtype=["BF16"]), "which is not known"),
    "a negative size": (one_tensor(shape=[-4]), "no list of sizes"),
    "a size that is true": (one_tensor(shape=[True, 4]), "no list of sizes"),
    "a size beyond any": (one_tensor(shape=[2**63]), "no list of sizes"),
    "too many sizes": (one_tensor(shape=[1] * 65), "no list of sizes"),
    "offsets backwards": (one_tensor(data_offsets=[8, 0]), "no begin and end"),
    "three offsets": (one_tensor(data_offsets=[0, 4, 8]), "no begin and end"),
    "negative offsets": (one_tensor(data_offsets=[-8, 0]), "no begin and end"),
    "a gap before": (one_tensor(shape=[2], data_offsets=[4, 8]), "begins at byte 4 of the data.*ends at 0"),
    "an overlap": ({**one_tensor(), "b": one_tensor(shape=[2], data_offsets=[4, 8])["a"]}, "begins at byte 4.* at 8"),
    "beyond the file": (one_tensor(shape=[6], data_offsets=[0, 12]), "a download cut short"),
    "less than the file": (one_tensor(shape=[2], data_offsets=[0, 4]), "something is appended"),
    "no fields": ({"a": {}}, "no dtype, shape and data_offsets"),
    "no object": ({"a": 1}, "no dtype, shape and data_offsets"),
    "a list": (b"[]", "does not begin with an object"),
    "leading space": (b" {}", "does not begin with an object"),
    "half an object": (b'{"a": ', "ends too early"),
    "no text": (b'{"\xff', "not UTF-8"),
    "a name twice": (b'{"a": {}, "a": {}}', "there twice"),
    "no end of nesting": (b'{"a":' * 3000 + b"1" + b"}" * 3000, "nested deeper"),
}


@pytest.mark.parametrize(("header", "reason"), BAD_HEADERS.values(), ids=list(BAD_HEADERS))
def test_a_header_that_does_not_describe_its_file_is_refused(tmp_path, header, reason):
    write_file(tmp_path / "model.safetensors", header, 8)
    with pytest.raises(PlanError, match=rf"(?s)model\.safetensors.*{reason}.*weights_bytes \(--weights\)|there twice"):
        weight_bytes(tmp_path, model(), Parallelism())


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "has 0 bytes, too few"),
        (b"\x02\0\0", "has 3 bytes, too few"),
        ((100).to_bytes(8, "little") + b"{}", "states a header of 100, more than the file"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "100,000,001, more than the 100,000,000 of the format"),
        (b"\xff" * 8 + b"{}", "more than the 100,000,000 of the format"),
        (b"version https://example.org/spec/v1\noid sha256:0\nsize 1\n", "a pointer to a file that was not fetched"),
    ],
)
def test_a_file_without_a_header_is_refused(tmp_path, raw, reason):
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(PlanError, match=rf"model\.safetensors .*{reason}"):
        weight_bytes(tmp_path, model(), Parallelism())


@given(at=st.integers(0, 120), byte=st.integers(0, 255), cut=st.integers(0, 140))
def test_a_damaged_file_is_counted_or_refused_and_nothing_else(tmp_path_factory, at, byte, cut):
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    write_file(path, *described({"a": [2, 2], "b": [4]}))
    raw = bytearray(path.read_bytes())
    raw[min(at, len(raw) - 1)] = byte
    path.write_bytes(raw[: len(raw) - max(0, cut - 120)])
    try:
        found = weight_bytes(path.parent, model(), Parallelism())
    except PlanError as error:
        assert "model.safetensors" in str(error)
    else:
        assert found.nbytes == 16


def test_the_longest_header_is_not_read_from_a_file_that_is_shorter(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(MAX_HEADER_BYTES.to_bytes(8, "little"))
    os.truncate(path, MAX_HEADER_BYTES)  # a hole; eight bytes short of the header
    with pytest.raises(PlanError, match="more than the file"):
        weight_bytes(tmp_path, model(), Parallelism())


BAD_NAMES = [
    "../model.safetensors",
    "/etc/model.safetensors",
    "sub/model.safetensors",
    "..\\model.safetensors",
    "C:model.safetensors",
    "..",
    ".safetensors",
    "config.json",
    "a\n.safetensors",
    "a\0.safetensors",
    "",
    7,
    None,
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_an_index_leads_nowhere_but_to_files_beside_it(folder, name):
    write_index(folder, {"a": name})
    with pytest.raises(PlanError, match=r"index\.json names the file .*no plain name.*give weights_bytes"):
        weight_bytes(folder, model(), Parallelism())


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "", '{"weight_map": {"a"'])
def test_an_index_without_a_map_is_refused(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(PlanError, match=r"model\.safetensors\.index\.json.*weights_bytes"):
        weight_bytes(folder, model(), Parallelism())


def test_an_index_beyond_any_is_not_read(folder):
    path = folder / "model.safetensors.index.json"
    path.touch()
    os.truncate(path, MAX_HEADER_BYTES + 1)
    with pytest.raises(PlanError, match="100,000,001 bytes, more than the 100,000,000 of any index"):
        weight_bytes(folder, model(), Parallelism())


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path, halves())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(PlanError, match=r"model-00002-of-00002\.safetensors is missing; download it, or give weights_"):
        weight_bytes(tmp_path, model(), Parallelism())


def test_a_tensor_that_only_the_index_names_is_refused(tmp_path):
    homes = write_shards(tmp_path, halves())
    write_index(tmp_path, {**homes, "ghost": "model-00001-of-00002.safetensors"})
    with pytest.raises(PlanError, match=r"model-00001-of-00002\.safetensors lacks the tensor 'ghost'"):
        weight_bytes(tmp_path, model(), Parallelism())


def test_a_tensor_that_the_index_does_not_name_is_refused(tmp_path):
    homes = write_shards(tmp_path, halves())
    del homes[HEAD]
    write_index(tmp_path, homes)
    with pytest.raises(
        PlanError, match=r"model-00002-of-00002\.safetensors holds the tensor 'lm_head\.weight', which .*"
    ):
        weight_bytes(tmp_path, model(), Parallelism())


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shards = halves()
    shards["model-00002-of-00002.safetensors"][EMBEDDING] = SHAPES[EMBEDDING]
    write_shards(tmp_path, shards)
    with pytest.raises(PlanError, match=r"00001-of-00002.*embed_tokens.*index\.json finds in model-00002-of-00002"):
        weight_bytes(tmp_path, model(), Parallelism())


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(tmp_path):
    homes = write_shards(tmp_path, halves())
    write_index(tmp_path, {**homes, EMBEDDING: "model-00002-of-00002.safetensors"})
    with pytest.raises(PlanError, match=r"00001-of-00002.*'model\.embed_tokens\.weight', .* finds in model-00002"):
        weight_bytes(tmp_path, model(), Parallelism())


def test_a_link_to_a_store_of_blobs_is_followed(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    write_file(blobs / "0123", *described(SHAPES))
    (snapshot / "model.safetensors").symlink_to("../blobs/0123")
    assert weight_bytes(snapshot, model(), Parallelism()).nbytes == ALL_BYTES


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match="no regular file"):
        weight_bytes(tmp_path, model(), Parallelism())


# Plans.


def profile(**fields):
    values = {"total_bytes": GIB, "free_before_load_bytes": GIB, "free_bytes": GIB, **fields}
    return DeviceInfo(device_type="cpu", name="card", **values)


def plan(source, *, device=None, **fields):
    return kvdock.plan(source, device=device or profile(), registry=core_only(), **fields)


def test_a_plan_of_a_folder_takes_the_weights_off_a_profile(folder):
    made = plan(folder)
    assert made.budget.weights_bytes == ALL_BYTES
    assert made.budget.weights_source == "from the headers of 1 safetensors file"
    assert "safetensors" in made.explain()
    assert not any("no weights are taken off" in warning for warning in made.warnings)
    assert made.budget_bytes == plan(str(folder), weights_bytes=ALL_BYTES).budget_bytes


@pytest.mark.parametrize(
    ("fields", "nbytes"),
    [
        ({"weights_bytes": 12345}, 12345),
        ({"budget_bytes": 2**24}, 0),
        ({"device": profile(index=0)}, 0),
        ({"device": profile(free_bytes=GIB - ALL_BYTES)}, 0),
    ],
    ids=["given weights", "given budget", "live device", "loaded device"],
)
def test_headers_are_not_read_where_something_else_says_it(folder, fields, nbytes):
    (folder / "model.safetensors").write_bytes(b"broken")
    made = plan(folder, **fields)
    assert (made.budget.weights_bytes, made.budget.weights_source) == (nbytes, "")


def test_a_config_without_its_folder_has_no_weights(folder):
    for source in (folder / "config.json", CONFIG, load_config(folder)[1]):
        assert any("no weights are taken off" in warning for warning in plan(source).warnings)


def test_broken_weights_are_refused_by_name(folder):
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(PlanError, match=r"model\.safetensors has 6 bytes"):
        plan(folder)


def test_ranks_take_their_own_weights_off(folder):
    for rank in (0, 1):
        parallel = Parallelism(pp_size=2, pp_rank=rank)
        assert plan(folder, parallel=parallel).budget.weights_bytes == weight_bytes(folder, model(), parallel).nbytes


def test_a_plan_file_is_read_without_the_folder(folder):
    made = plan(folder, reserve_bytes=2**20)
    text = made.to_json()
    (folder / "model.safetensors").unlink()
    again = kvdock.CachePlan.from_json(text, core_only())
    assert again.budget == made.budget
    assert again.to_json() == text


def drafting(draft):
    return {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "max_running_requests": 2, "draft": draft}


def test_weights_of_a_draft_are_counted_on_the_last_stage(folder):
    # D-03: draft weights are no part of nobody's budget, and are there once
    other = folder / "draft"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    write_file(other / "model.safetensors", *described({"layers.0.mlp.up_proj.weight": [128, 64]}))
    first, last = (
        plan(folder, options=drafting(str(other)), parallel={"pp_size": 2, "pp_rank": rank}).budget for rank in (0, 1)
    )
    assert first.weights_bytes == EMBEDDING_BYTES + 2 * LAYER_BYTES
    assert last.weights_bytes == EMBEDDING_BYTES + 2 * LAYER_BYTES + NORM_BYTES + MLP_BYTES
    assert "those of a draft among them" in last.weights_source
    assert "draft" not in first.weights_source


def test_a_draft_without_weights_is_named(folder):
    made = plan(folder, options=drafting({**CONFIG, "num_hidden_layers": 1}))
    assert made.budget.weights_bytes == ALL_BYTES
    assert "those of a draft not counted" in made.explain()


def test_the_command_line_takes_weights_from_a_folder(folder):
    result = CliRunner().invoke(main, ["plan", str(folder), "--device", "h200", "--reserve", "2GiB", "--json"])
    assert result.exit_code == 0, result.stderr
    inputs = json.loads(result.stdout)["inputs"]
    assert (inputs["weights_bytes"], inputs["reserve_bytes"]) == (ALL_BYTES, 2 * GIB)
