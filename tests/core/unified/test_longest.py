"""The longest request of a plan, found again by letting one grow in an empty cache until it finds no page."""

import pytest

torch = pytest.importorskip("torch")

OPTIONS = (
    {},
    {"prefix_cache": False, "max_running_requests": 2},
    {"state_extra_buffer": "on"},
    {"chunked_prefill_size": 8},
)


def grown(cache, name, length, to):
    """Whether a request found slots up to token `to`."""
    table, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    last = table.req_to_token[table.row_of(name), length - 1 : length].long()
    lens = torch.tensor([length]), [length], torch.tensor([to]), [to]
    slots = allocator.alloc_extend(*lens, last, to - length)
    if slots is not None:
        table.write([table.row_of(name)], [length], [to], slots)
    return slots is not None


def reach(cache, window, first, chunk, context):
    """The tokens that a request reaches which begins with `first` and grows by `chunk`, what left the window given back."""
    if cache.admit("r", first) is None:
        return 0
    length, step = first, chunk
    while length < context and step:
        if window is not None and length > window:
            cache.evict(["r"], [length - window])
        step = next((k for k in range(min(step, context - length), 0, -1) if grown(cache, "r", length, length + k)), 0)
        length += step
        if step < chunk:  # its last step, which is as long as it can be
            break
    cache.release("r")
    return length


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 4, 12, 16])
@pytest.mark.parametrize("kind", ["linear", "sliding", "three", "pure"])
def test_the_longest_request_is_the_longest_that_an_empty_cache_serves(small, kind, page_size, options):
    given = {key: value for key, value in options.items() if key != "state_extra_buffer" or kind != "sliding"}
    if kind == "sliding" and given != options:
        given = {"swa_full_tokens_ratio": 0.5}
    cache = small.build(
        kind, debug=False, budget_bytes=15_000 + 600 * page_size, context=512, page_size=page_size, **given
    )
    spaces, chunk = cache.plan.outline.spaces, given.get("chunked_prefill_size", 1)
    # Where every layer slides requests are numbered in sliding slots, and a request counts them all.
    window = spaces["swa"].window_tokens if "swa" in spaces and kind != "pure" else None
    found = [reach(cache, window, first, chunk, 512) for first in range(1, chunk + 1)]
    assert cache.plan.max_request_tokens == min(found) < 512


@pytest.mark.parametrize(("budget", "longest"), [(9_000, 11), (12_000, 36)])
def test_a_request_shorter_than_its_window_takes_no_window_of_pages(small, budget, longest):
    plan = small.plan("sliding", budget_bytes=budget, page_size=1, context=512)
    assert plan.max_request_tokens == longest == plan.max_length(1)
