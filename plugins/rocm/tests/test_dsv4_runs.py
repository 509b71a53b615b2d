"""DeepSeek V4 on AMD devices: requests from end to end, what is taken together, and what is given back."""

import random

import kvdock
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.trace import Arrival  # noqa: E402
from kvdock.testing.values import WrongValue  # noqa: E402
from kvdock_rocm.dsv4.pools import RocmRowsPool  # noqa: E402
from kvdock_rocm.dsv4.router import RocmDSV4Pool  # noqa: E402

PAGE = 256
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}


@pytest.fixture
def tiny(small):
    """A layer of each kind, rows of 48 bytes."""
    return small | {"num_hidden_layers": 3, "head_dim": 24, "qk_rope_head_dim": 8, "compress_ratios": [0, 4, 128]}


def arrivals(count, seed, prompt=700, output=150, apart=20.0):
    rng = random.Random(seed)
    lengths = [(rng.randint(1, prompt), rng.randint(1, output)) for _ in range(count)]
    return [Arrival(timestamp_ms=apart * i, input_length=p, output_length=o) for i, (p, o) in enumerate(lengths)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device": "mi355x", "state_dtype": "bfloat16"},
        {"role": "prefill"},
        {"role": "decode"},
        EAGLE,
        {"role": "decode", "decode_extra_slots": 1, "max_running_requests": 2, **EAGLE},
    ],
    ids=["plain", "narrow", "prefill", "decode", "speculation", "decode-speculation"],
)
def test_what_is_read_back_is_what_was_written(options, cached, tiny):
    report = drive(cached(tiny, **{"max_total_tokens": 2304, **options}), arrivals(12, seed=1), seed=2, chunk=300)
    assert report.problems == ()
    assert (report.finished, report.unfinished, report.shared_tokens) == (12, 0, 0)
    assert report.checks > 13_000
    assert (report.rollbacks > 0) == ("speculative_algorithm" in options)
    assert (report.received > 0) == (options.get("role") == "decode")


def test_a_model_may_have_no_layer_of_some_ratio(cached, tiny):
    for ratios in ([4, 4, 128], [0, 0, 128], [4, 0, 4], [0, 0, 0]):
        found = cached({**tiny, "compress_ratios": ratios}, max_total_tokens=1024)
        report = drive(found, arrivals(3, seed=3, output=40), seed=4)
        assert (report.problems, report.finished) == ((), 3)


def test_requests_are_swapped_out_and_come_back_whole(cached, tiny):
    """With their rings, in another row and in several chunks."""
    found = cached(tiny, max_total_tokens=1024, max_running_requests=6)
    report = drive(found, arrivals(12, seed=1, output=200), seed=1, chunk=300)
    assert (report.problems, report.finished) == ((), 12)
    assert report.preemptions > 0


def test_nothing_leaks_over_hundreds_of_requests(cached, tiny):
    found = cached(tiny, max_total_tokens=1024, max_running_requests=8)
    report = drive(found, arrivals(300, seed=5, prompt=150, output=8, apart=1.0), seed=6)
    assert (report.problems, report.finished) == ((), 300)
    assert report.peak_slots["requests"] > 2


@pytest.mark.parametrize(
    ("cls", "name", "wrong", "what"),
    [
        (RocmRowsPool, "first_compressed", property(lambda self: self.row_count - 16 * 64 - 128), "row|key"),
        (RocmDSV4Pool, "request_swa_locs", lambda self, rows, positions: rows * 128 + positions % 127, "key"),
        (RocmDSV4Pool, "request_state_locs", lambda self, rows, positions, ratio=128: positions % ratio + 1, "state"),
    ],
    ids=["compressed rows in rings", "short rings", "states of another request"],
)
def test_a_wrong_place_is_found(cls, name, wrong, what, cached, tiny, monkeypatch):
    found = cached(tiny, max_total_tokens=2048)
    monkeypatch.setattr(cls, name, wrong)
    with pytest.raises(WrongValue, match=what):
        drive(found, arrivals(6, seed=7), seed=8)


def test_compressed_rows_appear_at_the_ends_of_groups(cached):
    """Token by token: a row of ratio 4 with every fourth, one of 128 with the 128th, each behind the last."""
    cache = cached()
    slots = cache.admit("a", 1)
    allocator, table, pool = cache.token_to_kv_pool_allocator, cache.req_to_token_pool, cache.token_to_kv_pool
    row = table.row_of("a")
    found = {4: [], 128: []}
    for length in range(1, 300):
        for ratio, places in found.items():
            (place,) = pool.translate_loc_from_full_to_row(slots, ratio).tolist()
            assert (place >= 0) == (length % ratio == 0)
            places += [place] if place >= 0 else []
        slots = allocator.alloc_decode(torch.tensor([length + 1]), [length + 1], slots, owners=["a"])
        table.write([row], [length], [length + 1], slots)
    # 5 rings of 128, then page 1 for the first 256 tokens, and page 2.
    assert found[4] == [640 + 64 + i for i in range(74)]
    assert found[128] == [640 + 2, 640 + 3]


def free_sizes(cache):
    return cache.token_to_kv_pool_allocator.available_size(), cache.req_to_token_pool.available_size()


def test_a_prompt_that_is_aborted_gives_all_back(cached):
    cache = cached()
    before = free_sizes(cache)
    slots = cache.admit("a", 300)
    row = cache.req_to_token_pool.row_of("a")
    grown = torch.tensor([300]), [300], torch.tensor([900]), [900], slots[-1:], 600
    more = cache.token_to_kv_pool_allocator.alloc_extend(*grown, owners=["a"])
    cache.req_to_token_pool.write([row], [300], [900], more)
    assert free_sizes(cache) == (before[0] - 4 * PAGE, before[1] - 1)
    assert cache.trim(["a"], [400]) == 2 * PAGE
    cache.release("a")
    assert free_sizes(cache) == before
    cache.check(held=slots[:0])


@pytest.mark.parametrize(
    ("part", "name", "way"),
    [
        ("allocator", "alloc_extend", "short"),
        ("allocator", "alloc_extend", "raises"),
        ("allocator", "kernel", "raises"),
        ("rows", "alloc", "short"),
        ("rows", "alloc", "raises"),
        ("rows", "write", "raises"),
    ],
)
def test_a_failure_anywhere_takes_nothing(part, name, way, cached, monkeypatch):
    """Slots, then the row, then the table: whatever fails, what came before it is given back, and the name may begin."""
    cache = cached()
    cache.admit("a", 100)
    before = free_sizes(cache)
    found = {"allocator": cache.token_to_kv_pool_allocator, "rows": cache.req_to_token_pool}[part]

    def fail(*args, **kwargs):
        if way == "raises":
            raise RuntimeError("the device went away")

    target = found.parts.kernels if name == "kernel" else found
    monkeypatch.setattr(target, "alloc_extend" if name == "kernel" else name, fail)
    if way == "raises":
        with pytest.raises(RuntimeError, match="went away"):
            cache.admit("b", 600)
    else:
        assert cache.admit("b", 600) is None
    monkeypatch.undo()
    assert free_sizes(cache) == before
    cache.check()
    assert cache.admit("b", 600) is not None
    cache.release("a"), cache.release("b")
    cache.close()


def test_a_name_that_failed_has_not_begun(cached, monkeypatch):
    cache = cached()
    allocator = cache.token_to_kv_pool_allocator
    with monkeypatch.context() as patched:
        patched.setattr(cache.req_to_token_pool, "alloc", lambda requests: None)
        assert cache.admit("b", 600) is None
    slots = cache.admit("a", 512)
    grown = torch.tensor([256]), [256], torch.tensor([300]), [300], slots[255:256], 44
    with pytest.raises(kvdock.SlotError, match="'b' cannot go on behind 256 tokens that are another's"):
        allocator.alloc_extend(*grown, owners=["b"])


def test_a_request_does_not_go_on_behind_anothers_tokens(cached):
    cache = cached()
    slots = cache.admit("a", 256)
    before, allocator = free_sizes(cache), cache.token_to_kv_pool_allocator
    with pytest.raises(kvdock.SlotError, match="request 'b': prefix=256 says that its first tokens are another's"):
        cache.admit("b", 400, prefix=slots)
    with pytest.raises(kvdock.SlotError, match="'b' cannot go on behind 256 tokens that are another's"):
        allocator.alloc_decode(torch.tensor([257]), [257], slots[-1:], owners=["b"])
    assert free_sizes(cache) == before
    assert allocator.alloc_decode(torch.tensor([257]), [257], slots[-1:], owners=["a"]) is not None
    cache.clear()
    with pytest.raises(kvdock.SlotError, match="'a' cannot go on"):
        allocator.alloc_decode(torch.tensor([257]), [257], slots[-1:], owners=["a"])


def test_a_request_that_arrives_has_a_ring_whatever_its_length(cached):
    # G-03: the full side has len tokens, in whole pages; what slides is a ring, and costs nothing but the row
    cache = cached(role="decode", max_running_requests=2)
    for name, length in (("a", 1000), ("b", 100), ("c", 129), ("d", 1024)):
        before = cache.token_to_kv_pool_allocator.available_size()
        assert len(cache.admit(name, length, arriving=True)) == length
        assert before - cache.token_to_kv_pool_allocator.available_size() == -(-length // PAGE) * PAGE
    assert cache.token_to_kv_pool.get_swa_key_buffer(0).shape == (2 + 4 + 1, 128, 1, 80)


def test_a_long_prompt_is_admitted_whatever_a_ring_holds(cached):
    #
    cache = cached(max_total_tokens=2048, max_running_requests=1)
    assert len(cache.admit("a", 2048)) == 2048


mixes = st.lists(st.sampled_from([1, 3, 127, 128, 129, 255, 256, 257, 600, 1111, 2048]), min_size=1, max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), extra=st.integers(0, 2**20), requests=st.integers(1, 6), lengths=mixes)
def test_no_admitted_request_can_hang(seed, extra, requests, lengths, planned, tiny):
    """Whatever the budget and the mix: while a row and full pages are free, a request gets all that it needs.

    A request alone grows to its context, or to all tokens.
    """
    rng = random.Random(seed)
    smallest = planned(tiny, max_running_requests=requests, max_total_tokens=requests * PAGE).total_bytes
    made = planned(tiny, budget=smallest + extra, max_running_requests=requests)
    cache = kvdock.build(made, device="cpu", debug=False)
    allocator, table = cache.token_to_kv_pool_allocator, cache.req_to_token_pool
    live, longest = {}, made.max_request_tokens
    for name, wanted in enumerate(lengths):
        length = min(wanted, longest)
        room = -(-length // PAGE) * PAGE <= allocator.available_size() and table.available_size() > 0
        assert (cache.admit(name, length) is not None) == room
        live |= {name: length} if room else {}
        for request in sorted(live):
            seq = min(longest, live[request] + rng.choice([1, 1, 4, rng.randrange(1, 300)]))
            room = allocator.pages_needed([live[request]], [seq]) * PAGE <= allocator.available_size()
            assert grow(cache, request, live[request], seq) == room
            live[request] = seq if room else live[request]
        if live and rng.random() < 0.3:
            ended = rng.choice(sorted(live))
            cache.release(ended)
            del live[ended]
    cache.check()
    first = min(live, default=None)
    for request in list(live):
        if request != first:
            cache.release(request)
    if first is not None:
        assert grow(cache, first, live[first], longest)
        cache.release(first)
    assert free_sizes(cache) == (made.spaces["full"], made.max_running_requests)


def grow(cache, request, prefix, seq):
    """Let a request grow to `seq` tokens and write them to its row; tell whether there was room."""
    table = cache.req_to_token_pool
    row = table.row_of(request)
    last = table.req_to_token[row, prefix - 1 : prefix].long()
    batch = torch.tensor([prefix]), [prefix], torch.tensor([seq]), [seq], last, seq - prefix
    slots = cache.token_to_kv_pool_allocator.alloc_extend(*batch, owners=[request])
    if slots is not None:
        table.write([row], [prefix], [seq], slots)
    return slots is not None


def test_hot_paths_never_wait_for_the_device(planned):
    """On the meta device every read of a value raises."""
    cache = kvdock.build(planned(max_total_tokens=4096), device="meta", debug=False)
    allocator, table, pool = cache.token_to_kv_pool_allocator, cache.req_to_token_pool, cache.token_to_kv_pool
    (row,) = table.alloc(["a"])
    numbers = torch.empty(1, dtype=torch.int64, device="meta")
    slots = allocator.alloc_extend(numbers, [0], numbers, [700], numbers, 700, owners=["a"])
    table.write([row], [0], [700], slots)
    assert len(allocator.alloc_decode(numbers, [701], numbers, owners=["a"])) == 1
    k = torch.empty(700, 1, 80, dtype=torch.bfloat16, device="meta")
    rows = torch.empty(700, dtype=torch.int64, device="meta")
    for layer in range(4):
        pool.set_swa_key_buffer(layer, rows, rows, k)
        assert pool.read_swa_key(layer, rows, rows).shape == (700, 1, 80)
    pool.set_extra_key_buffer(2, slots, k)
    pool.set_index_k(1, slots, torch.empty(700, 128, device="meta"))
    pool.state_pool(2).set_states(2, pool.request_state_locs(rows, rows), *torch.empty(2, 700, 80, device="meta"))
    pool.move_kv_cache(slots, slots)
    allocator.free_rows(table.req_to_token, [row], [0], [700])
    assert allocator.available_size() > 0
