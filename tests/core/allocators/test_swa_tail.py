"""Sliding slots for the newest tokens alone: what the tail takes, what it maps, and how it is given back."""

import random
from pathlib import Path

import kvdock
import pytest
from kvdock.errors import SlotError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.allocators import (  # noqa: E402
    PagedAllocator,
    Shortfall,
    SortedAllocator,
    swa_tail_start,
    swa_tail_tokens,
)
from kvdock.families.groups import window_pages  # noqa: E402

MODELS = Path(__file__).parents[2] / "models"
NOTHING = torch.zeros(0, dtype=torch.int64)


def slots(*values):
    return torch.tensor(values, dtype=torch.int64)


def extend_tail(allocator, prefix, seq, last, tails, **named):
    total = sum(seq) - sum(prefix)
    return allocator.alloc_extend_swa_tail(
        torch.tensor(prefix), prefix, torch.tensor(seq), seq, slots(*last), total, tails, **named
    )


def row_of(held, columns):
    table = torch.zeros(2, columns, dtype=torch.int32)
    table[1, : held.numel()] = held
    return table


def free(allocator):
    return allocator.full_available_size(), allocator.swa_available_size()


# G-03
TAILS = [(1000, 128, 64, 168), (100, 128, 64, 100), (128, 128, 64, 128), (129, 128, 64, 129), (1024, 128, 256, 256)]


@pytest.mark.parametrize(("length", "window", "page_size", "kept"), TAILS)
def test_a_tail_is_the_window_and_the_rest_of_its_first_page(length, window, page_size, kept):
    # G-03
    assert swa_tail_tokens(length, window, page_size) == kept
    assert swa_tail_start(length, window, page_size) == length - kept
    assert swa_tail_start(length, window, page_size) % page_size == 0


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(("length", "window", "page_size", "kept"), TAILS)
def test_every_token_gets_a_full_slot_and_the_tail_a_sliding_one(make, length, window, page_size, kept, debug):
    # G-03
    allocator = make.swa(2048, 512, page_size, debug=debug)
    held = extend_tail(allocator, [0], [length], [-1], [window])
    assert held.tolist() == list(range(page_size, page_size + length))
    mapped = allocator.translate(held)
    assert mapped[: length - kept].tolist() == [0] * (length - kept)
    assert mapped[length - kept :].tolist() == list(range(page_size, page_size + kept))
    whole = -(-length // page_size) * page_size
    assert free(allocator) == (2048 - whole, 512 - (whole - length + kept))
    allocator.check(held=held)
    allocator.free_rows(row_of(held, 2048), [1], [0], [length], swa_starts=[length - kept])
    assert free(allocator) == (2048, 512)
    allocator.check(held=NOTHING)


def test_a_prompt_is_bound_by_the_full_side_alone(make):
    """A-14: full 100,000, sliding 10,000 tokens: a prompt of 50,000 fits, and a second one."""
    allocator = make.swa(100_000, 10_000)
    first, second = (extend_tail(allocator, [0], [50_000], [-1], [128]) for _ in range(2))
    assert free(allocator) == (0, 10_000 - 2 * 128)
    assert extend_tail(allocator, [0], [1], [-1], [1]) is None
    allocator.check(held=torch.cat([first, second]))


@pytest.mark.parametrize("debug", [False, True])
def test_the_requests_of_a_batch_have_tails_of_their_own(make, debug):
    allocator = make.swa(64, 64, 4, debug=debug)
    kept = allocator.alloc(8)  # two pages that a request goes on after
    held = extend_tail(allocator, [0, 8, 0, 0], [10, 21, 3, 8], [-1, 11, -1, -1], [3, 100, 0, 0], owners="abcd")
    pages = [range(12, 22), range(24, 37), range(40, 43), range(44, 52)]
    assert held.tolist() == [slot for request in pages for slot in request]
    mapped = allocator.translate(held).split([10, 13, 3, 8])
    assert mapped[0].tolist() == [0] * 4 + list(range(12, 18))
    assert mapped[1].tolist() == list(range(20, 33))
    assert mapped[2].tolist() == [36, 37, 38]
    assert mapped[3].tolist() == [0] * 8
    assert allocator.translate(kept).tolist() == list(range(4, 12))
    allocator.check(held=torch.cat([kept, held]))


def test_a_page_that_the_prefix_began_keeps_its_sliding_page(make):
    allocator = make.swa(64, 64, 4)
    first = extend_tail(allocator, [0], [10], [-1], [2])
    more = extend_tail(allocator, [10], [19], [int(first[-1])], [8])
    assert more.tolist() == list(range(14, 23))
    assert allocator.translate(torch.cat([first, more])).tolist() == [0] * 8 + [4, 5, 6, 7, *range(8, 15)]
    assert free(allocator) == (64 - 20, 64 - 12)


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_an_undone_extend_mapped_is_not_left_behind_a_tail(make, page_size):
    allocator = make.swa(16 * page_size, 16 * page_size, page_size)
    state = allocator.backup_state()
    allocator.alloc(8 * page_size)
    allocator.restore_state(state)
    held = extend_tail(allocator, [0], [8 * page_size], [-1], [2 * page_size])
    mapped = allocator.translate(held)
    assert mapped.tolist() == [0] * (6 * page_size) + list(range(page_size, 3 * page_size))
    allocator.check(held=held)


@pytest.mark.parametrize(
    ("full", "swa", "served"), [(40, 12, True), (36, 12, False), (40, 8, False), (36, 8, False), (400, 8, False)]
)
def test_both_sides_are_served_or_neither(make, full, swa, served):
    """39 tokens take 10 full pages; of a tail of 9 tokens from token 28 on, 3 sliding pages."""
    allocator = make.swa(full, swa, 4)
    held = extend_tail(allocator, [0], [39], [-1], [9])
    assert (held is not None) is served
    assert free(allocator) == ((full - 40, swa - 12) if served else (full, swa))
    allocator.check(held=held if served else NOTHING)


def test_admission_counts_each_side_by_its_own_pages(make):
    #
    allocator = make.swa(40, 8, 4)
    pages, swa_pages = (
        allocator.pages_needed([0, 4], [39, 9]),
        allocator.swa_pages_needed([0, 4], [39, 9], [9, 100]),
    )
    assert (pages, swa_pages) == (10 + 2, 3 + 2)
    assert allocator.shortfall(pages, swa_pages) == (
        Shortfall(space="full", needed=48, available=40),
        Shortfall(space="swa", needed=20, available=8),
    )
    assert allocator.shortfall(10, 2) == ()
    assert [lack.missing for lack in allocator.shortfall(10)] == [32]


@pytest.mark.parametrize(
    ("prefix", "seq", "tails", "message"),
    [
        ([0, 0], [8, 8], [4], "1 swa_tail_lens for 2 requests; give one of each"),
        ([0], [8], [-1], "swa_tail_lens holds -1; a tail has at least 0 tokens"),
        ([0], [8], [2.5], "which are no whole numbers"),
        ([0], [8], [4, 4], "2 swa_tail_lens for 1 requests"),
        ([5], [4], [4], "grows from 5 to 4 tokens"),
    ],
)
def test_tails_that_contradict_the_batch_are_refused(make, prefix, seq, tails, message):
    allocator = make.swa(32, 32, 4)
    with pytest.raises(SlotError, match=message):
        extend_tail(allocator, prefix, seq, [-1] * len(prefix), tails)
    assert free(allocator) == (32, 32)
    with pytest.raises(SlotError, match=message):
        allocator.swa_pages_needed(prefix, seq, tails)


@pytest.mark.parametrize("kind", ["swa", "pure"])
def test_a_tail_leaves_no_half_page_behind_and_what_the_message_advises_works(make, kind):
    allocator = make.swa(64, 64, 4) if kind == "swa" else make.pure(64, 4)
    first = extend_tail(allocator, [0], [6], [-1], [6])
    with pytest.raises(
        SlotError,
        match=r"prefix 6, pages of 4\), and a tail of 13 of its 21 tokens .* at least 14 tokens, or .* to 8 t",
    ):
        extend_tail(allocator, [6], [21], [int(first[-1])], [13])
    assert free(allocator)[1] == 56
    held = torch.cat([first, extend_tail(allocator, [6], [21], [int(first[-1])], [14])])
    assert allocator.translate(held).eq(0).sum() == 0
    table = row_of(held, 32)
    allocator.free_rows(table, [1], [0], [21])

    first = extend_tail(allocator, [0], [8], [-1], [8])
    allocator.free_swa_rows(row_of(first, 32), [1], [0], [8])
    held = torch.cat([first, extend_tail(allocator, [8], [21], [int(first[-1])], [5])])
    assert free(allocator)[1] == 64 - 8
    allocator.free_rows(row_of(held, 32), [1], [0], [21], swa_starts=[swa_tail_start(21, 5, 4)])
    assert free(allocator) == (64, 64)
    allocator.check(held=NOTHING)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("kind", ["swa", "pure"])
def test_a_tail_never_waits_for_the_device(make, kind, page_size):
    room = 64 * page_size
    allocator = (
        make.swa(room, room, page_size, device="meta") if kind == "swa" else make.pure(room, page_size, device="meta")
    )
    meta = lambda *values: slots(*values).to("meta")  # noqa: E731
    lens = [0, 0], [20 * page_size, 5]
    held = allocator.alloc_extend_swa_tail(
        meta(0, 0), lens[0], meta(*lens[1]), lens[1], meta(-1, -1), sum(lens[1]), [1, 9]
    )
    assert (held.shape, held.dtype, held.device.type) == ((sum(lens[1]),), torch.int64, "meta")
    assert free(allocator)[1] == room - page_size - -(-5 // page_size) * page_size


@pytest.mark.parametrize("debug", [False, True])
def test_decoding_goes_on_behind_a_tail_and_the_window_moves_through_it(make, debug):
    allocator = make.swa(64, 32, 4, debug=debug)
    held = extend_tail(allocator, [0], [18], [-1], [5])
    assert allocator.translate(held).tolist() == [0] * 12 + list(range(4, 10))
    for length in range(19, 26):
        held = torch.cat([held, allocator.alloc_decode(slots(length), [length], held[-1:])])
    assert allocator.translate(held[12:]).tolist() == list(range(4, 17))
    table = row_of(held, 64)
    for start, end, left in [(12, 15, 16), (15, 16, 12), (16, 22, 8)]:
        allocator.free_swa_rows(table, [1], [start], [end])
        assert allocator.swa_available_size() == 32 - left
        allocator.check(held=held)
    allocator.free_rows(table, [1], [0], [25], swa_starts=[22])
    assert free(allocator) == (64, 32)
    allocator.check(held=NOTHING)


def test_debug_finds_a_tail_that_is_given_back_as_if_it_were_the_whole(make):
    allocator = make.swa(64, 32, 4, debug=True)
    held = extend_tail(allocator, [0], [18], [-1], [5], owners=["r"])
    table = row_of(held, 64)
    for misuse in (
        lambda: allocator.free_swa_rows(table, [1], [0], [16]),
        lambda: allocator.free_rows(table, [1], [0], [18]),
        lambda: allocator.free_pages(slots(1)),
    ):
        with pytest.raises(SlotError, match="sliding slots are freed twice"):
            misuse()
    allocator.check(held=held)
    allocator.free(held)
    assert free(allocator) == (64, 32)


@pytest.mark.parametrize(("window", "page_size", "peak"), [(11, 128, 2), (128, 256, 2), (128, 64, 3), (128, 1, 128),
                                                           (1, 64, 1), (65, 64, 2), (66, 64, 3)])  # fmt: skip
def test_a_window_straddles_as_many_pages_as_it_can(make, window, page_size, peak):
    """A-16: of a request that decodes, and gives back before each token what that one does not see."""
    earlier, first, last = window - 1, 2 * page_size + window, 4 * page_size + window
    assert window_pages(earlier, page_size) == peak
    pages = -(-last // page_size)
    allocator = make.swa(pages * page_size, pages * page_size, page_size)
    evicted, most = swa_tail_start(first, earlier, page_size), 0
    table = row_of(extend_tail(allocator, [0], [first], [-1], [earlier]), last)
    for length in range(first, last):
        end = max(evicted, length - earlier)
        allocator.free_swa_rows(table, [1], [evicted], [end])
        evicted, grown = end, length + 1
        table[1, length] = allocator.alloc_decode(slots(grown), [grown], table[1, length - 1 : length].long())
        most = max(most, pages - allocator.swa_available_size() // page_size)
    assert most == peak


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("inner", [None, {"full": SortedAllocator, "swa": SortedAllocator}])
def test_random_requests_with_tails_lose_nothing(make, inner, page_size, debug):
    """Tails, extends, decodes, evictions and ends; what is mapped is counted token by token."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    allocator = make.swa(40 * page_size, 20 * page_size, page_size, debug=debug, inner=inner)
    requests = {}  # name → [slots, first token with a sliding slot]
    for name in range(150):
        act = rng.choice(["tail", "extend", "decode", "evict", "end"])
        known = sorted(requests)
        if act == "tail":
            length, tail = rng.randint(1, 10 * page_size), rng.randint(0, 5 * page_size)
            held = extend_tail(allocator, [0], [length], [-1], [tail])
            if held is not None:
                requests[name] = [held, swa_tail_start(length, tail, page_size)]
        elif known and act in ("extend", "decode"):
            own = requests[rng.choice(known)]
            before, grown = own[0].numel(), 1 if act == "decode" else rng.randint(1, 3 * page_size)
            after, last = before + grown, own[0][-1:]
            new = (
                allocator.alloc_decode(slots(after), [after], last)
                if act == "decode"
                else allocator.alloc_extend(slots(before), [before], slots(after), [after], last, grown)
            )
            own[0] = own[0] if new is None else torch.cat([own[0], new])
        elif known and act == "evict":
            own = requests[rng.choice(known)]
            end = rng.randint(own[1], max(own[1], own[0].numel() - 1))
            allocator.free_swa_rows(row_of(own[0], 2000), [1], [own[1]], [end])
            own[1] = end
        elif known:
            held, start = requests.pop(rng.choice(known))
            allocator.free_rows(row_of(held, 2000), [1], [0], [held.numel()], swa_starts=[start])
        for held, start in requests.values():
            gone = start // page_size * page_size
            mapped = allocator.translate(held)
            assert mapped.eq(0).tolist() == [token < gone for token in range(held.numel())]
        everything = [held for held, _ in requests.values()]
        allocator.check(held=torch.cat(everything) if everything else NOTHING)


def built(debug, role="none"):
    options = {"page_size": 16, "max_running_requests": 8, "plugins": (), "role": role}
    plan = kvdock.plan(str(MODELS / "gpt-oss-20b.json"), device="cpu", budget_bytes=2**27, options=options)
    return kvdock.build(plan, debug=debug)


def arrive(cache, request, length, prefix=NOTHING):
    """Give a new request its prompt, of which sliding layers keep what the next token sees; return where that starts."""
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    window, begin = cache.plan.outline.spaces["swa"].window_tokens, prefix.numel()
    (row,) = table.alloc([request])
    last = [int(prefix[-1]) if begin else -1]
    new = extend_tail(allocator, [begin], [length], last, [window], owners=[request])
    table.write([row], [0], [length], torch.cat([prefix, new]))
    start = swa_tail_start(length, window, allocator.page_size)
    cache.hold_prefix(request, borrowed=begin, evicted=start)
    return start


def decode(cache, requests, steps):
    """Decode a batch as an engine does, and give back what left the window before each step."""
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    window, rows = cache.plan.outline.spaces["swa"].window_tokens, [table.row_of(r) for r in requests]
    for _ in range(steps):
        lens = [int(table.lengths[row]) for row in rows]
        cache.evict(requests, [max(0, length - window) for length in lens])
        last = torch.stack([table.req_to_token[row, n - 1] for row, n in zip(rows, lens, strict=True)]).long()
        grown = [n + 1 for n in lens]
        new = allocator.alloc_decode(slots(*grown), grown, last, owners=requests)
        table.write(rows, lens, grown, new)


def swa_pages(cache, requests):
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    rows = [(table.row_of(r), int(table.lengths[table.row_of(r)])) for r in requests]
    mapped = torch.cat([allocator.translate(table.req_to_token[row, :n]) for row, n in rows])
    return (mapped[mapped > 0] // 16).unique().numel()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(("role", "side"), [("none", PagedAllocator), ("decode", SortedAllocator)])
def test_requests_that_arrive_prefilled_decode_and_end_in_a_whole_cache(role, side, debug):
    cache = built(debug, role)
    allocator = cache.token_to_kv_pool_allocator
    before = free(allocator)
    assert (type(allocator.full), type(allocator.swa)) == (side, side)
    assert cache.plan.outline.spaces["swa"].window_tokens == 127
    # 1,000 tokens: the newest 127 from token 873 on, from its page's first, 864, on: 136 tokens on 9 pages of 63.
    assert (arrive(cache, "A", 1000), arrive(cache, "B", 100)) == (864, 0)
    assert free(allocator) == (before[0] - 1008 - 112, before[1] - 144 - 112)
    decode(cache, ["A", "B"], 60)
    # A has 1,060 tokens; before the last one, those before 1,059 − 127 = 932 had left: pages from 928 on are kept.
    assert swa_pages(cache, ["A"]) == 67 - 58
    assert free(allocator) == (before[0] - 1072 - 160, before[1] - 9 * 16 - 160 + 32)
    cache.check()
    cache.release("A")
    cache.release("B")
    assert free(allocator) == before
    cache.check(held=NOTHING)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("length", [96, 400])
def test_a_tail_goes_on_from_a_prefix_that_is_anothers(length, debug):
    """The sliding slots of a borrowed prefix stay with its owner, whether the tail starts inside it or behind."""
    cache = built(debug)
    allocator = cache.token_to_kv_pool_allocator
    before = free(allocator)
    arrive(cache, "A", 80)
    prefix = cache.req_to_token_pool.req_to_token[cache.req_to_token_pool.row_of("A"), :64].long()
    # 400 tokens keep those from 273 on, from 272 on: 8 pages. 96 tokens are all in the window: 2 new pages.
    arrive(cache, "B", length, prefix)
    own = {96: 2, 400: 8}[length]
    assert free(allocator) == (before[0] - 80 - (length - 64), before[1] - 80 - own * 16)
    decode(cache, ["B"], 30)
    cache.check()
    cache.release("B")
    assert free(allocator) == (before[0] - 80, before[1] - 80)
    cache.release("A")
    assert free(allocator) == before
    cache.check(held=NOTHING)
