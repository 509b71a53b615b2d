"""Draft snapshots: what states are after each draft token, and how the accepted one becomes the state."""

import msgspec
import pytest
from kvdock.builder import build
from kvdock.device import DeviceInfo
from kvdock.errors import SlotError
from kvdock.model import ConvBlock, ConvParams, LayerSpec, MHAParams, ModelSpec, RingParams, StateParams
from kvdock.options import Parallelism, make_options
from kvdock.planner import plan_from
from kvdock.startup import core_only

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

DEVICE = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**44, free_before_load_bytes=2**44, free_bytes=2**44)
HEADS = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=2, head_dim=256, v_head_dim=256))
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
TREE = {**EAGLE, "speculative_topk": 2}


def conv(*blocks, kernel=4, channels_last=False):
    return ConvParams(
        blocks=tuple(ConvBlock(heads=h, head_dim=d) for h, d in blocks), kernel=kernel, channels_last=channels_last
    )


DELTA = StateParams(conv=(conv((16, 128), (16, 128), (32, 128)),), temporal=(32, 128, 128))
SMALL = StateParams(
    conv=(conv((4, 2)), conv((3, 1), kernel=3, channels_last=True)),
    temporal=(2, 3),
    ring=RingParams(k_heads=2, k_dim=2, v_heads=2, v_dim=2),
)
DENSE = msgspec.structs.replace(SMALL, dense_windows=True)


def model(*layers):
    made = tuple(layer if isinstance(layer, LayerSpec) else LayerSpec(kind="state", params=layer) for layer in layers)
    return ModelSpec(name="m", architecture="A", layers=made, context_length=64, dtype="bfloat16")


def plan(*layers, drafts=(), tp=1, **options):
    registry = core_only()
    given = {"max_state_slots": 8, "max_total_tokens": 128, "prefix_cache": False, "max_running_requests": 4, **options}
    models = (model(*layers), *drafts)
    return plan_from(models, DEVICE, make_options(given), Parallelism(tp_size=tp), registry, budget_bytes=2**43)


def states(made, **fields):
    return build(made, **fields).token_to_kv_pool.states


def shapes(made):
    return {b.name: (b.shape, b.dtype) for group in made.groups for b in group.buffers if b.role == "snapshot"}


def random(shape, seed):
    return torch.randint(-99, 99, shape, generator=torch.manual_seed(seed)).float()


def windows_of(inputs, params, steps):
    """The window of each convolution after each step, from its inputs ``[n, channels, kernel - 1 + steps]``."""
    found = []
    for step in range(steps):
        own = []
        for values, one in zip(inputs, params.conv, strict=True):
            window = values[:, :, step + 1 : step + one.kernel]
            own.append(window.transpose(1, 2) if one.channels_last else window)
        found.append(own)
    return found


def write_chain(pool, params, rows, steps=4):
    """Write snapshots of a chain of random inputs, layer by layer and step by step, and return them."""
    written = {}
    for layer in pool.layer_ids:
        channels = [sum(b.heads * b.head_dim for b in one.blocks) for one in params.conv]
        inputs = [
            random((len(rows), count, one.kernel - 1 + steps), 10 * layer + i)
            for i, (count, one) in enumerate(zip(channels, params.conv, strict=True))
        ]
        temporal = random((steps, len(rows), *params.temporal), 10 * layer + 5)
        for step, windows in enumerate(windows_of(inputs, params, steps)):
            pool.write_snapshot(layer, rows, step, windows, temporal[step])
            written[layer, step] = (*windows, temporal[step])
    return written


def test_snapshots_are_those_that_engines_allocate():
    """qwen3-next-mtp-tp4: windows overlap; the draft has no states."""
    draft = ModelSpec(name="d", architecture="A", layers=(HEADS,), context_length=64, dtype="bfloat16")
    made = plan(*[DELTA] * 36, HEADS, drafts=(draft,), tp=4, max_state_slots=338, max_running_requests=64, **EAGLE)
    assert shapes(made) == {
        "conv_windows": ((36, 65, 2048, 6), "bfloat16"),
        "temporal_snapshots": ((36, 65, 4, 8, 128, 128), "float32"),
    }
    sums = {buffer.name: buffer.nbytes for group in made.groups for buffer in group.buffers}
    assert (sums["conv_windows"], sums["temporal_snapshots"]) == (57_507_840, 4_907_335_680)
    assert (sums["conv"], sums["temporal"]) == (149_962_752, 6_398_410_752)
    cache = build(made, device="meta")
    assert cache.token_to_kv_pool.states.mem_usage == 11_513_217_024
    assert [(group.worker, group.kind) for group in made.groups] == [
        *(("target", "state"), ("target", "mha"), ("draft", "mha")),
    ]
    assert type(cache.drafts["draft"]).__name__ == "MHAPool"


@pytest.mark.parametrize(
    ("params", "options", "expected"),
    [
        (SMALL, EAGLE, {"conv_windows": (8, 6), "conv_windows.1": (5, 3), "temporal_snapshots": (4, 2, 3)}),
        (SMALL, TREE, {"conv_windows": (4, 8, 3), "conv_windows.1": (4, 2, 3), "temporal_snapshots": (4, 2, 3)}),
        (DENSE, EAGLE, {"conv_windows": (4, 8, 3), "conv_windows.1": (4, 2, 3), "temporal_snapshots": (4, 2, 3)}),
        (SMALL, {}, {}),
    ],
    ids=["chain", "tree", "dense", "no speculation"],
)
def test_windows_of_a_chain_lie_over_each_other_and_those_of_a_tree_apart(params, options, expected):
    made = plan(params, params, **options)
    assert {name: shape for name, (shape, _) in shapes(made).items()} == {
        name: (2, 5, *shape) for name, shape in expected.items()
    }
    cache = build(made)
    assert cache.allocated_bytes() == made.total_bytes


def test_a_decode_worker_has_rows_for_requests_that_still_arrive():
    made = plan(SMALL, role="decode", decode_extra_slots=3, **EAGLE)
    assert {shape[1] for shape, _ in shapes(made).values()} == {4 + 3 + 1}
    assert build(made).allocated_bytes() == made.total_bytes


@pytest.mark.parametrize("page_major", [False, True])
@pytest.mark.parametrize(("params", "options"), [(SMALL, EAGLE), (SMALL, TREE), (DENSE, EAGLE)])
def test_every_window_reads_as_it_was_written(params, options, page_major):
    """A chain's windows are stored once and read as those of the dense form are."""
    pool = states(plan(params, params, page_major=page_major, **options))
    rows = torch.tensor([4, 2, 1])
    for (layer, step), written in write_chain(pool, params, rows).items():
        for place in (0, 1):
            assert torch.equal(pool.window(layer, rows, step, place).float(), written[place])
        assert torch.equal(pool.snapshot_views(layer).temporal[rows, step], written[2])
    views = pool.snapshot_views(1)
    assert not any(view[[0, 3]].any() for view in (*views.conv, views.temporal))


@pytest.mark.parametrize("page_major", [False, True])
@pytest.mark.parametrize(("params", "options"), [(SMALL, EAGLE), (SMALL, TREE), (DENSE, EAGLE)])
@pytest.mark.parametrize("steps", [[0, 0, 0], [3, 3, 3], [2, 0, 3]])
def test_a_commit_makes_the_accepted_step_the_state(params, options, steps, page_major):
    pool = states(plan(params, params, page_major=page_major, **options))
    for number, view in enumerate(pool.slot_views()):
        view.copy_(random(view.shape, 1000 + number))
    before = {
        layer: [view.clone() for view in (*s.conv, s.temporal)] for layer in (0, 1) for s in [pool.get_state(layer)]
    }
    rows, slots = torch.tensor([4, 2, 1], dtype=torch.int32), [7, 1, 5]
    written = write_chain(pool, params, rows)
    pool.commit(rows, torch.tensor(steps), torch.tensor(slots))
    for layer in (0, 1):
        state = pool.get_state(layer)
        for part, view in enumerate((*state.conv, state.temporal)):
            expected = before[layer][part].float()
            for place, (step, slot) in enumerate(zip(steps, slots, strict=True)):
                expected[slot] = written[layer, step][part][place]
            assert torch.equal(view.float(), expected)


def test_padded_entries_of_a_batch_go_to_the_padding_slot():
    pool = states(plan(SMALL, **EAGLE))
    written = write_chain(pool, SMALL, torch.tensor([1]))
    pool.commit(torch.tensor([1, 0, 0]), torch.tensor([1, 0, 0]), torch.tensor([3, 0, 0]))
    assert torch.equal(pool.temporal_states(0)[3], written[0, 1][2][0])
    assert not pool.temporal_states(0)[[1, 2, 4, 5, 6, 7, 8]].any()


def test_a_commit_begins_the_replay_ring_of_its_slots_anew():
    pool = states(plan(SMALL, replay_rings=True, **EAGLE))
    pool.cursor.fill_(3)
    pool.commit(torch.tensor([1]), torch.tensor([0]), torch.tensor([2]))
    assert pool.cursor.tolist() == [3, 3, 0, 3, 3, 3, 3, 3, 3]


def test_snapshots_belong_to_rows_and_stay_where_slots_are_cleared_moved_and_described():
    pool = states(plan(SMALL, **EAGLE))
    write_chain(pool, SMALL, torch.tensor([1, 2]))
    views = pool.snapshot_views(0)
    before = [view.clone() for view in (*views.conv, views.temporal)]
    pool.clear_slots(torch.tensor([1, 2]))
    pool.copy_slots(torch.tensor([3]), torch.tensor([1]))
    assert all(torch.equal(then, now) for then, now in zip(before, (*views.conv, views.temporal), strict=True))
    assert {info.role for info in pool.state_infos()} == {"conv", "temporal"}
    pool.clear()
    assert not views.temporal.any()


def test_a_step_that_no_draft_token_has_is_refused():
    pool = states(plan(SMALL, **EAGLE))
    rows = torch.tensor([1])
    values = [torch.ones(1, 8, 3), torch.ones(1, 2, 3)], torch.ones(1, 2, 3)
    for step in (4, -1):
        with pytest.raises(
            SlotError, match=f"step {step} is outside 0 … 3, the draft tokens that are verified at once"
        ):
            pool.write_snapshot(0, rows, step, *values)
        with pytest.raises(SlotError, match=f"step {step} is outside 0 … 3"):
            pool.window(0, rows, step)


@pytest.mark.parametrize(
    ("windows", "temporal"),
    [
        ([torch.ones(1, 8, 3)], torch.ones(1, 2, 3)),
        ([torch.ones(1, 8, 3), torch.ones(1, 3, 2)], torch.ones(1, 2, 3)),
        ([torch.ones(2, 8, 3), torch.ones(2, 2, 3)], torch.ones(2, 2, 3)),
        ([torch.ones(1, 8, 3), torch.ones(1, 2, 3)], None),
    ],
)
def test_values_that_do_not_fit_are_refused_and_nothing_is_written(windows, temporal):
    pool = states(plan(SMALL, **EAGLE))
    with pytest.raises(
        SlotError, match=r"give \[\[1, 8, 3\], \[1, 2, 3\], \[1, 2, 3\]\]: a window a convolution, then"
    ):
        pool.write_snapshot(0, torch.tensor([1]), 0, windows, temporal)
    assert not any(view.any() for view in pool.snapshot_views(0).conv)


def test_one_convolution_needs_no_list():
    params = StateParams(conv=(conv((4, 2)),), temporal=())
    pool = states(plan(params, **EAGLE))
    pool.write_snapshot(0, torch.tensor([2]), 1, torch.full((1, 8, 3), 6.0))
    assert pool.snapshot_views(0).temporal is None
    assert pool.snapshot_views(0).conv[0][2, 0].tolist() == [0, 6, 6, 6, 0, 0]
    pool.commit(torch.tensor([2]), torch.tensor([1]), torch.tensor([4]))
    assert pool.conv_states(0)[4].eq(6).all()


def test_without_speculation_there_are_no_snapshots():
    pool = states(plan(SMALL))
    one = torch.tensor([1])
    for call in (
        lambda: pool.snapshot_views(0),
        lambda: pool.window(0, one, 0),
        lambda: pool.commit(one, one, one),
        lambda: pool.write_snapshot(0, one, 0, one),
    ):
        with pytest.raises(SlotError, match="there are no draft snapshots: this plan has no speculative_algorithm"):
            call()


def test_debug_refuses_rows_steps_and_slots_that_do_not_exist():
    pool = states(plan(SMALL, **EAGLE), debug=True)
    pool.parts.request_pool.alloc(["a"])
    one, far = torch.tensor([1]), torch.tensor([5])
    with pytest.raises(SlotError, match="request row 5 is outside 0 … 4; nothing was written"):
        pool.commit(far, one, one)
    with pytest.raises(SlotError, match="step 5 is outside 0 … 3"):
        pool.commit(one, far, one)
    with pytest.raises(SlotError, match="state slot 5 is not handed out"):
        pool.commit(one, one, far)
    with pytest.raises(SlotError, match="request row 5 is outside"):
        pool.window(0, far, 0)
    with pytest.raises(SlotError, match="2 rows, 1 steps, 1 slots; nothing was written"):
        pool.commit(torch.tensor([1, 2]), one, one)


@pytest.mark.parametrize("options", [EAGLE, TREE])
def test_no_call_waits_for_the_device(options):
    pool = states(plan(SMALL, **options), device="meta")
    loc = torch.zeros(2, dtype=torch.int64, device="meta")
    windows = [torch.zeros(2, 8, 3, device="meta"), torch.zeros(2, 2, 3, device="meta")]
    pool.write_snapshot(0, loc, 1, windows, torch.zeros(2, 2, 3, device="meta"))
    pool.commit(loc, loc, loc)
    assert pool.window(0, loc, loc).shape == (2, 8, 3)


def test_kernels_that_override_nothing_clear_the_same_slots():
    from kvdock.kernels.interface import Kernels
    from kvdock.kernels.reference import ReferenceKernels

    whole = random((5, 4, 3, 2), 1)
    views = [whole.clone(), whole.clone().transpose(2, 3), whole.clone()[..., :1], random((20,), 2).view(5, 4)]
    expected = [view.clone() for view in views]
    loc = torch.tensor([19, 0, 7], dtype=torch.int32)
    for view in expected:
        view[[4, 0, 1], [3, 0, 3]] = 0
    for clear in (Kernels.clear, ReferenceKernels.clear):
        found = [view.clone() for view in views]
        found[1] = views[1].transpose(2, 3).clone().transpose(2, 3)
        clear(ReferenceKernels(), found, loc)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
