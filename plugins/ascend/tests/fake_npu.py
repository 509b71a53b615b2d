"""A stand-in for torch_npu on the host: as strict as the operators are documented, and right where they are.

An argument of another type, rank, shape or arrangement than documented raises `OperatorError`, as does an index
that does not exist, though a device would write somewhere. Tensors of the host stand for those of the device.
"""

import inspect

import torch


class OperatorError(RuntimeError):
    """An operator was called otherwise than it is documented."""


def require(holds, what):
    if not holds:
        caller = inspect.stack()[1].function
        raise OperatorError(f"{caller}: {what}")


class TorchNpu:
    """The operators that this plugin calls; `calls` counts them by name."""

    def __init__(self, device="cpu"):
        self.device = torch.device(device)
        self.calls = {}

    def npu_scatter_nd_update_(self, input, indices, updates):
        """Write updates to the rows that indices name, in place; takes strided tensors, returns the input.

        Indices ``[…, a]`` name the first `a` dimensions, and updates are ``[…, rest of the input]``.
        """
        self._count("npu_scatter_nd_update_", input, indices, updates)
        floats = (torch.float32, torch.float16, torch.bfloat16)
        require(input.dtype in (*floats, torch.bool, torch.int64, torch.int8), f"input of type {input.dtype}")
        require(updates.dtype == input.dtype, f"updates of {updates.dtype} for an input of {input.dtype}")
        require(indices.dtype in (torch.int32, torch.int64), f"indices of type {indices.dtype}")
        require(1 <= input.dim() <= 8, f"input of {input.dim()} dimensions")
        require(indices.dim() >= 2, f"indices of {indices.dim()} dimensions")
        named = indices.shape[-1]
        require(1 <= named <= input.dim(), f"indices name {named} of {input.dim()} dimensions")
        wanted = (*indices.shape[:-1], *input.shape[named:])
        require(tuple(updates.shape) == wanted, f"updates {tuple(updates.shape)} where {wanted} are written")
        require(updates.numel() > 0, "nothing to write")
        flat = indices.reshape(-1, named)
        for place in range(named):
            column = flat[:, place]
            require(bool(((column >= 0) & (column < input.shape[place])).all()), "an index out of bounds")
        rows = updates.reshape(-1, *input.shape[named:])
        for row, index in enumerate(flat.tolist()):
            input[tuple(index)] = rows[row]
        return input

    def _npu_reshape_and_cache(self, key, value, key_cache, value_cache, slot_indices):
        """Write keys and values ``[n, heads, dim]`` to the slots of caches ``[pages, page_size, heads, dim]``, in place.

        ND tensors without gaps, of float16, bfloat16 or int8; slots are int32 ``[n]``, negative ones are skipped.
        """
        tensors = (key, value, key_cache, value_cache)
        self._count("_npu_reshape_and_cache", *tensors, slot_indices)
        require(slot_indices.dtype == torch.int32, f"slots of type {slot_indices.dtype}")
        require(slot_indices.dim() == 1, f"slots of {slot_indices.dim()} dimensions")
        require(key.dtype in (torch.float16, torch.bfloat16, torch.int8), f"keys of type {key.dtype}")
        require(len({tensor.dtype for tensor in tensors}) == 1, "types that differ")
        require(all(tensor.is_contiguous() for tensor in (*tensors, slot_indices)), "a tensor with gaps")
        for name, rows, cache in (("keys", key, key_cache), ("values", value, value_cache)):
            require(
                rows.dim() == 3 and cache.dim() == 4, f"{name} of {rows.dim()} in a cache of {cache.dim()} dimensions"
            )
            require(
                rows.shape[0] == slot_indices.shape[0] > 0, f"{rows.shape[0]} {name} for {slot_indices.shape[0]} slots"
            )
            require(rows.shape[1:] == cache.shape[2:], f"{name} {tuple(rows.shape)} for a cache {tuple(cache.shape)}")
        require(key_cache.shape[:2] == value_cache.shape[:2], "caches of different pages")
        page_size = key_cache.shape[1]
        for row, slot in enumerate(slot_indices.tolist()):
            require(slot < key_cache.shape[0] * page_size, f"slot {slot} out of bounds")
            if slot >= 0:
                key_cache[slot // page_size, slot % page_size] = key[row]
                value_cache[slot // page_size, slot % page_size] = value[row]

    def _count(self, name, *tensors):
        require(all(tensor.device == self.device for tensor in tensors), "tensors of different devices")
        self.calls[name] = self.calls.get(name, 0) + 1
