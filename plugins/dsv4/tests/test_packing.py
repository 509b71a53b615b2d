"""The packed row against arithmetic in float64."""

import math

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.errors import PlanError  # noqa: E402
from kvdock_dsv4.packing import PackedFormat  # noqa: E402

FLASH = PackedFormat(nope_dim=448, rope_dim=64)


def reference(nope):
    """Each block of 64 over the smallest power of two that keeps it within 448, rounded to 3 bits of mantissa."""
    found = torch.empty_like(nope)
    exponents = torch.zeros(nope.shape[0], 7, dtype=torch.int64)
    for i, row in enumerate(nope.reshape(-1, 7, 64).tolist()):
        for j, block in enumerate(row):
            largest = max(map(abs, block))
            exponents[i, j] = math.ceil(math.log2(largest / 448)) if largest else 0
            found[i, 64 * j : 64 * j + 64] = torch.tensor([e4m3(x / 2.0 ** exponents[i, j].item()) for x in block])
            found[i, 64 * j : 64 * j + 64] *= 2.0 ** exponents[i, j].item()
    return found, exponents


def e4m3(value):
    """The nearest 8-bit float, ties to even: 3 bits of mantissa from 2 ** -6 on, steps of 2 ** -9 below."""
    if value == 0:
        return 0.0
    step = 2.0 ** (max(math.frexp(abs(value))[1] - 1, -6) - 3)
    return round(value / step) * step


def test_a_row_takes_584_bytes():
    assert (FLASH.data_nbytes, FLASH.scale_nbytes, FLASH.nbytes) == (448 + 2 * 64, 8, 584)
    assert FLASH.blocks == 7  # and a byte of padding


@pytest.mark.parametrize("spread", [1.0, 1e-6, 3e4])
def test_rows_read_back_as_float64_arithmetic_gives(spread):
    torch.manual_seed(0)
    nope, rope = torch.randn(33, 448) * spread, torch.randn(33, 64).bfloat16()
    expected, exponents = reference(nope.double())
    data, scales = FLASH.pack(nope, rope)
    assert scales[:, :7].to(torch.int64).sub(127).equal(exponents)
    assert not scales[:, 7].any()
    found, tail = FLASH.unpack(data, scales)
    assert found.double().equal(expected)
    assert tail.equal(rope)
    worst = (found.double() - nope.double()).abs().reshape(33, 7, 64).amax(-1)
    assert (worst <= 2.0 ** exponents.double() * 16).all()  # half a step of the largest binade, 256 … 448


@pytest.mark.parametrize(
    ("largest", "exponent"), [(448.0, 0), (449.0, 1), (896.0, 1), (224.0, -1), (0.0, 0), (1.75, -8)]
)
def test_a_scale_is_the_smallest_power_of_two_that_does_not_saturate(largest, exponent):
    nope = torch.zeros(1, 448)
    nope[0, 5] = -largest
    data, scales = FLASH.pack(nope, torch.zeros(1, 64))
    assert int(scales[0, 0]) == exponent + 127
    found = FLASH.unpack(data, scales)[0][0, 5]
    assert float(found) == (-448.0 if largest == 449.0 else -largest)  # 449 / 2 is halfway to none: nearest is 224


def test_infinity_and_nan_read_back_as_they_are():
    nope = torch.zeros(1, 448)
    nope[0, 0], nope[0, 64], nope[0, 65] = math.inf, math.nan, 3.0
    found = FLASH.unpack(*FLASH.pack(nope, torch.zeros(1, 64)))[0][0]
    assert found[0] == math.inf
    assert found[64].isnan() and found[65] == 3.0


def test_pages_hold_columns_first_and_then_scales():
    pages = torch.arange(2 * 4 * 584).remainder(251).to(torch.uint8).view(2, 4 * 584)
    data, scales = FLASH.split(pages, 4)
    assert data.shape == (2, 4, 576) and scales.shape == (2, 4, 8)
    assert data[1, 2].equal(pages[1, 2 * 576 : 3 * 576])
    assert scales[1, 2].equal(pages[1, 4 * 576 + 16 : 4 * 576 + 24])
    assert data.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()


def test_packing_waits_for_no_device():
    nope, rope = torch.zeros(3, 448, device="meta"), torch.zeros(3, 64, device="meta")
    found, tail = FLASH.unpack(*FLASH.pack(nope, rope))
    assert found.shape == (3, 448) and tail.shape == (3, 64)


def test_a_width_that_does_not_divide_is_refused():
    with pytest.raises(PlanError, match="450 columns without a position are no whole number of blocks of 64"):
        PackedFormat(nope_dim=450, rope_dim=64)
