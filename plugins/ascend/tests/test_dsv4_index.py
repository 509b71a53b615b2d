"""Index keys of DeepSeek V4 on NPUs: integers of 8 bits and a float16 scale each, against float64."""

import pytest
from kvdock.builder import build

pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)

LIMIT = 127 * 65504
"""The largest number that an integer of 8 bits times a float16 is."""


@pytest.fixture
def index(planned):
    return build(planned(max_total_tokens=1024), device="cpu", debug=False).token_to_kv_pool.index_pool(1)


def stored(index, keys):
    loc = 128 + torch.arange(len(keys))
    index.set_index_k(1, loc, keys)
    return index.read_index_k(1, loc).double()


def half_step(largest):
    """Half a step by hand: of float16 numbers 2^-14 … 65504 lie 2^-11 apart at most, smaller ones 2^-24."""
    return (largest / 127 * (1 + 2**-11) + 2**-24) / 2


@pytest.mark.parametrize("exponent", range(-30, 23))
def test_keys_are_read_within_half_a_step(index, exponent):
    generator = torch.Generator().manual_seed(exponent + 100)
    keys = (2 * torch.rand(16, 128, generator=generator) - 1) * 2.0**exponent
    found, wide = stored(index, keys), keys.double()
    largest = wide.abs().amax(-1, keepdim=True)
    assert found.isfinite().all()
    assert ((found - wide).abs() <= half_step(largest) * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    ("largest", "error"), [(1e-3, 0.004), (1e-4, 0.0045), (1e-5, 0.006), (3e-6, 0.01), (1e-6, 0.03)]
)
def test_small_keys_keep_their_accuracy(index, largest, error):
    """As far as multiples of 2^-24 go: half of one is 3e-8."""
    keys = torch.linspace(-largest, largest, 128).view(1, -1)
    assert ((stored(index, keys) - keys.double()).abs() <= error * largest).all()


def test_keys_beyond_the_range_are_kept_as_its_end(index):
    keys = torch.zeros(4, 128)
    keys[0, :3] = torch.tensor([1e9, -1e9, 4e6])
    keys[1, :2] = torch.tensor([3e38, 1.0])
    keys[2, 0] = LIMIT
    found = stored(index, keys)
    assert found[0, :3].tolist() == [LIMIT, -LIMIT, 61 * 65504]  # 4e6 / 65504 = 61.06
    assert found[1, :2].tolist() == [LIMIT, 0]
    assert found[2, 0] == LIMIT
    assert not found[3].any()


def test_scales_that_are_powers_of_two_lose_nothing(index):
    """Whole multiples of a scale come back as they are, the smallest of float16 included."""
    codes = torch.arange(-64, 64, dtype=torch.float32)
    codes[0] = 127
    for exponent in (-24, -20, -15, -14, -3, 0, 9, 15):
        keys = (codes * 2.0**exponent).view(1, -1)
        assert torch.equal(stored(index, keys), keys.double())


def test_nothing_waits_for_the_device(planned):
    pool = build(planned(max_total_tokens=1024), device="meta", debug=False).token_to_kv_pool.index_pool(1)
    loc = torch.zeros(3, dtype=torch.int64, device="meta")
    pool.set_index_k(1, loc, torch.zeros(3, 128, device="meta"))
