import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdock.errors import BudgetError, PlanError
from kvdock.layout import Buffer, Share, SizeRule, Space, Unit
from kvdock.sizing import Problem, Solver, largest, ordered, smallest, token_factors

FULL = Space(name="full", rule=SizeRule(per_token=(1, 1), needs=2))


def kv(nbytes, *, space="full", guard=1, layers=(0,), **fields):
    return Buffer(
        name=f"kv-{space}-{nbytes}",
        role="key",
        space=space,
        shape=(nbytes,),
        dtype="uint8",
        guard=guard,
        layers=layers,
        **fields,
    )


def problem(spaces, buffers, *, page_size=1, **fields):
    return Problem(spaces={s.name: s for s in spaces}, buffers=tuple(buffers), page_size=page_size, **fields)


def test_tokens_fill_the_budget_to_the_last_slot():
    # one padding slot: 100 bytes buy 10 slots of 10 bytes, 9 of them usable
    solution = Solver(problem([FULL], [kv(10)]), 100).solve()
    assert (solution.tokens, solution.total_bytes, solution.bound) == (9, 100, "budget")


def test_one_byte_less_costs_a_slot():
    assert Solver(problem([FULL], [kv(10)]), 99).solve().tokens == 8


def test_a_page_is_never_split():
    space = Space(name="full", page_size=16, rule=SizeRule(per_token=(1, 1), round_to=16, needs=16))
    # (n + 16) * 10 <= 1000: 84 slots fit, which is five pages
    solution = Solver(problem([space], [kv(10, guard=16)], page_size=16), 1000).solve()
    assert (solution.tokens, solution.total_bytes) == (80, 960)


def test_the_smallest_budget_that_works_is_named_and_works():
    # S-25: a page is reserved as padding, so one page of memory serves nothing and two serve one
    space = Space(name="full", page_size=16, rule=SizeRule(per_token=(1, 1), round_to=16, needs=16))
    one_page = problem([space], [kv(10, guard=16)], page_size=16)
    with pytest.raises(BudgetError, match="needs 320 bytes, but the budget is 160 bytes") as caught:
        Solver(one_page, 160).solve()
    assert caught.value.needed_bytes == 320
    assert Solver(one_page, 320).solve().tokens == 16


def test_a_space_follows_another_exactly():
    swa = Space(name="swa", rule=SizeRule(per_token=(4, 5), of="full", round_to=1))
    solver = Solver(problem([FULL, swa], [kv(10), kv(5, space="swa")]), 10**6)
    assert solver.sizes(7) == {"full": 7, "swa": 5}  # 0.8 * 7 = 5.6, rounded down


def test_rounding_up_is_for_caps():
    cap = Space(name="cap", rule=SizeRule(per_request=(3, 2), fixed=1, round="up", round_to=4))
    requests = Space(name="requests", rule=SizeRule(fixed=3), issued_by="request_pool")
    sizes = Solver(problem([FULL, cap, requests], [kv(1)]), 1000).sizes(10)
    assert sizes["cap"] == 8  # 3 * 1.5 + 1 = 5.5, up to whole fours


def test_a_share_caps_a_space_at_its_own_buffers():
    requests = Space(
        name="requests",
        rule=SizeRule(at_least=100, shares=(Share(of_budget=(1, 4)),), needs=1),
        issued_by="request_pool",
    )
    table = kv(10, space="requests")
    # a quarter of 1000 bytes holds 25 rows, one of them padding
    assert Solver(problem([FULL, requests], [kv(1), table]), 1000).sizes(50)["requests"] == 24


def test_a_share_never_goes_below_what_is_needed():
    requests = Space(
        name="requests",
        rule=SizeRule(at_least=100, shares=(Share(of_budget=(1, 100)),), needs=1),
        issued_by="request_pool",
    )
    assert Solver(problem([FULL, requests], [kv(1), kv(400, space="requests")]), 1000).sizes(50)["requests"] == 1


def test_a_share_counts_states_apart_from_tables():
    shares = (Share(of_budget=(1, 4), counts="kv"), Share(of_budget=(1, 2), counts="bookkeeping"))
    requests = Space(name="requests", rule=SizeRule(at_least=100, shares=shares, needs=1), issued_by="request_pool")
    table = kv(10, space="requests")
    state = kv(2, space="requests", is_kv=True)
    # half of 1000 bytes holds 50 rows of the table, a quarter 125 of the states; a row of each is padding
    assert Solver(problem([FULL, requests], [kv(1), table, state]), 1000).sizes(500)["requests"] == 49


def test_a_share_pays_for_what_follows_its_space():
    # three slots serve a request: 10 bytes a slot and 30 a request are 20 bytes a slot, padding of both aside
    share = Share(of_budget=(1, 2), beside=(("requests", (1, 3)),))
    states = Space(name="state", rule=SizeRule(fixed=10**6, shares=(share,), needs=1), issued_by="request_pool")
    requests = Space(name="requests", rule=SizeRule(fixed=4), issued_by="request_pool")
    buffers = [kv(1), kv(10, space="state", guard=0), kv(30, space="requests", guard=0)]
    # half of 1,205 bytes: 30 slots and the snapshots of 10 requests take 600, a slot more 610
    assert Solver(problem([FULL, states, requests], buffers), 1205).sizes(50)["state"] == 30


def test_an_addressing_limit_stops_the_growth_and_says_so():
    # S-23: 2^31 - 1 bytes a tensor; a slot of 149,760 bytes passes it with row 14,340
    limited = kv(149_760, max_tensor_bytes=2**31 - 1)
    solution = Solver(problem([FULL], [limited]), 2**40).solve()
    assert solution.tokens + 1 == (2**31 - 1) // 149_760 == 14_339
    assert solution.bound.startswith("addressing limit of buffer kv-full-149760")


def test_slots_never_outgrow_their_numbering():
    solution = Solver(problem([FULL], [kv(1)]), 2**50).solve()
    assert solution.tokens == 2**31 - 2
    assert "numbering" in solution.bound


def test_a_cap_binds_and_is_named():
    solution = Solver(problem([FULL], [kv(10)], cap_tokens=5, cap_name="max_total_tokens"), 10**6).solve()
    assert (solution.tokens, solution.bound) == (5, "max_total_tokens")


def test_granularity_rounds_every_tensor():
    two = kv(10, layers=(0, 1))
    # 512-byte steps: each of two tensors holds 51 rows of 10 bytes
    solution = Solver(problem([FULL], [two], granularity_bytes=512), 1024).solve()
    assert (solution.tokens, solution.total_bytes) == (50, 1024)


def test_pages_of_unequal_kinds_cost_no_padding():
    # S-19: attention page 12,416 bytes, state page 12,648,448 bytes, no multiple of each other
    states = Space(name="state", rule=SizeRule(fixed=4), issued_by="derived")
    buffers = [
        Buffer(name="kv", role="key", space="full", unit=Unit.PAGE, shape=(12_416,), dtype="uint8"),
        Buffer(name="state", role="state", space="state", shape=(12_648_448,), dtype="uint8"),
    ]
    budget = 12_416 * 101 + 12_648_448 * 5
    solution = Solver(problem([FULL, states], buffers), budget).solve()
    assert (solution.sizes, solution.total_bytes) == ({"full": 100, "state": 4}, budget)


@pytest.mark.parametrize(
    "counts",
    [
        {"full": 19, "sliding": 18},
        {"full": 9, "sliding": 39, "draft": 5},
        {"full": 10, "sliding": 5, "state": 30, "other": 1},
    ],
)
def test_groups_of_any_width_cost_no_padding(counts):
    # S-20: every group is as wide as its own layers, so bytes are exactly layers * rows * row bytes
    spaces = [Space(name=name, rule=SizeRule(per_token=(1, 1), needs=1)) for name in counts]
    buffers = [kv(64, space=name, layers=tuple(range(count))) for name, count in counts.items()]
    per_token = 64 * sum(counts.values())
    solution = Solver(problem(spaces, buffers), per_token * 11).solve()
    assert (solution.tokens, solution.total_bytes) == (10, per_token * 11)


def test_a_circle_of_spaces_is_refused():
    one = Space(name="one", rule=SizeRule(per_token=(1, 1), of="two"))
    two = Space(name="two", rule=SizeRule(per_token=(1, 1), of="one"))
    with pytest.raises(PlanError, match="one, two follow each other in a circle"):
        ordered({"one": one, "two": two})


def test_a_rule_about_a_missing_space_is_refused():
    with pytest.raises(PlanError, match="'swa' follows 'full', which no plugin declares"):
        ordered({"swa": Space(name="swa", rule=SizeRule(per_token=(1, 2), of="full"))})


def test_a_space_that_can_never_be_large_enough_is_refused():
    tiny = Space(name="tiny", rule=SizeRule(per_token=(1, 1), at_most=3, needs=8), options=("tiny_slots",))
    with pytest.raises(PlanError, match=r"'tiny' can have 3 slots at most, but one request needs 8.*tiny_slots"):
        Solver(problem([FULL, tiny], [kv(1)]), 10**6).solve()


def test_factors_multiply_along_the_chain():
    c4 = Space(name="c4", rule=SizeRule(per_token=(1, 4), of="swa"))
    swa = Space(name="swa", rule=SizeRule(per_token=(4, 5), of="full"))
    assert {k: str(v) for k, v in token_factors({"c4": c4, "swa": swa, "full": FULL}).items()} == {
        "full": "1",
        "swa": "4/5",
        "c4": "1/5",
    }


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_searches_find_the_bound(bound, low):
    if bound >= low:
        assert largest(lambda value: value <= bound, low, 3000) == bound
    assert smallest(lambda value: value >= bound, low, 3000) == max(bound, low)
    assert smallest(lambda value: False, low, 3000) is None


@given(
    page=st.sampled_from([1, 3, 16, 64, 256]),
    ratio=st.sampled_from([(4, 5), (1, 10), (1, 1), (3, 7)]),
    rows=st.lists(st.integers(1, 5000), min_size=2, max_size=6),
    requests=st.integers(1, 300),
    granularity=st.sampled_from([1, 512, 2**21]),
    budget=st.integers(10**6, 10**12),
)
def test_never_over_the_budget_and_never_a_page_short(page, ratio, rows, requests, granularity, budget):
    full = Space(name="full", page_size=page, rule=SizeRule(per_token=(1, 1), round_to=page, needs=page))
    swa = Space(name="swa", page_size=page, rule=SizeRule(per_token=ratio, of="full", round_to=page))
    rule = SizeRule(fixed=requests, at_most_of=(("tokens", (1, 2)),), needs=1)
    pool = Space(name="requests", rule=rule, issued_by="request_pool")
    buffers = [kv(n, space=("full", "swa")[i % 2], guard=page, layers=(i,)) for i, n in enumerate(rows)]
    buffers.append(kv(40, space="requests"))
    solver = Solver(problem([full, swa, pool], buffers, page_size=page, granularity_bytes=granularity), budget)
    try:
        solution = solver.solve()
    except BudgetError as error:
        assert error.needed_bytes == solver.nbytes(solver.floor_tokens()) > budget
        return
    assert solution.total_bytes == solver.nbytes(solution.tokens) <= budget
    assert solver.nbytes(solution.tokens + page) > budget or solution.bound.startswith("numbering")


def test_ranks_that_share_tokens_share_the_numbering():
    # slots of four ranks are numbered together: 4 * (n + 1) stays within 2^31 - 1
    solution = Solver(problem([FULL], [kv(1)], dcp_size=4), 2**50).solve()
    assert solution.tokens == (2**31 - 1) // 4 - 1
    assert "numbering" in solution.bound
