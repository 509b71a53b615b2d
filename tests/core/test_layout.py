import msgspec
import pytest
from kvdock import dtypes
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError
from kvdock.layout import Buffer, LayerGroup, Share, SizeRule, Space, Unit, round_up
from kvdock.model import LayerParams, LayerSpec, MHAParams, ModelSpec, model_from_builtins, model_to_builtins

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
        ({"guard": 1.5}, "buffer 'b': guard=1.5 does not fit: give a whole number"),
        ({"shape": (8, 1.5)}, r"buffer 'b': shape=\(8, 1.5\) does not fit: give a list of whole numbers"),
        ({"shape": 8}, "shape=8 does not fit"),
        ({"memory": "hots"}, "memory='hots' does not fit: give one of .*; did you mean 'host'"),
        ({"unit": "slots"}, "unit='slots' does not fit: give a Unit"),
        ({"name": None}, "name=None does not fit: give text"),
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
        ({"per_token": 0.8}, "size rule: per_token=0.8 does not fit: give a pair of whole numbers"),
        ({"per_token": (1, 2, 3)}, r"per_token=\(1, 2, 3\) does not fit"),
        ({"at_least": True}, "at_least=True does not fit: give a whole number"),
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


def test_lists_in_a_layout_become_tuples_and_data_becomes_no_struct():
    keys = Buffer(name="k", role="key", shape=[8, 128], dtype="bfloat16", layers=[0, 1])
    assert (keys.shape, keys.layers, keys.row_nbytes) == ((8, 128), (0, 1), 2048)
    assert SizeRule(per_token=[4, 5]).per_token == (4, 5)
    with pytest.raises(PlanError, match=r"space 'full': rule={} does not fit: give a SizeRule"):
        Space(name="full", rule={})
    with pytest.raises(PlanError, match=r"layer group 'g': layers=.* does not fit"):
        LayerGroup(name="g", kind="mha", space="full", layers=(LAYER,))


def test_a_group_without_layers_is_refused():
    with pytest.raises(PlanError, match="'g' has no layer"):
        LayerGroup(name="g", kind="mha", space="full", layers=())


def test_layout_is_json_both_ways():
    keys = Buffer(name="k", role="key", space="full", shape=(8,), dtype="bfloat16", unit=Unit.PAGE, layers=(0,))
    space = Space(name="full", rule=SizeRule(per_token=(4, 5), at_most_of=(("tokens", (1, 2)),)), page_size=16)
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
        ({"context_length": 4096.5}, "model 'm': context_length=4096.5 does not fit: give a whole number"),
        ({"context_length": "4096"}, "context_length='4096' does not fit"),
        ({"context_length": True}, "context_length=True does not fit"),
        ({"dtype": None}, "dtype=None does not fit: give text"),
        ({"name": 5}, "name=5 does not fit: give text"),
        ({"layers": 5}, "layers=5 does not fit: give a list of LayerSpecs"),
        ({"layers": (LAYER, MHA)}, "layers=.* does not fit: give a list of LayerSpecs"),
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


@pytest.mark.parametrize("value", [8.5, "8", float("nan"), True, None])
def test_a_count_of_heads_is_a_whole_number(value):
    with pytest.raises(PlanError, match=f"MHAParams num_kv_heads={value!r} does not fit: give a whole number"):
        MHAParams(num_kv_heads=value, head_dim=8, v_head_dim=8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window_tokens": 8.5}, "window_tokens=8.5 does not fit"),
        ({"window_tokens": True}, "window_tokens=True does not fit"),
        ({"shares_kv_with": "0"}, "shares_kv_with='0' does not fit"),
        ({"params": {}}, "params={} does not fit: give a LayerParams"),
        ({"kind": 5}, "kind=5 does not fit: give text"),
    ],
)
def test_a_layer_of_other_types_is_refused(fields, message):
    with pytest.raises(PlanError, match=message):
        LayerSpec(**({"kind": "mha", "params": MHA} | fields))


def test_the_shape_of_a_kind_of_its_own_may_hold_what_it_annotates():
    class RingParams(LayerParams, frozen=True, kw_only=True):
        ratio: float
        label: str | None = None
        taps: tuple[int, ...] = ()

    assert RingParams(ratio=1, taps=[3, 4]) == RingParams(ratio=1.0, taps=(3, 4))
    with pytest.raises(PlanError, match="RingParams label=5 does not fit: give text"):
        RingParams(ratio=0.5, label=5)


def test_layers_of_a_model_may_be_a_list():
    assert model(layers=[LAYER, LAYER]) == model()


@pytest.mark.parametrize("field", ["total_bytes", "granularity_bytes", "index"])
def test_sizes_of_a_device_are_whole_numbers(field):
    sizes = {"total_bytes": 4, "free_before_load_bytes": 4, "free_bytes": 4}
    with pytest.raises(PlanError, match=f"device 'd': {field}=1.5 does not fit: give a whole number"):
        DeviceInfo(**({"device_type": "cpu", "name": "d"} | sizes | {field: 1.5}))


def test_a_device_cannot_have_more_free_after_loading():
    with pytest.raises(PlanError, match="loading a model frees no memory"):
        DeviceInfo(device_type="cpu", name="d", total_bytes=4, free_before_load_bytes=2, free_bytes=3)


@pytest.mark.parametrize(("value", "multiple", "result"), [(0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 16, 32)])
def test_round_up(value, multiple, result):
    assert round_up(value, multiple) == result


def test_a_share_is_a_part_of_the_budget():
    with pytest.raises(PlanError, match="more than the whole budget"):
        Share(of_budget=(3, 2))
    with pytest.raises(PlanError, match="beside"):
        Share(of_budget=(1, 2), beside=(("requests", (1, 0)),))
