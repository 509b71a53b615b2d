"""Views in guarded memory, twice: for the kernels under test and for the reference, so that every byte is compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvdock.kernels.interface import Kernels

GUARD = 64
"""Elements before and behind a view's memory, which no kernel may touch."""

ARRANGEMENTS = ("layer_major", "page_major", "token_major")
"""A tensor of its own; one of two layers side by side in each page; one of two side by side in each slot."""

A09_SPANS = ((10, 50), (0, 0), (128, 128), (127, 300))
"""Prefixes and lengths that trip an extend in pages of 128: inside a page, empty, at a bound, over two bounds."""


class Twin:
    """Random memory, and one view ``[pages, page_size, *shape]`` of it: `view` under test, `other` on the host."""

    def __init__(
        self, draw: Draw, arrangement: str, pages: int, page_size: int, shape: Sequence[int], dtype: str
    ) -> None:
        dims = {
            "layer_major": (pages, page_size, *shape),
            "page_major": (pages, 2, page_size, *shape),
            "token_major": (pages, page_size, 2, *shape),
        }[arrangement]
        self._dims, self._arrangement = dims, arrangement
        count = 1
        for extent in dims:
            count *= extent
        self._other = draw.numbers((count + 2 * GUARD,), dtype)
        self._memory = self._other.clone().to(draw.device)
        self.view, self.other = self._seen(self._memory), self._seen(self._other)

    def _seen(self, memory: torch.Tensor) -> torch.Tensor:
        whole = memory[GUARD:-GUARD].view(self._dims)
        if self._arrangement == "page_major":
            return whole[:, 1]
        return whole[:, :, 1] if self._arrangement == "token_major" else whole

    def check(self, where: str, but_slot_0: bool = False) -> None:
        """Compare all memory bit by bit, guards and neighbours too; slot 0 may be left out."""
        found = self._memory.cpu()
        if but_slot_0:
            self._seen(found)[0, 0] = 0
            self.other[0, 0] = 0
        assert same(found, self._other), f"{where}: memory differs from the reference ({self._difference(found)})"

    def _difference(self, found: torch.Tensor) -> str:
        wrong = (as_bytes(found).view(len(found), -1) != as_bytes(self._other).view(len(found), -1)).any(1)
        inside = self._seen(wrong)
        rows = inside.flatten(2).any(2).flatten() if inside.dim() > 2 else inside.flatten()
        outside = int(wrong.sum()) - int(inside.sum())
        return f"slots {rows.nonzero().flatten().tolist()[:8]}, and {outside} elements outside the view"


class Draw:
    """Random numbers of one seed: made on the host, the same for both sides."""

    def __init__(self, seed: int, device: str) -> None:
        import torch

        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def numbers(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """Return numbers of `dtype` on the host: whole ones, so that no bit pattern is a NaN."""
        import torch

        low, high = (0, 256) if dtype == "uint8" else (-120, 120)
        drawn = torch.randint(low, high, tuple(shape), generator=self._generator)
        return drawn.to(getattr(torch, dtype))

    def below(self, limit: int) -> int:
        """Return a whole number from 0 to `limit` − 1."""
        import torch

        return int(torch.randint(limit, (1,), generator=self._generator))

    def floats(self, shape: Sequence[int], dtype: str = "float32") -> torch.Tensor:
        """Return numbers over many magnitudes, with rows of zeros among them."""
        import torch

        wide = torch.randn(tuple(shape), generator=self._generator)
        scaled = wide * 2.0 ** torch.randint(-20, 12, wide.shape, generator=self._generator)
        if scaled.shape[0] > 2:
            scaled[1] = 0
        return scaled.to(getattr(torch, dtype))

    def slots(self, count: int, limit: int, dtype: str) -> torch.Tensor:
        """Return `count` different numbers below `limit`, in any order."""
        import torch

        return torch.randperm(limit, generator=self._generator)[:count].to(getattr(torch, dtype))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    import torch

    return tensor.contiguous().view(torch.uint8)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two tensors are of one type and shape, bit by bit."""
    import torch

    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return found.numel() == 0 or torch.equal(as_bytes(found.cpu()), as_bytes(expected.cpu()))


def slots_by_token(spans: Sequence[tuple[int, int]], last: Sequence[int], pages: Sequence[int], page: int) -> list[int]:
    """Return the slots of an extend, token by token: the definition that kernels are held to."""
    found, new = [], iter(pages)
    for (prefix, seq), slot in zip(spans, last, strict=True):
        for token in range(prefix, seq):
            slot = next(new) * page if token % page == 0 else slot + 1
            found.append(slot)
    return found


class Extend:
    """An extend of requests over `spans`, with exactly the pages that it needs."""

    def __init__(self, draw: Draw, spans: Sequence[tuple[int, int]], page_size: int) -> None:
        self.page_size, self.spans = page_size, spans
        needed = [-(-seq // page_size) - -(-prefix // page_size) for prefix, seq in spans]
        numbers = [int(page) + 1 for page in draw.slots(sum(needed) + len(spans), 1000, "int64")]
        held, self.pages = numbers[: len(spans)], numbers[len(spans) :]
        self.last = [
            page * page_size + (prefix - 1) % page_size if prefix else -1
            for page, (prefix, _) in zip(held, spans, strict=True)
        ]

    @property
    def expected(self) -> list[int]:
        """The slots, by the loop over the tokens."""
        return slots_by_token(self.spans, self.last, self.pages, self.page_size)

    def run(self, kernels: Kernels, device: str, dtype: str) -> torch.Tensor:
        """Return what a kernel set answers to numbers of `dtype`, after checking that it left them as they were."""
        given = [
            integers(values, dtype, device)
            for values in ([p for p, _ in self.spans], [s for _, s in self.spans], self.last, self.pages)
        ]
        before = [tensor.clone() for tensor in given]
        found = kernels.alloc_extend(
            given[0], given[1], given[2], given[3], self.page_size, sum(seq - prefix for prefix, seq in self.spans)
        )
        assert all(same(now, then) for now, then in zip(given, before, strict=True)), "an extend changed its arguments"
        return found


def random_spans(draw: Draw, page_size: int, requests: int) -> Iterator[tuple[int, int]]:
    """Yield a prefix and a length for each request: short ones, empty ones, and those at a bound of a page."""
    for _ in range(requests):
        prefix = draw.below(2 * page_size + 1) * draw.below(2)
        step = (0, 1, draw.below(page_size + 1), -prefix % page_size, draw.below(3 * page_size + 1))[draw.below(5)]
        yield prefix, prefix + step


def integers(values: Sequence[int], dtype: str, device: str) -> torch.Tensor:
    """Return whole numbers as a tensor on a device."""
    import torch

    return torch.tensor(list(values), dtype=getattr(torch, dtype), device=device)
