"""Offsets of 2 ** 31 elements and more, in the units in which each kernel counts: rows of odd bytes, far pages and runs.

Run by `test_interpreted` in a process of its own: with TRITON_INTERPRET=1 over files that have holes, without it on the
accelerator.
"""

import numpy as np
import pytest
import torch
from kvdock import dtypes
from kvdock.kernels import triton_tables
from kvdock.kernels.triton_set import TritonKernels

KERNELS = TritonKernels()
FAR = 2**31 + 12345
"""An element that 32 bits do not reach."""


@pytest.fixture
def memory(device, tmp_path):
    """Give memory of so many elements, of which little is touched."""

    def give(count, dtype=torch.uint8):
        nbytes = count * dtype.itemsize
        if device != "cpu":
            if torch.cuda.mem_get_info()[0] < nbytes + 2**30:
                pytest.skip(f"the device has no {nbytes} bytes free")
            return torch.empty(count, dtype=dtype, device=device)
        path = tmp_path / f"{nbytes} bytes"
        try:
            with path.open("wb") as file:
                file.truncate(nbytes)
            taken = path.stat().st_blocks * 512
        except OSError as error:
            pytest.skip(f"no file of {nbytes} bytes here: {error}")
        if taken > 2**20:
            pytest.skip("files have no holes here")
        return torch.from_file(str(path), shared=True, size=count, dtype=dtype)

    return give


def numbers(device, *values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=device)


def odd_rows(device, n, width):
    """Rows of bytes that are no two alike."""
    return (torch.arange(n * width, device=device) % 251 + 1).to(torch.uint8).view(n, width)


def test_rows_of_odd_bytes_are_found_past_32_bits(memory, device):
    """Rows of 67 bytes move byte by byte: slot 32,100,000 starts at byte 2,150,700,000."""
    far, near, width = 32_100_000, 5, 67
    base = memory((far + 8) * width)
    view, rows = base.view(-1, 4, width), odd_rows(device, 2, width)
    at = lambda slot: base[slot * width : (slot + 1) * width]  # noqa: E731
    loc, low = numbers(device, far + 1, far + 6), numbers(device, near, near + 1)
    KERNELS.store(view, loc, rows)
    assert [torch.equal(at(slot), row) for slot, row in zip((far + 1, far + 6), rows, strict=True)] == [True] * 2
    assert torch.equal(KERNELS.gather(view, loc), rows)
    KERNELS.move([view, view[..., :0]], low, loc)
    assert torch.equal(KERNELS.gather(view, low), rows)
    KERNELS.clear([view, view[..., :0]], loc)
    assert not KERNELS.gather(view, loc).any()
    KERNELS.copy_rows(view, loc, view, low.flip(0))
    assert torch.equal(KERNELS.gather(view, loc), rows.flip(0))
    KERNELS.store_kv(view[..., :30], view[..., 30:], loc, rows[:, :30], rows[:, 30:])
    assert torch.equal(KERNELS.gather(view, loc), rows)
    KERNELS.store_mla(view, loc, rows[:, 5:], rows[:, :5])
    assert torch.equal(KERNELS.gather(view, loc), rows.roll(-5, 1))
    KERNELS.clear([view], loc[:1])
    assert [bool(at(slot).any()) for slot in (far + 1, far + 6)] == [False, True]


def test_a_long_move_finds_rows_of_odd_bytes_past_32_bits(memory, device, monkeypatch):
    monkeypatch.setattr("kvdock.kernels.triton_set.MOVED_AT_ONCE", 1)
    far, width = 32_100_000, 67
    view, rows = memory((far + 8) * width).view(-1, 1, width), odd_rows(device, 2, width)
    loc = numbers(device, far, far + 7, dtype=torch.int32)
    KERNELS.store(view, loc, rows)
    KERNELS.move([view], loc, loc.flip(0))
    assert torch.equal(KERNELS.gather(view, loc), rows.flip(0))


def test_pages_and_runs_may_be_16_gib_apart(memory, device):
    """In units of 16 bytes 2 ** 30, of which a kernel that counts 8 bytes makes 2 ** 31."""
    apart, rows = 2**34, odd_rows(device, 2, 32)
    base = memory(apart + 64)
    pages = base.as_strided((2, 2, 32), (apart, 32, 1))
    KERNELS.store(pages, numbers(device, 2, 3), rows)
    assert torch.equal(base[apart:], rows.flatten())
    KERNELS.move([pages], numbers(device, 0, 1), numbers(device, 3, 2))
    assert torch.equal(base[:64], rows.flip(0).flatten())
    runs = base.as_strided((2, 1, 2, 32), (32, 32, apart, 1))
    KERNELS.store(runs, numbers(device, 1, 0), torch.stack((rows, rows + 1), 1))
    assert torch.equal(base[apart:].view(2, 32), rows.flip(0) + 1)
    assert torch.equal(KERNELS.gather(runs, numbers(device, 0)).view(2, 32), torch.stack((rows[1], rows[1] + 1)))
    KERNELS.move([runs], numbers(device, 0), numbers(device, 1))
    assert torch.equal(base[apart:].view(2, 32), (rows[:1] + 1).expand(2, 32))


def test_steps_and_states_lie_past_32_bits(memory, device):
    """Rows of 3 steps of 67 bytes: row 10,700,000 starts at byte 2,150,700,000."""
    row, width = 10_700_000, 67
    steps, rows = memory((row + 2) * 3 * width).view(-1, 3, width), odd_rows(device, 2, width)
    KERNELS.store_step(steps, numbers(device, row, row + 1), 2, rows)
    states = torch.zeros(4, 1, width, dtype=torch.uint8, device=device)
    KERNELS.commit_steps([(steps, states)], numbers(device, row, row + 1), numbers(device, 2, 2), numbers(device, 3, 1))
    assert torch.equal(states[[3, 1], 0], rows)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_blocks_are_stored_and_read_past_32_bits(memory, device, name):
    chosen = dtypes.find(name)
    width = 2 * chosen.block
    held = width * chosen.bits // 8
    far = FAR // held
    data, scales = memory((far + 3) * held).view(-1, 1, held), memory((far + 3) * 2).view(-1, 1, 2)
    loc, values = numbers(device, far + 1, far + 2), torch.full((2, width), 6.0, device=device)
    values[1] *= 2  # scales of 1 and 2 where elements reach 6
    KERNELS.store_blocks(data, scales, loc, values, chosen)
    assert torch.equal(KERNELS.load_blocks(data, scales, loc, chosen, torch.float32), values)
    assert bool(data.flatten()[-2 * held :].all())


def test_request_rows_lie_past_32_bits(memory, device):
    """Two rows of a table that are 2 ** 31 + 12,345 words apart."""
    table = memory(FAR + 64, torch.int32).as_strided((2, 64), (FAR, 1))
    KERNELS.write_rows(table, numbers(device, 1, 1), numbers(device, 0, 63), numbers(device, 70, 80))
    assert table[1, [0, 63]].tolist() == [70, 80]
    one = np.array([1])
    KERNELS.write_spans(table, one, np.array([8]), np.array([12]), numbers(device, 24, 25, 26, 27))
    assert table[1, 8:12].tolist() == [24, 25, 26, 27]
    assert KERNELS.read_pages(table, one, np.array([2]), np.array([3]), 4).tolist() == [6]


def test_a_map_may_reach_past_32_bits(memory, device):
    mapping = memory(FAR + 1, torch.int32).as_strided((2,), (FAR,))
    mapping[1] = 40_000_000
    assert KERNELS.translate(mapping, numbers(device, 64 + 3, dtype=torch.int32), 64).tolist() == [2_560_000_003]


def test_a_grid_of_many_parts_is_one_that_devices_take(device, monkeypatch):
    """1,024 states of 4 MiB are moved in 131,072 parts; only the first number of a grid may be above 65,535."""
    grids = []
    monkeypatch.setattr(triton_tables, "launch", lambda kernel, grid, *_, **constants: grids.append((grid, constants)))
    views = [torch.empty(1, 1, 2**20, device="meta").as_strided((2000, 1, 2**20), (0, 0, 1)) for _ in range(2)]
    table = triton_tables._table(views, views)
    loc = torch.zeros(1024, dtype=torch.int64)
    triton_tables.launch_move(table, loc, loc)
    triton_tables.launch_table(table, 10**6, target_loc=loc)
    assert [grid for grid, _ in grids] == [(131_072, 2), (500_000 * 1024, 2)]
    assert all(first < 2**31 and max(rest) <= 65_535 for (first, *rest), _ in grids)
