"""Six spaces in step: full and sliding slots, compressed rows of both ratios, and the states of both."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import msgspec
from kvdock.allocators import SWAAllocator, lengths
from kvdock.allocators.base import Shortfall, Together
from kvdock.allocators.swa import SWAState
from kvdock.demand import draft_tokens
from kvdock.errors import SlotError
from kvdock.layout import FULL, SWA, Buffer
from kvdock.planned import Parts
from kvdock.queries import AllocatorQuery
from kvdock_dsv4.begun import Begun
from kvdock_dsv4.geometry import C4, C4_STATE, C128, C128_STATE, RATIO_OF, STATE_RATIO, first_needed

from kvdock_ascend.device import DEVICE_TYPE
from kvdock_ascend.dsv4.beside import Beside, columns_of, map_buffer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Lens = Sequence[int] | torch.Tensor


@runtime_checkable
class TakesPlaces(Protocol):
    """A request pool with tables of what lies beside full slots."""

    def take_places_from(self, allocator: DSV4NpuAllocator) -> None:
        """Ask this allocator where tokens lie."""


class OutCacheLoc(NamedTuple):
    """Where the new tokens of a batch write, int32: request after request.

    `full` and `swa` have a slot a token, `c4` and `c128` one for each group that is finished, ``seq // ratio −
    prefix // ratio`` a request; `c4_state` and `c128_state` one for each new token of the tail, what the next groups
    are made of, whichever drafts are accepted. Spaces that the model has not are empty.
    """

    full: torch.Tensor
    swa: torch.Tensor
    c4: torch.Tensor
    c128: torch.Tensor
    c4_state: torch.Tensor
    c128_state: torch.Tensor


class NpuState(NamedTuple):
    """What `DSV4NpuAllocator.backup_state` returns."""

    both: SWAState
    others: dict[str, Any]


class DSV4NpuAllocator(SWAAllocator):
    """Hands out full and sliding slots, and with them pages of compressed rows and of states; all of them or none.

    A page of compressed rows has as many rows as a page has tokens, and is one request's: it goes back with the
    full page at which it begins. States have a few pages a request, used in turn, which go back with its first
    full pages. Requests share no pages: a request whose name is given begins at its first token.
    """

    device_types: ClassVar[frozenset[str] | None] = frozenset({DEVICE_TYPE})

    def __init__(self, query: AllocatorQuery, parts: Parts) -> None:
        super().__init__(_both(query), parts)
        self.query = query
        self.drafts = draft_tokens(query)
        self._beside = Beside(parts.tensors.rows("beside"), columns_of(query), self.page_size)
        self._others = {name: parts.allocators[name] for name in self._beside.columns}
        self._tiers |= self._others
        self._begun = Begun("pages of compressed rows and of states belong to one request")
        self._queued: set[int] = set()
        if isinstance(parts.request_pool, TakesPlaces):
            parts.request_pool.take_places_from(self)

    @classmethod
    def buffers(cls, query: AllocatorQuery) -> tuple[Buffer, ...]:
        """Declare the map of sliding pages, and that of what lies beside full pages."""
        return (*super().buffers(_both(query)), map_buffer(query))

    def alloc(self, need_size: int, owner: Any = None) -> torch.Tensor | None:
        """Return `need_size` slots of a request that begins; ``None`` if any space is short."""
        count = lengths.whole_pages(need_size, self.page_size, self._journal.name)
        take = super().alloc
        return self._with_others(self._first_pages(count), None, [owner], lambda: take(need_size, owner))

    def alloc_pages(self, count: int, owners: Sequence[Any] | None = None) -> torch.Tensor | None:
        """Return `count` pages of a request that begins, the first of `owners`; ``None`` if any space is short."""
        take, growth = super().alloc_pages, self._first_pages(lengths.whole_count(count, "count"))
        return self._with_others(growth, None, owners, lambda: take(count, owners), are_pages=True)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: Lens, last_loc: torch.Tensor, owners: Sequence[Any] | None = None
    ) -> torch.Tensor | None:
        """Return one full slot a request; ``None`` if any space is short."""
        growth, take = lengths.decode_growth(seq_lens_cpu, self.page_size), super().alloc_decode
        return self._with_others(growth, last_loc, owners, lambda: take(seq_lens, seq_lens_cpu, last_loc, owners))

    def alloc_extend_bundle(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: Lens,
        seq_lens: torch.Tensor,
        seq_lens_cpu: Lens,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        owners: Sequence[Any] | None = None,
    ) -> OutCacheLoc | None:
        """Return where the new tokens of a batch write in every space; ``None`` if any is short."""
        batch = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, owners)
        return self._bundled(lambda: self.alloc_extend(*batch), prefix_lens_cpu, seq_lens_cpu)

    def alloc_decode_bundle(
        self, seq_lens: torch.Tensor, seq_lens_cpu: Lens, last_loc: torch.Tensor, owners: Sequence[Any] | None = None
    ) -> OutCacheLoc | None:
        """Return where one token a request writes in every space; ``None`` if any is short."""
        growth = lengths.decode_growth(seq_lens_cpu, self.page_size)
        take = lambda: self.alloc_decode(seq_lens, seq_lens_cpu, last_loc, owners)  # noqa: E731
        return self._bundled(take, growth.prefix.tolist(), growth.seq.tolist())

    def bundle(self, slots: torch.Tensor, prefix_lens_cpu: Lens, seq_lens_cpu: Lens) -> OutCacheLoc:
        """Return where new tokens write whose full slots are known; never waits for the device.

        Raises:
            SlotError: `slots` are no tensor ``[n]`` of whole numbers, or the lengths contradict each other or do not add
                up to `n`.
        """
        import torch

        lengths.require_row("slots", slots)
        prefix, seq, _ = lengths.extend_growth((prefix_lens_cpu, seq_lens_cpu), slots.numel(), self.page_size)
        found = {FULL: slots, SWA: self.translate(slots)}
        for name in (C4, C128, C4_STATE, C128_STATE):
            if name not in self._others:
                found[name] = slots[:0]
                continue
            chosen = lengths.to_device(places_in(name, prefix, seq, self.drafts), slots.device)
            found[name] = self.translate_beside(name, slots.index_select(0, chosen))
        return OutCacheLoc(**{name: places.to(torch.int32) for name, places in found.items()})

    def translate_beside(self, name: str, loc: torch.Tensor) -> torch.Tensor:
        """Return the slots of a space beside full slots, int64.

        Of compressed rows −1 for tokens that are not the last of their group; −1 for −1 everywhere.

        Raises:
            SlotError: there is no such space, or slots are no tensor of whole numbers.
        """
        lengths.require_integers("slots", loc)
        if not isinstance(name, str) or name not in self._others:
            raise SlotError(f"no space {name!r} lies beside full slots; there are {', '.join(self._others) or 'none'}")
        is_state = self._beside.columns[name].is_state
        return self._beside.states(name, loc) if is_state else self._beside.compressed(name, loc)

    def free(self, indices: torch.Tensor) -> None:
        """Give back the pages of these tokens, in every space; waits for the device."""
        self.full.verify_slots(indices)
        pages = lengths.to_host(lengths.distinct_pages(indices.reshape(-1), self.page_size))
        new = [page for page in pages.tolist() if page not in self._queued]
        owned = self._beside.owned(lengths.to_device(lengths.on_host(new, "pages"), indices.device))
        free = super().free
        self._give_all(owned, lambda: free(indices))
        if self._grouping:
            self._queued.update(new)

    def free_pages(self, pages: torch.Tensor, has_swa: bool = True) -> None:
        """Give back full pages and all that lies beside them; waits for the device once."""
        self.full.verify_pages(pages)
        owned = self._beside.owned(pages.to(self._map.dtype))
        free = super().free_pages
        self._give_all(owned, lambda: free(pages, has_swa))

    def free_rows(
        self,
        table: torch.Tensor,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        swa_starts: Sequence[int] | None = None,
    ) -> None:
        """Give back the tokens ``starts[i] … ends[i]`` of request rows, in every space; never waits for the device."""
        bounds = lengths.checked_ranges(table.shape, rows, starts, ends).page_bounds(self.page_size)
        pages = bounds.pages(table, self.parts.kernels)
        self.full.verify_pages(pages)
        owned = self._beside.owned_at(pages, lengths.spread(bounds.first, bounds.last - bounds.first))
        free = super().free_rows
        self._give_all(owned, lambda: free(table, rows, starts, ends, swa_starts))

    def release(self, request: Hashable) -> None:
        """Forget that a request has begun; its pages go back with its row."""
        self._begun.forget(request)

    @property
    def unshared(self) -> str:
        """Why nothing of a request can be kept for another, or lent to it."""
        return self._begun.why

    def shortfall(self, pages: int, swa_pages: int | None = None) -> tuple[Shortfall, ...]:
        """Say which space lacks how many slots for `pages` pages of one request that begins."""
        needs = self._beside.needs(self._first_pages(lengths.whole_count(pages, "pages")))
        others = (part.shortfall(needs[name]) for name, part in self._others.items())
        return super().shortfall(pages, swa_pages) + tuple(lack for found in others for lack in found)

    def free_group_end(self) -> None:
        """Give back what was collected, in every space, also where one of them refuses."""
        try:
            super().free_group_end()
        finally:
            if not self._grouping:
                self._queued.clear()

    def backup_state(self) -> NpuState:  # type: ignore[override]
        """Return a token of the present allocations of every space."""
        return NpuState(super().backup_state(), {name: part.backup_state() for name, part in self._others.items()})

    def restore_state(self, state: Any) -> None:
        """Take back what every space handed out since `state`; the maps keep what they held.

        Raises:
            SlotError: something was freed since, or `state` is not of this allocator.
        """
        with Together(self):
            super().restore_state(state.both if isinstance(state, NpuState) else None)
            for name, part in self._others.items():
                part.restore_state(state.others[name])
        self._begun.back_to(self._journal.position)

    def check(self, held: torch.Tensor | None = None) -> None:
        """Verify every space, and that what is live beside full pages is what live ones own."""
        import torch

        super().check(held)
        live = self.live_pages()
        if live is None or self._grouping:
            return
        owned = self._beside.owned(torch.tensor(live, dtype=torch.int64, device=self._map.device))
        for name, part in self._others.items():
            part.check(owned[name] * self.page_size)

    def _extended(self, batch: Any, swa_tail_lens: Lens | None, owners: Sequence[Any] | None) -> torch.Tensor | None:
        growth = lengths.extend_growth((batch[1], batch[3]), batch[5], self.page_size)
        take = super()._extended
        return self._with_others(growth, batch[4], owners, lambda: take(batch, swa_tail_lens, owners))

    def _with_others(
        self,
        growth: lengths.Growth,
        last_loc: torch.Tensor | None,
        owners: Sequence[Any] | None,
        take: Callable[[], torch.Tensor | None],
        are_pages: bool = False,
    ) -> torch.Tensor | None:
        """Return what `take` gets of full and sliding slots, with pages of all other spaces; all of them or nothing."""
        lengths.check_owners(owners)
        if owners is not None and len(owners) == len(growth.seq):
            self._begun.verify(growth.prefix.tolist(), owners)
        if not growth.page_count:
            return take()
        needs = self._beside.needs(growth)
        if any(count * self.page_size > self._others[name].available_size() for name, count in needs.items()):
            return None
        before = self.backup_state()
        found = take()
        if found is None:
            return None
        try:
            pages = found if are_pages else self._new_pages(found, growth).to(self._map.dtype)
            self._take_others(needs, pages, growth, last_loc)
        except BaseException:
            self.restore_state(before)
            raise
        self._begun.note(growth.prefix.tolist(), owners, before.both.mark.position)
        return found

    def _take_others(
        self, needs: dict[str, int], pages: torch.Tensor, growth: lengths.Growth, last_loc: torch.Tensor | None
    ) -> None:
        taken: dict[str, torch.Tensor] = {}
        for name, count in needs.items():
            found = self._others[name].alloc_pages(count)
            if found is None:
                raise SlotError(f"space {name!r} handed out less than its available_size; allocate through this alone")
            taken[name] = found
        last = pages.new_full((len(growth.seq),), -1) if last_loc is None else last_loc
        self._beside.write(pages, growth, last, taken)

    def _give_all(self, owned: dict[str, torch.Tensor], free: Callable[[], None]) -> None:
        """Give back pages of all other spaces, then what `free` gives back; after an error nothing has."""
        self._freed()  # also where it fails: the spaces' own marks may be void then
        with Together(*(self._others[name] for name in owned)):
            for name, pages in owned.items():
                if pages.shape[0]:
                    self._others[name].free_pages(pages)
            free()

    def _bundled(
        self, take: Callable[[], torch.Tensor | None], prefix_lens_cpu: Lens, seq_lens_cpu: Lens
    ) -> OutCacheLoc | None:
        """Return where the new tokens write that `take` gets slots for, or take nothing."""
        before = self.backup_state()
        slots = take()
        try:
            return None if slots is None else self.bundle(slots, prefix_lens_cpu, seq_lens_cpu)
        except BaseException:
            self.restore_state(before)
            raise

    def _first_pages(self, count: int) -> lengths.Growth:
        """Return the growth of one request from nothing to `count` pages."""
        tokens = max(0, count) * self.page_size
        return lengths.extend_growth(([0], [tokens]), tokens, self.page_size)

    def _forget(self) -> None:
        super()._forget()
        self._begun.clear()
        self._queued.clear()
        self._beside.clear()


def places_in(name: str, prefix: lengths.Ints, seq: lengths.Ints, drafts: int = 0) -> lengths.Ints:
    """Return which of the new tokens of a batch write to a space: the last of each group, or those of the tail."""
    grown = seq - prefix
    starts = grown.cumsum() - grown
    if name in RATIO_OF:
        ratio = RATIO_OF[name]
        count = seq // ratio - prefix // ratio
        first = (prefix // ratio + 1) * ratio - 1
        group = lengths.spread(count * 0, count)
        places: lengths.Ints = (starts + first - prefix).repeat(count) + group * ratio
        return places
    begin = tail_start(name, seq, drafts).clip(prefix, seq)
    return lengths.spread(starts + begin - prefix, seq - begin)


def tail_start(name: str, seq: lengths.Ints, drafts: int = 0) -> lengths.Ints:
    """Return the first token whose state the next groups of a request are made of, if any of its last `drafts` are refused.

    Those of its unfinished group of 128, and for the overlapping groups of 4 the 128 before. Drafts may reach into the
    next group: then those of the group that goes on if they are refused.
    """
    import numpy as np

    ratio = STATE_RATIO[name]
    whole = seq // RATIO_OF[C128] * RATIO_OF[C128]
    accepted = whole - RATIO_OF[C128] if ratio == RATIO_OF[C4] else whole
    first: lengths.Ints = np.minimum(accepted, first_needed(seq - drafts, ratio)).clip(0)
    return first


def _both(query: AllocatorQuery) -> AllocatorQuery:
    """Return the query for full and sliding slots alone."""
    chosen = tuple(space for space in query.spaces if space.name in (FULL, SWA))
    return msgspec.structs.replace(query, spaces=chosen)
