"""Rows of blocks in torch: what a scale is of, where the last block is short, and which rows have none."""

import pytest
from kvdock import dtypes
from kvdock.errors import SlotError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.kernels.reference import ReferenceKernels  # noqa: E402

KERNELS = ReferenceKernels()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_short_last_block_has_a_scale_of_its_own(dtype):
    """448 is the largest e4m3 and 0x7e, half of it is 0x76, and 1 is 0x38."""
    values = torch.tensor([[448.0, 224.0, 1.0, 896.0, 2.0]], dtype=dtype)
    data, scales = KERNELS.quantize_blocks(values, "float8_e4m3fn", 3)
    assert scales.tolist() == [[1.0, 2.0]]
    assert data.tolist() == [[0x7E, 0x76, 0x38, 0x7E, 0x38]]
    assert KERNELS.dequantize_blocks(data, scales, "float8_e4m3fn", 3).tolist() == [[448.0, 224.0, 1.0, 896.0, 2.0]]


@pytest.mark.parametrize("lead", [(), (0,), (2, 3)])
def test_rows_narrower_than_a_block_have_one_scale(lead):
    data, scales = KERNELS.quantize_blocks(torch.ones(*lead, 5), "float8_e5m2", 128)
    assert (data.shape, scales.shape) == ((*lead, 5), (*lead, 1))
    assert torch.equal(KERNELS.dequantize_blocks(data, scales, "float8_e5m2", 128), torch.ones(*lead, 5))


def test_blocks_of_an_odd_number_share_a_byte():
    """Codes of e2m1: 6 is 7, 4 is 6, 1 is 2; scales 2 ** 0 and 2 ** 1 are 127 and 128."""
    values = torch.tensor([[6.0, 4.0, 1.0, 12.0, 8.0, 2.0]])
    data, scales = KERNELS.quantize_blocks(values, "float4_e2m1fn_x2", 3)
    assert (data.tolist(), scales.tolist()) == ([[0x67, 0x72, 0x26]], [[127, 128]])
    assert torch.equal(KERNELS.dequantize_blocks(data, scales, "float4_e2m1fn_x2", 3), values)


def test_rows_that_end_inside_a_byte_are_refused():
    data, scales = (torch.zeros(3, 2, 1, width, dtype=torch.uint8) for width in (2, 1))
    with pytest.raises(
        SlotError, match="a row of 5 elements of 4 bits ends inside a byte; give rows of an even number"
    ):
        KERNELS.quantize_blocks(torch.ones(2, 5), "float4_e2m1fn_x2", 16)
    with pytest.raises(SlotError, match="a row of 5 elements of 4 bits"):
        KERNELS.store_blocks(data, scales, torch.tensor([1, 2]), torch.ones(2, 1, 5), dtypes.find("nvfp4"))


@pytest.mark.parametrize(("width", "blocks", "count"), [(32, 1, 2), (16, 2, 2), (16, 1, 1)])
def test_blocks_that_do_not_fit_are_refused_before_anything_is_written(width, blocks, count):
    """Two slots of 16 elements in a block of one scale each are asked for."""
    data, scales = (torch.zeros(3, 2, 1, held, dtype=torch.uint8) for held in (width // 2, blocks))
    with pytest.raises(SlotError, match="for 2 slots of a view"):
        KERNELS.store_blocks(data, scales, torch.tensor([1, 2]), torch.ones(count, 1, 16), dtypes.find("nvfp4"))
    assert not data.any()
    assert not scales.any()
