import msgspec
import pytest
from kvdock import dtypes
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError
from kvdock.layout import Buffer, LayerGroup, SizeRule, Space, Unit, round_up
from kvdock.model import LayerSpec, MHAParams, ModelSpec, model_from_builtins, model_to_builtins

MHA = MHAParams(num_kv_heads=8, head_dim=128, v_head_dim=128)
LAYER = LayerSpec(kind="mha", params=MHA)


def model(**fields):
    values = {"name": "m", "architecture": "A", "layers": (LAYER,) * 2, "context_length": 4096, "dtype": "bfloat16"}
    return ModelSpec(**(values | fields))


def test_a_keys_buffer_counts_its_padding_page():
    keys = Buffer(name="k", role="key", space="full", shape=(8, 128), dtype="bfloat16", guard=16, layers=(0, 1))
    assert keys.row_nbytes == 2048
    assert keys.rows(160) == 176
    assert keys.tensors * keys.tensor_nbytes(160) == 2 * 176 * 2048


def test_a_stacked_buffer_is_one_tensor_of_the_same_bytes():
    keys = Buffer(name="k", role="key", space="full", shape=(4,), dtype="uint8", layers=(0, 1, 2), stacked=True)
    assert (keys.tensors, keys.tensor_nbytes(9)) == (1, 3 * 10 * 4)


def test_rows_and_bytes_are_rounded_where_asked():
    ring = Buffer(
        name="ring", role="state", space="full", shape=(5,), dtype="uint8", guard=3, round_rows_to=4, row_bytes_align=8
    )
    assert (ring.rows(6), ring.row_nbytes) == (12, 8)  # 6 + 3 = 9 rows, up to 12; 5 bytes, up to 8


def test_an_aligned_base_takes_room_and_none_takes_nothing():
    plain = Buffer(name="k", role="key", shape=(10,), dtype="uint8")
    aligned = msgspec.structs.replace(plain, base_align=2**21)
    assert plain.tensor_nbytes(0) == 10
    assert aligned.tensor_nbytes(0) == 10 + 2**21


def test_a_fixed_buffer_has_the_rows_of_its_guard():
    assert Buffer(name="scales", role="scale", shape=(2,), dtype="float32", guard=3).tensor_nbytes(0) == 24


def test_four_bits_are_two_to_a_byte():
    assert dtypes.packed_nbytes(128, "float4_e2m1fn_x2") == 64
    assert dtypes.packed_nbytes(3, "fp4") == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shape": (-1,)}, "negative extent"),
        ({"dtype": "float7"}, "is not a data type"),
        ({"round_rows_to": 0}, "round_rows_to=0"),
        ({"guard": -1}, "guard=-1"),
        ({"layers": (1, 1)}, "name one layer twice"),
        ({"stacked": True}, "stacked over no layer"),
    ],
)
def test_a_buffer_that_makes_no_sense_is_refused(fields, message):
    values = {"name": "b", "role": "key", "shape": (1,), "dtype": "uint8"}
    with pytest.raises(PlanError, match=message):
        Buffer(**(values | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"per_token": (-1, 2)}, "per_token"),
        ({"per_token": (1, 0)}, "per_token"),
        ({"fixed": -1}, "fixed=-1"),
        ({"round_to": 0}, "round_to=0"),
        ({"at_most_share": (3, 2)}, "more than the whole budget"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(PlanError, match=message):
        SizeRule(**fields)


def test_a_space_cannot_follow_itself_or_be_called_tokens():
    with pytest.raises(PlanError, match="follows itself"):
        Space(name="full", rule=SizeRule(per_token=(1, 1), of="full"))
    with pytest.raises(PlanError, match="cannot be called 'tokens'"):
        Space(name="tokens", rule=SizeRule())


def test_a_group_without_layers_is_refused():
    with pytest.raises(PlanError, match="'g' has no layer"):
        LayerGroup(name="g", kind="mha", space="full", layers=())


def test_layout_is_json_both_ways():
    keys = Buffer(name="k", role="key", space="full", shape=(8,), dtype="bfloat16", unit=Unit.PAGE, layers=(0,))
    space = Space(name="full", rule=SizeRule(per_token=(4, 5), at_most_of=("tokens", (1, 2))), page_size=16)
    for value in (keys, space):
        assert msgspec.json.decode(msgspec.json.encode(value), type=type(value)) == value


def test_a_model_is_json_both_ways():
    spec = model(layers=(LAYER, LayerSpec(kind="mha", params=MHA, window_tokens=127, shares_kv_with=0)))
    assert model_from_builtins(msgspec.json.decode(msgspec.json.encode(model_to_builtins(spec)))) == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d | {"nam": 1}, "model has no field 'nam'; did you mean 'name'"),
        (lambda d: d | {"layers": 3}, "a list of layers"),
        (lambda d: d | {"layers": [{"kind": "ring"}]}, "kind 'ring', whose plugin is not loaded"),
        (lambda d: d | {"layers": [{"kind": "mha", "params": {"num_kv_heads": 1}}]}, "missing required field"),
        (lambda d: d | {"layers": [d["layers"][0] | {"windows": 1}]}, "layer 0 has no field 'windows'"),
        (lambda d: d | {"context_length": "long"}, "context_length"),
    ],
)
def test_a_model_file_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(PlanError, match=message):
        model_from_builtins(change(model_to_builtins(model())))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": ()}, "0 layers"),
        ({"context_length": 0}, "context_length=0"),
        ({"context_length": 2**31 + 1}, r"2147483649 is outside 1 … 2\^31"),
        ({"dtype": "int8"}, "no floating-point type"),
        ({"layers": (LAYER, LayerSpec(kind="mha", params=MHA, shares_kv_with=7))}, "layer 7, which the model does not"),
        (
            {
                "layers": (
                    LAYER,
                    LayerSpec(kind="mha", params=MHA, shares_kv_with=0),
                    LayerSpec(kind="mha", params=MHA, shares_kv_with=1),
                )
            },
            "layer 2 shares the KV of layer 1, which owns none itself",
        ),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(PlanError, match=message):
        model(**fields)


@pytest.mark.parametrize("value", [0, -1, 2**20 + 1])
def test_extents_beyond_belief_are_refused(value):
    with pytest.raises(PlanError, match=f"head_dim={value} is outside 1"):
        MHAParams(num_kv_heads=1, head_dim=value, v_head_dim=1)


def test_a_device_cannot_have_more_free_after_loading():
    with pytest.raises(PlanError, match="loading a model frees no memory"):
        DeviceInfo(device_type="cpu", name="d", total_bytes=4, free_before_load_bytes=2, free_bytes=3)


@pytest.mark.parametrize(("value", "multiple", "result"), [(0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 16, 32)])
def test_round_up(value, multiple, result):
    assert round_up(value, multiple) == result
