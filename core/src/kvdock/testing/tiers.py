"""Rows in two tiers: what a scheduler does so that a step finds the rows that it chose in its request's device buffer."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvdock.allocators.hisparse import HiSparseAllocator
from kvdock.layout import DEVICE, HOST
from kvdock.pools.hisparse import HiSparseDSAPool
from kvdock.testing.kinds import Layer, Where
from kvdock.testing.owners import Owners
from kvdock.testing.values import BLOCK_TOKENS, RunError, Values

if TYPE_CHECKING:
    import torch

    from kvdock.cache import KVCache
    from kvdock.testing.slots import Request

LINGERING = 0.25
"""How often tokens keep their device rows for longer than they must, and a request decodes without a buffer."""
SMALL = 0.25
"""How often a buffer begins smaller than a whole one, and grows when a step needs more of it."""
FEW_TOKENS = 8
"""Tokens that a step reads in the layers whose turn it is not."""


class Residents:
    """Which tokens lie where in a buffer, in one layer; the one that was read longest ago leaves first."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._places = OrderedDict((token, place) for place, token in enumerate(tokens))

    def bring(self, chosen: Sequence[int], room: int) -> tuple[list[int], set[int]]:
        """Return the places of `chosen`, at most `room` tokens, and those of them that were not there before."""
        missing = {token for token in chosen if token not in self._places}
        for token in chosen:
            if token not in missing:
                self._places.move_to_end(token)
        for token in sorted(missing):
            place = len(self._places)
            self._places[token] = place if place < room else self._places.popitem(last=False)[1]
        return [self._places[token] for token in chosen], missing


class _DeviceBuffer:
    """Device slots that a request's steps read from, and what each layer has there; at first the tokens `kept`."""

    def __init__(self, slots: torch.Tensor, kept: range) -> None:
        self.slots = slots
        self._kept = kept
        self._residents: dict[tuple[str, int], Residents] = {}

    def residents(self, worker: str, layer_id: int) -> Residents:
        """Return what one layer has there."""
        return self._residents.setdefault((worker, layer_id), Residents(self._kept))

    def grow(self, slots: torch.Tensor) -> None:
        """Take in more slots."""
        import torch

        self.slots = torch.cat((self.slots, slots))


class Tiers:
    """What a scheduler does with rows in two tiers; where the plan has one tier, nothing.

    Every row is copied to the host as it is written. Prompts give their device rows back from time to time, a request
    that decodes gets a buffer, and what a layer reads then is on the device already or swapped in.
    """

    def __init__(self, cache: KVCache, values: Values, rng: random.Random) -> None:
        allocator = cache.token_to_kv_pool_allocator
        self.cache = cache
        self.values = values
        self.rng = rng
        self.rows = cache.req_to_token_pool
        self.allocator = allocator if isinstance(allocator, HiSparseAllocator) else None
        self.pools = [pool for pool in cache.pools.values() if isinstance(pool, HiSparseDSAPool)]
        self.top_k = cache.plan.options.values.hisparse_top_k or 1
        self.steps = self.swapped_in = self.found = self.given = self.grown = 0
        self._starts: dict[int, int] = {}
        self._reserved: dict[int, torch.Tensor] = {}
        self._buffers: dict[int, _DeviceBuffer] = {}
        if self.allocator is not None:
            sizes = {DEVICE: self.allocator.device.size, HOST: self.allocator.host.size}
            self.owners = Owners(sizes, self.allocator.page_size)

    def __bool__(self) -> bool:
        """Whether rows lie in two tiers."""
        return self.allocator is not None

    def counts(self) -> dict[str, int]:
        """Return what a report says of tiers."""
        return {
            "swapped_in": self.swapped_in,
            "found_on_device": self.found,
            "device_buffers": self.given,
            "grown_buffers": self.grown,
        }

    def names(self, requests: Iterable[Request]) -> list[int] | None:
        """Return the names by which the allocator knows requests that hold buffers; ``None`` with one tier."""
        return None if self.allocator is None else [request.name for request in requests]

    def reserve(self, request: Request) -> bool:
        """Take host slots for all that a request that has a row may write; ``False``, and nothing changes, if there are too few."""
        if self.allocator is None:
            return True
        slots = self.allocator.reserve_host(request.name, request.total)
        if slots is None:
            return False
        self.owners.take(HOST, slots, request.name)
        self._reserved[request.name] = slots
        return True

    def verify(self, request: Request, slots: torch.Tensor) -> None:
        """Verify that the device slots of new tokens of a request that has no buffer are nobody's."""
        if self.allocator is not None:
            self.owners.verify_free(DEVICE, self._resident(slots), request.name)

    def take(self, request: Request, slots: torch.Tensor) -> None:
        """Note the device slots of new tokens of a request; those of one with a buffer are its own already."""
        if self.allocator is not None and request.name not in self._buffers:
            self.owners.take(DEVICE, self._resident(slots), request.name)

    def arrive(self, request: Request) -> tuple[str, torch.Tensor] | None:
        """Return where the rows of a prompt arrive that has no device slots: on the host; ``None`` with one tier."""
        if self.allocator is None:
            return None
        self._starts[request.name] = request.prompt
        return HOST, self.host_slots(request, 0, request.prompt)

    def pass_on(self, slots: torch.Tensor, holder: int | None) -> None:
        """Note whose the device slots of a kept prefix are now; ``None``: nobody's."""
        if self.allocator is not None:
            self.owners.give(DEVICE, self._resident(slots), **({} if holder is None else {"holder": holder}))

    def is_whole(self, request: Request) -> bool:
        """Return whether all rows of a request are on the device, so that others can begin with them."""
        return request.name not in self._buffers and not self._starts.get(request.name, 0)

    def back_up(self, parts: Iterable[tuple[Request, torch.Tensor]]) -> None:
        """Copy the rows of each request's next tokens to its host slots."""
        if self.allocator is None:
            return
        for request, slots in parts:
            host = self.host_slots(request, request.length, slots.shape[0])
            for pool in self.pools:
                pool.offload(slots, host)

    def adopt(self, request: Request) -> None:
        """Copy the rows of a prefix that a request begins with to its own host slots."""
        if self.allocator is not None and request.length:
            host = self.host_slots(request, 0, request.length)
            for pool in self.pools:
                pool.offload(self._slots(request, 0), host)

    def host_slots(self, request: Request, start: int, tokens: int) -> torch.Tensor:
        """Return the host slots of the tokens of a request from `start` on."""
        return self._allocator.host_slots(request.name, start, start + tokens)

    def host_of(self, request: Request, start: int, tokens: int) -> tuple[torch.Tensor, ...]:
        """Return the same as what copies of rows need beside slots; nothing with one tier."""
        return () if self.allocator is None else (self.host_slots(request, start, tokens),)

    def evict(self, requests: Iterable[Request], always: bool = True) -> bool:
        """Give back the device rows of whole pages of requests without a buffer; tell whether any were."""
        if self.allocator is None:
            return False
        before = self.allocator.device_available_size()
        chosen = [r for r in requests if r.name not in self._buffers and (always or self.rng.random() >= LINGERING)]
        due = [(r, self.start(r), self._floor(r.length)) for r in chosen if self._floor(r.length) > self.start(r)]
        given = [self._resident(self._slots(r, start)[: end - start]) for r, start, end in due]
        self.cache.evict([r.name for r, _, _ in due], [end for _, _, end in due])
        for (request, _, end), slots in zip(due, given, strict=True):
            self.owners.give(DEVICE, slots)
            self._starts[request.name] = end
        freed, due_slots = self.allocator.device_available_size() - before, sum(slots.numel() for slots in given)
        if freed != due_slots:
            raise RunError(f"evict was due to give back {due_slots} device slots, and gave back {freed}")
        return freed > 0

    def start(self, request: Request) -> int:
        """Return the first token whose device rows are the request's own, while it has no buffer."""
        return max(self._starts.get(request.name, 0), request.borrowed)

    def ready(self, requests: list[Request]) -> list[Request]:
        """Return those that can decode: they have a buffer, get one now, or go on without one for a while."""
        return requests if self.allocator is None else [request for request in requests if self._is_ready(request)]

    def _is_ready(self, request: Request) -> bool:
        if request.name in self._buffers:
            return True
        # A page goes on where it lies, so without a buffer the page of the newest token must be on the device.
        can_linger = self.start(request) <= self._floor(request.length) or request.length % self._page_size == 0
        return (can_linger and self.rng.random() < LINGERING) or self._give_buffer(request)

    def _give_buffer(self, request: Request) -> bool:
        """Give a request a device buffer; ``False``, and nothing changes, if there is no room."""
        allocator, size = self._allocator, self._page_size
        first = self._floor(self.start(request))
        own, before = self._resident(self._slots(request, first)), allocator.device_available_size()
        found = allocator.alloc_device_buffer(request.name, self.start(request), self._slots_to_begin_with())
        if found is None:
            self._refuse_change(before)
            return False
        self.owners.give(DEVICE, own)
        self.owners.take(DEVICE, found, request.name)
        read = found[: found.shape[0] - size]
        if request.length % size and not own.shape[0]:
            for pool in self.pools:
                pool.swap_in(*allocator.map_newest(request.name))
        kept = min(own.shape[0] // size * size, read.shape[0])
        self._buffers[request.name] = _DeviceBuffer(read, range(first, first + kept))
        self.given += 1
        return True

    def _slots_to_begin_with(self) -> int:
        whole, size = self._allocator.device_slots_per_request, self._page_size
        is_small = whole > 2 * size and self.rng.random() < SMALL
        return self.rng.randrange(2, whole // size) * size if is_small else whole

    def release(self, request: Request, kept: int = 0) -> None:
        """Note that a request is about to give back its buffer, or the device rows from token `kept` on, and host slots."""
        if self.allocator is None:
            return
        if request.name in self._buffers:
            row = self.allocator.req_to_device_buffer[request.row]
            self.owners.give(DEVICE, row[row > 0])
        else:
            first = max(kept, self._floor(self.start(request)))
            self.owners.give(DEVICE, self._resident(self._slots(request, first)))
        self.owners.give(HOST, self._reserved.pop(request.name, self._tensor([])))
        self._buffers.pop(request.name, None)
        self._starts.pop(request.name, None)

    def holds_buffer(self, request: Request) -> bool:
        """Return whether a request reads from a device buffer."""
        return request.name in self._buffers

    def read_step(self, request: Request) -> None:
        """Read what a step's indexers chose: `top_k` tokens in the layer whose turn it is, some in the others.

        Raises:
            WrongValue: names the first value that differs.
        """
        turn = self.steps % max(1, len(self.values.layers))
        self.steps += 1
        for place, layer in enumerate(self.values.layers):
            count = min(self.top_k if place == turn else min(self.top_k, FEW_TOKENS), request.length)
            drawn = self.rng.sample(range(request.length - 1), count - 1)
            self._read(request, layer, sorted([*drawn, request.length - 1]))

    def check_all(self, request: Request) -> None:
        """Compare all that a request has in both tiers: the host's rows, and each of them as a step reads it.

        Raises:
            WrongValue: names the first value that differs.
        """
        for layer in self.values.layers:
            buffer = self._buffers.get(request.name)
            block = BLOCK_TOKENS if buffer is None else buffer.slots.shape[0]
            for start in range(0, request.length, block):
                positions = range(start, min(start + block, request.length))
                self._read(request, layer, positions)
                self._compare(request, layer, positions, (HOST, self.host_slots(request, start, len(positions))))

    def _read(self, request: Request, layer: Layer, chosen: Sequence[int]) -> None:
        """Compare tokens in a layer where a step reads them: on the device, or without a buffer on the host."""
        on_device = self._translate(self._slots(request, 0)[self._tensor(chosen)])
        is_absent = on_device == 0
        absent = self._tensor(chosen)[is_absent].tolist()
        buffer = self._buffers.get(request.name)
        if buffer is None:
            there = self._tensor(chosen)[~is_absent].tolist()
            self._compare(request, layer, there, (DEVICE, on_device[~is_absent]))
            host = self.host_slots(request, 0, request.length)[self._tensor(absent)]
            self._compare(request, layer, absent, (HOST, host))
            return
        if len(absent) > buffer.slots.shape[0]:
            self._grow(request, buffer, len(absent))
        # A buffer that finds no room to grow takes fewer.
        is_read = ~is_absent | (is_absent.cumsum(0) <= buffer.slots.shape[0])
        on_device[is_absent & is_read] = self._bring(request, layer, absent[: buffer.slots.shape[0]])
        self._compare(request, layer, self._tensor(chosen)[is_read].tolist(), (DEVICE, on_device[is_read]))

    def _bring(self, request: Request, layer: Layer, chosen: Sequence[int]) -> torch.Tensor:
        """Return the device slots of tokens in a request's buffer, after swapping in those that are not there."""
        buffer = self._buffers[request.name]
        places, missing = buffer.residents(layer.worker, layer.owner).bring(chosen, buffer.slots.shape[0])
        slots = buffer.slots[self._tensor(places)]
        is_missing = self._tensor([token in missing for token in chosen]).bool()
        host = self.host_slots(request, 0, request.length)[self._tensor(sorted(missing))]
        layer.pool.swap_in(host, slots[is_missing], layer.owner)
        self.swapped_in += len(missing)
        self.found += len(chosen) - len(missing)
        return slots

    def _grow(self, request: Request, buffer: _DeviceBuffer, tokens: int) -> None:
        """Make a buffer large enough to read `tokens` tokens, if there is room and a buffer may be as large."""
        allocator, before = self._allocator, self._allocator.device_available_size()
        slots = min(tokens + allocator.page_size, allocator.device_slots_per_request)
        more = allocator.grow_device_buffer(request.name, slots)
        if more is None:
            self._refuse_change(before)
            return
        self.owners.take(DEVICE, more, request.name)
        buffer.grow(more)
        self.grown += int(more.shape[0] > 0)

    def _compare(self, request: Request, layer: Layer, positions: Sequence[int], at: tuple[str, torch.Tensor]) -> None:
        if len(positions):
            where = self._tensor(positions)
            slots = self._slots(request, 0)[where]
            self.values.compare(layer, request.name, request.salts(where), where, Where(slots, slots, at))

    def _refuse_change(self, before: int) -> None:
        after = self._allocator.device_available_size()
        if after != before:
            raise RunError(f"a device buffer that was refused changed the free device slots from {before} to {after}")

    @property
    def _allocator(self) -> HiSparseAllocator:
        if self.allocator is None:
            raise RunError("this plan has one tier, so no request has device buffers or host slots")
        return self.allocator

    @property
    def _page_size(self) -> int:
        return self._allocator.page_size

    def _floor(self, tokens: int) -> int:
        return tokens // self._page_size * self._page_size

    def _translate(self, slots: torch.Tensor) -> torch.Tensor:
        return self._allocator.translate(slots)

    def _resident(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the device slots of those tokens that have their rows there."""
        found = self._translate(slots)
        return found[found > 0]

    def _slots(self, request: Request, first: int) -> torch.Tensor:
        import torch

        return self.rows.req_to_token[request.row, first : request.length].to(torch.int64)

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        import torch

        return torch.tensor(numbers, dtype=torch.int64, device=self.rows.req_to_token.device)
