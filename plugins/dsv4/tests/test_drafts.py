"""How many drafts a step may verify: as many as leave the states in their rings that are needed if none is accepted."""

import pytest
from kvdock.errors import UnsupportedCombination
from kvdock_dsv4 import objections
from kvdock_dsv4.geometry import first_needed, most_drafts
from small_dsv4 import drafting, of_ratios

ONLINE = {"plugin_options": {"dsv4": {"online_compress": True}}}
LIMITS = [([4, 128], {}, 9), ([0, 128], {}, 129), ([4, 128], ONLINE, 9), ([4, 0], {}, 9)]
"""Ratios and options → drafts: rings of 16 less the 7 tokens before one of a row of 8, or of 256 less 127."""
IDS = ["both", "128 alone", "online", "4 alone"]


def members(length, ratio):
    """Return the written tokens of which that row is made to which token `length` belongs; those of 4 overlap."""
    own = length - length % ratio
    return range(max(0, own - (4 if ratio == 4 else 0)), length)


def lost(places, ratio, drafts):
    """Return the lengths at which a step of so many tokens writes over a state that is needed if none is accepted."""
    found = []
    for length in range(len(places) - drafts):
        kept = {places[token] for token in members(length, ratio)}
        found += [length] if kept & set(places[length : length + drafts]) else []
    return found


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_row_is_made_of_these_tokens(ratio):
    for length in range(3 * 128 + 1):
        needed = [token for token in range(length) if token >= first_needed(length, ratio)]
        assert needed == list(members(length, ratio))


@pytest.mark.parametrize(("rows", "ratio", "most"), [(16, 4, 9), (8, 4, 1), (256, 128, 129), (128, 128, 1)])
def test_a_step_may_write_what_a_ring_has_beside_the_tokens_of_a_row(rows, ratio, most):
    # By brute force over three turns of the ring.
    ring = [position % rows for position in range(4 * rows + 300)]
    assert most_drafts(rows, ratio) == most
    assert lost(ring, ratio, most) == []
    first = lost(ring, ratio, most + 1)[0]
    assert first % ratio == ratio - 1


@pytest.mark.parametrize(("ratios", "options", "most"), LIMITS, ids=IDS)
def test_a_step_of_more_drafts_is_refused_with_the_most_that_works(plan, ratios, options, most):
    config = of_ratios(*ratios)
    assert plan(config, 2**24, **drafting(most), **options).total_bytes > 0
    with pytest.raises(UnsupportedCombination) as caught:
        plan(config, 2**24, **drafting(most + 1), **options)
    (reason,) = [reason for plugin, reason in caught.value.objections if plugin == "dsv4"]
    ratio, rows = (4, 16) if most == 9 else (128, 256)
    assert reason == (
        f"speculative_num_draft_tokens={most + 1}: a step of {most + 1} tokens overwrites states of which rows of {ratio} "
        f"tokens are still made, for a request has {rows} in turn; give speculative_num_draft_tokens={most} or less"
    )


def test_a_chain_that_its_steps_make_too_wide_is_refused_by_these(plan):
    chain = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 9}
    with pytest.raises(UnsupportedCombination, match=r"speculative_num_steps=9 with speculative_topk=1: a step of 10 "):
        plan(of_ratios(4, 128), 2**24, **chain)
    tree = chain | {"speculative_num_steps": 3, "speculative_topk": 3}
    with pytest.raises(UnsupportedCombination, match=r"speculative_num_steps=3 with speculative_topk=3: a step of 10 "):
        plan(of_ratios(4, 128), 2**24, **tree)
    assert plan(of_ratios(4, 128), 2**24, **(chain | {"speculative_num_steps": 8})).total_bytes > 0


@pytest.mark.parametrize(("ratios", "options"), [([0, 0], {}), ([0, 128], ONLINE)], ids=["no ratio", "online alone"])
def test_without_rings_any_number_of_drafts_is_planned(plan, ratios, options):
    assert plan(of_ratios(*ratios), 2**25, **drafting(200), **options).total_bytes > 0


@pytest.mark.parametrize("page_size", [128, 256])
@pytest.mark.parametrize("ratio", [4, 128])
def test_the_places_of_a_request_leave_room_for_as_many_drafts_and_no_more(cache, ratio, page_size):
    torch = pytest.importorskip("torch")
    found = cache(page_size=page_size, swa_full_tokens_ratio=1.0, **drafting(9))
    slots, pool = found.admit("a", 1000), found.token_to_kv_pool
    if ratio == 4:
        places = pool.translate_loc_from_full_to_state(slots)
    else:
        places = pool.request_state_locs(torch.ones(1000, dtype=torch.int64), torch.arange(1000))
    most = {4: 9, 128: 129}[ratio]
    assert lost(places.tolist(), ratio, most) == []
    assert lost(places.tolist(), ratio, most + 1) != []


@pytest.mark.parametrize(("ratios", "most"), [(ratios, most) for ratios, options, most in LIMITS if not options])
def test_the_widest_step_is_driven_and_one_more_loses_a_state(cache, monkeypatch, widest, ratios, most):
    from kvdock.testing.driver import drive
    from kvdock.testing.trace import Arrival
    from kvdock.testing.values import WrongValue

    first = 90 if most == 9 else 120  # amid a page, whose ring ends with it, or before the end of a row of 128

    def driven(drafts):
        found = cache(of_ratios(*ratios), page_size=128, swa_full_tokens_ratio=1.0, **drafting(drafts))
        arrival = Arrival(timestamp_ms=0.0, input_length=first, output_length=drafts + 12)
        return drive(found, [arrival], seed=1, speculating=1.0, max_steps=14)

    report = driven(most)
    assert (report.problems, report.rollbacks) == ((), len(widest))
    assert widest.count(most) >= 8
    kept = tuple(rule for rule in objections.RULES if rule is not objections._drafts_beyond_states)
    monkeypatch.setattr(objections, "RULES", kept)
    with pytest.raises(WrongValue, match="state"):
        driven(most + 1)
