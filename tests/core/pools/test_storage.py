"""Declared buffers become tensors of exactly the declared bytes."""

import pytest
from kvdock.errors import BuildError, SlotError
from kvdock.layout import Buffer, SizeRule, Space, Unit

torch = pytest.importorskip("torch")

from kvdock.pools.storage import allocate, unique_storages  # noqa: E402

SPACES = {"full": Space(name="full", rule=SizeRule(), page_size=4)}
CPU = torch.device("cpu")


def buffer(**fields):
    return Buffer(**{"name": "b", "role": "key", "shape": (2, 3), "dtype": "bfloat16"} | fields)


def place(*buffers, tokens=8, device=CPU, granularity=1):
    return allocate(buffers, {"full": tokens}, SPACES, device, granularity)


def test_a_tensor_a_layer_in_rows_of_the_declared_shape():
    tensors = place(buffer(space="full", guard=4, layers=(3, 7)))
    assert tensors.rows("b", 3).shape == (12, 2, 3)
    assert [raw.untyped_storage().nbytes() for raw in tensors.storages()] == [12 * 2 * 3 * 2] * 2
    assert tensors.rows("b", 3).data_ptr() != tensors.rows("b", 7).data_ptr()


def test_slots_are_read_in_pages():
    tensors = place(buffer(space="full", guard=4, layers=(0,)))
    tensors.rows("b", 0)[5] = 1
    assert tensors.paged("b", 0).shape == (3, 4, 2, 3)
    assert tensors.paged("b", 0)[1, 1].eq(1).all()
    assert tensors.rows("b").sum() == 6


def test_rows_that_fill_no_whole_page_are_in_no_page():
    tensors = place(buffer(space="full", guard=1, layers=(0,)))
    assert tensors.rows("b").shape[0] == 9
    assert tensors.paged("b").shape[:2] == (2, 4)


def test_rows_of_a_page_buffer_are_pages():
    tensors = place(buffer(space="full", unit=Unit.PAGE, guard=1, shape=(10,), dtype="uint8"))
    assert tensors.rows("b").shape == (3, 10)


def test_a_buffer_without_a_space_has_its_guard_alone():
    assert place(buffer(guard=5)).rows("b").shape == (5, 2, 3)


def test_a_scalar_a_row():
    assert place(buffer(shape=(), dtype="int64", space="full", guard=0)).rows("b").shape == (8,)


def test_a_stacked_buffer_is_one_tensor():
    tensors = place(buffer(space="full", guard=4, layers=(1, 5), stacked=True))
    assert len(tensors.storages()) == 1
    assert tensors.nbytes() == 2 * 12 * 12
    step = tensors.rows("b", 5).data_ptr() - tensors.rows("b", 1).data_ptr()
    assert step == 12 * 12


def test_rows_are_padded_to_their_alignment():
    tensors = place(buffer(space="full", guard=4, row_bytes_align=16))
    assert tensors.rows("b").stride(0) * 2 == 16
    assert tensors.nbytes() == 12 * 16


def test_an_aligned_base_stays_inside_the_declared_bytes():
    asked = buffer(space="full", guard=4, base_align=4096)
    tensors = place(asked)
    assert tensors.rows("b").data_ptr() % 4096 == 0
    assert tensors.nbytes() == asked.tensor_nbytes(8) == 12 * 12 + 4096
    tensors.rows("b")[-1] = 1


def test_each_device_tensor_is_rounded_to_the_granularity_and_host_tensors_are_not():
    tensors = place(buffer(guard=5, layers=(0, 1)), buffer(name="h", guard=5, memory="host"), granularity=512)
    assert tensors.nbytes() == 2 * 512
    assert tensors.nbytes("host") == 60


@pytest.mark.parametrize(
    ("dtype", "stored", "width"),
    [
        ("float32", torch.float32, 8),
        ("bfloat16", torch.bfloat16, 8),
        ("float8_e4m3fn", torch.uint8, 8),
        ("float8_e5m2fnuz", torch.uint8, 8),
        ("float4_e2m1fn_x2", torch.uint8, 4),
        ("bool", torch.bool, 8),
        ("int32", torch.int32, 8),
    ],
)
def test_tensors_have_the_storage_type(dtype, stored, width):
    rows = place(buffer(shape=(2, 8), dtype=dtype)).rows("b")
    assert rows.dtype == stored
    assert rows.shape == (1, 2, width)


def test_an_odd_number_of_4_bit_elements_is_refused():
    with pytest.raises(BuildError, match=r"'b': the last extent of \(2, 3\) is no whole number of bytes"):
        place(buffer(dtype="fp4"))


def test_rows_of_a_fraction_of_an_element_are_refused():
    with pytest.raises(BuildError, match="'b': a row of 15 bytes holds no whole number of bfloat16"):
        place(buffer(row_bytes_align=5))


def test_everything_starts_at_zero():
    tensors = place(buffer(space="full", guard=4, layers=(0, 1)))
    assert not any(raw.any() for raw in tensors.storages())


def test_unknown_names_and_layers_are_refused():
    tensors = place(buffer(layers=(3, 7)))
    with pytest.raises(SlotError, match=r"no tensor for layer 4; it holds the layers \[3, 7\]"):
        tensors.rows("b", 4)
    with pytest.raises(SlotError, match="no tensor for layer None"):
        tensors.rows("b")
    with pytest.raises(SlotError, match="no buffer is called 'c' here; there are b"):
        tensors.rows("c")


def test_meta_tensors_take_no_memory_and_count_the_same():
    asked = (buffer(space="full", guard=4, layers=(0, 1)), buffer(name="z", guard=3))
    tensors = place(*asked, tokens=2**31, device=torch.device("meta"))
    assert tensors.rows("b", 1).device.type == "meta"
    assert tensors.nbytes() == 2 * (2**31 + 4) * 12 + 36


def test_host_buffers_are_real_even_on_meta():
    tensors = place(buffer(memory="host", guard=2), device=torch.device("meta"))
    assert tensors.rows("b").sum() == 0


def test_memory_that_is_not_there_is_an_error_that_names_the_bytes():
    needed = (2**50 + 4) * 12
    with pytest.raises(BuildError, match=rf"buffer 'b' of full asked for {needed:,} bytes on cpu"):
        place(buffer(space="full", guard=4, layers=(0, 1), owner="full"), tokens=2**50)


def test_a_storage_counts_once():
    raw = place(buffer(guard=5)).storages()[0]
    assert list(unique_storages([raw, raw[3:], raw.view(torch.int16)]).values()) == [60]


def test_offsets_beyond_32_bits_are_exact():
    """S-23: pages of 149,760 bytes; page 14,340 starts past 2^31, and a layer has more than 2^31 elements."""
    space = {"full": Space(name="full", rule=SizeRule(), page_size=1)}
    page = buffer(shape=(149_760,), dtype="uint8", space="full", layers=(0,))
    view = allocate([page], {"full": 20_000}, space, torch.device("meta")).paged("b", 0)
    assert view[14_340].storage_offset() == 14_340 * 149_760 == 2_147_558_400 > 2**31
    assert view.numel() == 20_001 * 149_760 > 2**31
