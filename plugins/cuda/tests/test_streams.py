"""Values beside keys: on a double of torch's streams that knows what each of them has waited for."""

import contextlib
from collections import namedtuple

import pytest

pytest.importorskip("torch")

from kvdock.kernels.reference import ReferenceKernels
from kvdock_cuda.kernels import extended
from kvdock_cuda.streams import SMALL_BATCH, SideStream

Device = namedtuple("Device", "type index")
GPU = Device("cuda", 0)


class Stream:
    """Work in order; what another stream did is done for this one only after it waited for that."""

    def __init__(self, device=GPU):
        assert device == GPU
        self.done = set()

    def wait_stream(self, other):
        self.done |= other.done


class Cuda:
    """``torch.cuda`` with one device."""

    def __init__(self, capturing=True):
        self.default = self.current = Stream()
        self.made, self.capturing = [], capturing

    def Stream(self, device):
        assert not self.made
        self.made.append(Stream(device))
        return self.made[-1]

    def current_stream(self, device):
        assert device == GPU
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def is_current_stream_capturing(self):
        return self.capturing


class Torch:
    def __init__(self, **facts):
        self.cuda = Cuda(**facts)


class Tensor:
    """Something that one operation wrote; whoever reads it has to have waited for that."""

    def __init__(self, torch, name, rows=4):
        self.torch, self.name, self.shape, self.device = torch, name, (rows, 2, 8), GPU
        self.written = object()
        torch.cuda.current.done.add(self.written)

    def read(self):
        if self.written not in self.torch.cuda.current.done:
            raise AssertionError(f"{self.name} is read on a stream that did not wait for it")

    def write(self):
        self.read()  # what was there before has to be finished with
        self.written = object()
        self.torch.cuda.current.done.add(self.written)


class Recording(ReferenceKernels):
    """A kernel set whose stores read and write on the current stream, and are noted."""

    def __init__(self):
        self.stores = []

    def store(self, view, loc, values):
        loc.read()
        values.read()
        view.write()
        self.stores.append((view.name, values.name, view.torch.cuda.current))

    def store_kv(self, k_view, v_view, loc, k, v):
        self.stores.append("one launch")


def kernels_of(torch, side=True):
    return extended(Recording)(SideStream(torch) if side else None)


def tensors(torch, rows=4):
    return [Tensor(torch, name, rows) for name in ("k_view", "v_view", "loc", "k", "v")]


def test_keys_stay_on_the_current_stream_and_values_go_beside():
    torch = Torch()
    kernels, given = kernels_of(torch), tensors(torch)
    kernels.store_kv(*given)
    (beside,) = torch.cuda.made
    assert sorted(kernels.stores, key=str) == sorted(
        [("v_view", "v", beside), ("k_view", "k", torch.cuda.default)], key=str
    )
    assert torch.cuda.current is torch.cuda.default
    for tensor in given:
        tensor.read()  # the current stream has waited: whatever follows sees both writes


def test_layer_after_layer_uses_one_stream():
    torch = Torch()
    kernels, given = kernels_of(torch), tensors(torch)
    for _ in range(3):
        kernels.store_kv(*given)
    assert len(torch.cuda.made) == 1
    assert [store[0] for store in kernels.stores] == ["v_view", "k_view"] * 3


@pytest.mark.parametrize("broken", ["before", "after"])
def test_the_double_catches_a_missing_wait(broken):
    class Careless(Stream):
        def wait_stream(self, other):
            if (self is torch.cuda.default) != (broken == "after"):
                super().wait_stream(other)

    torch = Torch()
    torch.cuda.default = torch.cuda.current = Careless()
    torch.cuda.Stream = lambda device: Careless(device)
    kernels, given = kernels_of(torch), tensors(torch)
    with pytest.raises(AssertionError, match="did not wait"):
        kernels.store_kv(*given)
        given[1].read()


def test_a_large_batch_is_written_in_one_launch():
    torch = Torch()
    kernels = kernels_of(torch)
    kernels.store_kv(*tensors(torch, SMALL_BATCH + 1))
    assert kernels.stores == ["one launch"]
    kernels.store_kv(*tensors(torch, SMALL_BATCH))
    assert len(kernels.stores) == 3
    assert SMALL_BATCH == 256


def test_outside_of_a_capture_it_is_one_launch_and_the_stream_is_made_for_later():
    torch = Torch(capturing=False)
    kernels = kernels_of(torch)
    kernels.store_kv(*tensors(torch))
    assert (kernels.stores, len(torch.cuda.made)) == (["one launch"], 1)


def test_without_a_side_stream_the_set_writes_as_it_does():
    torch = Torch()
    kernels = kernels_of(torch, side=False)
    kernels.store_kv(*tensors(torch))
    assert kernels.stores == ["one launch"]


def test_tensors_of_the_host_are_none_of_its_business():
    torch = Torch()
    kernels, given = kernels_of(torch), tensors(torch)
    for tensor in given:
        tensor.device = Device("cpu", None)
    kernels.store_kv(*given)
    assert (kernels.stores, torch.cuda.made) == (["one launch"], [])
