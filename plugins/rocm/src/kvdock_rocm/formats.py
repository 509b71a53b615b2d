"""The 8-bit floats that a chip reads, for names that leave the encoding to the device."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from kvdock.device import DeviceInfo
from kvdock.queries import PoolQuery

from kvdock_rocm import device

NATIVE: Mapping[str, str] = {
    "fp8": "float8_e4m3fnuz",
    "fp8_e4m3": "float8_e4m3fnuz",
    "float8_e4m3": "float8_e4m3fnuz",
    "fp8_e5m2": "float8_e5m2fnuz",
}
"""Short name of a format → its encoding where `device.FNUZ` holds; a full name (``float8_e4m3fn``) is kept."""

INDEX_NATIVE: Mapping[str, str] = {**NATIVE, "auto": "float8_e4m3fnuz"}
"""The same for index keys, which are of 8 bits unless asked otherwise."""


def is_fnuz(info: DeviceInfo) -> bool:
    """Return whether the device's 8-bit floats are those without infinities and negative zero."""
    return device.architecture(info) in device.FNUZ


def native(query: PoolQuery) -> PoolQuery:
    """Return the query with the encodings that the device reads in place of short names."""
    if not is_fnuz(query.device):
        return query
    options = query.options
    return msgspec.structs.replace(
        query,
        options=msgspec.structs.replace(
            options,
            kv_cache_dtype=_native(options.kv_cache_dtype, NATIVE),
            index_dtype=_native(options.index_dtype, INDEX_NATIVE),
            model_dtype=_native(options.model_dtype, NATIVE),  # keys and values may follow it
        ),
    )


def _native(name: str | None, table: Mapping[str, str]) -> str | None:
    return None if name is None else table.get(name.removeprefix("torch."), name)
