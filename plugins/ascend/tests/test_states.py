"""States as an NPU reads them: channels last, room for drafts, temporal states swapped; shapes worked out by hand."""

from pathlib import Path

import kvdock
import pytest
from kvdock.builder import build
from kvdock_ascend.pools import NpuMHAPool, NpuStatePool

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

QWEN = Path(__file__).parents[3] / "tests" / "models" / "qwen3-next-80b-a3b.json"
SPECULATING = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}


def states(plan, **options):
    made = plan("linear", max_total_tokens=1024, max_running_requests=2, prefix_cache=False, **options)
    cache = build(made, device="cpu", debug=False)
    (pool,) = cache.token_to_kv_pool.state_pools
    return cache, pool


def shapes(cache):
    (group,) = [group for group in cache.plan.groups if group.kind == "state"]
    return {buffer.name: buffer.shape[1:] for buffer in group.buffers if buffer.shape[0] == len(group.layers)}


def test_convolutions_lie_channels_last(plan):
    """2 layers of 64 channels, 3 inputs; 2 slots and padding. 4 heads of 8 × 16."""
    cache, pool = states(plan)
    assert type(pool) is NpuStatePool
    assert {type(part) for part in cache.pools.values()} == {NpuStatePool, NpuMHAPool}
    assert shapes(cache) == {"conv": (3, 3, 64), "temporal": (3, 4, 8, 16)}
    assert pool.conv_states(1).shape == (3, 3, 64)
    assert pool.conv_states(2).data_ptr() - pool.conv_states(1).data_ptr() == 3 * 3 * 64 * 2
    assert len({raw.data_ptr() for raw in pool.storages()}) == 2


def test_drafts_have_room_behind_the_inputs_and_swap_temporal_states(plan):
    """4 drafts: 3 + 3 inputs; snapshots keep a window of 3 for each, whole."""
    cache, _ = states(plan, **SPECULATING)
    assert shapes(cache) == {
        "conv": (3, 6, 64),
        "temporal": (3, 4, 16, 8),
        "conv_windows": (3, 4, 3, 64),
        "temporal_snapshots": (3, 4, 4, 16, 8),
    }
    assert cache.allocated_bytes() == cache.plan.total_bytes


def test_a_commit_writes_what_the_next_token_needs(plan, npu_pool):
    """The accepted window goes to the first 3 inputs; the room behind them is the kernels' own."""
    cache, _ = states(plan, **SPECULATING)
    name = next(name for name, pool in cache.pools.items() if isinstance(pool, NpuStatePool))
    pool, _ = npu_pool(cache, name)
    rows, slots = torch.tensor([1, 2]), torch.tensor([2, 1])
    windows = torch.randn(4, 2, 3, 64).bfloat16()
    temporal = torch.randn(4, 2, 4, 16, 8)
    pool.conv_states(1)[:] = 7
    for step in range(4):
        pool.write_snapshot(1, rows, step, windows[step], temporal[step])
    pool.commit(rows, torch.tensor([3, 0]), slots)
    state = pool.get_state(1)
    assert torch.equal(state.conv[0][2, :3], windows[3, 0])
    assert torch.equal(state.conv[0][1, :3], windows[0, 1])
    assert bool((state.conv[0][:, 3:] == 7).all())
    assert torch.equal(state.temporal[2], temporal[3, 0])
    assert torch.equal(pool.window(1, rows, 2), windows[2])


def test_slots_are_cleared_copied_and_saved_whole(plan, npu_pool):
    cache, _ = states(plan, **SPECULATING)
    name = next(name for name, pool in cache.pools.items() if isinstance(pool, NpuStatePool))
    pool, fake = npu_pool(cache, name)
    one, two = torch.tensor([1]), torch.tensor([2])
    for layer in (1, 2):
        pool.conv_states(layer)[1] = torch.randn(6, 64).bfloat16()
        pool.temporal_states(layer)[1] = torch.randn(4, 16, 8)
    pool.copy_slots(one, two)
    saved = pool.get_cpu_copy(two)
    assert [list(copy.shape) for copy in saved] == [[1, 6, 64]] * 2 + [[1, 4, 16, 8]] * 2
    pool.clear_slots(two)
    assert not pool.conv_states(1)[2].any()
    pool.load_cpu_copy(saved, two)
    assert torch.equal(pool.conv_states(2)[2], pool.conv_states(2)[1])
    assert torch.equal(pool.temporal_states(1)[2], pool.temporal_states(1)[1])
    assert fake.calls["npu_scatter_nd_update_"] == 8


@pytest.mark.parametrize("more", [{}, {"speculative_topk": 2, "speculative_num_steps": 2}], ids=["chain", "tree"])
def test_requests_with_drafts_run_through_it_and_read_what_they_wrote(more, plan):
    from kvdock.testing.driver import drive
    from kvdock.testing.trace import Arrival

    cache, _ = states(plan, **SPECULATING, **more)
    arrivals = [Arrival(timestamp_ms=float(i), input_length=90 + 50 * i, output_length=60) for i in range(4)]
    report = drive(cache, arrivals, seed=1, speculating=0.5)
    assert (report.finished, report.problems) == (4, ())
    assert report.committed > 0


def test_what_the_next_token_needs_has_no_room_for_drafts(plan):
    _, pool = states(plan, **SPECULATING)
    needed, whole = pool.needed_state(1), pool.get_state(1)
    assert (whole.conv[0].shape[1:], needed.conv[0].shape[1:]) == ((6, 64), (3, 64))
    assert needed.conv[0].data_ptr() == whole.conv[0].data_ptr()
    assert needed.temporal is whole.temporal


def test_trees_of_drafts_keep_a_window_each(plan):
    cache, _ = states(plan, **SPECULATING, speculative_topk=2, speculative_num_steps=2)
    assert shapes(cache)["conv_windows"] == (3, 4, 3, 64)


def test_state_descriptors_name_layers_and_roles(plan):
    _, pool = states(plan)
    found = [(info.role, info.layer_id, info.item_nbytes) for info in pool.state_infos()]
    assert found == [("conv", 1, 384), ("conv", 2, 384), ("temporal", 1, 2048), ("temporal", 2, 2048)]


def test_a_published_model_follows_the_formula(plan):
    """Qwen3-Next: (2 · 16 · 128 + 32 · 128) = 8,192 channels of 3 inputs; 32 heads of 128 × 128."""
    config = QWEN
    made = plan(
        config, budget=2**34, max_running_requests=4, max_total_tokens=4096, context_length=4096, prefix_cache=False
    )
    (group,) = [group for group in made.groups if group.kind == "state"]
    found = {buffer.name: buffer.shape[2:] for buffer in group.buffers}
    assert found == {"conv": (3, 8192), "temporal": (32, 128, 128)}
    drafted = plan(
        config,
        budget=2**34,
        max_running_requests=4,
        max_total_tokens=4096,
        context_length=4096,
        prefix_cache=False,
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=3,
    )
    (group,) = [group for group in drafted.groups if group.kind == "state"]
    assert {buffer.name: buffer.shape[2:] for buffer in group.buffers}["conv"] == (5, 8192)


def test_replay_rings_are_refused(objections):
    assert objections(QWEN, replay_rings=True, max_running_requests=1) == [
        "replay_rings=true keeps the last steps of a layer in rings, which no kernel of 910b-64gb reads; leave "
        "replay_rings out"
    ]


def test_layers_that_keep_no_state_are_none_of_this_pool():
    from kvdock_ascend.pools.states import _layer

    layer = kvdock.LayerSpec(kind="mha", params=kvdock.MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8))
    assert _layer(layer, True) is layer
