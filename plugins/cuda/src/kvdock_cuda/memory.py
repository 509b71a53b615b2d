"""Where device memory is taken from: memory that can be released and restored, or a pool that is given."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from kvdock.errors import BuildError

if TYPE_CHECKING:
    import torch
    from kvdock.layout import Buffer
    from kvdock.pools.storage import Within

KV_TAG = "kv_cache"
"""Tag of all that slots own, in every part of a cache and of its drafts; what engines call it."""

PACKAGE = "torch_memory_saver"


def releasable(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which memory of `device` is taken that `pause` releases.

    Raises:
        BuildError: torch_memory_saver is not installed.
    """
    return _region(device, _saver())


@contextmanager
def _region(device: torch.device, saver: Any) -> Iterator[None]:
    import torch

    # A region takes memory of the current device, whatever the tensors in it ask for.
    with torch.cuda.device(device), saver.region(tag=KV_TAG):
        yield


def pause(tag: str = KV_TAG) -> None:
    """Release the memory of `tag`; its addresses stay, what was in it is lost, and nothing may read or write it.

    Release every request first. Request tables, free lists and maps are not part of it.

    Raises:
        BuildError: torch_memory_saver is not installed.
    """
    _saver().pause(tag)


def resume(tag: str = KV_TAG) -> None:
    """Take the memory of `tag` again, at the same addresses; call `KVCache.clear` then, since it holds anything.

    Raises:
        BuildError: torch_memory_saver is not installed.
    """
    _saver().resume(tag)


def in_pool(pool: torch.cuda.MemPool) -> Within:
    """Return what `kvdock.build` takes as `within`: all that layers read is taken from `pool`, the rest as usual.

    The pool lives as long as the tensors of the cache.
    """

    def within(buffer: Buffer, device: torch.device) -> AbstractContextManager[None]:
        if device.type != "cuda":
            raise BuildError(
                f"buffer {buffer.name!r} lies on {str(device)!r}, where a pool of CUDA memory has none; build on cuda, "
                "or leave within out"
            )
        return _pooled(device, pool) if buffer.is_kv else nullcontext()

    return within


@contextmanager
def _pooled(device: torch.device, pool: torch.cuda.MemPool) -> Iterator[None]:
    import torch

    with torch.cuda.device(device), torch.cuda.use_mem_pool(pool):
        yield


def _saver() -> Any:
    try:
        return importlib.import_module(PACKAGE).torch_memory_saver
    except ImportError as error:
        raise BuildError(
            f"memory_saver=true needs the package {PACKAGE} ({error}); install it with: pip install 'kvdock-cuda[saver]', "
            "or give memory_saver=false"
        ) from error
