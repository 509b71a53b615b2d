"""Block formats against a model in plain Python, bounds derived from the formats, and what has no place in them."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvdock import dtypes

torch = pytest.importorskip("torch")

from kvdock.kernels import microscaling  # noqa: E402
from kvdock.pools import MHAPool, MLAPool  # noqa: E402

FP4, NVFP4, MXFP8 = (dtypes.find(name) for name in ("fp4", "nvfp4", "mxfp8"))
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
INF, NAN = float("inf"), float("nan")
LARGEST = 3.4028234663852886e38
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Exponents of one block are near each other more often than those of arbitrary floats.
NEAR = st.builds(math.ldexp, st.floats(-1, 1, width=16), st.integers(-8, 3))


def there_and_back(values, block_format, factor=None):
    """Encode one row and return data, scales and the decoded values as float64."""
    row = torch.tensor([values], dtype=torch.float32)
    data, scales = microscaling.encode(row, block_format, factor)
    read = microscaling.decode(data, scales, block_format, torch.float32, factor)
    return data[0].tolist(), scales[0].tolist(), read[0].tolist()


def nearest_e2m1(magnitude):
    """The code of the nearest value; of two at the same distance the even one. What is above 6 is 6."""
    return min(range(8), key=lambda code: (abs(E2M1[code] - magnitude), code % 2))


def exponent_of(block, largest_exponent):
    """The exponent of a block's scale by OCP MX v1.0, as far as e8m0 reaches down."""
    largest = max(map(abs, block))
    floor_log2 = math.frexp(largest)[1] - 1 if largest else -1000
    return max(-127, floor_log2 - largest_exponent)


def test_the_first_of_two_elements_lies_in_the_low_half():
    # The largest is 6, so the scale is 1 (127 as e8m0), and the codes are those of ½, −6, 2, −1 and zeros.
    data, scales, _ = there_and_back([0.5, -6, 2, -1] + [0.0] * 12, FP4)
    assert data == [0xF1, 0xA4, 0, 0, 0, 0, 0, 0]
    assert scales == [127]


@pytest.mark.parametrize("exponent", [-120, -3, 0, 1, 100])
def test_every_value_of_the_format_is_kept(exponent):
    values = [sign * math.ldexp(value, exponent) for value in E2M1 for sign in (1, -1)]
    _, scales, read = there_and_back(values, FP4)
    assert scales == [127 + exponent]
    assert read == values


def test_ties_go_to_even_codes():
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] + [0.0] * 8)
    assert there_and_back(halfway.tolist(), FP4)[2][:7] == [0, 1, 1, 2, 2, 4, 4]
    above = halfway.nextafter(torch.tensor(9.0))
    above[7] = 6.0
    assert there_and_back(above.tolist(), FP4)[2][:7] == [0.5, 1, 1.5, 2, 3, 4, 6]


@settings(max_examples=150, deadline=None)
@given(block=st.one_of(st.lists(NEAR, min_size=16, max_size=16), st.lists(FLOATS, min_size=16, max_size=16)))
@example(block=[LARGEST] * 8 + [-1.0] * 8)
@example(block=[1e-45] * 16)
def test_fp4_is_the_model(block):
    block = torch.tensor(block, dtype=torch.float32).tolist()
    data, scales, read = there_and_back(block, FP4)
    exponent = exponent_of(block, 2)
    assert scales == [127 + exponent]
    codes = [nearest_e2m1(math.ldexp(abs(value), -exponent)) for value in block]
    found = [code for byte in data for code in (byte & 15, byte >> 4)]
    assert [code & 7 for code in found] == codes
    assert [code >> 3 for code in found] == [int(math.copysign(1, value) < 0) for value in block]
    assert [abs(value) for value in read] == [math.ldexp(E2M1[code], exponent) for code in codes]


@settings(max_examples=100, deadline=None)
@given(block=st.lists(NEAR, min_size=32, max_size=32))
def test_errors_of_mxfp8_are_half_a_step_or_what_is_above_448(block):
    # The scale is 2^x with x = floor(log2(largest)) − 8, so elements are below 2^9. e4m3 keeps 3 bits after the
    # first: up to 448 the error is half a unit in the last place, 2^(e−4), and never under half of the smallest
    # subnormal, 2^−10. Elements from 448 to 512 become 448, which is off by 1/8 of the element at most.
    block = torch.tensor(block, dtype=torch.float32).tolist()
    _, scales, read = there_and_back(block, MXFP8)
    exponent = exponent_of(block, 8)
    assert scales == [127 + exponent]
    for value, found in zip(block, read, strict=True):
        element = math.ldexp(abs(value), -exponent)
        step = max(math.frexp(element)[1] - 1 - 3, -9) if element else -9
        bound = element - 448 if element > 448 else math.ldexp(1, step - 1)
        assert abs(found - value) <= math.ldexp(bound, exponent)


@settings(max_examples=100, deadline=None)
@given(
    block=st.lists(NEAR, min_size=16, max_size=16),
    factor=st.sampled_from([1.0, 2.0**-10, 0.001]),
)
def test_errors_of_nvfp4_are_half_a_step_of_its_scale(block, factor):
    # The wanted scale is largest / (6 · factor). As e4m3 it is off by 2^−4 of itself at most, or by half of the
    # smallest subnormal, 2^−10; it ends at 448. Elements are then off by half a step of e2m1: ¼, ½ or 1; one
    # above 6 becomes 6. The factor is a float32, and so are quotients and products: 2^−20 covers their rounding.
    block = torch.tensor(block, dtype=torch.float32).tolist()
    factor = torch.tensor(factor)
    data, scales, read = there_and_back(block, NVFP4, factor)
    wanted = max(map(abs, block)) / (6 * factor.item())
    scale = torch.tensor(scales, dtype=torch.uint8).view(torch.float8_e4m3fn).item()
    assert abs(scale - min(wanted, 448)) <= max(wanted * 2**-4, 2**-10) * (1 + 2**-20)
    step = scale * factor.item()
    for value, found in zip(block, read, strict=True):
        element = abs(value) / step if step else 0.0
        half = 0.25 if element < 2 else 0.5 if element < 4 else 1.0
        bound = max(half, element - 6) * step if step else abs(value)
        assert abs(found - value) <= bound * (1 + 2**-20) + abs(value) * 2**-20
    if not scale:
        assert not any(data)


def test_nvfp4_reaches_as_far_as_its_factor_lets_it():
    # 448 · 6 = 2688 with a factor of 1; what is larger saturates.
    assert there_and_back([2688.0, 1e9, -1e9] + [0.0] * 13, NVFP4)[2][:3] == [2688, 2688, -2688]
    factor = torch.tensor(1e9 / 2688)
    assert there_and_back([1e9, -1e9] + [0.0] * 14, NVFP4, factor)[2][:2] == pytest.approx([1e9, -1e9], rel=2**-20)


def test_an_outlier_costs_its_own_block_alone():
    # 1000 = 1.95 · 2^9 has the scale 2^7: steps of 64 near zero, so ones vanish; 1000 / 128 = 7.8 saturates at 6.
    read = there_and_back([1000.0] + [1.0] * 31, FP4)[2]
    assert read[:16] == [768.0] + [0.0] * 15
    assert read[16:] == [1.0] * 16


@pytest.mark.parametrize("block_format", [FP4, NVFP4, MXFP8], ids=lambda found: found.name)
def test_zeros_are_zeroed_bytes_and_zeroed_bytes_are_zeros(block_format):
    data, scales, read = there_and_back([0.0] * 40, block_format)
    assert not any(data)
    assert not any(scales)
    assert read == [0.0] * 40


def test_an_infinity_saturates_and_zeroes_what_shares_its_block():
    # As the largest float32, 1.99 · 2^127, it has the scale 2^125 (e2m1) or 2^119 (e4m3).
    assert there_and_back([INF, -INF, 1.0] + [1.0] * 29, FP4)[2] == (
        [6 * 2.0**125, -6 * 2.0**125] + [0.0] * 14 + [1.0] * 16
    )
    assert there_and_back([-INF] + [1.0] * 31, MXFP8)[2] == [-448 * 2.0**119] + [0.0] * 31
    assert there_and_back([INF] + [1.0] * 15, NVFP4)[2] == [2688.0] + [0.0] * 15


@pytest.mark.parametrize(("block_format", "scale"), [(FP4, 0xFF), (NVFP4, 0x7F)], ids=["fp4", "nvfp4"])
def test_nan_makes_its_block_nan_where_elements_have_none(block_format, scale):
    data, scales, read = there_and_back([1.0, NAN] + [6.0] * 30, block_format)
    assert scales[0] == scale
    assert not any(data[:8])
    assert all(map(math.isnan, read[:16]))
    assert read[16:] == [6.0] * 16


def test_nan_stays_alone_where_elements_have_it():
    read = there_and_back([1.0, NAN, -2.0] + [0.5] * 29, MXFP8)[2]
    assert math.isnan(read[1])
    assert read[:1] + read[2:] == [1.0, -2.0] + [0.5] * 29


@pytest.mark.parametrize(("block_format", "blocks"), [(FP4, 3), (NVFP4, 3), (MXFP8, 2)], ids=["fp4", "nvfp4", "mxfp8"])
def test_the_last_block_of_a_row_may_be_short(block_format, blocks):
    row = [6.0] * 32 + [1.5] * 8
    data, scales, read = there_and_back(row, block_format)
    assert len(data) == 40 * block_format.bits // 8
    assert len(scales) == blocks
    assert read == pytest.approx(row, rel=2**-4)


@pytest.mark.parametrize("block_format", [FP4, NVFP4, MXFP8], ids=lambda found: found.name)
def test_encoding_and_decoding_never_wait_for_the_device(block_format):
    rows = torch.zeros(3, 2, 40, device="meta", dtype=torch.bfloat16)
    factor = torch.ones((), device="meta")
    data, scales = microscaling.encode(rows, block_format, factor)
    assert microscaling.decode(data, scales, block_format, torch.bfloat16, factor).shape == rows.shape


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_8_bit_floats_are_read_back_times_their_scales(make, slots, dtype):
    pool = make.pool(MHAPool, make.query({0: make.mha()}, page_size=3, dtype=dtype, shared=((1, 0),)))
    k, v = torch.full((2, 2, 8), 12.0), torch.full((2, 2, 8), -20.0)
    pool.set_kv_buffer(0, slots(4, 7), k, v, k_scale=2.0, v_scale=torch.tensor(4.0))
    keys, values = pool.read_kv(1, slots(7, 3, 4), k_scale=2.0, v_scale=torch.tensor(4.0))
    assert keys.dtype == values.dtype == torch.bfloat16
    assert keys[:, 0, 0].tolist() == [12, 0, 12]
    assert values[:, 1, 7].tolist() == [-20, 0, -20]
    keys, values = pool.read_kv(1, slots(7), dtype=torch.float32)
    assert keys.dtype == torch.float32
    assert (keys[0, 0, 0].item(), values[0, 0, 0].item()) == (6, -5)


def test_wide_types_are_read_back_as_they_are(make, slots):
    pool = make.pool(MHAPool, make.query({0: make.mha()}, dtype="float32"))
    k, v = torch.full((1, 2, 8), 1.1), torch.full((1, 2, 8), 2.2)
    pool.set_kv_buffer(0, slots(5), k, v, k_scale=3.0, v_scale=3.0)
    keys, values = pool.read_kv(0, slots(5), k_scale=3.0, v_scale=3.0, dtype=torch.float32)
    assert keys.equal(k)
    assert values.equal(v)
    assert pool.read_kv(0, slots(5))[0].equal(k.bfloat16())


def test_a_latent_row_is_read_back_with_one_scale(make, slots):
    pool = make.pool(MLAPool, make.query({0: make.mla()}, dtype="fp8"))
    pool.set_kv_buffer(0, slots(5), torch.arange(24.0).view(1, 1, 24), k_scale=0.5)
    rows, latents = pool.read_kv(0, slots(5), k_scale=0.5, v_scale=7.0)
    assert rows.shape == (1, 1, 24)
    assert latents.equal(rows[..., :16])
    assert rows[0, 0, :9].tolist() == list(range(9))


def test_what_is_stored_is_shown_by_name(make, slots):
    pool = make.pool(MHAPool, make.query({2: make.mha()}, dtype="fp8", shared=((3, 2),)))
    raw = pool.get_raw_kv_buffer(3)
    assert list(raw) == ["k", "v"]
    assert raw["k"].dtype == torch.uint8
    assert raw["k"].data_ptr() == pool.get_key_buffer(2).data_ptr()
