"""The smallest budget with which a plan's own decisions hold the slots that requests need.

What a plan holds does not always grow with its budget: where a space takes a share of it, a little more memory
can give that space a slot more, and the tokens what is left. A bisection alone would stop at any crossing.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvdock.errors import KVDockError
from kvdock.layout import MAX_SLOTS, REQUESTS, STATE
from kvdock.planner import CachePlan
from kvdock.sizing import Problem, Solver, paying_budget, smallest

MOST_BYTES = 2**50
"""Largest budget that is tried: a pebibyte."""
MOST_STEPS = 512
"""Steps after which a bisection ends the search: only shares of more than nine tenths take as many."""


def least_budget(plan: CachePlan, held: Mapping[str, int], cap_tokens: int | None = None) -> int | None:
    """Return the smallest budget at which the decisions of `plan` have the slots `held` of each space, or ``None``.

    `plan` is of one rank, for a device with `MOST_BYTES`; `cap_tokens` is as in `CachePlan.replan`.
    """
    return _Search(plan, held, cap_tokens).find()


class _Search:
    """Goes up from below, from one budget to the least that its shares leave possible, so none is passed over.

    The spaces that do not follow the tokens alone (`fixed`) only grow with the budget. What a plan lacks of tokens
    beside the slots that it gave to those is lacking at every budget up to what both take together.
    """

    def __init__(self, plan: CachePlan, held: Mapping[str, int], cap_tokens: int | None) -> None:
        outline = plan.outline
        self.plan = plan
        self.held = held
        self.cap_tokens = cap_tokens
        self.fixed = [name for name, space in outline.spaces.items() if name == REQUESTS or space.rule.shares]
        self.problem = Problem(
            spaces=outline.spaces,
            buffers=outline.sized_buffers,
            page_size=outline.options.values.page_size or 1,
            granularity_bytes=outline.device.granularity_bytes,
            dcp_size=outline.parallel.dcp_size,
        )

    def find(self) -> int | None:
        """Return the smallest budget that holds."""
        if self.plan.outline.line(self.plan.spaces) is not None:
            return smallest(self._holds, 1, MOST_BYTES)  # no space takes a share of a buffer that all of them share
        budget = self._open(1)
        for _ in range(MOST_STEPS):
            if budget is None or budget > MOST_BYTES:
                return None
            made = self._at(budget)
            if made is None or self._lacks(made, self.fixed):
                budget = self._open(budget + 1)
                continue
            if not self._lacks(made, made.spaces):
                return budget
            needed = self._needed(made)
            if needed is None or needed <= budget:
                return None  # it is not memory that is lacking
            budget = needed
        return smallest(self._holds, budget or 1, MOST_BYTES)

    def _at(self, budget_bytes: int) -> CachePlan | None:
        try:
            return self.plan.sized_for(budget_bytes, self.cap_tokens)
        except KVDockError:
            return None

    def _lacks(self, made: CachePlan, names: Mapping[str, int] | list[str]) -> bool:
        return any(made.spaces[name] < self.held[name] for name in names)

    def _holds(self, budget_bytes: int) -> bool:
        made = self._at(budget_bytes)
        return made is not None and made.outline.holds(self.held, made.spaces)

    def _open(self, low: int) -> int | None:
        """Return the smallest budget from `low` on whose fixed spaces hold what is needed."""

        def is_open(budget_bytes: int) -> bool:
            made = self._at(budget_bytes)
            return made is not None and not self._lacks(made, self.fixed)

        if low >= MOST_BYTES:
            return None
        states = self.problem.spaces.get(STATE)
        if states is None or not states.rule.shares:
            return smallest(is_open, low, MOST_BYTES)
        first = Solver(self.problem, low).share_caps[STATE]

        def ending(slots: int) -> int:
            """Return the largest budget that pays for no more slots of states."""
            return max(low, min(MOST_BYTES, paying_budget(self.problem, states, slots + 1) - 1))

        # Requests that are fixed are refused where one slot more leaves no page for each; less memory may serve them.
        slots = smallest(lambda count: is_open(ending(count)), first, MAX_SLOTS)
        if slots is None:
            return None
        return smallest(is_open, low if slots == first else ending(slots - 1) + 1, ending(slots))

    def _needed(self, made: CachePlan) -> int | None:
        """Return the bytes of the fewest tokens that hold, beside the fixed spaces as they are; ``None`` if none do."""
        page, ranks = self.problem.page_size, self.problem.dcp_size
        solver = Solver(self.problem, made.budget_bytes, {name: made.spaces[name] for name in self.fixed})

        def holds(pages: int) -> bool:
            sizes = solver.sizes(pages * page)
            return all(sizes[name] >= self.held[name] for name in sizes)

        pages = smallest(holds, 1, MAX_SLOTS // (page * ranks) - 1)
        return None if pages is None else solver.nbytes(pages * page)
