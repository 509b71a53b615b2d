"""Random budgets and request mixes: whoever is admitted ends, and nothing is left behind, however many there are."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdock.errors import BudgetError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.testing.driver import drive  # noqa: E402
from kvdock.testing.trace import Arrival  # noqa: E402

PAGE = 128
SPECULATIVE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 2, "speculative_topk": 1}
TIERS = {"hisparse": True, "hisparse_top_k": 48}
DECODE = {"role": "decode"}
FORMS = [{}, {"plugin_options": {"dsv4": {"online_compress": True}}}, SPECULATIVE, DECODE]
TIERED = [TIERS, TIERS | DECODE, TIERS | DECODE | SPECULATIVE]
"""With rows of ratio 4."""


def one_layer(small, ratio):
    return small | {"num_hidden_layers": 1, "compress_ratios": [ratio], "max_position_embeddings": 1024}


def test_no_admitted_request_hangs(cache, small, effort):
    """From the smallest budget on: every request that the plan can hold ends, alone or beside others."""

    @effort
    @given(
        layer=st.sampled_from([(ratio, form) for ratio in (0, 4, 128) for form in FORMS] + [(4, f) for f in TIERED]),
        more=st.integers(0, 400_000),
        requests=st.integers(1, 4),
        swa_ratio=st.sampled_from([0.1, 0.5, 1.0]),
        lengths=st.lists(st.tuples(st.integers(1, 500), st.integers(1, 60)), min_size=1, max_size=5),
        seed=st.integers(0, 2**16),
    )
    def property_holds(layer, more, requests, swa_ratio, lengths, seed):
        ratio, form = layer
        model = one_layer(small, ratio)
        options = {"page_size": PAGE, "max_running_requests": requests, "swa_full_tokens_ratio": swa_ratio, **form}
        with pytest.raises(BudgetError) as least:
            cache(model, 1, **options)
        found = cache(model, least.value.needed_bytes + more, **options)
        arrivals = [Arrival(timestamp_ms=10.0 * i, input_length=p, output_length=o) for i, (p, o) in enumerate(lengths)]
        report = drive(found, arrivals, seed=seed)
        assert report.problems == ()
        assert report.finished + report.rejected == len(lengths)

    property_holds()


@pytest.mark.parametrize("form", [{}, TIERS | DECODE], ids=["one tier", "two tiers, decode"])
def test_nothing_is_left_of_many_requests(cache, small, effort, form):
    rng = random.Random(7)
    count = 3000 if effort.max_examples > 100 else 150
    found = cache(one_layer(small, 4), 2**21, page_size=PAGE, max_running_requests=16, **form)
    arrivals = [
        Arrival(timestamp_ms=2.0 * i, input_length=rng.randint(1, 200), output_length=rng.randint(1, 6))
        for i in range(count)
    ]
    report = drive(found, arrivals, seed=8)
    assert report.problems == ()
    assert report.finished == count
