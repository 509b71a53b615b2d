"""Every inner call of a request's life fails once, in six spaces: nothing changes, and the call is made again."""

import kvdock
import pytest

pytest.importorskip("kvdock_dsv4.hooks")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.testing.failing import Life  # noqa: E402


@pytest.mark.parametrize(
    ("role", "debug", "way"),
    [
        *((role, debug, way) for role in ("none", "prefill") for debug in (False, True) for way in ("before", "after")),
        ("none", False, "operator"),
    ],
)
def test_a_failed_call_changes_nothing_and_can_be_made_again(planned, role, debug, way):
    made = planned(max_total_tokens=4096, page_size=128, role=role)
    life = Life(kvdock.build(made, device="cpu", debug=debug), way)
    page = life.page_size
    life.admit("a", 2 * page + 5)
    life.grow("a", 3 * page)
    life.admit("b", page - 1)
    life.decode(["a", "b"], 2)
    life.retract("a", page + 1)
    life.evict(["a", "b"], [3 * page, 0])
    life.grow("a", 2 * page)
    life.trim(["a"], [5 * page + 7])
    slots = life.slots("a")
    lens = torch.tensor([len(slots)]), [len(slots)], torch.tensor([6 * page]), [6 * page]
    state = life.allocator.backup_state()
    batch = (*lens, slots[-1:], 6 * page - len(slots), ["a"])
    assert life.attempt(lambda: life.allocator.alloc_extend_bundle(*batch)).full.shape[0] == 6 * page - len(slots)
    life.allocator.restore_state(state)
    one = torch.tensor([len(slots) + 1]), [len(slots) + 1]
    assert life.attempt(lambda: life.allocator.alloc_decode_bundle(*one, slots[-1:], ["a"])).full.shape == (1,)
    life.allocator.restore_state(state)
    life.release_in_a_group(["b"])
    life.release("a")
    life.end()
