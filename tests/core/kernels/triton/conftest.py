"""What tests of Triton kernels share: a process of their own, the device, and views of every form in two copies."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
torch.set_num_threads(1)

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture
def passed_alone(tmp_path):
    """Run test files of this folder in a process of their own and return how many passed; none may fail."""

    def run(*names, **environment):
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "PYTEST_"))}
        files = [str(Path(__file__).with_name(name)) for name in names]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files],
            capture_output=True,
            text=True,
            check=False,
            env={**inherited, "TRITON_CACHE_DIR": str(tmp_path), **environment},
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        (summary,) = re.findall(r"^(\d+) passed\b", done.stdout, re.MULTILINE)
        return int(summary)

    return run


@pytest.fixture
def device():
    """Where the kernels under test run."""
    return DEVICE


def layer_major(base, pages, page_size, shape):
    count = pages * page_size * shape.numel()
    return base[:count].view(pages, page_size, *shape)


def page_major(base, pages, page_size, shape):
    """The second of three layers in each page."""
    count = 3 * pages * page_size * shape.numel()
    return base[:count].view(pages, 3, page_size, *shape)[:, 1]


def token_major(base, pages, page_size, shape):
    """The first of two layers in each slot."""
    count = 2 * pages * page_size * shape.numel()
    return base[:count].view(pages, page_size, 2, *shape)[:, :, 0]


def part_of_heads(base, pages, page_size, shape):
    """All but the first column of rows that are a column wider: as many runs as heads."""
    wider = torch.Size((*shape[:-1], shape[-1] + 1))
    return layer_major(base, pages, page_size, wider)[..., 1:]


def columns_apart(base, pages, page_size, shape):
    """Every second column of every second head: runs within runs."""
    wider = torch.Size((*(2 * extent for extent in shape),))
    chosen = (slice(None), slice(None), *(slice(None, None, 2) for _ in shape))
    return layer_major(base, pages, page_size, wider)[chosen]


FORMS = {form.__name__: form for form in (layer_major, page_major, token_major, part_of_heads, columns_apart)}


class Twins:
    """Views of one form over two copies of the same random bytes: one for the device, one for the torch kernels."""

    def __init__(self, seed):
        self.random = torch.Generator().manual_seed(seed)
        self.bases = []

    def view(self, form, pages, page_size, shape, dtype):
        shape = torch.Size(shape)
        elements = pages * page_size * 4 * (shape.numel() + shape[:-1].numel() if shape else 1)
        raw = self.bytes_of(elements * dtype.itemsize)
        ours, theirs = raw.to(DEVICE, copy=True), raw.clone()
        self.bases.append((ours, theirs))
        return tuple(FORMS[form](base.view(dtype), pages, page_size, shape) for base in (ours, theirs))

    def rows(self, *shape, dtype):
        """Random rows, the same for both."""
        raw = self.bytes_of(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)
        return raw.to(DEVICE), raw

    def slots(self, n, view, dtype=torch.int64, unique=True):
        """Random slots of a view, the same for both."""
        last = view.shape[0] * view.shape[1]
        found = torch.randperm(last, generator=self.random)[:n] if unique else self.numbers(n, last)
        return found.to(DEVICE, dtype), found.to(dtype)

    def numbers(self, n, end):
        return torch.randint(0, end, (n,), generator=self.random)

    def bytes_of(self, count):
        return torch.randint(0, 256, (count,), generator=self.random, dtype=torch.uint8)

    def are_equal(self):
        return all(torch.equal(ours.cpu(), theirs) for ours, theirs in self.bases)


@pytest.fixture
def twins(request):
    """Views over the same random bytes; the seed is the test's name's, which a failure prints."""
    return Twins(sum(map(ord, request.node.name)))
