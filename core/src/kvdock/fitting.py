"""What fits on one rank: requests, tokens and every space, in steps on which all ranks agree.

A rank first sizes alone, then takes the smallest of all ranks' numbers twice: of what does not follow the
tokens alone (requests, spaces with a share of the budget), and of the tokens that fit beside those. All sizes
follow from these agreed numbers, so they are equal on all ranks and the rank that binds is not a page short.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from typing import TypeVar

import msgspec

from kvdock.budget import Budget, refuse_budget, show_bytes
from kvdock.errors import BudgetError, PlanError
from kvdock.families.groups import MIN_TOKENS
from kvdock.layout import MAX_SLOTS, REQUESTS, STATE, SizeRule, round_up
from kvdock.levers import Attempt, find_divisions, find_levers, most_requests, nothing, roomier_dtype
from kvdock.model import model_to_builtins
from kvdock.outline import Outline
from kvdock.sizing import Problem, Solution, Solver, largest, smallest, token_factors, total_nbytes
from kvdock.storages import bytes_of

T = TypeVar("T")
Vector = tuple[int, ...]
"""What a rank proposes or what all agreed on: the smallest of each place over the ranks."""
NOBODY = 2**62
"""Stands in a vector for a rank that has nothing to say."""


class Agreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ranks that are sized together agreed on, and which of them binds.

    `tokens` is what every rank plans for (a rank's own slots), `own_tokens` what this rank would hold beside the
    agreed requests, `next_tokens` what the ranks other than the binding one would (``None`` where all bind).
    Budgets are those of the ranks with the least and the most.
    """

    rank: int
    ranks: int
    binding_rank: int
    tokens: int
    own_tokens: int
    next_tokens: int | None
    least_budget_bytes: int
    least_budget_rank: int
    most_budget_bytes: int
    vectors: tuple[Vector, ...]
    """What was agreed on, step by step; enough to plan this rank again without the others."""


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a rank, the budget that they are measured by, and what a person should know."""

    problem: Problem
    budget: Budget
    solution: Solution
    agreement: Agreement
    warnings: tuple[str, ...]


Steps = Generator[Vector, Vector, Fitted]
"""Sizing in progress: yields what this rank proposes, is sent what all ranks agreed on, returns the sizes."""


def fit(
    outline: Outline,
    budget: Budget,
    cap_tokens: int | None,
    rank: int = 0,
    ranks: int = 1,
    attempt: Attempt = nothing,
) -> Steps:
    """Size one rank in steps; `attempt` tries what errors and warnings suggest.

    Raises:
        PlanError, BudgetError: what does not fit on this rank, and what would.
    """
    warnings: list[str] = []
    problem = _problem(outline, cap_tokens)
    fixed = _fixed_spaces(problem)
    common = _digest(outline, fixed)
    begun = yield (-int(_follows_tokens(problem)), common, -common)
    if begun[1] != -begun[2]:
        raise PlanError("the ranks plan different models, options or parallel sizes; give all of them the same")
    if begun[0] == 0 and problem.cap_tokens is None:
        problem = _without_kv(outline, problem)
    try:
        budget = _authoritative_budget(outline, problem, budget, warnings)
        alone = _solve(problem, budget.nbytes, outline, warnings, attempt)
    except BudgetError as error:
        raise _with_advice(error, outline, budget, attempt) from error
    agreed = yield tuple(alone.sizes[name] for name in fixed)
    pinned = dict(zip(fixed, agreed, strict=True))
    solver = Solver(problem, budget.nbytes, pinned)
    own = alone if pinned.items() <= alone.sizes.items() else solver.solve()
    agreement, tokens = yield from _compare(own, budget, rank, ranks, begun, agreed)
    solution = own if own.tokens == tokens else solver.at(tokens, f"rank {agreement.binding_rank}")
    warnings += _lowered(alone, solution, agreement, outline)
    if outline.sized_buffers != outline.buffers:
        problem = msgspec.structs.replace(problem, buffers=outline.buffers)
        solution = msgspec.structs.replace(solution, total_bytes=total_nbytes(problem, solution.sizes))
    return Fitted(problem=problem, budget=budget, solution=solution, agreement=agreement, warnings=tuple(warnings))


def _compare(
    own: Solution, budget: Budget, rank: int, ranks: int, *before: Vector
) -> Generator[Vector, Vector, tuple[Agreement, int]]:
    """Agree on the tokens and find out which rank binds and how far the others are from it."""
    (tokens, least, most) = yield (own.tokens, budget.nbytes, -budget.nbytes)
    binds = own.tokens == tokens
    told = yield (
        rank if binds else NOBODY,
        NOBODY if binds else own.tokens,
        rank if budget.nbytes == least else NOBODY,
        budget.nbytes if binds else NOBODY,
    )
    return Agreement(
        rank=rank,
        ranks=ranks,
        binding_rank=told[0],
        tokens=tokens,
        own_tokens=own.tokens,
        next_tokens=None if told[1] == NOBODY else told[1],
        least_budget_bytes=least,
        least_budget_rank=told[2],
        most_budget_bytes=-most,
        vectors=(*before, (tokens, least, most), told),
    ), tokens


def _lowered(alone: Solution, solution: Solution, agreement: Agreement, outline: Outline) -> list[str]:
    """Return a sentence where other ranks lower what this one would serve, and where memory is uneven."""
    found = []
    workers = outline.parallel.attn_dp_size
    if outline.given.max_running_requests is not None and solution.sizes[REQUESTS] < alone.sizes[REQUESTS]:
        found.append(
            f"max_running_requests: {_asked(outline.spaces[REQUESTS].rule.fixed, workers)}, "
            f"{solution.sizes[REQUESTS]} fit on every rank; "
            "the rank with the least memory to spare decides"
        )
    least, most = agreement.least_budget_bytes, agreement.most_budget_bytes
    binding_bytes = agreement.vectors[-1][-1]
    uneven = binding_bytes == least and least * UNEVEN[1] < most * UNEVEN[0]
    if agreement.next_tokens is not None and uneven:  # else the layers are uneven, whatever the memory
        found.append(
            f"memory is uneven: rank {agreement.binding_rank} has {show_bytes(least)} for the cache, another has "
            f"{show_bytes(most)}; rank {agreement.binding_rank} limits every rank to {agreement.tokens:,} tokens, "
            f"the others would hold {agreement.next_tokens:,}"
        )
    return found


UNEVEN = (9, 10)
"""Ranks whose budgets differ by more than this factor are worth a warning."""


def replay(steps: Generator[Vector, Vector, T], vectors: Sequence[Vector]) -> T:
    """Run the steps of a rank with what was agreed on before; its own proposals where that ends (all of them: alone).

    Raises:
        PlanError: what was agreed on cannot have come from this rank.
    """
    told = iter(vectors)
    try:
        proposed = next(steps)
        while True:
            agreed = next(told, proposed)
            if len(agreed) != len(proposed) or any(a > own for a, own in zip(agreed, proposed, strict=True)):
                raise PlanError(f"the ranks agreed on {list(agreed)}, but this rank can do {list(proposed)} at most")
            proposed = steps.send(agreed)
    except StopIteration as end:
        done: T = end.value
        return done


def _fixed_spaces(problem: Problem) -> tuple[str, ...]:
    """Return the spaces whose sizes do not follow from the tokens alone."""
    return tuple(sorted(name for name, space in problem.spaces.items() if name == REQUESTS or space.rule.shares))


def _digest(outline: Outline, fixed: tuple[str, ...]) -> int:
    """Return a number that ranks share which number the same slots: of models, options, sizes and spaces, not places."""
    models = [{**model_to_builtins(model), "name": ""} for model in outline.models]
    given = msgspec.structs.replace(outline.given, draft=None)  # perhaps a path on this host; its model is here
    parallels = [msgspec.structs.replace(own, pp_rank=0, cp_rank=0, dcp_rank=0) for own in outline.parallels]
    numbering = [(space.name, space.page_size, space.window_tokens) for space in outline.spaces.values()]
    encoder = msgspec.json.Encoder(enc_hook=repr, order="deterministic")
    text = encoder.encode((models, given, parallels, numbering, fixed))
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "big")


def _problem(outline: Outline, cap_tokens: int | None) -> Problem:
    options = outline.options.values
    page = options.page_size or 1
    caps = {"max_total_tokens": options.max_total_tokens, "cap_tokens": cap_tokens}
    given = {name: value for name, value in caps.items() if value is not None}
    if page * outline.parallel.dcp_size > MAX_SLOTS // 3:
        raise PlanError(f"page_size={page} leaves no room for a page beside padding among {MAX_SLOTS:,} slots")
    for name, value in given.items():
        if value < page:
            raise PlanError(f"{name}={value} is less than one page of page_size={page}; give at least {page}")
    name = min(given, key=lambda key: given[key]) if given else "max_total_tokens"
    return Problem(
        spaces=outline.spaces,
        buffers=outline.sized_buffers,
        page_size=page,
        granularity_bytes=outline.device.granularity_bytes,
        cap_tokens=given.get(name),
        cap_name=name,
        dcp_size=outline.parallel.dcp_size,
        host_budget_bytes=options.host_budget_bytes,
    )


def _follows_tokens(problem: Problem) -> bool:
    """Return whether some KV of this rank grows with the tokens."""
    factors = token_factors(problem.spaces)
    return any(b.is_kv and b.space is not None and factors[b.space] for b in problem.buffers)


def _without_kv(outline: Outline, problem: Problem) -> Problem:
    """Return the problem with the tokens that ranks number when no KV of any of them grows with tokens."""
    options, page = outline.options.values, problem.page_size
    context = options.context_length or outline.model.context_length
    requests = options.max_running_requests or outline.spaces[REQUESTS].rule.at_least or 1
    tokens = min(round_up(requests * context, page), (MAX_SLOTS - page) // page * page)
    return msgspec.structs.replace(problem, cap_tokens=tokens, cap_name="max_running_requests · context_length")


def _authoritative_budget(outline: Outline, problem: Problem, budget: Budget, warnings: list[str]) -> Budget:
    """Return the budget, raised to the free memory where the user's own token count needs it.

    `mem_fraction_static` is a default's way of leaving room; tokens that the user states outright win
    over it as long as the memory is really there. Where it is not, the fraction's own capacity holds.
    """
    tokens = outline.options.values.max_total_tokens
    if budget.base == "given" or tokens is None:
        return budget
    needed = _stated_nbytes(outline, problem, budget, tokens)
    fraction = f"mem_fraction_static={outline.options.values.mem_fraction_static}"
    if needed <= budget.nbytes:
        return budget
    if needed > budget.free_bytes:
        warnings.append(
            f"max_total_tokens={tokens} takes {show_bytes(needed)}, but {show_bytes(max(0, budget.free_bytes))} are "
            f"free beside weights and reserve; what {fraction} leaves ({show_bytes(budget.nbytes)}) is planned instead"
        )
        return budget
    warnings.append(
        f"max_total_tokens={tokens} takes {show_bytes(needed)}, more than {fraction} leaves "
        f"({show_bytes(budget.nbytes)}); the stated tokens win, and {show_bytes(budget.free_bytes - needed)} stay "
        "for activations"
    )
    return msgspec.structs.replace(
        budget, nbytes=needed, note=f"{show_bytes(needed)}, what max_total_tokens={tokens} takes of the free memory"
    )


def _stated_nbytes(outline: Outline, problem: Problem, budget: Budget, tokens: int) -> int:
    """Return the bytes of a cache of the tokens that the user stated, with the requests that go with them."""
    limit = outline.spaces[REQUESTS].rule.fixed
    pinned = {REQUESTS: max(1, min(limit, tokens // MIN_TOKENS))} if limit else {}
    solver = Solver(problem, max(budget.free_bytes, 0), pinned)
    return solver.nbytes(max(tokens // problem.page_size * problem.page_size, solver.floor_tokens()))


def _solve(problem: Problem, budget_bytes: int, outline: Outline, warnings: list[str], attempt: Attempt) -> Solution:
    rule = outline.spaces[REQUESTS].rule
    asked = rule.fixed if outline.given.max_running_requests is not None else 0
    if not asked:
        return Solver(problem, budget_bytes).solve()
    workers = outline.parallel.attn_dp_size
    if rest := (outline.given.max_running_requests or 0) % workers:
        warnings.append(
            f"max_running_requests={outline.given.max_running_requests} over {workers} workers: {asked} each, and {rest} of "
            f"them nowhere; give a multiple of {workers}"
        )
    charge = _Charge(problem, budget_bytes, workers)
    with_states = charge.within_states(asked, warnings, attempt)
    fixed = charge.within_cap(with_states)
    Solver(problem, budget_bytes, {REQUESTS: fixed}).check_bounds()
    charge.refuse_tables(fixed, outline.given.max_running_requests or asked, attempt)
    solution = Solver(problem, budget_bytes, {REQUESTS: fixed}).solve()
    if solution.tokens < MIN_TOKENS * fixed:
        fixed = max(1, charge.served(fixed))
        solution = Solver(problem, budget_bytes, {REQUESTS: fixed}).solve()
    if fixed < with_states:
        capped, least = solution.bound == problem.cap_name, fixed
        dtype = None if capped else roomier_dtype(outline, attempt, lambda made: made.spaces[REQUESTS] > least)
        raised_by = problem.cap_name if capped else " or ".join(("a larger budget", *filter(None, [dtype])))
        warnings.append(
            f"max_running_requests: {_asked(asked, workers)}, {fixed} fit, since each needs {MIN_TOKENS} of the "
            f"{solution.tokens} tokens; {raised_by} raises it"
        )
    return solution


def _with_advice(error: BudgetError, outline: Outline, budget: Budget, attempt: Attempt) -> BudgetError:
    """Return the error with what would make the cache fit."""
    if attempt is nothing:
        return error
    levers = find_levers(outline, attempt, "max_running_requests" in str(error), budget.base == "fraction")
    idle = outline.device.free_bytes == outline.device.free_before_load_bytes
    no_weights = budget.base == "given" or (idle and not budget.weights_bytes)
    divisions = find_divisions(outline, attempt, no_weights)

    def works(name: str, value: float) -> bool:
        return attempt({name: value}) is not None

    return refuse_budget(error, budget, outline.device, outline.options.values, levers, divisions, works)


def _asked(limit: int, workers: int) -> str:
    return f"{limit} asked for" if workers == 1 else f"{limit} asked for of each of {workers} workers"


class _Charge:
    """What a number of requests that the user fixed takes, tables in full; the user counts those of all `workers`."""

    def __init__(self, problem: Problem, budget_bytes: int, workers: int) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes
        self.workers = workers

    def nbytes(self, requests: int, tokens_each: int) -> int:
        """Return all bytes with `requests` rows and, for each, `tokens_each` tokens; at least what one needs."""
        page = self.problem.page_size
        solver = Solver(self.problem, self.budget_bytes, {REQUESTS: requests})
        tokens = round_up(requests * tokens_each, page)
        if self.problem.cap_tokens is not None:
            tokens = min(tokens, self.problem.cap_tokens // page * page)
        return solver.nbytes(max(tokens, solver.floor_tokens()))

    def within_cap(self, limit: int) -> int:
        """Return `limit`, or the most requests that have their tokens under the cap."""
        cap, page = self.problem.cap_tokens, self.problem.page_size
        return limit if cap is None else max(1, min(limit, cap // page * page // MIN_TOKENS))

    def within_states(self, limit: int, warnings: list[str], attempt: Attempt = nothing) -> int:
        """Return `limit`, or the most requests whose states have slots, with a warning."""
        each = dict(self.problem.spaces[REQUESTS].rule.at_most_of).get(STATE)
        if each is None:
            return limit
        slots = Solver(self.problem, self.budget_bytes, {REQUESTS: limit}).sizes(self.problem.page_size)[STATE]
        fits = max(1, slots * each[0] // each[1])
        if fits < limit:
            warnings.append(
                f"max_running_requests: {_asked(limit, self.workers)}, {fits} fit, since a request may hold {each[1]} "
                f"of the {slots} state slots; {self._more_states(limit, fits, each, attempt)}"
            )
        return min(limit, fits)

    def _more_states(self, limit: int, fits: int, each: tuple[int, int], attempt: Attempt) -> str:
        """Return how many requests states that the user states outright would serve in this memory, once tried."""
        spaces = self.problem.spaces

        def holds(requests: int) -> bool:
            rule = SizeRule(fixed=-(-requests * each[1] // each[0]), needs=spaces[STATE].rule.needs)
            problem = msgspec.structs.replace(
                self.problem, spaces={**spaces, STATE: msgspec.structs.replace(spaces[STATE], rule=rule)}
            )
            return _Charge(problem, self.budget_bytes, self.workers).nbytes(requests, MIN_TOKENS) <= self.budget_bytes

        served = largest(holds, fits, limit)
        slots = -(-served * each[1] // each[0]) * self.workers
        made = attempt({"max_state_slots": slots}) if served > fits else None
        if made is None or made.spaces[REQUESTS] < served:
            stated = not spaces[STATE].rule.shares  # then memory alone brings none
            return f"a larger budget{' and max_state_slots together raise' if stated else ' raises'} it"
        return f"max_state_slots={slots} serves {'all' if served == limit else served} of them"

    def served(self, limit: int, tokens_each: int = MIN_TOKENS) -> int:
        """Return the most requests up to `limit` that have `tokens_each` tokens each."""
        return largest(lambda count: self.nbytes(count, tokens_each) <= self.budget_bytes, 0, limit)

    def least_budget(self, requests: int, tokens_each: int) -> int:
        """Return a budget for `requests` with their tokens, or as many as have states then; the smallest, but for a slot of states."""

        def holds(budget_bytes: int) -> bool:
            charge = _Charge(self.problem, budget_bytes, self.workers)
            return charge.nbytes(charge.served_states(requests), tokens_each) <= budget_bytes

        low = _Charge(self.problem, 0, self.workers).nbytes(1, tokens_each)
        return smallest(holds, low, NOBODY) or NOBODY

    def served_states(self, limit: int) -> int:
        """Return `limit`, or the most requests whose states have slots and which have their tokens under the cap."""
        return self.within_cap(self.within_states(limit, []))

    def refuse_tables(self, requests: int, given: int, attempt: Attempt) -> None:
        """Refuse a limit whose tables do not fit beside one page per request.

        `requests` are those that have states and tokens here, of the `given` of all workers; a larger budget may bring
        states for all.

        Raises:
            BudgetError: always then; gives the bytes and the number that fits.
        """
        page, spaces, asked = self.problem.page_size, self.problem.spaces, given // self.workers
        own = [b for b in self.problem.buffers if b.space == REQUESTS and b.memory == "device"]
        if not own or self.nbytes(requests, page) <= self.budget_bytes:
            return
        # Nobody reads the message of what is only tried, and the least budget is a search.
        needed = self.nbytes(requests, page) if attempt is nothing else self.least_budget(asked, page)
        wanted = _Charge(self.problem, needed, self.workers).served_states(asked)
        tables = sum(bytes_of(own, spaces, {REQUESTS: wanted}, self.problem.granularity_bytes))
        fits = most_requests(attempt, self.served(requests, max(MIN_TOKENS, page)), requests, self.workers)
        some = f", {wanted * self.workers} of them served," if wanted < asked else ""
        raise BudgetError(
            f"max_running_requests={given}{some} needs {needed:,} bytes with one page per request "
            f"({tables:,} of them what each request keeps: tables, draft snapshots), but the budget is {self.budget_bytes:,} bytes; "
            + (f"max_running_requests={fits * self.workers} fits" if fits else "not one request fits"),
            needed_bytes=needed,
            budget_bytes=self.budget_bytes,
        )
