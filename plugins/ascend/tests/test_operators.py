"""Writes through torch_npu's operators, by a stand-in that refuses what they do not document."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvdock.builder import build
from kvdock.errors import SlotError

torch = pytest.importorskip("torch")
torch.set_num_threads(1)


@pytest.fixture
def kernels(fake_npu):
    from kvdock_ascend.kernels.npu_set import NpuKernels
    from kvdock_ascend.ops import Ops

    fake = fake_npu.TorchNpu()
    return NpuKernels(Ops(fake)), fake


def expected(view, loc, values):
    found = view.clone()
    for slot, row in zip(loc.tolist(), values, strict=True):
        found[slot // view.shape[1], slot % view.shape[1]] = row
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.int64])
@pytest.mark.parametrize("slots", [torch.int32, torch.int64])
def test_rows_are_scattered_by_one_operator(kernels, dtype, slots):
    npu, fake = kernels
    view, values = torch.zeros(3, 4, 2, 8, dtype=dtype), torch.arange(48).view(3, 2, 8).to(dtype)
    loc = torch.tensor([9, 1, 6], dtype=slots)
    wanted = expected(view, loc, values)
    npu.store(view, loc, values)
    assert torch.equal(view, wanted)
    assert fake.calls == {"npu_scatter_nd_update_": 1}


def test_types_that_the_operator_does_not_take_are_written_by_torch(kernels):
    npu, fake = kernels
    view, loc, values = torch.zeros(3, 4, 2, dtype=torch.int32), torch.tensor([5]), torch.ones(1, 2, dtype=torch.int32)
    npu.store(view, loc, values)
    assert view[1, 1].tolist() == [1, 1]
    assert fake.calls == {}


def test_keys_and_values_of_one_shape_are_written_at_once(kernels):
    npu, fake = kernels
    keys, values = torch.zeros(3, 16, 2, 8).bfloat16(), torch.zeros(3, 16, 2, 8).bfloat16()
    loc, k = torch.tensor([17, 40]), torch.randn(2, 2, 8).bfloat16()
    # A slice of a wider projection has gaps, which the operator does not take.
    v = torch.randn(2, 2, 16).bfloat16()[..., :8]
    npu.store_kv(keys, values, loc, k, v)
    assert torch.equal(keys, expected(torch.zeros_like(keys), loc, k))
    assert torch.equal(values, expected(torch.zeros_like(values), loc, v))
    assert fake.calls == {"_npu_reshape_and_cache": 1}


def test_latents_and_rope_parts_are_scattered_one_after_the_other(kernels):
    npu, fake = kernels
    keys, values = torch.zeros(3, 16, 1, 8).bfloat16(), torch.zeros(3, 16, 1, 4).bfloat16()
    loc, k, v = torch.tensor([17]), torch.randn(1, 1, 8).bfloat16(), torch.randn(1, 1, 4).bfloat16()
    npu.store_kv(keys, values, loc, k, v)
    assert torch.equal(keys[1, 1], k[0])
    assert torch.equal(values[1, 1], v[0])
    assert fake.calls == {"npu_scatter_nd_update_": 2}


def test_nothing_is_launched_for_nothing(kernels):
    npu, fake = kernels
    view, none = torch.zeros(3, 16, 2, 8).bfloat16(), torch.empty(0, dtype=torch.int64)
    npu.store_kv(view, view, none, torch.empty(0, 2, 8).bfloat16(), torch.empty(0, 2, 8).bfloat16())
    assert npu.gather(view, none).shape == (0, 2, 8)
    assert fake.calls == {}


def test_rows_with_gaps_between_them_are_scattered(kernels):
    """The window of a convolution is the first inputs of a state with room for more."""
    npu, fake = kernels
    states = torch.zeros(4, 1, 6, 8)
    npu.store(states[:, :, :3], torch.tensor([2]), torch.ones(1, 3, 8))
    assert states.sum() == states[2, 0, :3].sum() == 24
    assert fake.calls == {"npu_scatter_nd_update_": 1}


def test_rows_in_pieces_are_left_to_torch(kernels):
    npu, fake = kernels
    view = torch.zeros(2, 4, 2, 8).transpose(2, 3)
    npu.store(view, torch.tensor([5]), torch.ones(1, 8, 2))
    assert view.sum() == view[1, 1].sum() == 16
    assert torch.equal(npu.gather(view, torch.tensor([5])), torch.ones(1, 8, 2))
    assert fake.calls == {}


def test_pages_apart_are_left_to_torch(kernels):
    npu, fake = kernels
    view = torch.zeros(3, 2, 4, 8)[:, 0]
    npu.store(view, torch.tensor([5]), torch.ones(1, 8))
    assert view.sum() == view[1, 1].sum() == 8
    assert fake.calls == {}


def test_moves_read_before_they_write(kernels):
    npu, _ = kernels
    view = torch.arange(8, dtype=torch.float32).view(2, 4, 1)
    npu.move([view], torch.tensor([5, 6]), torch.tensor([4, 5]))
    assert view.flatten().tolist() == [0, 1, 2, 3, 4, 4, 5, 7]


def spread(tensor, draw):
    """Return the same numbers with gaps between them, in one or in all dimensions, or in another order in memory."""
    form = draw(st.sampled_from(["plain", "rows", "columns", "turned", "one of several"]))
    if form == "plain":
        return tensor
    if form == "turned":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if form == "one of several":
        return torch.stack([tensor] * 3, -1)[..., draw(st.integers(0, 2))]
    place, step = (0 if form == "rows" else -1), draw(st.integers(2, 3))
    wide = tensor.repeat_interleave(step, place)
    return wide[::step] if place == 0 else wide[..., ::step]


def wider(shape, dtype, draw):
    """Return a view of zeros, with gaps behind its rows or pages or without."""
    pages, page_size, *row = shape
    gap = draw(st.sampled_from(["none", "rows", "pages"]))
    if gap == "rows":
        return torch.zeros(pages, page_size, *row[:-1], row[-1] + 3, dtype=dtype)[..., : row[-1]]
    if gap == "pages":
        return torch.zeros(pages, 2 * page_size, *row, dtype=dtype)[:, :page_size]
    return torch.zeros(shape, dtype=dtype)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_gaps_arguments_have_the_operators_take_them(fake_npu, data):
    """Slots, keys and values of any strides: written and read as if they had none."""
    from kvdock_ascend.kernels.npu_set import NpuKernels
    from kvdock_ascend.ops import Ops

    npu, draw = NpuKernels(Ops(fake_npu.TorchNpu())), data.draw
    heads, dim, count = (draw(st.integers(1, top)) for top in (2, 8, 4))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8]))
    slots = draw(st.lists(st.integers(0, 11), min_size=count, max_size=count, unique=True))
    loc = spread(torch.tensor(slots, dtype=draw(st.sampled_from([torch.int32, torch.int64]))), draw)
    v_dim = draw(st.sampled_from([dim, dim + 1]))
    rows = [torch.randint(0, 100, (count, heads, width)).to(dtype) for width in (dim, v_dim)]
    views = [wider((3, 4, heads, width), dtype, draw) for width in (dim, v_dim)]
    wanted = [expected(torch.zeros(view.shape, dtype=dtype), loc, own) for view, own in zip(views, rows, strict=True)]
    npu.store_kv(*views, loc, *(spread(own, draw) for own in rows))
    for view, own, right in zip(views, rows, wanted, strict=True):
        assert torch.equal(view, right)
        assert torch.equal(npu.gather(view, loc), own)
        npu.store(view, loc, spread(own.flip(0), draw))
        assert torch.equal(view, expected(torch.zeros(view.shape, dtype=dtype), loc, own.flip(0)))
        npu.move([view], spread(loc.flip(0), draw), loc)
        assert torch.equal(view, right)


@pytest.mark.parametrize("call", ["store", "store_kv"])
def test_another_number_of_rows_than_slots_is_refused(kernels, call):
    npu, fake = kernels
    view, loc, rows = torch.zeros(2, 4, 2, 8).half(), torch.tensor([1, 2]), torch.ones(1, 2, 8).half()
    with pytest.raises(SlotError, match=r"values of shape \[1, 2, 8\] .* for 2 slots"):
        getattr(npu, call)(*[view] * len(call.split("_")), loc, *[rows] * len(call.split("_")))
    assert not view.any()
    assert fake.calls == {}


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("scatter", {"indices": torch.tensor([1])}, "indices of 1 dimensions"),
        ("scatter", {"indices": torch.tensor([[1.0]])}, "indices of type torch.float32"),
        ("scatter", {"indices": torch.tensor([[6]])}, "an index out of bounds"),
        ("scatter", {"indices": torch.tensor([[-1]])}, "an index out of bounds"),
        ("scatter", {"updates": torch.zeros(1, 3)}, r"updates \(1, 3\) where \(1, 4\) are written"),
        ("scatter", {"updates": torch.zeros(1, 4).half()}, "updates of torch.float16 for an input of torch.float32"),
        ("scatter", {"input": torch.zeros(6, 4).to(torch.uint8)}, "input of type torch.uint8"),
        ("scatter", {"input": torch.zeros(6, 4, device="meta")}, "tensors of different devices"),
        ("cache", {"slot_indices": torch.tensor([1])}, "slots of type torch.int64"),
        ("cache", {"slot_indices": torch.tensor([[1]], dtype=torch.int32)}, "slots of 2 dimensions"),
        ("cache", {"slot_indices": torch.tensor([32], dtype=torch.int32)}, "slot 32 out of bounds"),
        ("cache", {"key": torch.zeros(1, 2, 4)}, "keys of type torch.float32"),
        ("cache", {"value": torch.zeros(1, 2, 4).half()}, "types that differ"),
        ("cache", {"key": torch.zeros(1, 2, 8).bfloat16()[..., :4]}, "a tensor with gaps"),
        ("cache", {"value": torch.zeros(1, 8).bfloat16()}, "values of 2 in a cache of 4 dimensions"),
        ("cache", {"value": torch.zeros(2, 2, 4).bfloat16()}, "2 values for 1 slots"),
        ("cache", {"value_cache": torch.zeros(3, 16, 2, 4).bfloat16()}, "caches of different pages"),
        ("cache", {"key_cache": torch.zeros(2, 16, 1, 4).bfloat16()}, "keys .* for a cache"),
    ],
)
def test_the_stand_in_refuses_what_is_not_documented(fake_npu, name, change, says):
    good = {
        "scatter": {"input": torch.zeros(6, 4), "indices": torch.tensor([[1]]), "updates": torch.ones(1, 4)},
        "cache": {
            "key": torch.ones(1, 2, 4).bfloat16(),
            "value": torch.ones(1, 2, 4).bfloat16(),
            "key_cache": torch.zeros(2, 16, 2, 4).bfloat16(),
            "value_cache": torch.zeros(2, 16, 2, 4).bfloat16(),
            "slot_indices": torch.tensor([1], dtype=torch.int32),
        },
    }[name]
    fake = fake_npu.TorchNpu()
    operator = fake.npu_scatter_nd_update_ if name == "scatter" else fake._npu_reshape_and_cache
    operator(**good)
    with pytest.raises(fake_npu.OperatorError, match=says):
        operator(**{**good, **change})


@pytest.mark.parametrize("kind", ["mha", "mla", "dsa"])
@pytest.mark.parametrize("slots", [torch.int32, torch.int64])
def test_every_other_slot_of_a_batch_can_be_written(plan, npu_pool, kind, slots):
    """Slots come in int32 here, and a slice of them has gaps."""
    cache = build(plan(kind, max_total_tokens=1024, max_running_requests=4), device="cpu", debug=True)
    pool, fake = npu_pool(cache)
    loc = cache.admit("a", 300).to(slots)[::2]
    k, v = (torch.randn(150, *pool.get_kv_buffer(0)[side].shape[2:]).bfloat16() for side in (0, 1))
    pool.set_kv_buffer(0, loc, k, v)
    found = pool.read_kv(0, loc)
    assert torch.equal(found[0], k)
    assert torch.equal(found[1], v)
    assert sum(fake.calls.values()) == (1 if kind == "mha" else 2)
