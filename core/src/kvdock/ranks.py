"""Ranks that agree: all of a deployment in one process, or each in its own over ``torch.distributed``.

Both run the same steps (`kvdock.fitting.fit`) and take the smallest of what the ranks propose at each, so both
give the same plans.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvdock.errors import BudgetError, KVDockError, PlanError, UnsupportedCombination
from kvdock.fitting import NOBODY, Vector

if TYPE_CHECKING:
    import torch.distributed

T = TypeVar("T")
Steps = Generator[Vector, Vector, T]


def agree_here(steps: Sequence[Steps[T]], ranks: Sequence[int]) -> list[T]:
    """Run the steps of `ranks` side by side in this process, and return what each ends with.

    Raises:
        KVDockError: one rank cannot be served; the message names it.
    """
    done: dict[int, T] = {}
    told: Vector | None = None
    while not done:
        proposed = [_advance(step, told, rank, done) for step, rank in zip(steps, ranks, strict=True)]
        told = smallest([vector for vector in proposed if vector is not None])
    return [done[rank] for rank in ranks]


def _advance(step: Steps[T], told: Vector | None, rank: int, done: dict[int, T]) -> Vector | None:
    try:
        return next(step) if told is None else step.send(told)
    except StopIteration as end:
        done[rank] = end.value
        return None
    except KVDockError as error:
        raise of_rank(error, rank) from error


def smallest(vectors: Sequence[Vector]) -> Vector:
    """Return the smallest of each place; nothing of nothing."""
    return tuple(min(values) for values in zip(*vectors, strict=True))


def of_rank(error: KVDockError, rank: int) -> KVDockError:
    """Return an error of the same class whose message names the rank."""
    text = f"rank {rank}: {error}"
    if isinstance(error, BudgetError):
        return BudgetError(text, needed_bytes=error.needed_bytes, budget_bytes=error.budget_bytes)
    if isinstance(error, UnsupportedCombination):
        return UnsupportedCombination(text, error.objections)
    return type(error)(text)


def agree_over(group: torch.distributed.ProcessGroup, start: Callable[[int, int], Steps[T]]) -> T:
    """Run this rank's steps, every rank of `group` running its own.

    `start` is called with the rank and the number of ranks; what it raises is told to the other ranks like any
    failure, so that none waits.

    Raises:
        PlanError: another rank failed, or this process is none of `group`.
        KVDockError: this rank cannot be served.
    """
    import torch.distributed as dist

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise PlanError("this process is no member of group; give the process group of the ranks that have to agree")
    return _Exchange(group, rank).run(lambda: start(rank, ranks))


class _Exchange:
    """Steps of one rank in lock step with the others of a process group."""

    def __init__(self, group: Any, rank: int) -> None:
        self.group = group
        self.rank = rank

    def run(self, start: Callable[[], Steps[T]]) -> T:
        """Return what the steps end with."""
        steps, proposed = self._try(lambda: self._begin(start))
        while True:
            told = self._smallest(proposed)
            try:
                proposed = self._try(lambda told=told: steps.send(told))  # type: ignore[misc]
            except StopIteration as end:
                done: T = end.value
                return done

    def _begin(self, start: Callable[[], Steps[T]]) -> tuple[Steps[T], Vector]:
        steps = start()
        return steps, next(steps)

    def _try(self, work: Callable[[], Any]) -> Any:
        """Do this rank's part, then hear whether all have done theirs.

        Raises:
            StopIteration: the steps have ended, on all ranks at once.
        """
        result, ended = None, None
        try:
            result = work()
        except StopIteration as end:
            ended = end
        except Exception:
            self._smallest((self.rank,))
            raise
        (failed,) = self._smallest((NOBODY,))
        if failed != NOBODY:
            raise PlanError(f"rank {failed} cannot be planned, so no rank is; its own message says why")
        if ended is not None:
            raise ended
        return result

    def _smallest(self, vector: Vector) -> Vector:
        import torch
        import torch.distributed as dist

        device = "cpu" if dist.get_backend(self.group) == "gloo" else torch.accelerator.current_accelerator()
        numbers = torch.tensor(vector, dtype=torch.int64, device=device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=self.group)
        return tuple(numbers.tolist())
