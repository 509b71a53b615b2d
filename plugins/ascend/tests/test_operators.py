"""Writes through torch_npu's operators, by a stand-in that refuses what they do not document."""

import pytest

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
