"""The torch kernels write and read the bytes of their slots and no others: any data type, width, place and count.

Beside plain indexing of bytes: a view's elements are numbers in a row, and an element is a row of bytes.
"""

import pytest
from kvdock.errors import SlotError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.kernels.reference import ReferenceKernels  # noqa: E402

KERNELS = ReferenceKernels()
PAGES, PAGE_SIZE = 4, 3
NAMES = (
    *("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "uint8", "int8", "bool", "int16", "uint16", "int32", "int64", "complex128"),
)
DTYPES = pytest.mark.parametrize("dtype", [getattr(torch, name) for name in NAMES], ids=NAMES)
SHAPES = pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 5), (3, 1), (2, 8)], ids=str)
FORMS = (
    "contiguous",
    "page-major",
    "token-major",
    "head-major",
    "part of heads",
    "columns apart",
    "pages further apart",
)
COUNTS = (0, 1, 5)


class Memory:
    """Random bytes, and beside them the same bytes by element, which tests write for themselves."""

    def __init__(self, dtype, elements):
        high = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, high, (elements * dtype.itemsize,), dtype=torch.uint8)
        self.dtype, self.wanted = dtype, raw.clone().view(elements, dtype.itemsize)
        self.held = raw.view(dtype)

    def view(self, places):
        """The elements at `places`, as a view."""
        return self.held.as_strided(places.shape, places.stride(), places.storage_offset())

    def is_as_wanted(self):
        return torch.equal(self.held.view(torch.uint8), self.wanted.flatten())


def view_places(form, shape, offset):
    """Where the elements ``[PAGES, PAGE_SIZE, *shape]`` of a view lie, numbers that are strided as the view is."""
    count, (last, *_) = torch.Size(shape).numel(), (*reversed(shape), 1)
    numbers = torch.arange(9 + 4 * PAGES * PAGE_SIZE * (count + 1) * 2)[offset:]
    cut = lambda *sizes: numbers[: torch.Size(sizes).numel()].view(sizes)  # noqa: E731
    if form == "page-major":
        return cut(PAGES, 3, PAGE_SIZE, *shape)[:, 1]
    if form == "token-major":
        return cut(PAGES, PAGE_SIZE, 2, *shape)[:, :, 1]
    if form == "head-major" and len(shape) == 2:
        return cut(PAGES, shape[0], PAGE_SIZE, last).transpose(1, 2)
    if form == "part of heads" and shape:
        return cut(PAGES, PAGE_SIZE, *shape[:-1], last + 3)[..., 2:-1]
    if form == "columns apart":
        return cut(PAGES, PAGE_SIZE, *shape, 2)[..., 1]
    if form == "pages further apart":
        return cut(PAGES, PAGE_SIZE * count + 5)[:, :-5].unflatten(1, (PAGE_SIZE, *shape))
    return cut(PAGES, PAGE_SIZE, *shape)


def rows_of(dtype, n, shape, form):
    """Random rows ``[n, *shape]`` as a caller may give them, and their bytes."""
    count = torch.Size(shape).numel()
    memory = Memory(dtype, 2 * max(n, 1) * count + 3)
    numbers = torch.arange(len(memory.held))
    places = {
        "dense": numbers[: n * count].view(n, *shape),
        "after one element": numbers[1 : n * count + 1].view(n, *shape),
        "fused": numbers[1 : 2 * n * count + 1].view(n, 2, *shape)[:, 0],
        "columns apart": numbers[: 2 * n * count].view(n, *shape, 2)[..., 1],
        "turned": numbers[: n * count].view(*shape, n).movedim(-1, 0),
        "repeated": numbers[1 : count + 1].view(1, *shape).expand(n, *shape),
    }[form]
    return memory.view(places), memory.wanted[places]


def bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def slots_of(n, dtype=torch.int64):
    return torch.randperm(PAGES * PAGE_SIZE)[:n].to(dtype)


def at(places, slots):
    return places[slots.long() // PAGE_SIZE, slots.long() % PAGE_SIZE]


def views(dtype, shape):
    """A memory and where a view of it lies: every form, at an aligned place and at odd ones."""
    for form in FORMS:
        for offset in (0, 1, 3, 8):
            places = view_places(form, shape, offset)
            yield Memory(dtype, 9 + 4 * PAGES * PAGE_SIZE * (torch.Size(shape).numel() + 1) * 2), places


@DTYPES
@SHAPES
def test_a_store_writes_the_bytes_of_its_slots_and_a_gather_reads_them(dtype, shape):
    for memory, places in views(dtype, shape):
        for n in COUNTS:
            for given in ("dense", "after one element", "fused", "columns apart", "turned", "repeated"):
                (rows, wanted), slots = rows_of(dtype, n, shape, given), slots_of(n, torch.int32)
                KERNELS.store(memory.view(places), slots, rows)
                memory.wanted[at(places, slots)] = wanted
                assert memory.is_as_wanted(), (places.stride(), places.storage_offset(), n, given)
                found = KERNELS.gather(memory.view(places), slots)
                assert (found.shape, found.dtype) == ((n, *shape), dtype)
                assert torch.equal(bytes_of(found), wanted.flatten())


@DTYPES
@SHAPES
def test_moves_clearings_and_copies_leave_the_bytes_of_other_slots(dtype, shape):
    for memory, places in views(dtype, shape):
        for n in COUNTS:
            target, source = slots_of(n), slots_of(n)
            KERNELS.move([memory.view(places)], target, source)
            memory.wanted[at(places, target)] = memory.wanted[at(places, source)]
            KERNELS.clear([memory.view(places)], target[:1])
            memory.wanted[at(places, target[:1])] = 0
            other = Memory(dtype, len(memory.held))
            KERNELS.copy_rows(memory.view(places), source, other.view(places), target)
            memory.wanted[at(places, source)] = other.wanted[at(places, target)]
            assert memory.is_as_wanted(), (places.stride(), places.storage_offset(), n)
            assert other.is_as_wanted()


@DTYPES
@pytest.mark.parametrize("widths", [(512, 64), (5, 3), (1, 1)], ids=str)
def test_keys_and_values_and_latents_of_any_width_go_to_the_same_slots(dtype, widths):
    for n in COUNTS:
        for offset in (0, 1):
            slots, places = slots_of(n), view_places("page-major", (1, sum(widths)), offset)
            memory = Memory(dtype, 9 + 4 * PAGES * PAGE_SIZE * (sum(widths) + 1) * 2)
            (latent, first), (rope, last) = (rows_of(dtype, n, (1, width), "fused") for width in widths)
            KERNELS.store_mla(memory.view(places), slots, latent, rope)
            memory.wanted[at(places, slots)] = torch.cat((first, last), dim=-2)
            assert memory.is_as_wanted()
            KERNELS.store_kv(memory.view(places[..., 1:]), memory.view(places[..., :1]), slots, *_turned(latent, rope))
            row = torch.cat((first, last), dim=-2)
            memory.wanted[at(places, slots)] = row.roll(1, dims=-2)
            assert memory.is_as_wanted()


def _turned(latent, rope):
    """All but the last column, and the last one."""
    row = torch.cat((latent.contiguous().view(torch.uint8), rope.contiguous().view(torch.uint8)), dim=-1)
    row = row.view(latent.dtype)
    return row[..., :-1], row[..., -1:]


@DTYPES
@pytest.mark.parametrize("form", ["dense", "after one element", "windows"])
def test_steps_are_stored_and_committed_byte_by_byte(dtype, form):
    rows, steps, channels, kept = 3, 2, 5, 3
    numbers = torch.arange(rows * steps * channels * (kept + steps) + 1)
    places = {
        "dense": numbers[: rows * steps * 15].view(rows, steps, channels, kept),
        "after one element": numbers[1 : rows * steps * 15 + 1].view(rows, steps, channels, kept),
        "windows": numbers.as_strided((rows, steps, channels, kept), (channels * 4, 1, 4, 1)),
    }[form]
    memory, target = Memory(dtype, len(numbers)), Memory(dtype, PAGES * PAGE_SIZE * 15)
    values, wanted = rows_of(dtype, 2, (channels, kept), "fused")
    KERNELS.store_step(memory.view(places), torch.tensor([2, 0], dtype=torch.int32), 1, values)
    memory.wanted[places[[2, 0], 1]] = wanted
    assert memory.is_as_wanted()
    aim = torch.arange(len(target.held)).view(PAGES, PAGE_SIZE, channels, kept)
    pair = memory.view(places), target.view(aim)
    KERNELS.commit_steps([pair], torch.tensor([1, 2]), torch.tensor([1, 0], dtype=torch.int32), torch.tensor([10, 4]))
    target.wanted[at(aim, torch.tensor([10, 4]))] = memory.wanted[places[[1, 2], [1, 0]]]
    assert memory.is_as_wanted()
    assert target.is_as_wanted()


def test_rows_that_do_not_fit_are_refused_before_anything_is_written():
    view, loc = torch.zeros(3, 2, 4, dtype=torch.bfloat16), torch.tensor([1, 2])
    fit = view.new_ones(2, 4)
    for other in (view.new_ones(2, 5), view.new_ones(1, 4), fit.half()):  # half: as wide as bfloat16
        with pytest.raises(SlotError, match=r"for 2 slots of a view \[3, 2, 4\] in torch.bfloat16; give 2 rows of 4"):
            KERNELS.store(view, loc, other)
        with pytest.raises(SlotError, match="give 2 rows of 4 elements of the view's type"):
            KERNELS.store_kv(view, view, loc, fit, other)
    with pytest.raises(SlotError, match="give 2 rows of 3 elements"):
        KERNELS.store_mla(view, loc, fit[:, :1], view.new_ones(1, 3))
    assert not view.any()
