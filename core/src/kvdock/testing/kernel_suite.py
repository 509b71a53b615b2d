"""What every kernel set does, as tests: each method beside the torch reference, on random data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from kvdock import dtypes
from kvdock.testing.kernel_data import (
    A09_SPANS,
    ARRANGEMENTS,
    Draw,
    Extend,
    Twin,
    integers,
    random_spans,
    same,
)
from kvdock.testing.suite_base import Checks, vary

if TYPE_CHECKING:
    import torch

    from kvdock.kernels.interface import Kernels

BLOCK_FORMATS = ("float4_e2m1fn_x2", "nvfp4", "mxfp8")
"""Formats of `store_blocks`."""


class KernelSuite(Checks):
    """The results of a kernel set are those of `kvdock.kernels.reference`, bit by bit, and nothing else is written."""

    torch_device: ClassVar[str] = "cpu"
    """Where the kernels run."""
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float32", "uint8")
    page_sizes: ClassVar[tuple[int, ...]] = (1, 3, 16)
    shapes: ClassVar[tuple[tuple[int, ...], ...]] = ((2, 8), (1, 5), (3,))
    """What a slot holds; odd widths too."""
    counts: ClassVar[tuple[int, ...]] = (0, 1, 7, 133)
    """Slots of a batch."""
    quantized: ClassVar[tuple[str, ...]] = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2")
    """Types of `quantize_blocks`."""
    runs_on_meta: ClassVar[bool] = False
    """True for kernels in torch: the check that nothing waits for a device then needs no device."""
    seeds = (1,)

    def kernels(self) -> Kernels:
        """Return the kernel set under test; a subclass gives it.

        Raises:
            TypeError: the subclass does not.
        """
        raise TypeError(f"{type(self).__name__} names no kernel set; give kernels(), which returns one")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run what addresses slots in each arrangement and with each page size."""
        super().pytest_generate_tests(metafunc)
        vary(metafunc, "arrangement", ARRANGEMENTS)
        vary(metafunc, "page_size", self.page_sizes)

    @pytest.fixture
    def both(self) -> tuple[Kernels, Kernels]:
        """Give the kernels under test, and the reference."""
        pytest.importorskip("torch")
        from kvdock.kernels.reference import ReferenceKernels

        return self.kernels(), ReferenceKernels()

    @pytest.fixture
    def draw(self, seed: int) -> Draw:
        """Give random data."""
        pytest.importorskip("torch")
        return Draw(seed, self.torch_device)

    def _batches(self, draw: Draw, page_size: int) -> Iterator[tuple[int, str, tuple[int, ...], torch.Tensor]]:
        """Yield pages, data type, row shape and slots: every type with every count, shapes and slot types in turn."""
        pages = -(-(max(self.counts) + 1) // page_size) + 1
        turn = 0
        for dtype in self.dtypes:
            for count in self.counts:
                loc = draw.slots(count, pages * page_size, ("int64", "int32")[turn % 2])
                yield pages, dtype, self.shapes[turn % len(self.shapes)], loc
                turn += 1

    def test_store(self, both: Any, draw: Draw, arrangement: str, page_size: int) -> None:
        """`store` writes rows to their slots and to nothing else."""
        for pages, dtype, shape, loc in self._batches(draw, page_size):
            twin = Twin(draw, arrangement, pages, page_size, shape, dtype)
            rows = draw.numbers((len(loc), *shape), dtype)
            both[0].store(twin.view, self._given(loc), self._given(rows))
            both[1].store(twin.other, loc, rows)
            twin.check(f"store of {len(loc)} rows {shape} of {dtype}")

    def test_store_takes_padding(self, both: Any, draw: Draw, arrangement: str, page_size: int) -> None:
        """Slot 0 may be named several times in one batch; whichever row stays there, no other slot changes."""
        twin = Twin(draw, arrangement, 8, page_size, (2, 8), self.dtypes[0])
        rows = draw.numbers((4, 2, 8), self.dtypes[0])
        loc = integers([0, 5, 0, 0], "int64", "cpu")
        both[0].store(twin.view, self._given(loc), self._given(rows))
        both[1].store(twin.other, loc, rows)
        twin.check("store of a padded batch", but_slot_0=True)

    def test_store_kv(self, both: Any, draw: Draw, arrangement: str, page_size: int) -> None:
        """`store_kv` writes keys and values of other widths to the same slots of two views."""
        for pages, dtype, shape, loc in self._batches(draw, page_size):
            wider = (*shape[:-1], shape[-1] + 3)
            twins = [Twin(draw, arrangement, pages, page_size, each, dtype) for each in (shape, wider)]
            k, v = (draw.numbers((len(loc), *each), dtype) for each in (shape, wider))
            both[0].store_kv(twins[0].view, twins[1].view, self._given(loc), self._given(k), self._given(v))
            both[1].store_kv(twins[0].other, twins[1].other, loc, k, v)
            for twin, name in zip(twins, ("keys", "values"), strict=True):
                twin.check(f"{name} of store_kv of {len(loc)} rows of {dtype}")

    @pytest.mark.parametrize("heads", [(), (1,)], ids=["rows", "one head"])
    def test_store_mla(self, both: Any, draw: Draw, arrangement: str, page_size: int, heads: tuple[int, ...]) -> None:
        """`store_mla` writes the latent first and the rope last, in rows that may be wider than both."""
        for wider, (pages, dtype, _, loc) in enumerate(self._batches(draw, page_size)):
            twin = Twin(draw, arrangement, pages, page_size, (*heads, 16 + 5 + wider % 3), dtype)
            latent, rope = (draw.numbers((len(loc), *heads, width), dtype) for width in (16, 5))
            both[0].store_mla(twin.view, self._given(loc), self._given(latent), self._given(rope))
            both[1].store_mla(twin.other, loc, latent, rope)
            twin.check(f"store_mla of {len(loc)} rows of {dtype}, {wider % 3} columns wider")

    def test_gather(self, both: Any, draw: Draw, arrangement: str, page_size: int) -> None:
        """`gather` returns the rows of the slots, which may repeat, as a copy."""
        for pages, dtype, shape, loc in self._batches(draw, page_size):
            twin = Twin(draw, arrangement, pages, page_size, shape, dtype)
            repeated = loc.repeat(2)
            found = both[0].gather(twin.view, self._given(repeated))
            assert same(found, both[1].gather(twin.other, repeated)), f"gather of {len(repeated)} rows of {dtype}"
            found.zero_()
            twin.check("writing to what gather returned")

    def test_move(self, both: Any, draw: Draw, arrangement: str, page_size: int) -> None:
        """`move` reads every source before it writes, in every view."""
        for pages, dtype, shape, loc in self._batches(draw, page_size):
            twins = self._of_two_types(draw, arrangement, pages, page_size, shape, dtype)
            targets = loc.roll(1)
            both[0].move([twin.view for twin in twins], self._given(targets), self._given(loc))
            both[1].move([twin.other for twin in twins], targets, loc)
            for twin in twins:
                twin.check(f"move of {len(loc)} slots of {dtype}")

    def _of_two_types(
        self, draw: Draw, arrangement: str, pages: int, page_size: int, shape: tuple[int, ...], dtype: str
    ) -> list[Twin]:
        """Return views that one pool may have: rows of `dtype`, and others of another shape and type."""
        other = self.dtypes[(self.dtypes.index(dtype) + 1) % len(self.dtypes)]
        return [Twin(draw, arrangement, pages, page_size, each, of) for each, of in ((shape, dtype), ((4,), other))]

    def test_clear(self, both: Any, draw: Draw, arrangement: str, page_size: int) -> None:
        """`clear` zeroes the slots of every view and nothing else."""
        for pages, dtype, shape, loc in self._batches(draw, page_size):
            twins = self._of_two_types(draw, arrangement, pages, page_size, shape, dtype)
            both[0].clear([twin.view for twin in twins], self._given(loc))
            both[1].clear([twin.other for twin in twins], loc)
            for twin in twins:
                twin.check(f"clear of {len(loc)} slots of {dtype}")

    def test_copy_rows(self, both: Any, draw: Draw, arrangement: str, page_size: int) -> None:
        """`copy_rows` copies slots from view to view; the source stays as it is."""
        for pages, dtype, shape, loc in self._batches(draw, page_size):
            twins = [Twin(draw, arrangement, pages, page_size, shape, dtype) for _ in range(2)]
            targets = draw.slots(len(loc), pages * page_size, "int64")
            both[0].copy_rows(twins[0].view, self._given(targets), twins[1].view, self._given(loc))
            both[1].copy_rows(twins[0].other, targets, twins[1].other, loc)
            for twin, name in zip(twins, ("target", "source"), strict=True):
                twin.check(f"{name} of copy_rows of {len(loc)} slots of {dtype}")

    @pytest.mark.parametrize("name", BLOCK_FORMATS)
    def test_store_and_load_blocks(self, both: Any, draw: Draw, arrangement: str, page_size: int, name: str) -> None:
        """`store_blocks` and `load_blocks` are those of `kvdock.kernels.microscaling`, by slot and in whole pages."""
        import torch

        form, width = dtypes.find(name), 64
        scale = integers([1], "float32", "cpu") / 64 if name == "nvfp4" else None
        given = None if scale is None else self._given(scale)
        for count in self.counts:
            pages = -(-(count + 1) // page_size)
            loc = draw.slots(count, pages * page_size, "int64")
            data = Twin(draw, arrangement, pages, page_size, (2, width * form.bits // 8), "uint8")
            scales = Twin(draw, arrangement, pages, page_size, (2, width // form.block), "uint8")
            everything = draw.slots(pages * page_size, pages * page_size, "int64")
            for slots in (everything, loc):
                rows = draw.floats((len(slots), 2, width), "bfloat16")
                both[0].store_blocks(data.view, scales.view, self._given(slots), self._given(rows), form, given)
                both[1].store_blocks(data.other, scales.other, slots, rows, form, scale)
            data.check(f"elements of {count} rows of {name}")
            scales.check(f"scales of {count} rows of {name}")
            for some in (loc, None):
                at = None if some is None else self._given(some)
                found = both[0].load_blocks(data.view, scales.view, at, form, torch.float32, given)
                right = both[1].load_blocks(data.other, scales.other, some, form, torch.float32, scale)
                assert same(found, right), f"load_blocks of {name}, {'every slot' if some is None else count}"

    def test_store_step(self, both: Any, draw: Draw) -> None:
        """`store_step` writes one step of some rows, steps apart or over each other."""
        for dtype in self.dtypes:
            for arrangement in ARRANGEMENTS:
                twin = Twin(draw, arrangement, 9, 4, (2, 3), dtype)
                self._store_steps(both, draw, twin, twin.view, twin.other, f"{arrangement} of {dtype}")
            twin = Twin(draw, "layer_major", 9, 6, (3,), dtype)
            windows = [view.unfold(1, 3, 1).transpose(2, 3) for view in (twin.view, twin.other)]
            self._store_steps(both, draw, twin, windows[0], windows[1], f"windows of {dtype}")

    def _store_steps(
        self, both: Any, draw: Draw, twin: Twin, view: torch.Tensor, other: torch.Tensor, where: str
    ) -> None:
        for step, count in enumerate((0, 1, 5, 9)):
            rows = draw.slots(count, 9, ("int64", "int32")[step % 2])
            values = draw.numbers((count, *view.shape[2:]), str(view.dtype).removeprefix("torch."))
            both[0].store_step(view, self._given(rows), step, self._given(values))
            both[1].store_step(other, rows, step, values)
            twin.check(f"store_step {step} of {count} rows, {where}")

    def test_commit_steps(self, both: Any, draw: Draw, arrangement: str, page_size: int) -> None:
        """`commit_steps` copies a step of each row, different ones, to slots of the targets."""
        for dtype in self.dtypes:
            for count in (0, 1, 7):
                sources = [Twin(draw, "layer_major", 8, 4, shape, dtype) for shape in self.shapes]
                targets = [Twin(draw, arrangement, 12, page_size, shape, dtype) for shape in self.shapes]
                rows, loc = draw.slots(count, 8, "int64"), draw.slots(count, 12, "int64")
                steps = integers([draw.below(4) for _ in range(count)], "int32", "cpu")
                pairs = list(zip(sources, targets, strict=True))
                both[0].commit_steps(
                    [(s.view, t.view) for s, t in pairs], self._given(rows), self._given(steps), self._given(loc)
                )
                both[1].commit_steps([(s.other, t.other) for s, t in pairs], rows, steps, loc)
                for twin in (*sources, *targets):
                    twin.check(f"commit_steps of {count} rows of {dtype}")

    @pytest.mark.parametrize("integer", ["int64", "int32"])
    def test_extends_equal_a_loop_over_the_tokens(self, both: Any, draw: Draw, integer: str) -> None:
        """`alloc_extend` takes the rest of each last page, then new pages in order; int64, and of the length asked for."""
        pages = (*self.page_sizes, 128)
        spans = [(A09_SPANS, 128), ((), 4), (((0, 0),) * 3, 16)]
        spans += [(tuple(random_spans(draw, page, 1 + draw.below(9))), page) for page in pages for _ in range(6)]
        for each, page in spans:
            extend = Extend(draw, each, page)
            found = extend.run(both[0], self.torch_device, integer)
            assert str(found.dtype) == "torch.int64", f"slots of an extend are {found.dtype}, not int64"
            assert found.tolist() == extend.expected, f"extend of {each} in pages of {page}"
            assert extend.run(both[1], "cpu", integer).tolist() == extend.expected

    @pytest.mark.parametrize("integer", ["int64", "int32"])
    def test_decodes_take_pages_in_order(self, both: Any, draw: Draw, integer: str) -> None:
        """`alloc_decode` follows each last slot, and at a bound takes the next new page."""
        for page in (*self.page_sizes, 128):
            for requests in (0, 1, 5, 70):
                spans = [(prefix, prefix + 1) for prefix, _ in random_spans(draw, page, requests)]
                extend = Extend(draw, spans, page)
                seq, last, new = (
                    integers(values, integer, self.torch_device)
                    for values in ([seq for _, seq in spans], extend.last, extend.pages)
                )
                found = both[0].alloc_decode(seq, last, new, page)
                assert str(found.dtype) == "torch.int64", f"slots of a decode are {found.dtype}, not int64"
                assert found.tolist() == extend.expected, f"decode of {spans} in pages of {page}"

    def test_slots_are_64_bits_wide(self, both: Any) -> None:
        """Page 40,000,000 of 64 slots begins at slot 2,560,000,000, whatever the width of the arguments."""
        page, first = 40_000_000, 2_560_000_000

        def given(*values: int) -> torch.Tensor:
            return integers(values, "int32", self.torch_device)

        extended = both[0].alloc_extend(given(0, 1), given(2, 2), given(-1, 2**31 - 1), given(page), 64, 3)
        assert extended.tolist() == [first, first + 1, 2**31]
        assert both[0].alloc_decode(given(1), given(-1), given(page), 64).tolist() == [first]
        assert both[0].translate(given(0, page), given(67), 64).tolist() == [first + 3]

    def test_offsets_are_64_bits_wide(self, both: Any) -> None:
        """Rows beyond 2 GiB of a view are written, moved, cleared and read where they are, by every method."""
        import torch

        rows, width = 2**31 // 64 + 1024, 64
        memory = torch.empty(rows * width, dtype=torch.uint8, device=self.torch_device)
        value = torch.arange(1, 2 * width + 1, dtype=torch.uint8, device=self.torch_device).view(2, width)
        far, near = (integers(slots, "int64", self.torch_device) for slots in ([rows - 1, rows - 900], [3, 20]))
        table = memory.view(rows, width)
        for page_size in (1, 16):
            view = memory.view(-1, page_size, width)
            for name, call in _far_calls(both[0], view, far, near, value).items():
                table[near], table[far] = value, value if name == "clear" else 0
                call()
                expected = value * 0 if name == "clear" else value
                assert same(table[far], expected), (
                    f"{name} beyond 2 GiB, pages of {page_size}: compute offsets in int64"
                )
            table[near], table[far] = 0, value
            assert same(both[0].gather(view, far), value), f"gather beyond 2 GiB, pages of {page_size}"
            both[0].copy_rows(view, near, view, far)
            assert same(table[near], value), f"copy_rows from beyond 2 GiB, pages of {page_size}"
            table[near] = 0
            both[0].move([view], near, far)
            assert same(table[near], value), f"move from beyond 2 GiB, pages of {page_size}"

    def test_rows_may_be_parts_of_wider_ones(self, both: Any, draw: Draw, arrangement: str, page_size: int) -> None:
        """Keys and values may be cut out of one tensor, and slots be every other one of a tensor; none of them changes."""
        for dtype in self.dtypes:
            twins = [Twin(draw, arrangement, 8, page_size, (2, 8), dtype) for _ in range(2)]
            count = min(5, 8 * page_size)
            wide, slots = (
                draw.numbers((count, 6, 8), dtype),
                draw.slots(count, 8 * page_size, "int64").repeat_interleave(2),
            )
            given = self._given(wide), self._given(slots)
            both[0].store_kv(twins[0].view, twins[1].view, given[1][::2], given[0][:, 2:4], given[0][:, 4:])
            both[1].store_kv(twins[0].other, twins[1].other, slots[::2], wide[:, 2:4], wide[:, 4:])
            for twin, name in zip(twins, ("keys", "values"), strict=True):
                twin.check(f"{name} of store_kv of {dtype}, rows apart by their strides")
            assert same(given[0], wide), f"store_kv of {dtype} changed the rows that it was given"
            assert same(given[1], slots), f"store_kv of {dtype} changed the slots that it was given"

    def test_write_rows(self, both: Any, draw: Draw) -> None:
        """`write_rows` writes a word a token to a table whose rows may be longer than what is seen of them."""
        for arrangement in ("layer_major", "token_major"):
            for count in self.counts:
                table = Twin(draw, arrangement, 12, 40, (), "int32")
                places = draw.slots(count, 480, ("int64", "int32")[count % 2])
                rows, columns = places // 40, places % 40
                slots = draw.slots(count, 1000, "int64")
                both[0].write_rows(table.view, self._given(rows), self._given(columns), self._given(slots))
                both[1].write_rows(table.other, rows, columns, slots)
                table.check(f"write_rows of {count} slots")

    def test_write_spans(self, both: Any, draw: Draw) -> None:
        """`write_spans` writes the slots of several rows, span after span, empty ones among them."""
        for arrangement in ("layer_major", "token_major"):
            for spans in ((), ((3, 5, 5),), ((2, 0, 40),), ((7, 1, 4), (0, 39, 40), (11, 6, 6), (1, 0, 17))):
                table = Twin(draw, arrangement, 12, 40, (), "int32")
                rows, starts, ends = _columns(spans)
                slots = draw.slots(int((ends - starts).sum()), 1000, "int64")
                both[0].write_spans(table.view, rows, starts, ends, self._given(slots))
                both[1].write_spans(table.other, rows, starts, ends, slots)
                table.check(f"write_spans of {spans}")

    def test_read_pages(self, both: Any, draw: Draw) -> None:
        """`read_pages` returns the pages of several rows, from the word of the first column of each, as int64."""
        import torch

        for page in self.page_sizes:
            pages = draw.numbers((6, 8), "uint8").to(torch.int32)
            table = (
                pages.repeat_interleave(page, 1) * page + torch.arange(8 * page, dtype=torch.int32) % page
            ).contiguous()
            for spans in ((), ((3, 2, 2),), ((2, 0, 8),), ((5, 1, 4), (0, 7, 8), (1, 3, 3), (4, 0, 5))):
                rows, firsts, lasts = _columns(spans)
                found = both[0].read_pages(self._given(table), rows, firsts, lasts, page)
                right = [number for row, first, last in spans for number in pages[row, first:last].tolist()]
                assert str(found.dtype) == "torch.int64"
                assert found.tolist() == right, f"read_pages of {spans}, pages of {page}"

    def test_translate(self, both: Any, draw: Draw) -> None:
        """`translate` keeps the place in the page and −1; page 0 is slot 0; the answer is int64 of the slots' shape."""
        for page in self.page_sizes:
            for turn, count in enumerate(self.counts):
                mapping = draw.slots(50, 60, ("int64", "int32")[turn // 2])
                mapping[:3] = 0
                slots = integers([draw.below(50 * page + 1) - 1 for _ in range(2 * count)], "int64", "cpu")
                loc = slots.to(mapping.dtype).view(2, count)
                found = both[0].translate(self._given(mapping), self._given(loc), page)
                assert same(found, both[1].translate(mapping, loc, page)), f"translate of {count}, pages of {page}"

    def test_quantize_blocks(self, both: Any, draw: Draw) -> None:
        """`quantize_blocks` answers the bytes and scales of the reference, and `dequantize_blocks` what they are worth."""
        for dtype in self.quantized:
            for shape in ((0, 128), (1, 64), (7, 2, 128), (33, 128)):
                values = draw.floats(shape)
                found = both[0].quantize_blocks(self._given(values), dtype, 32)
                right = both[1].quantize_blocks(values, dtype, 32)
                for name, mine, its in zip(("bytes", "scales"), found, right, strict=True):
                    assert same(mine, its), f"{name} of {shape} in {dtype}"
                assert same(both[0].dequantize_blocks(*found, dtype, 32), both[1].dequantize_blocks(*right, dtype, 32))

    def test_what_is_no_number_stays_in_its_block(self, both: Any, draw: Draw) -> None:
        """Infinities saturate, NaN makes its block NaN, and the next block does not notice."""
        import torch

        for dtype in self.quantized:
            values = draw.floats((3, 64))
            values[0, 5], values[1, 40], values[2, 0] = torch.inf, -torch.inf, torch.nan
            found = both[0].dequantize_blocks(*both[0].quantize_blocks(self._given(values), dtype, 32), dtype, 32)
            right = both[1].dequantize_blocks(*both[1].quantize_blocks(values, dtype, 32), dtype, 32)
            assert torch.equal(found.cpu().nan_to_num(1e30), right.nan_to_num(1e30)), f"{dtype}"

    def test_nothing_waits_for_the_device(self, both: Any) -> None:
        """No method reads a value back: on ``meta``, or while the device refuses to be waited for."""
        import torch

        if self.torch_device.startswith("cuda"):
            run = _Calls(both[0], self.torch_device)
            run.make()  # compiles, and may wait once for what it keeps
            torch.cuda.set_sync_debug_mode("error")
            try:
                run.make()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        elif self.runs_on_meta:
            _Calls(both[0], "meta").make()
        else:
            pytest.skip(
                f"nothing tells on {self.torch_device} whether a kernel waits; set runs_on_meta for torch kernels"
            )

    def _given(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device of the kernels."""
        return tensor.to(self.torch_device)


def _columns(spans: Sequence[tuple[int, int, int]]) -> tuple[Any, Any, Any]:
    """Return rows, starts and ends of spans as numbers on the host."""
    import numpy as np

    table = np.array(spans, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _far_calls(
    kernels: Kernels, view: torch.Tensor, far: torch.Tensor, near: torch.Tensor, value: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Return the calls that write `value`, which the slots `near` hold, to the slots `far`; one that zeroes these."""
    return {
        "store": lambda: kernels.store(view, far, value),
        "store_kv": lambda: kernels.store_kv(view[..., :24], view[..., 24:], far, value[:, :24], value[:, 24:]),
        "store_mla": lambda: kernels.store_mla(view, far, value[:, :24], value[:, 24:]),
        "move": lambda: kernels.move([view], far, near),
        "copy_rows": lambda: kernels.copy_rows(view, far, view, near),
        "clear": lambda: kernels.clear([view], far),
    }


class _Calls:
    """One call of each method that is on the path of a token; the arguments are there before."""

    def __init__(self, kernels: Kernels, device: str) -> None:
        import torch

        self.kernels, self.device = kernels, device
        self.view = torch.zeros(4, 4, 8, dtype=torch.bfloat16, device=device)
        self.rows = torch.ones(2, 8, dtype=torch.bfloat16, device=device)
        self.wide = torch.ones(2, 32, dtype=torch.bfloat16, device=device)
        self.blocks = [torch.zeros(4, 4, width, dtype=torch.uint8, device=device) for width in (32, 1)]
        self.table = torch.zeros(4, 16, dtype=torch.int32, device=device)
        self.loc, self.one, self.two, self.last = (
            integers(values, "int64", "cpu").to(device) for values in ([5, 6], [1, 1], [6, 2], [7, 4])
        )

    def make(self) -> None:
        """Call everything."""
        kernels, view, loc = self.kernels, self.view, self.loc
        kernels.store(view, loc, self.rows)
        kernels.store_kv(view, view, loc, self.rows, self.rows)
        kernels.store_mla(view, loc, self.rows[:, :6], self.rows[:, 6:])
        kernels.gather(view, loc)
        kernels.move([view], loc, self.last)
        kernels.clear([view], loc)
        kernels.copy_rows(view, loc, view, self.last)
        kernels.write_rows(self.table, self.one, loc, loc)
        kernels.write_spans(self.table, *_columns(((1, 0, 2),)), loc)
        kernels.read_pages(self.table, *_columns(((1, 0, 2),)), 4)
        kernels.store_step(view, self.one[:1], 1, self.rows[:1])
        kernels.commit_steps([(view, view)], self.one, self.one, loc)
        kernels.store_blocks(self.blocks[0], self.blocks[1], loc, self.wide, dtypes.find("mxfp8"))
        kernels.load_blocks(self.blocks[0], self.blocks[1], loc, dtypes.find("mxfp8"), self.wide.dtype)
        kernels.dequantize_blocks(*kernels.quantize_blocks(self.rows.float(), "float8_e4m3fn", 8), "float8_e4m3fn", 8)
        kernels.translate(self.last, self.one, 1)
        kernels.alloc_extend(self.one, self.two, self.last, self.loc[:1], 4, 6)
        kernels.alloc_decode(self.two, self.last, self.loc[:0], 4)
