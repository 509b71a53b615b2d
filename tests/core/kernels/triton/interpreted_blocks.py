"""Block formats in Triton have the bytes and the values of the torch forms.

Run by `test_interpreted` in a process of its own: with TRITON_INTERPRET=1 anywhere, without it on the accelerator.
"""

import math

import pytest
import torch
from kvdock import dtypes
from kvdock.errors import SlotError
from kvdock.kernels import triton_blocks
from kvdock.kernels.reference import ReferenceKernels
from kvdock.kernels.triton_set import TritonKernels

# The interpreter's numpy warns of divisions and overflows that are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KERNELS, TORCH = TritonKernels(), ReferenceKernels()
FLOATS_8 = pytest.mark.parametrize("element", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"])
FORMATS = pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "nvfp4", "mxfp8"])
OUTPUTS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)


@pytest.fixture
def launches(monkeypatch):
    """How many kernels of block formats were launched, one entry each."""
    found = []
    launch = triton_blocks.launch

    def counted(*arguments, **constants):
        found.append(1)
        launch(*arguments, **constants)

    monkeypatch.setattr(triton_blocks, "launch", counted)
    return found


def wild(random, *shape):
    """Floats of all magnitudes that float32 has, zeros and ties among them, block after block."""
    count = math.prod(shape)
    values = torch.randn(count, generator=random) * torch.exp2(
        torch.randint(-140, 120, (count,), generator=random).float()
    )
    tame = torch.randint(-12, 13, (count,), generator=random) / 4
    return torch.where(torch.rand(count, generator=random) < 0.5, values, tame).view(shape)


def calm(random, *shape):
    """Floats whose blocks have one magnitude each, so that elements use their whole range."""
    values = torch.randn(*shape, generator=random)
    return values * torch.exp2(torch.randint(-30, 30, (*shape[:-1], 1), generator=random).float())


def with_odd_ones(values):
    """Infinities, NaN, a block of zeros and numbers below the normal ones, each in a row of its own."""
    values = values.clone()
    rows = values.view(-1, values.shape[-1])
    rows[0, 1], rows[1, -1], rows[2, 3] = math.inf, math.nan, -math.inf
    rows[3] = 0.0
    rows[4] = torch.linspace(-1e-40, 1e-40, rows.shape[1])
    rows[5, 0] = -0.0
    return values


def equal(got, want):
    return torch.equal(got.cpu(), want)


def same_values(got, want):
    return got.dtype == want.dtype and torch.equal(got.cpu().nan_to_num(-1.25), want.nan_to_num(-1.25))


@FLOATS_8
@pytest.mark.parametrize(
    ("dim", "block", "dtype"),
    [
        (128, 128, torch.bfloat16),
        (512, 128, torch.float32),
        (96, 32, torch.float16),
        (6, 3, torch.float32),
        (130, 128, torch.float64),  # the last block is short
        (7, 24, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("values_of", [wild, calm])
def test_8_bit_floats_have_the_bytes_and_scales_of_torch(
    twins, launches, device, element, dim, block, dtype, values_of
):
    values = values_of(twins.random, 11, 2, dim).clamp(-6e4, 6e4).to(dtype)
    data, scales = KERNELS.quantize_blocks(values.to(device), element, block)
    wanted, wanted_scales = TORCH.quantize_blocks(values, element, block)
    assert (data.shape, data.dtype, scales.dtype) == ((11, 2, dim), torch.uint8, torch.float32)
    assert equal(data, wanted)
    assert equal(scales, wanted_scales)
    assert same_values(
        KERNELS.dequantize_blocks(data, scales, element, block),
        TORCH.dequantize_blocks(wanted, wanted_scales, element, block),
    )
    assert len(launches) == 2


@FLOATS_8
def test_every_code_of_8_bits_has_its_value(device, element):
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    scales = torch.tensor([[1.0], [-3.0]])
    got = KERNELS.dequantize_blocks(codes.to(device), scales.to(device), element, 128)
    assert same_values(got, codes.view(getattr(torch, element)).float() * scales)


@FLOATS_8
def test_infinities_saturate_and_nan_takes_its_block_in_8_bits(twins, device, element):
    values = with_odd_ones(wild(twins.random, 8, 256))
    data, scales = KERNELS.quantize_blocks(values.to(device), element, 128)
    wanted, wanted_scales = TORCH.quantize_blocks(values, element, 128)
    assert same_values(scales, wanted_scales)
    decoded = data.cpu().view(getattr(torch, element)).float()
    assert same_values(decoded, wanted.view(getattr(torch, element)).float())
    assert bool(decoded[1, 128:].isnan().all())


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize(("width", "dtype"), [(128, torch.bfloat16), (40, torch.float32), (2, torch.float16)], ids=str)
def test_4_bit_floats_are_quantised_as_torch_does(twins, launches, device, block, width, dtype):
    values = calm(twins.random, 9, width).clamp(-6e4, 6e4).to(dtype)
    data, scales = KERNELS.quantize_blocks(values.to(device), "float4_e2m1fn_x2", block)
    wanted, wanted_scales = TORCH.quantize_blocks(values, "float4_e2m1fn_x2", block)
    assert equal(data, wanted)
    assert equal(scales, wanted_scales)
    assert equal(
        KERNELS.dequantize_blocks(data, scales, "float4_e2m1fn_x2", block),
        TORCH.dequantize_blocks(wanted, wanted_scales, "float4_e2m1fn_x2", block),
    )
    assert len(launches) == 2


def test_pairs_of_two_blocks_are_quantised_by_torch(twins, launches, device):
    values = calm(twins.random, 9, 8)
    data, scales = KERNELS.quantize_blocks(values.to(device), "float4_e2m1fn_x2", 3)
    wanted, wanted_scales = TORCH.quantize_blocks(values, "float4_e2m1fn_x2", 3)
    assert equal(data, wanted)
    assert equal(scales, wanted_scales)
    read = KERNELS.dequantize_blocks(data, scales, "float4_e2m1fn_x2", 3)
    assert equal(read, TORCH.dequantize_blocks(wanted, wanted_scales, "float4_e2m1fn_x2", 3))
    assert launches == []


def test_rows_that_end_inside_a_byte_are_refused(device):
    values, loc = torch.ones(2, 1, 5, device=device), torch.tensor([1, 2], device=device)
    data, scales = (torch.zeros(3, 2, 1, width, dtype=torch.uint8, device=device) for width in (2, 1))
    with pytest.raises(
        SlotError, match="a row of 5 elements of 4 bits ends inside a byte; give rows of an even number"
    ):
        KERNELS.quantize_blocks(values, "float4_e2m1fn_x2", 16)
    with pytest.raises(SlotError, match="a row of 5 elements of 4 bits"):
        KERNELS.store_blocks(data, scales, loc, values, dtypes.find("nvfp4"))


@pytest.mark.parametrize(("width", "blocks", "count"), [(32, 1, 2), (16, 2, 2), (16, 1, 1)])
def test_blocks_that_do_not_fit_are_refused_before_anything_is_written(device, width, blocks, count):
    """Two slots of 16 elements in a block of one scale each are asked for."""
    data, scales = (torch.zeros(3, 2, 1, held, dtype=torch.uint8, device=device) for held in (width // 2, blocks))
    loc = torch.tensor([1, 2], device=device)
    with pytest.raises(SlotError, match="for 2 slots of a view"):
        KERNELS.store_blocks(data, scales, loc, torch.ones(count, 1, 16, device=device), dtypes.find("nvfp4"))
    assert not data.any()
    assert not scales.any()


def block_views(twins, chosen, pages, page_size, heads, width, *, joined):
    """Views of elements and scales in pages that hold two layers; scales of all heads in one row if `joined`."""
    blocks = -(-width // chosen.block)
    data = twins.view("page_major", pages, page_size, (heads, width * chosen.bits // 8), torch.uint8)
    shape = (heads * blocks,) if joined else (heads, blocks)
    return zip(data, twins.view("page_major", pages, page_size, shape, torch.uint8), strict=True)


@FORMATS
@pytest.mark.parametrize(
    ("heads", "width", "page_size", "dtype"),
    [
        (8, 128, 64, torch.bfloat16),
        (1, 576, 16, torch.bfloat16),
        (1, 64, 3, torch.float16),
        (3, 80, 3, torch.float32),
        (2, 6, 1, torch.bfloat16),
    ],
    ids=str,
)
def test_encoding_and_storing_are_one_launch(twins, launches, device, name, heads, width, page_size, dtype):
    chosen = dtypes.find(name)
    (data, scales), (want_data, want_scales) = block_views(twins, chosen, 9, page_size, heads, width, joined=heads == 1)
    loc, want_loc = twins.slots(7, data, torch.int32)
    values = calm(twins.random, 7, heads, width).clamp(-6e4, 6e4).to(dtype)
    factor = torch.tensor([0.37]) if name == "nvfp4" else None
    on_device = None if factor is None else factor.to(device)
    KERNELS.store_blocks(data, scales, loc, values.to(device), chosen, on_device)
    TORCH.store_blocks(want_data, want_scales, want_loc, values, chosen, factor)
    assert twins.are_equal()
    got = KERNELS.load_blocks(data, scales, loc, chosen, dtype, on_device)
    assert equal(got, TORCH.load_blocks(want_data, want_scales, want_loc, chosen, dtype, factor))
    assert len(launches) == 2


@FORMATS
@pytest.mark.parametrize("factor", [None, 0.0, 3e-5, 1e30])
def test_odd_numbers_are_stored_as_torch_stores_them(twins, device, name, factor):
    chosen = dtypes.find(name)
    (data, scales), (want_data, want_scales) = block_views(twins, chosen, 3, 4, 2, 48, joined=False)
    values = with_odd_ones(wild(twins.random, 8, 2, 48))
    loc, want_loc = twins.slots(8, data)
    scale = None if factor is None else torch.tensor([factor])
    on_device = None if scale is None else scale.to(device)
    KERNELS.store_blocks(data, scales, loc, values.to(device), chosen, on_device if name == "nvfp4" else None)
    TORCH.store_blocks(want_data, want_scales, want_loc, values, chosen, scale if name == "nvfp4" else None)
    read = [
        kernels.load_blocks(d, s, at, chosen, torch.float32, f if name == "nvfp4" else None)
        for kernels, d, s, at, f in (
            (KERNELS, data, scales, loc, on_device),
            (TORCH, want_data, want_scales, want_loc, scale),
        )
    ]
    assert same_values(*read)


@FORMATS
@OUTPUTS
def test_all_slots_are_read_in_pages_with_every_byte(twins, launches, name, dtype):
    """Random bytes: each code of elements and of scales, NaN among them."""
    chosen = dtypes.find(name)
    (data, scales), (want_data, want_scales) = block_views(twins, chosen, 16, 4, 2, 160, joined=False)
    got = KERNELS.load_blocks(data, scales, None, chosen, dtype)
    want = TORCH.load_blocks(want_data, want_scales, None, chosen, dtype)
    assert got.shape == (16, 4, 2, 160)
    assert same_values(got, want)
    assert len(launches) == 1


def test_rows_that_lie_apart_are_encoded_as_they_lie(twins, launches, device):
    """The keys of a fused projection: the first of three parts of each token."""
    chosen = dtypes.find("nvfp4")
    (data, scales), (want_data, want_scales) = block_views(twins, chosen, 3, 4, 2, 32, joined=False)
    fused, (loc, want_loc) = calm(twins.random, 5, 6, 32), twins.slots(5, data)
    KERNELS.store_blocks(data, scales, loc, fused.to(device)[:, :2], chosen)
    TORCH.store_blocks(want_data, want_scales, want_loc, fused[:, :2], chosen)
    KERNELS.store_blocks(data, scales, loc[:2], fused.to(device)[:2, ::3], chosen)
    TORCH.store_blocks(want_data, want_scales, want_loc[:2], fused[:2, ::3], chosen)
    assert twins.are_equal()
    assert len(launches) == 2


def test_elements_in_runs_are_encoded_by_torch(twins, launches, device):
    chosen = dtypes.find("mxfp8")
    data, want_data = twins.view("part_of_heads", 3, 4, (2, 32), torch.uint8)
    scales, want_scales = twins.view("layer_major", 3, 4, (2, 1), torch.uint8)
    values, (loc, want_loc) = calm(twins.random, 5, 2, 32), twins.slots(5, data)
    KERNELS.store_blocks(data, scales, loc, values.to(device), chosen)
    TORCH.store_blocks(want_data, want_scales, want_loc, values, chosen)
    assert twins.are_equal()
    got = KERNELS.load_blocks(data, scales, loc, chosen, torch.float32)
    assert equal(got, TORCH.load_blocks(want_data, want_scales, want_loc, chosen, torch.float32))
    assert launches == []


def test_empty_batches_launch_nothing(launches, device):
    chosen = dtypes.find("nvfp4")
    data, scales = (torch.ones(3, 2, 1, width, dtype=torch.uint8, device=device) for width in (8, 1))
    none = torch.empty(0, dtype=torch.int64, device=device)
    KERNELS.store_blocks(data, scales, none, torch.empty(0, 1, 16, device=device), chosen)
    assert KERNELS.load_blocks(data, scales, none, chosen, torch.bfloat16).shape == (0, 1, 16)
    got, factors = KERNELS.quantize_blocks(torch.empty(0, 256, device=device), "float8_e4m3fn", 128)
    assert (got.shape, factors.shape) == ((0, 256), (0, 2))
    assert KERNELS.dequantize_blocks(got, factors, "float8_e4m3fn", 128).shape == (0, 256)
    assert launches == []
    assert int(data.sum()) == 48
