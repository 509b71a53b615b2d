"""Allocators of other engines, where they are installed: called through their own interface, never changed.

`sglang()` and `vllm()` return an object that makes the things to time, or ``None`` with the reason printed. Neither
is needed: a benchmark leaves out the columns of a peer that is not there. Their packages import much that has nothing
to do with allocators; a module of a third party that is missing is replaced by an empty one.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import sys
import types
import warnings
from typing import Any

import torch

OWN = ("sglang", "vllm", "torch", "triton", "numpy")
"""Packages that are never replaced: without them there is no peer."""


class Empty(types.ModuleType):
    """A module in which every name is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class EmptyModules:
    """Finds the packages in `names`, as empty modules."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = name.split(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Empty:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


EMPTY = EmptyModules()


def load(name: str) -> Any:
    """Import a module of a peer, with empty modules for what it misses."""
    if EMPTY not in sys.meta_path:
        sys.meta_path.append(EMPTY)
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            if not missing or missing in EMPTY.names or missing in OWN:
                raise
            EMPTY.names.add(missing)


def find(name: str, make: Any) -> Any:
    """Return ``make(version)``, or ``None`` after saying why the peer is left out."""
    try:
        return make(importlib.metadata.version(name))
    except Exception as error:  # a peer may fail in any way while it is imported
        reason = " ".join(str(error).split())[:120]
        print(f"{name} is left out: {type(error).__name__}: {reason}", file=sys.stderr)
        return None


def sglang() -> SGLang | None:
    return find("sglang", SGLang)


def vllm() -> VLLM | None:
    return find("vllm", VLLM)


class SGLang:
    """Its default allocators (`need_sort` off), the torch-native paths, on the CPU."""

    name = "SGLang"

    def __init__(self, version: str) -> None:
        self.version = version
        # The allocators come first: they bring in the modules that look for what is installed.
        self._paged = load("sglang.srt.mem_cache.allocator.paged")
        self._token = load("sglang.srt.mem_cache.allocator.token")
        self._rows = load("sglang.srt.mem_cache.allocation")
        self._pools = load("sglang.srt.mem_cache.memory_pool")

    def allocator(self, size: int, page_size: int) -> Any:
        if page_size == 1:
            return self._token.TokenToKVPoolAllocator(size, torch.bfloat16, "cpu", None, need_sort=False)
        made = self._paged.PagedTokenToKVPoolAllocator(size, page_size, torch.bfloat16, "cpu", None, need_sort=False)
        made.use_triton_kernels = False
        return made

    def table(self, rows: int, columns: int) -> Any:
        return self._pools.ReqToTokenPool(rows, columns, "cpu", enable_memory_saver=False)

    def writer(self) -> Any:
        """Return the function that writes the rows of an extend; it asks a running server for its backend."""
        self._rows.attention_backends = lambda: ("torch_native", "torch_native")
        return self._rows.write_cache_indices


class VLLM:
    """Its KV-cache manager with one group of full attention, without prefix caching."""

    name = "vLLM"

    def __init__(self, version: str) -> None:
        self.version = version
        self._manager = load("vllm.v1.core.kv_cache_manager")
        self._specs = load("vllm.v1.kv_cache_interface")
        self._request = load("vllm.v1.request")
        self._params = load("vllm.sampling_params")

    def manager(self, blocks: int, page_size: int) -> Any:
        spec = self._specs.FullAttentionSpec(block_size=page_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        group = self._specs.KVCacheGroupSpec(["layer.0"], spec)
        config = self._specs.KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        return self._manager.KVCacheManager(
            config, max_model_len=4096, scheduler_block_size=page_size, hash_block_size=page_size, enable_caching=False
        )

    def request(self, name: str, length: int) -> Any:
        params = self._params.SamplingParams(max_tokens=4000)
        return self._request.Request(name, list(range(length)), params, None)
