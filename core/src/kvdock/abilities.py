"""What a cache asks of the parts that it drives beside the interface of all: capabilities, by what is offered."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from kvdock.requests.states import DueStates


@runtime_checkable
class Evicts(Protocol):
    """An allocator whose oldest tokens give back the slots of sliding layers."""

    def free_swa_rows(
        self, table: torch.Tensor, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Give back the sliding pages whose last token is in ``starts[i] … ends[i]``."""

    def free_rows(
        self,
        table: torch.Tensor,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        swa_starts: Sequence[int] | None = None,
    ) -> None:
        """Give back both sides; `swa_starts` is where `free_swa_rows` ended."""


@runtime_checkable
class TakesTails(Protocol):
    """An allocator that gives sliding slots to the newest tokens of a batch alone."""

    def alloc_extend_swa_tail(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: Sequence[int],
        seq_lens: torch.Tensor,
        seq_lens_cpu: Sequence[int],
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        swa_tail_lens: Sequence[int],
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return slots for the new tokens of each request."""


@runtime_checkable
class HoldsStates(Protocol):
    """A request pool that hands out state slots beside its rows."""

    def fork_state(self, request: Hashable, cached_slot: int) -> tuple[int, int]:
        """Let a request begin with the state of another slot."""

    def due_states(self, pools: int | None = None) -> list[DueStates]:
        """Return what is to be done with the slots in each of `pools` pools; empty a part of it when it was done."""

    def check(self, held_states: Iterable[int] | None = None) -> None:
        """Verify rows and state slots."""


@runtime_checkable
class KeepsStates(Protocol):
    """A pool of states, by slot."""

    def clear_slots(self, slots: torch.Tensor) -> None:
        """Put slots into the state of a request that begins."""

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all that slots own; every source is read before any target is written."""


@runtime_checkable
class KeepsByRequest(Protocol):
    """A pool in which requests own more than their tokens do, by their row of the request table."""

    def get_request_copy(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return host copies of what request rows own beside their tokens."""

    def load_request_copy(self, copies: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        """Write what `get_request_copy` returned to request rows, which may be others."""


@runtime_checkable
class Awaits(Protocol):
    """A request pool of a decode worker: requests arrive before they run."""

    def alloc(self, requests: Sequence[Hashable], arriving: bool = False) -> list[int] | None:
        """Return a row for each request."""

    def start(self, requests: Sequence[Hashable]) -> list[int] | None:
        """Let requests run that have arrived."""


@runtime_checkable
class HoldsMore(Protocol):
    """An allocator in which requests hold more than their tokens' slots."""

    def release(self, request: Hashable) -> None:
        """Give back what a request holds beside its tokens."""


@runtime_checkable
class SharesNothing(Protocol):
    """An allocator whose requests own all that their tokens have: nothing of one can be kept for another or lent to it."""

    @property
    def unshared(self) -> str:
        """Why, for messages."""


@runtime_checkable
class KeepsTiers(Protocol):
    """An allocator whose tokens give back their device rows before their slots, and whose requests hold more."""

    def alloc_logical_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: Sequence[int],
        seq_lens: torch.Tensor,
        seq_lens_cpu: Sequence[int],
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        owners: Sequence[Any] | None = None,
    ) -> torch.Tensor | None:
        """Return slots for tokens whose rows go to the host directly."""

    def free_device_rows(
        self, table: torch.Tensor, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> None:
        """Give back the device rows of the tokens ``starts[i] … ends[i]``."""

    def free_rows(
        self,
        table: torch.Tensor,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        device_starts: Sequence[int] | None = None,
    ) -> None:
        """Give back slots and device rows; `device_starts` is where `free_device_rows` ended."""

    def release(self, request: Hashable) -> None:
        """Give back what a request holds beside its tokens."""


def unshared_by(allocator: object) -> str:
    """Return why requests share nothing in what an allocator hands out; empty if they may."""
    return allocator.unshared if isinstance(allocator, SharesNothing) else ""
