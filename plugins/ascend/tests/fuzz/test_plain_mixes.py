"""Plain models on an NPU, random budgets and request mixes: whoever is admitted ends, and all that was taken is free."""

import kvdock
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.trace import Arrival  # noqa: E402

KINDS = ("mha", "mla", "dsa", "sliding", "pure", "linear")
edges = st.sampled_from([1, 15, 16, 17, 127, 128, 129, 255, 256, 257])
widths = st.sampled_from([None, 2, 5, 16])


def drafting(width):
    """Return the options of drafts from what was seen, verified `width` tokens at once."""
    if width is None:
        return {}
    return {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": width,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_no_admitted_request_hangs(kind, plan, model_of, effort):
    """From the smallest budget on, with contexts that end anywhere in a page."""

    @effort
    @given(
        page=st.sampled_from([128, 256, 384]),
        context=st.sampled_from([1, 2, 127, 129, 500, 1023]),
        more=st.sampled_from([0, 1]) | st.integers(0, 3_000_000),
        requests=st.integers(1, 5),
        width=widths,
        fia=st.booleans(),
        lengths=st.lists(st.tuples(edges | st.integers(1, 500), st.integers(1, 50)), min_size=1, max_size=6),
        chunk=st.sampled_from([40, 512]),
        seed=st.integers(0, 2**16),
    )
    def property_holds(page, context, more, requests, width, fia, lengths, chunk, seed):
        model = model_of(kind, context_length=context)
        options = {"page_size": page, "max_running_requests": requests, **drafting(width)}
        options |= {"plugin_options": {"ascend": {"fia": True}}} if fia and kind == "mha" else {}
        with pytest.raises(kvdock.BudgetError) as least:
            plan(model, budget=1, **options)
        made = plan(model, budget=least.value.needed_bytes + more, **options)
        cache = kvdock.build(made, device="cpu", debug=True)
        free = cache.token_to_kv_pool_allocator.available_size(), cache.req_to_token_pool.available_size()
        arrivals = [Arrival(timestamp_ms=10.0 * i, input_length=p, output_length=o) for i, (p, o) in enumerate(lengths)]
        report = drive(cache, arrivals, seed=seed, chunk=chunk)
        assert report.problems == ()
        assert report.rejected == sum(p + o > made.max_request_tokens for p, o in lengths)
        assert report.finished == len(lengths) - report.rejected
        assert free == (cache.token_to_kv_pool_allocator.available_size(), cache.req_to_token_pool.available_size())

    property_holds()
