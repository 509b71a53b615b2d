"""Stores, gathers, moves, clearings and commits in Triton leave the bytes that the torch kernels leave.

Run by `test_interpreted` in a process of its own: with TRITON_INTERPRET=1 anywhere, without it on the accelerator.
"""

import gc

import numpy as np
import pytest
import torch
from kvdock.errors import SlotError
from kvdock.kernels import triton_rows, triton_set, triton_tables
from kvdock.kernels.reference import ReferenceKernels
from kvdock.kernels.triton_set import TritonKernels

TORCH = ReferenceKernels()
FORMS = pytest.mark.parametrize("form", ["layer_major", "page_major", "token_major", "part_of_heads", "columns_apart"])
DTYPES = pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=["1", "2", "4"])
KINDS = pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1,), torch.uint8),
        ((1,), torch.float32),
        ((2, 3), torch.bfloat16),
        ((2, 3), torch.uint8),
        ((1, 64), torch.bfloat16),
        ((3, 80), torch.float32),
        ((1, 576), torch.uint8),
        ((1, 576), torch.bfloat16),
    ],
    ids=str,
)
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 3, 16, 64])
SLOTS = pytest.mark.parametrize("loc_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


@pytest.fixture
def kernels():
    return TritonKernels()


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that were launched, in order."""
    found = []

    def counted(launch):
        def run(kernel, *arguments, **constants):
            found.append(kernel.__name__ if hasattr(kernel, "__name__") else kernel.fn.__name__)
            launch(kernel, *arguments, **constants)

        return run

    for module in (triton_rows, triton_tables):
        monkeypatch.setattr(module, "launch", counted(module.launch))
    return found


@FORMS
@KINDS
def test_a_store_writes_the_bytes_of_its_slots_alone(twins, kernels, form, shape, dtype):
    ours, theirs = twins.view(form, 4, 3, shape, dtype)
    (loc, wanted_loc), (rows, wanted_rows) = twins.slots(7, ours), twins.rows(7, *shape, dtype=dtype)
    kernels.store(ours, loc, rows)
    TORCH.store(theirs, wanted_loc, wanted_rows)
    assert twins.are_equal()


@PAGE_SIZES
@SLOTS
def test_pages_of_any_size_are_found_by_slots_of_any_width(twins, kernels, page_size, loc_dtype):
    ours, theirs = twins.view("page_major", 5, page_size, (2, 8), torch.bfloat16)
    n = min(9, 5 * page_size)
    (loc, wanted_loc), (rows, wanted_rows) = twins.slots(n, ours, loc_dtype), twins.rows(n, 2, 8, dtype=torch.bfloat16)
    kernels.store(ours, loc, rows)
    TORCH.store(theirs, wanted_loc, wanted_rows)
    assert twins.are_equal()
    assert as_bytes(kernels.gather(ours, loc)) == as_bytes(wanted_rows)


@FORMS
@KINDS
def test_a_gather_reads_the_bytes_of_its_slots(twins, kernels, form, shape, dtype):
    ours, theirs = twins.view(form, 4, 3, shape, dtype)
    loc, wanted_loc = twins.slots(8, ours, unique=False)
    got = kernels.gather(ours, loc.view(2, 4))
    assert (got.shape, got.dtype) == ((2, 4, *shape), dtype)
    assert as_bytes(got) == as_bytes(theirs[wanted_loc // 3, wanted_loc % 3])
    assert twins.are_equal()


@FORMS
@pytest.mark.parametrize(
    ("widths", "dtype"),
    [((1, 3), torch.uint8), ((64, 64), torch.bfloat16), ((80, 64), torch.float32), ((3, 1), torch.float32)],
    ids=str,
)
def test_keys_and_values_of_any_width_take_one_launch(twins, kernels, launches, form, widths, dtype):
    (keys, want_k), (values, want_v) = (twins.view(form, 4, 3, (2, width), dtype) for width in widths)
    loc, want_loc = twins.slots(7, keys, torch.int32)
    (k, w_k), (v, w_v) = (twins.rows(7, 2, width, dtype=dtype) for width in widths)
    kernels.store_kv(keys, values, loc, k, v)
    TORCH.store_kv(want_k, want_v, want_loc, w_k, w_v)
    assert twins.are_equal()
    assert launches == ([] if form == "columns_apart" else ["pair_kernel"])


@DTYPES
@pytest.mark.parametrize("heads", [(), (1,)], ids=["no head", "one head"])
@pytest.mark.parametrize(("lora", "rope"), [(512, 64), (3, 1), (80, 3)])
def test_latents_and_rope_parts_take_one_launch(twins, kernels, launches, dtype, heads, lora, rope):
    ours, theirs = twins.view("page_major", 3, 16, (*heads, lora + rope), dtype)
    loc, want_loc = twins.slots(20, ours)
    (latent, w_latent), (part, w_part) = twins.rows(20, 1, lora, dtype=dtype), twins.rows(20, rope, dtype=dtype)
    kernels.store_mla(ours, loc, latent, part)
    TORCH.store_mla(theirs, want_loc, w_latent, w_part)
    assert twins.are_equal()
    assert launches == ["pair_kernel"]


def test_index_keys_and_their_scales_take_one_launch_inside_their_pages(twins, kernels, launches):
    """Pages of 64 slots of 132 bytes: 128 bytes of each key first, then 4 of each scale."""
    pages, want_pages = twins.view("layer_major", 4, 1, (64 * 132,), torch.uint8)
    parts = [
        [base[:, 0, : 64 * 128].view(4, 64, 128), base[:, 0, 64 * 128 :].view(4, 64, 4)] for base in (pages, want_pages)
    ]
    (loc, w_loc), (k, w_k), (s, w_s) = (
        twins.slots(70, parts[0][0]),
        twins.rows(70, 128, dtype=torch.uint8),
        twins.rows(70, 4, dtype=torch.uint8),
    )
    kernels.store_kv(*parts[0], loc, k, s)
    TORCH.store_kv(*parts[1], w_loc, w_k, w_s)
    assert twins.are_equal()
    assert launches == ["pair_kernel"]
    assert as_bytes(kernels.gather(parts[0][1], loc)) == as_bytes(w_s)


def test_rows_that_lie_apart_are_read_as_they_lie(twins, kernels, launches):
    """The keys of a fused projection: 128 of 512 columns of each token, at two of six columns a head."""
    ours, theirs = twins.view("layer_major", 4, 3, (2, 4), torch.float32)
    loc, want_loc = twins.slots(5, ours)
    fused, want_fused = twins.rows(5, 2, 6, dtype=torch.float32)
    kernels.store(ours, loc, fused[:, :, 1:5])
    TORCH.store(theirs, want_loc, want_fused[:, :, 1:5])
    kernels.store(ours, loc[:2], fused[:1, :, :4].expand(2, 2, 4))
    TORCH.store(theirs, want_loc[:2], want_fused[:1, :, :4].expand(2, 2, 4))
    assert twins.are_equal()
    assert launches == ["copy_kernel"] * 2


OTHER_DTYPES = (
    *("float16", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int8", "int16", "uint16", "int32", "int64", "complex128"),
)


@pytest.mark.parametrize("name", OTHER_DTYPES)
@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("form", ["layer_major", "part_of_heads", "columns_apart"])
def test_rows_of_any_type_that_start_anywhere_are_stored_moved_and_cleared(twins, kernels, name, n, form):
    dtype = getattr(torch, name)
    views = twins.view(form, 4, 3, (2, 7), dtype)
    loc, (tgt, want_tgt) = twins.slots(n, views[0], torch.int32), twins.slots(n, views[0])
    odd = [row[1:].view(n, 2, 7) for row in twins.rows(14 * n + 1, dtype=dtype)]
    fused = [rows[:, 1:8].unsqueeze(1).expand(n, 2, 7) for rows in twins.rows(n, 9, dtype=dtype)]
    for each, view, slots, target, rows, heads in zip(
        (kernels, TORCH), views, loc, (tgt, want_tgt), odd, fused, strict=True
    ):
        each.store(view, slots, rows)
        each.move([view, view[..., :3]], target, slots)
        each.store_kv(view[..., 1:], view[..., :1], target[:3], heads[:3, :, 1:], heads[:3, :, :1])
        each.clear([view[..., 2:]], target[3:])
    assert twins.are_equal()
    assert as_bytes(kernels.gather(views[0], loc[0])) == as_bytes(TORCH.gather(views[1], loc[1]))


def many_views(twins, pages, page_size):
    """Views of every item size, width and form but runs within runs, as a cache of several groups has them."""
    kinds = [
        ("layer_major", (2, 64), torch.bfloat16),
        ("page_major", (1, 576), torch.uint8),
        ("page_major", (3, 5), torch.float16),
        ("token_major", (7,), torch.uint8),
        ("layer_major", (4,), torch.uint8),
        ("layer_major", (1,), torch.int64),
        ("part_of_heads", (2, 3), torch.float32),
    ]
    return zip(*(twins.view(form, pages, page_size, shape, dtype) for form, shape, dtype in kinds), strict=True)


@PAGE_SIZES
@SLOTS
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "with runs"])
def test_overlapping_moves_read_all_sources_first_in_one_launch(twins, kernels, launches, page_size, loc_dtype, flat):
    ours, theirs = (list(views)[: 6 if flat else 7] for views in many_views(twins, 7, page_size))
    n = min(40, 7 * page_size)
    (tgt, want_tgt), (src, want_src) = twins.slots(n, ours[0], loc_dtype), twins.slots(n, ours[0], loc_dtype)
    kernels.move(ours, tgt, src)
    TORCH.move(theirs, want_tgt, want_src)
    assert twins.are_equal()
    assert launches == ["views_kernel"]


def test_a_move_of_as_many_slots_as_fit_takes_one_launch_and_of_more_two(twins, kernels, launches):
    ours, theirs = (list(views)[3:6] for views in many_views(twins, 40, 64))
    for n in (1024, 1025):
        launches.clear()
        (tgt, want_tgt), (src, want_src) = twins.slots(n, ours[0]), twins.slots(n, ours[0])
        kernels.move(ours, tgt, src)
        TORCH.move(theirs, want_tgt, want_src)
        assert twins.are_equal()
        assert len(launches) == n - 1023


def test_a_move_of_much_memory_goes_by_parts(twins, kernels, launches, monkeypatch):
    monkeypatch.setattr(triton_set, "MOVED_AT_ONCE", 8)
    monkeypatch.setattr(triton_tables, "_SCRATCH_NBYTES", 9 * 1024)
    ours, theirs = (list(views) for views in many_views(twins, 7, 3))
    (tgt, want_tgt), (src, want_src) = twins.slots(9, ours[0]), twins.slots(9, ours[0])
    kernels.move(ours, tgt, src)
    TORCH.move(theirs, want_tgt, want_src)
    assert twins.are_equal()
    assert launches == ["views_kernel"] * 2
    monkeypatch.setattr(triton_tables, "_SCRATCH_NBYTES", 8 * 1024)
    kernels.move(ours, src, tgt)
    TORCH.move(theirs, want_src, want_tgt)
    assert twins.are_equal()


def test_views_that_no_kernel_reads_are_moved_by_torch(twins, kernels, launches):
    ours, theirs = twins.view("columns_apart", 4, 3, (2, 3), torch.float32)
    (tgt, want_tgt), (src, want_src) = twins.slots(5, ours), twins.slots(5, ours)
    kernels.move([ours], tgt, src)
    TORCH.move([theirs], want_tgt, want_src)
    kernels.clear([ours, ours], tgt[:2])
    TORCH.clear([theirs], want_tgt[:2])
    assert twins.are_equal()
    assert launches == []


@PAGE_SIZES
def test_many_views_are_cleared_in_one_launch(twins, kernels, launches, page_size):
    ours, theirs = (list(views) for views in many_views(twins, 7, page_size))
    loc, want_loc = twins.slots(6, ours[0], torch.int32)
    kernels.clear(ours, loc)
    TORCH.clear(theirs, want_loc)
    kernels.clear(ours[:1], loc[:1])
    assert twins.are_equal()
    assert launches == ["views_kernel", "copy_kernel"]


def test_tables_are_written_once_for_views_that_live(twins, kernels):
    views = [twins.view("layer_major", 2, 2, (3,), torch.float32)[0] for _ in range(3)]
    table = kernels._tables.find(views, views)
    assert kernels._tables.find(list(views), tuple(views)) is table
    assert kernels._tables.find(views[:2], views[:2]) is not table
    del views
    twins.bases.clear()
    gc.collect()
    assert kernels._tables._kept == {}


def test_a_view_that_lies_elsewhere_gets_another_table(twins, kernels, device):
    views = [torch.ones(2, 2, 3, device=device) for _ in range(2)]
    kernels.clear(views, torch.tensor([1], device=device))
    views[0].set_(torch.full((2, 2, 3), 5.0, device=device))
    kernels.clear(views, torch.tensor([3], device=device))
    assert views[0].flatten(0, 1)[:, 0].tolist() == [5.0, 5.0, 5.0, 0.0]
    assert views[1].flatten(0, 1)[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0]


def overlapping_windows(base, steps=3, channels=4, kept=3):
    """Windows ``[rows, steps, channels, kept]`` of one row of inputs, each a column further."""
    return base.as_strided((6, steps, channels, kept), (channels * 5, 1, 5, 1))


def test_steps_are_stored_and_committed_where_windows_overlap(twins, kernels, launches):
    stored, want_stored = twins.view("layer_major", 6, 1, (4, 5), torch.bfloat16)
    temporal, want_temporal = twins.view("layer_major", 6, 3, (2, 8), torch.float32)
    conv, want_conv = twins.view("page_major", 5, 1, (4, 3), torch.bfloat16)
    states, want_states = twins.view("page_major", 5, 1, (2, 8), torch.float32)
    windows, want_windows = overlapping_windows(stored), overlapping_windows(want_stored)
    rows, values, want_values = torch.tensor([5, 1]), *twins.rows(2, 4, 3, dtype=torch.bfloat16)
    for step in (0, 2):
        kernels.store_step(windows, rows.to(stored.device, torch.int32), step, values)
        TORCH.store_step(want_windows, rows, step, want_values)
    places, loc = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([4, 2])
    kernels.commit_steps(
        [(windows, conv), (temporal, states)], rows.to(conv.device), places.to(conv.device), loc.to(conv.device)
    )
    TORCH.commit_steps([(want_windows, want_conv), (want_temporal, want_states)], rows, places, loc)
    assert twins.are_equal()
    assert launches == ["copy_kernel", "copy_kernel", "views_kernel"]


@FORMS
@DTYPES
def test_rows_are_copied_between_views_of_two_forms(twins, kernels, launches, form, dtype):
    ours, theirs = twins.view(form, 4, 3, (2, 5), dtype)
    other, want_other = twins.view("page_major", 2, 16, (2, 5), dtype)
    (tgt, want_tgt), (src, want_src) = twins.slots(6, ours, torch.int32), twins.slots(6, other)
    kernels.copy_rows(ours, tgt, other, src)
    TORCH.copy_rows(theirs, want_tgt, want_other, want_src)
    assert twins.are_equal()
    # What torch writes to runs within runs is read in one launch.
    assert launches == ["copy_kernel"]


def test_rows_go_to_pinned_memory_and_come_from_it(twins, kernels, launches, device):
    ours, theirs = twins.view("layer_major", 4, 3, (1, 8), torch.float32)
    host = torch.zeros(2, 16, 1, 8)
    host = host.pin_memory() if device != "cpu" else host
    (loc, want_loc), back = twins.slots(4, ours), torch.tensor([30, 2, 17, 9])
    kernels.copy_rows(host, back, ours, loc)
    kernels.copy_rows(ours, loc.flip(0), host, back)
    assert as_bytes(kernels.gather(ours, loc)) == as_bytes(TORCH.gather(theirs, want_loc).flip(0))
    assert launches[:2] == ["copy_kernel"] * 2


def test_empty_batches_and_empty_rows_launch_nothing(kernels, launches, device):
    view, none = torch.ones(3, 2, 4, device=device), torch.empty(0, dtype=torch.int64, device=device)
    hollow = torch.ones(3, 2, 0, device=device)
    kernels.store(view, none, view.new_empty(0, 4))
    kernels.store_kv(view, view, none, view.new_empty(0, 4), view.new_empty(0, 4))
    kernels.store_mla(view, none, view.new_empty(0, 1, 3), view.new_empty(0, 1))
    kernels.store(hollow, none.new_zeros(2), hollow.new_empty(2, 0))
    kernels.move([view, view], none, none)
    kernels.clear([view, hollow], none)
    kernels.clear([], none)
    kernels.move([], none, none)
    kernels.commit_steps([], none, none, none)
    kernels.copy_rows(view, none, view, none)
    assert kernels.gather(view, none).shape == (0, 4)
    assert kernels.gather(hollow, none.new_zeros(2)).shape == (2, 0)
    assert launches == []
    assert float(view.sum()) == 24.0


def test_rows_that_do_not_fit_are_refused_before_anything_is_written(kernels, device):
    view, loc = torch.zeros(3, 2, 4, device=device), torch.tensor([1, 2], device=device)
    for values in (view.new_ones(2, 5), view.new_ones(3, 4), torch.ones(2, 4, dtype=torch.float16, device=device)):
        with pytest.raises(SlotError, match=r"for 2 slots of a view \[3, 2, 4\].*give 2 rows of 4 elements"):
            kernels.store(view, loc, values)
        with pytest.raises(SlotError, match="give 2 rows of 4 elements"):
            kernels.store_kv(view, view, loc, view.new_ones(2, 4), values)
    assert not view.any()


def test_tensors_of_no_device_run_as_torch_runs_them(kernels):
    view, loc = torch.zeros(4, 4, 2, device="meta"), torch.zeros(3, dtype=torch.int64, device="meta")
    kernels.move([view], loc, loc)
    kernels.store(view, loc, torch.zeros(3, 2, device="meta"))
    assert kernels.gather(view, loc).shape == (3, 2)
    assert kernels.quantize_blocks(torch.zeros(3, 128, device="meta"), "float8_e4m3fn", 128)[1].shape == (3, 1)


def test_pages_past_32_bits_of_bytes_are_written_where_they_are(kernels, launches, tmp_path, device):
    # S-23: page 14,340 of 149,760 bytes starts past 2 ** 31.
    path, pages, page_nbytes = tmp_path / "pages", 14_400, 149_760
    with path.open("wb") as file:
        file.truncate(pages * page_nbytes)
    file = torch.from_file(str(path), shared=True, size=pages * page_nbytes, dtype=torch.uint8)
    base = file if device == "cpu" else torch.zeros(file.shape, dtype=torch.uint8, device=device)
    view = base.view(pages, 64, 1, 2340)
    first = 14_340 * 64
    loc = torch.tensor([first + 5, 9, first + 63], device=device)
    rows = torch.arange(3 * 2340, device=device).remainder(251).to(torch.uint8).view(3, 1, 2340)
    kernels.store(view, loc, rows)
    read = lambda offset: base[offset : offset + 2340]  # noqa: E731
    places = [2_147_558_400 + 5 * 2340, 9 * 2340, 2_147_558_400 + 63 * 2340]
    assert [torch.equal(read(place), row[0]) for place, row in zip(places, rows, strict=True)] == [True] * 3
    assert torch.equal(kernels.gather(view, loc), rows)
    kernels.move([view, view[..., :0]], loc, loc.flip(0))
    assert [torch.equal(read(place), row[0]) for place, row in zip(places, rows.flip(0), strict=True)] == [True] * 3
    kernels.clear([view, view[..., :0]], loc[:1])
    assert [bool(read(place).any()) for place in places] == [False, True, True]
    kernels.store_kv(view[..., :2336], view[..., 2336:], loc[:1], rows[:1, :, :2336], rows[:1, :, 2336:])
    assert torch.equal(read(places[0]), rows[0, 0])
    assert launches == ["copy_kernel", "copy_kernel", "views_kernel", "views_kernel", "pair_kernel"]


def as_bytes(tensor):
    return np.asarray(tensor.cpu().contiguous().reshape(-1).view(torch.uint8)).tobytes()
