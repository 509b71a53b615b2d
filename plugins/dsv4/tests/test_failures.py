"""Every inner call of a request's life fails once: nothing changes in any space, and the call is made again."""

import pytest
from kvdock.builder import build

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.testing.failing import Life  # noqa: E402

TIERS = {"hisparse": True, "hisparse_top_k": 64}


def cache_of(plan, small, debug, **options):
    options = {"max_running_requests": 4, "swa_full_tokens_ratio": 0.5, **options}
    return build(plan(small, 2**23, **options), device="cpu", debug=debug)


@pytest.mark.parametrize(
    ("debug", "way"), [(False, "before"), (True, "before"), (False, "after"), (True, "after"), (False, "operator")]
)
@pytest.mark.parametrize("options", [{}, TIERS, {"role": "decode", **TIERS}], ids=["one tier", "tiers", "decode"])
def test_a_failed_call_changes_nothing_and_can_be_made_again(plan, small, options, debug, way):
    life = Life(cache_of(plan, small, debug, **options), way)
    page, arrives = life.page_size, "role" in options
    life.admit("a", 3 * page + 5, **({"arriving": True} if arrives else {}))
    life.grow("a", 2 * page)
    life.admit("b", page - 1)
    if "hisparse" in options:
        life.attempt(lambda: life.allocator.alloc_device_buffer("a", 64))
        life.attempt(lambda: life.allocator.grow_device_buffer("a", 128))
    life.decode(["a", "b"], 2)
    life.retract("a", page + 1)
    life.evict(["a", "b"], [4 * page, 0])
    life.grow("a", 2 * page)
    life.trim(["a"], [5 * page + 7])
    prefix = life.slots("a")[:page]
    life.admit("c", 2 * page, prefix=prefix, evicted=page)
    life.release("c")
    life.release_in_a_group(["b"])
    life.release("a")
    life.end()
