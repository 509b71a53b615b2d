"""8-bit floats: bounds derived from the format, saturation, scales, bytes."""

import pytest

torch = pytest.importorskip("torch")

from kvdock.pools import MHAPool, MLAPool  # noqa: E402

FORMATS = {
    # name: mantissa bits, smallest normal exponent, largest finite value
    "float8_e4m3fn": (3, -6, 448.0),
    "float8_e5m2": (2, -14, 57344.0),
    "float8_e4m3fnuz": (3, -7, 240.0),
    "float8_e5m2fnuz": (2, -15, 57344.0),
}


def written(make, slots, dtype, values, scale=None):
    """Write `values` as keys of one head of 8 and return them as read, in float64."""
    pool = make.pool(MHAPool, make.query({0: make.mha(heads=1)}, page_size=1, dtype=dtype), tokens=len(values) // 8)
    rows = values.view(-1, 1, 8)
    loc = torch.arange(1, len(rows) + 1)
    pool.set_kv_buffer(0, loc, rows, rows, k_scale=scale, v_scale=scale)
    read = pool.get_key_buffer(0)
    assert read.dtype == getattr(torch, dtype)
    assert pool.get_value_buffer(0).view(torch.uint8).eq(read.view(torch.uint8)).all()
    return read[1:].to(torch.float64).flatten()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale", [None, 0.25, 3.0])
def test_a_round_trip_is_off_by_half_a_unit_in_the_last_place_at_most(make, slots, dtype, scale):
    mantissa, smallest, largest = FORMATS[dtype]
    generator = torch.Generator().manual_seed(7)
    sign = torch.randint(0, 2, (4096,), generator=generator) * 2.0 - 1
    reach = torch.tensor(largest, dtype=torch.float64).log2().item()
    exponent = torch.rand(4096, generator=generator, dtype=torch.float64) * (reach - smallest + 4) + smallest - 4
    exact = (sign * 2.0**exponent).to(torch.float32).to(torch.float64)
    divided = exact if scale is None else exact / scale
    inside = divided.abs() <= largest
    read = written(make, slots, dtype, exact.to(torch.float32), scale)
    bound = 2.0 ** (divided.abs().log2().floor().clamp(min=smallest) - mantissa - 1)
    # The division is rounded to 24 bits before the rounding to the format.
    error = (read - divided).abs()
    assert (error[inside] <= bound[inside] * (1 + 2**-18)).all()
    assert read[~inside].abs().eq(largest).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_is_too_large_saturates_and_nan_stays(make, slots, dtype):
    largest = FORMATS[dtype][2]
    values = torch.tensor([1e9, -1e9, float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1.0])
    read = written(make, slots, dtype, values)
    assert read[:4].tolist() == [largest, -largest, largest, -largest]
    assert read[4].isnan()
    assert read[5:].tolist() == [0.0, 0.0, 1.0]


def test_a_scale_may_be_a_tensor(make, slots):
    values = torch.arange(8.0)
    assert written(make, slots, "float8_e4m3fn", values, torch.tensor(2.0)).tolist() == [i / 2 for i in range(8)]


def test_keys_and_values_have_scales_of_their_own(make, slots):
    pool = make.pool(MHAPool, make.query({0: make.mha()}, dtype="fp8"))
    pool.set_kv_buffer(0, slots(5), torch.full((1, 2, 8), 8.0), torch.full((1, 2, 8), 8.0), k_scale=2.0, v_scale=4.0)
    assert pool.get_key_buffer(0)[1, 1].float().eq(4).all()
    assert pool.get_value_buffer(0)[1, 1].float().eq(2).all()


def test_bfloat16_is_divided_in_float32(make, slots):
    # The quotient is just above the middle of 1 and 1.125; bfloat16 would lose that and tie down to 1.
    scale = 1 / (1.0625 * (1 + 2**-10))
    values = torch.ones(8, dtype=torch.bfloat16)
    assert (values / scale).tolist() == [1.0625] * 8
    assert written(make, slots, "float8_e4m3fn", values, scale).tolist() == [1.125] * 8


def test_values_in_the_format_and_bytes_are_kept_bit_for_bit(make, slots):
    every = torch.arange(256, dtype=torch.uint8)
    for given in (every, every.view(torch.float8_e4m3fn)):
        pool = make.pool(MHAPool, make.query({0: make.mha(heads=1)}, page_size=1, dtype="fp8"), tokens=32)
        rows = given.view(32, 1, 8)
        pool.set_kv_buffer(0, torch.arange(1, 33), rows, rows, k_scale=9.0, v_scale=9.0)
        assert pool.get_key_buffer(0)[1:].view(torch.uint8).flatten().equal(every)


def test_latents_in_8_bits(make, slots):
    pool = make.pool(MLAPool, make.query({0: make.mla()}, dtype="fp8_e5m2"))
    pool.set_mla_kv_buffer(0, slots(5), torch.full((1, 1, 16), 1e9), torch.full((1, 1, 8), 1.25))
    nope, rope = pool.get_mla_kv_buffer(0, slots(5), torch.bfloat16)
    assert nope.eq(57344).all()
    assert rope.eq(1.25).all()
    assert pool.get_key_buffer(0).dtype == torch.float8_e5m2
    assert pool.get_value_buffer(0).dtype == torch.float8_e5m2
