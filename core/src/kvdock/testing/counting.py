"""What a call makes: bytes of tensors and arrays, to tell work that grows with a pool from work that does not."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any


def bytes_made(call: Callable[[], object]) -> int:
    """Return the bytes that `call` makes: of tensors that are no views of what is there, and of arrays at their peak."""
    from torch.overrides import TorchFunctionMode

    made = 0

    class Count(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal made
            found = func(*args, **(kwargs or {}))
            known = {_memory(tensor) for tensor in _tensors((args, kwargs or {}))}
            made += sum(tensor.nbytes for tensor in _tensors(found) if _memory(tensor) not in known)
            return found

    tracemalloc.start()
    try:
        with Count():
            call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return made + peak


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _memory(tensor: Any) -> int:
    """Return where the memory of a tensor begins, whatever part of it the tensor shows."""
    address: int = tensor.untyped_storage().data_ptr()
    return address
