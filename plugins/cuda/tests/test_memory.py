"""Memory that can be released, and pools of others: with doubles of torch.cuda and torch_memory_saver."""

import contextlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

import kvdock  # noqa: E402
from kvdock import BuildError  # noqa: E402
from kvdock_cuda import memory  # noqa: E402


class Device:
    """The current device; ``torch.cuda.device`` sets it for a while."""

    def __init__(self):
        self.current = 0

    @contextlib.contextmanager
    def __call__(self, device):
        before, self.current = self.current, device.index if device.index is not None else self.current
        yield
        self.current = before


class Saver:
    """A strict torch_memory_saver: regions do not nest, and a tag is paused and resumed in turn."""

    def __init__(self, device):
        self.device, self.open, self.regions, self.paused = device, None, [], set()

    @contextlib.contextmanager
    def region(self, tag="default", enable_cpu_backup=False):
        if self.open is not None:
            raise RuntimeError("a region in a region")
        self.open = (tag, self.device.current)
        self.regions.append(self.open)
        yield
        self.open = None

    def pause(self, tag=None):
        if tag not in {tag for tag, _ in self.regions} - self.paused:
            raise RuntimeError(f"{tag} is not in use")
        self.paused.add(tag)

    def resume(self, tag=None):
        self.paused.remove(tag)


@pytest.fixture
def current(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "device", device)
    return device


@pytest.fixture
def saver(current, monkeypatch):
    found = Saver(current)
    monkeypatch.setattr(memory, "_saver", lambda: found)
    return found


def test_memory_is_taken_in_a_region_of_the_tag_on_its_own_device(saver):
    with memory.releasable(torch.device("cuda:1")):
        assert saver.open == ("kv_cache", 1)
    assert (saver.open, saver.device.current) == (None, 0)


def test_a_tag_is_paused_and_resumed(saver):
    with memory.releasable(torch.device("cuda")):
        assert saver.open == ("kv_cache", 0)
    memory.pause()
    assert saver.paused == {"kv_cache"}
    memory.resume()
    assert saver.paused == set()
    with pytest.raises(RuntimeError, match="weights is not in use"):
        memory.pause("weights")


def test_a_missing_package_is_named():
    code = (
        "import sys; sys.modules['torch_memory_saver'] = None\n"
        "from kvdock import BuildError; from kvdock_cuda import memory\n"
        "for ask in (lambda: memory.releasable(None), memory.pause, memory.resume):\n"
        "    try: ask()\n"
        "    except BuildError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("memory_saver=true needs the package torch_memory_saver (")
        assert line.endswith("; install it with: pip install 'kvdock-cuda[saver]', or give memory_saver=false")


@pytest.fixture
def pools(current, monkeypatch):
    """Note each use of a pool: the pool, and the device that is current."""
    used = []

    @contextlib.contextmanager
    def use_mem_pool(pool, device=None):
        assert device is None
        used.append((pool, current.current))
        yield

    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    return used


def buffer(is_kv):
    return kvdock.Buffer(name="b", role="key", space="full", shape=(1,), dtype="uint8", is_kv=is_kv)


def test_what_layers_read_is_taken_from_a_pool_on_its_own_device(pools, current):
    within = memory.in_pool("a pool")
    with within(buffer(is_kv=True), torch.device("cuda:3")):
        assert (pools, current.current) == ([("a pool", 3)], 3)
    with within(buffer(is_kv=False), torch.device("cuda:3")):
        assert (len(pools), current.current) == (1, 0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_pool_of_cuda_memory_serves_no_other_device(pools, device):
    with pytest.raises(BuildError, match=f"buffer 'b' lies on '{device}', where a pool of CUDA memory has none"):
        memory.in_pool("a pool")(buffer(is_kv=False), torch.device(device))
