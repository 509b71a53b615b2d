"""Budget → sizes: the only solver.

Beside the caps that shares of the budget set, every size is non-decreasing in the number of tokens `n`, and
bytes are a sum of rows times a coefficient, so the largest `n` that fits is found by bisection over that sum,
exactly: never over the budget, never a page short. Over budgets it is not so: a larger one may give a space with a
share of it a slot more, and the tokens fewer. No hook is called here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

import msgspec

from kvdock.errors import BudgetError, PlanError
from kvdock.layout import MAX_SLOTS, REQUESTS, TOKENS, Buffer, Share, SizeRule, Space
from kvdock.storages import bytes_of


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be sized: spaces in the order in which they follow each other, and every buffer.

    `page_size` is the step of the tokens, `cap_tokens` the most that may be planned (``None``: what the
    memory holds) with the name of what caps them.
    """

    spaces: Mapping[str, Space]
    buffers: tuple[Buffer, ...]
    page_size: int
    granularity_bytes: int = 1
    cap_tokens: int | None = None
    cap_name: str = "max_total_tokens"
    dcp_size: int = 1
    """Ranks that share the tokens: the slots that an allocator hands out are those of all of them."""
    host_budget_bytes: int | None = None
    """Bytes of host memory for all buffers that lie there; ``None``: as many as the sizes take."""


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that fit: the tokens, the usable slots of each space, all device bytes, and what stopped the growth."""

    tokens: int
    sizes: dict[str, int]
    total_bytes: int
    bound: str


def ordered(spaces: Mapping[str, Space]) -> dict[str, Space]:
    """Return the spaces so that each comes after those that its rule follows.

    Raises:
        PlanError: a rule names a space that does not exist, or spaces follow each other in a circle.
    """
    done: dict[str, Space] = {}
    waiting = dict(spaces)
    while waiting:
        ready = [name for name, space in waiting.items() if space.rule.follows() <= done.keys()]
        if not ready:
            _refuse_order(waiting, spaces)
        for name in ready:
            done[name] = waiting.pop(name)
    return done


def _refuse_order(waiting: Mapping[str, Space], spaces: Mapping[str, Space]) -> None:
    for name, space in waiting.items():
        missing = space.rule.follows() - spaces.keys()
        if missing:
            raise PlanError(f"space {name!r} follows {sorted(missing)[0]!r}, which no plugin declares")
    raise PlanError(f"the spaces {', '.join(sorted(waiting))} follow each other in a circle")


def total_nbytes(problem: Problem, sizes: Mapping[str, int], memory: Iterable[str] = ("device",)) -> int:
    """Return the bytes of every buffer in `memory` at these sizes."""
    kinds = frozenset(memory)
    chosen = [buffer for buffer in problem.buffers if buffer.memory in kinds]
    return sum(bytes_of(chosen, problem.spaces, sizes, problem.granularity_bytes))


def host_nbytes(problem: Problem, sizes: Mapping[str, int]) -> int:
    """Return the bytes of every buffer in host memory at these sizes."""
    return total_nbytes(problem, sizes, ("host", "pinned"))


def share_nbytes(problem: Problem, space: Space, share: Share, size: int) -> int:
    """Return the bytes that one share of the budget pays for a space of this size."""
    paid = [buffer for buffer in problem.buffers if share.covers(buffer, space.name)]
    sizes = {space.name: size, **{name: size * ratio[0] // ratio[1] for name, ratio in share.beside}}
    return sum(bytes_of(paid, problem.spaces, sizes, problem.granularity_bytes))


def paying_budget(problem: Problem, space: Space, size: int) -> int:
    """Return the smallest budget whose shares pay for a space of this size."""
    if size <= space.rule.needs:
        return 0
    paid = [(share_nbytes(problem, space, share, size), share.of_budget) for share in space.rule.shares]
    return max(-(-nbytes * of_budget[1] // of_budget[0]) if nbytes else 0 for nbytes, of_budget in paid)


class Solver:
    """Sizes one problem under one budget; `pinned` fixes the size of spaces whatever their rule says."""

    def __init__(self, problem: Problem, budget_bytes: int, pinned: Mapping[str, int] | None = None) -> None:
        self.problem = msgspec.structs.replace(problem, spaces=ordered(problem.spaces))
        self.budget_bytes = budget_bytes
        self.pinned = dict(pinned or {})
        self.share_caps = {
            name: self._share_cap(space) for name, space in self.problem.spaces.items() if space.rule.shares
        }

    def sizes(self, tokens: int) -> dict[str, int]:
        """Return the usable slots of every space when `tokens` tokens are planned."""
        known = {TOKENS: tokens}
        for name, space in self.problem.spaces.items():
            known[name] = self.pinned[name] if name in self.pinned else self._size(space, known)
        del known[TOKENS]
        return known

    def _size(self, space: Space, known: Mapping[str, int]) -> int:
        rule = space.rule
        size = max(rule.at_least, _rounded(rule, known.get(rule.of, 0), known.get(REQUESTS, 0)))
        if rule.at_most is not None:
            size = min(size, rule.at_most)
        for of, (numerator, denominator) in rule.at_most_of:
            size = min(size, known[of] * numerator // denominator)
        if space.name in self.share_caps:
            size = min(size, self.share_caps[space.name])
        return size

    def _share_cap(self, space: Space) -> int:
        """Return the largest size whose device buffers stay within each of the space's shares of the budget."""
        return max(space.rule.needs, min(self.within_share(space, share) for share in space.rule.shares))

    def within_share(self, space: Space, share: Share) -> int:
        """Return the largest size of a space that one share of the budget pays for."""
        if not any(share.covers(buffer, space.name) for buffer in self.problem.buffers):
            return MAX_SLOTS
        allowed = self.budget_bytes * share.of_budget[0] // share.of_budget[1]
        return largest(lambda size: share_nbytes(self.problem, space, share, size) <= allowed, 0, MAX_SLOTS)

    def nbytes(self, tokens: int) -> int:
        """Return all device bytes when `tokens` tokens are planned."""
        return total_nbytes(self.problem, self.sizes(tokens))

    def floor_tokens(self) -> int:
        """Return the fewest tokens (whole pages) at which every space is of use.

        Raises:
            PlanError: no number of tokens makes some space large enough.
        """
        page = self.problem.page_size
        pages = smallest(lambda count: not self._lacking(count * page), 1, self._most_pages())
        if pages is None:
            name, size, needs = self._lacking(self._most_pages() * page)[0]
            raise PlanError(
                f"space {name!r} can have {size} slots at most, but one request needs {needs}; raise the option that "
                f"limits it ({', '.join(self.problem.spaces[name].options) or 'its plugin sets it'})"
            )
        return pages * page

    def _lacking(self, tokens: int) -> list[tuple[str, int, int]]:
        sizes = self.sizes(tokens)
        return [
            (name, sizes[name], space.rule.needs)
            for name, space in self.problem.spaces.items()
            if sizes[name] < space.rule.needs
        ]

    def _most_pages(self) -> int:
        return MAX_SLOTS // (self.problem.page_size * self.problem.dcp_size) - 1

    def broken(self, tokens: int) -> str | None:
        """Return what `tokens` tokens would break: the cap, the numbering, an address limit or the budget."""
        problem = self.problem
        if problem.cap_tokens is not None and tokens > problem.cap_tokens:
            return problem.cap_name
        sizes = self.sizes(tokens)
        for name, size in sizes.items():
            space = problem.spaces[name]
            ranks = problem.dcp_size if space.issued_by == "allocator" else 1
            if (size + space.page_size) * ranks > MAX_SLOTS:
                return f"numbering of space {name}"
        for buffer in problem.buffers:
            limit = buffer.max_tensor_bytes
            if limit is not None and buffer.tensor_nbytes(buffer.units_in(problem.spaces, sizes)) > limit:
                return f"addressing limit of buffer {buffer.name} ({limit:,} bytes a tensor)"
        if problem.host_budget_bytes is not None and host_nbytes(problem, sizes) > problem.host_budget_bytes:
            return "host_budget_bytes"
        return "budget" if total_nbytes(problem, sizes) > self.budget_bytes else None

    def solve(self) -> Solution:
        """Return the largest sizes that break nothing.

        Spaces that only take a share of the budget give way where the smallest plan would not fit beside
        them, and stay as they are where one page more fits only without their growth.

        Raises:
            BudgetError: the smallest plan that is of use needs more than the budget; gives both.
            PlanError: the cap or an address limit lies below that smallest plan.
        """
        floor = self.floor_tokens()
        broken = self.broken(floor)
        sharing = self.share_caps.keys() - self.pinned.keys()
        if broken == "budget" and sharing:
            return self._pinning(self._modest(floor, sorted(sharing))).solve()
        if broken is not None:
            self._refuse(floor, broken)
        solution = self._largest(floor)
        if not sharing:
            return solution
        held = {name: solution.sizes[name] for name in sharing}
        return self._pinning(held)._largest(solution.tokens)

    def _largest(self, low: int) -> Solution:
        """Return the solution with the most tokens, `low` being known to fit."""
        page = self.problem.page_size
        pages = largest(lambda count: self.broken(count * page) is None, low // page, self._most_pages())
        tokens = pages * page
        return self.at(tokens, self.broken(tokens + page) or f"numbering of {MAX_SLOTS:,} slots")

    def at(self, tokens: int, bound: str) -> Solution:
        """Return the sizes for a number of tokens that fits, whatever set it."""
        sizes = self.sizes(tokens)
        return Solution(tokens=tokens, sizes=sizes, total_bytes=total_nbytes(self.problem, sizes), bound=bound)

    def _pinning(self, sizes: Mapping[str, int]) -> Solver:
        return Solver(self.problem, self.budget_bytes, {**self.pinned, **sizes})

    def _modest(self, floor: int, names: Sequence[str]) -> dict[str, int]:
        """Return sizes of the spaces with a share that leave room for the smallest plan, or what they need."""
        sizes = {name: self.problem.spaces[name].rule.needs for name in names}
        wanted = self.sizes(floor)
        for name in names:

            def fits(size: int, name: str = name) -> bool:
                return self._pinning({**sizes, name: size}).nbytes(floor) <= self.budget_bytes

            sizes[name] = largest(fits, sizes[name], max(sizes[name], wanted[name]))
        return sizes

    def check_bounds(self) -> None:
        """Refuse a cap, host memory or an address limit below what one request needs, which no budget makes good.

        Raises:
            PlanError: always then; gives the smallest that works.
        """
        floor = self.floor_tokens()
        broken = self.broken(floor)
        if broken not in (None, "budget"):
            self._refuse(floor, broken)

    def _refuse(self, floor: int, broken: str) -> None:
        if broken == "budget":
            needed = self.nbytes(floor)
            raise BudgetError(
                f"the smallest cache that serves one request ({floor} tokens) needs {needed:,} bytes, "
                f"but the budget is {self.budget_bytes:,} bytes",
                needed_bytes=needed,
                budget_bytes=self.budget_bytes,
            )
        if broken == "host_budget_bytes":
            needed = host_nbytes(self.problem, self.sizes(floor))
            raise PlanError(
                f"host_budget_bytes={self.problem.host_budget_bytes} does not hold the host tiers of one request "
                f"({floor} tokens); give at least {needed}"
            )
        limit = f"{broken}={self.problem.cap_tokens}" if broken == self.problem.cap_name else f"the {broken}"
        raise PlanError(f"{limit} is below the {floor} tokens that one request needs; give at least {floor}")


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest value in ``low … high`` that fits; `low` is taken to fit, and fitting to end once."""
    step = 1
    while low + step <= high and fits(low + step):
        low += step
        step *= 2
    high = min(high, low + step - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def smallest(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the smallest value in ``low … high`` for which `holds`, which never ends once begun; or ``None``."""
    step = 0
    while low + step < high and not holds(low + step):
        step = 2 * step + 1
    high = min(high, low + step)
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _rounded(rule: SizeRule, of: int, requests: int) -> int:
    """Return ``per_token · of + per_request · requests + fixed``, exact, rounded as the rule says."""
    (token, per), (request, each) = rule.per_token, rule.per_request
    numerator = token * of * each + request * requests * per + rule.fixed * per * each
    divisor = per * each * rule.round_to
    whole = numerator // divisor if rule.round == "down" else -(-numerator // divisor)
    return whole * rule.round_to


def token_factors(spaces: Mapping[str, Space]) -> dict[str, Fraction]:
    """Return how many slots of each space one more token takes, rounding and caps left aside."""
    factors = {TOKENS: Fraction(1)}
    for name, space in ordered(spaces).items():
        factors[name] = Fraction(*space.rule.per_token) * factors.get(space.rule.of, Fraction(0))
    del factors[TOKENS]
    return factors
