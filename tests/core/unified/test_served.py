"""What answers say of unified memory is what a cache admits: spaces that have room alone may not have it together."""

import kvdock
import pytest

torch = pytest.importorskip("torch")


def admitted(cache, requests, tokens):
    """How many of the requests are admitted, one after the other."""
    return sum(cache.admit(name, tokens) is not None for name in range(requests))


@pytest.mark.parametrize("kind", ["linear", "sliding", "three"])
@pytest.mark.parametrize("requests", [2, 5])
def test_requests_of_the_longest_length_are_served_and_a_token_more_is_not(small, kind, requests):
    plan = small.plan(kind, budget_bytes=60_000, context=512, max_running_requests=6)
    length = plan.max_length(requests)
    assert 0 < length < 512
    if kind == "linear":  # with windows a prompt that is admitted whole holds more than one that grows
        assert admitted(kvdock.build(plan), requests, length) == requests
    served, more = kvdock.serves(plan, requests, length), kvdock.serves(plan, requests, length + 1)
    assert (served.fits, served.reasons, more.fits) == (True, (), False)
    assert more.reasons
    found = kvdock.longest(plan, requests)
    assert (found.length, found.limit) == (length, "tokens")
    assert found.bound


def test_the_budget_that_is_named_is_the_least_that_admits_all(small):
    options = {"context": 512, "max_running_requests": 6}
    plan = small.plan("linear", budget_bytes=60_000, **options)
    requests, tokens = 6, plan.max_length(6) + 40
    assert admitted(kvdock.build(plan), requests, tokens) < requests
    answer = kvdock.serves(plan, requests, tokens)
    enough = small.plan("linear", budget_bytes=answer.budget_bytes, **options)
    assert admitted(kvdock.build(enough), requests, tokens) == requests
    assert not kvdock.serves(
        small.plan("linear", budget_bytes=answer.budget_bytes - 1, **options), requests, tokens
    ).fits


def test_what_lies_in_one_buffer_is_compared_together(small):
    """By hand: a full page is 4 tokens · 2 · 8 columns · 4 bytes, 256 bytes; a sliding one that of three layers, 768."""
    plan = small.plan("sliding", budget_bytes=60_000, context=512, max_running_requests=6)
    length = plan.max_length(2) + 4  # a page of each request more
    held = -(-length // 4) * 2 * 256 + plan_windows(plan, length) * 2 * 768
    (reason,) = kvdock.serves(plan, 2, length).reasons
    assert reason.startswith(f"the shared buffer: pages of {held:,} bytes are needed at once, ")
    assert kvdock.longest(plan, 2).bound == "the shared buffer"


def plan_windows(plan, length):
    """Sliding pages of a request of `length` tokens, by what the plan says of one."""
    return (
        kvdock.serves(plan, 1, length)
        .spaces[[s.name for s in kvdock.serves(plan, 1, length).spaces].index("swa")]
        .needed
        // 4
    )
