"""Bytes that a model's weights take on one rank, from the headers of its safetensors files. No tensor is read."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import msgspec

from kvdock.errors import PlanError, printable
from kvdock.model import ModelSpec
from kvdock.options import CacheOptions, Parallelism, drafts_of
from kvdock.strictjson import parse_object

FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
ENDING = ".safetensors"
SHARDS = "model-*-of-*.safetensors"
"""Files that say themselves how many of them there are."""
MAX_HEADER_BYTES = 100_000_000
"""Longest header that the format allows; no index is longer either."""
MAX_DIMENSIONS = 64

BITS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("F4",), 4),
        **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
        **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
        **dict.fromkeys(("U32", "I32", "F32"), 32),
        **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    }
)
"""Bits of one element of each data type of the format."""

AGAIN = "download it again, or give weights_bytes (--weights)"

_SHARD = re.compile(r"model-\d{1,9}-of-\d{1,9}\.safetensors")
_EXTRA = re.compile(r"(^|\.)(mtp|nextn)\.")
_TOWER = re.compile(r"(^|[._])(vision|visual|audio|image)([._]|$)")
_LAYER = re.compile(r"(^|\.)(layers?|blocks|h)\.(\d{1,9})\.")
_HEAD = re.compile(r"(^|\.)(lm_head|output|embed_out|norm|norm_f|final_norm|final_layernorm|ln_f)\.")
_OUTPUT = re.compile(r"(^|\.)(lm_head|output|embed_out)\.")
_EMBEDDING = re.compile(r"embed|(^|\.)wte\.")
_ATTENTION = re.compile(r"attn|attention")


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that weights take on one rank; `source` says in words where they come from.

    `exact` is true on a deployment of one rank: the bytes of the files. On several it is an estimate, since each
    engine splits tensors in its own way.
    """

    nbytes: int
    exact: bool
    source: str


class _Tensor(NamedTuple):
    """One tensor of a file, as its header describes it."""

    name: str
    dimensions: int
    nbytes: int


def holds_weights(folder: str | os.PathLike[str]) -> bool:
    """Return whether the folder holds weights that `weight_bytes` counts: one file, an index and files, or shards."""
    path = Path(folder)
    return (path / FILE_NAME).exists() or any(path.glob(f"*{ENDING}" if (path / INDEX_NAME).exists() else SHARDS))


def weights_of(source: Any, model: ModelSpec, options: CacheOptions, parallel: Parallelism) -> Weights | None:
    """Return what the weights in the folder of a model, and of its drafts on the last stage, take on one rank.

    ``None``: `source`, from which the model was read, is no folder that holds weights.

    Raises:
        PlanError: as `weight_bytes`.
    """
    if not _is_folder(source):
        return None
    found = weight_bytes(source, model, parallel)
    if parallel.pp_rank != parallel.pp_size - 1:
        return found
    for draft in drafts_of(options):
        if draft.model is None:
            continue  # extra layers of the model's own files
        if not _is_folder(draft.model):
            found = msgspec.structs.replace(found, exact=False, source=f"{found.source}, those of a draft not counted")
            continue
        whole = msgspec.structs.replace(draft.parallel(parallel), pp_size=1, pp_rank=0, pp_layers=None)
        own = weight_bytes(draft.model, model, whole)  # on one stage every tensor is here, whatever the model's layers
        found = Weights(
            nbytes=found.nbytes + own.nbytes,
            exact=found.exact and own.exact,
            source=f"{found.source}, those of a draft among them",
        )
    return found


def _is_folder(source: Any) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(source, str | os.PathLike) and holds_weights(source)


def weight_bytes(folder: str | os.PathLike[str], model: ModelSpec, parallel: Parallelism) -> Weights:
    """Return what the weights in a model folder take on the rank of `parallel`.

    Layers go to the stage that owns them, extra layers beyond the model's to the last; embeddings to the first
    stage (tied ones to both ends), the last norm and the head to the last, all else to each. Tensors of two or
    more dimensions are split over the ranks of a stage, those of attention over its own ranks; others are whole.

    Without an index all files count that are numbered up to the number that their names state.

    Raises:
        PlanError: there are no such files, one is cut short, overlong or at odds with the index, or one of those that
            are numbered is missing; names the file.
    """
    files, tensors = _read_folder(Path(folder))
    share = _Share(model, parallel, tied=not any(_is_output(tensor.name) for tensor in tensors))
    ranks = parallel.tp_size * parallel.pp_size
    source = f"from the headers of {files} safetensors file{'s' if files > 1 else ''}"
    if ranks > 1:
        source += f", estimated for one of {ranks} ranks (tensors of two and more dimensions split)"
    return Weights(nbytes=sum(map(share.nbytes, tensors)), exact=ranks == 1, source=source)


def _is_output(name: str) -> bool:
    return _OUTPUT.search(name) is not None and not _LAYER.search(name)


class _Share:
    """What one rank holds of each tensor."""

    def __init__(self, model: ModelSpec, parallel: Parallelism, *, tied: bool) -> None:
        self.parallel = parallel
        self.own = parallel.stage_layers(len(model.layers))
        self.layers = len(model.layers)
        self.tied = tied
        self.is_first = parallel.pp_rank == 0
        self.is_last = parallel.pp_rank == parallel.pp_size - 1

    def nbytes(self, tensor: _Tensor) -> int:
        """Return the bytes of a tensor on this rank, rounded up."""
        if not self._is_here(tensor.name):
            return 0
        ranks = self.parallel.attn_tp_size if _ATTENTION.search(tensor.name) else self.parallel.tp_size
        return tensor.nbytes if tensor.dimensions < 2 else -(-tensor.nbytes // ranks)

    def _is_here(self, name: str) -> bool:
        if _EXTRA.search(name):
            return self.is_last
        layer = _LAYER.search(name)
        if _TOWER.search(name[: layer.start()] if layer else name):
            return True  # of another modality: its layers are none of the model's own
        if layer:
            layer_id = int(layer[3])
            return layer_id in self.own if layer_id < self.layers else self.is_last
        if _HEAD.search(name):
            return self.is_last
        if _EMBEDDING.search(name):
            return self.is_first or (self.tied and self.is_last)
        return True


def _read_folder(folder: Path) -> tuple[int, list[_Tensor]]:
    """Return how many files hold the weights, and every tensor once."""
    if not (folder / INDEX_NAME).exists():
        if (folder / FILE_NAME).exists():
            return 1, list(_read_header(folder / FILE_NAME))
        shards = _numbered(folder)
        return len(shards), _distinct(shards)
    homes = _read_index(folder / INDEX_NAME)
    tensors: list[_Tensor] = []
    names = sorted(set(homes.values()))
    for name in names:
        for tensor in _read_header(folder / name):
            _check_home(folder / name, tensor.name, homes.get(tensor.name))
            tensors.append(tensor)
    for missing in sorted(homes.keys() - {tensor.name for tensor in tensors}):
        raise PlanError(
            f"{_shown(folder / homes[missing])} lacks the tensor {printable(missing)!r}, which {INDEX_NAME} finds "
            f"there; {AGAIN}"
        )
    return len(names), tensors


def _numbered(folder: Path) -> list[Path]:
    """Return the files of a folder without an index, which are numbered: as many as their names state, in order."""
    found = sorted(path for path in folder.glob(SHARDS) if _SHARD.fullmatch(path.name))
    if not found:
        raise PlanError(
            f"{_shown(folder)} holds neither {FILE_NAME} nor {INDEX_NAME}, nor files {SHARDS}; give a folder that does, "
            "or give weights_bytes (--weights)"
        )
    stated = {path.name.rpartition("-of-")[2] for path in found}
    if len(stated) > 1:
        raise PlanError(
            f"{_shown(folder)} holds files of several sets ({', '.join(sorted(stated))}) and no {INDEX_NAME}; {AGAIN}"
        )
    (ending,) = stated
    digits, count = ending.removesuffix(ENDING), len(found)
    numbers = {int(path.name.split("-")[1]) for path in found}
    lacking = next((number for number in range(1, int(digits) + 1) if number not in numbers), None)
    if lacking is not None or count != int(digits):
        name = f"model-{lacking or 0:0{len(digits)}}-of-{ending}"
        raise PlanError(
            f"{_shown(folder)} holds {count} of {int(digits)} files of weights and no {INDEX_NAME}, which would list them; "
            f"{printable(name)} is missing: {AGAIN}"
        )
    return found


def _distinct(paths: list[Path]) -> list[_Tensor]:
    """Return the tensors of files of one set, each of which is in one of them."""
    homes: dict[str, Path] = {}
    tensors = []
    for path in paths:
        for tensor in _read_header(path):
            if tensor.name in homes:
                raise PlanError(
                    f"{_shown(path)} holds the tensor {printable(tensor.name)!r}, which {_shown(homes[tensor.name])} "
                    f"holds too; {AGAIN}"
                )
            homes[tensor.name] = path
            tensors.append(tensor)
    return tensors


def _check_home(path: Path, tensor: str, home: str | None) -> None:
    """Refuse a tensor outside the one file in which the index finds it."""
    if home != path.name:
        says = "does not name" if home is None else f"finds in {printable(home)}"
        raise PlanError(f"{_shown(path)} holds the tensor {printable(tensor)!r}, which {INDEX_NAME} {says}; {AGAIN}")


def _read_index(path: Path) -> dict[str, str]:
    """Return tensor → file, for file names that are plain."""
    size = _regular_size(path)
    if size > MAX_HEADER_BYTES:
        raise PlanError(f"{_shown(path)} has {size:,} bytes, more than the {MAX_HEADER_BYTES:,} of any index; {AGAIN}")
    homes = parse_object(_read(path, 0, size), _shown(path), AGAIN).get("weight_map")
    if not isinstance(homes, dict) or not homes:
        raise PlanError(f"{_shown(path)} has no weight_map from tensors to files; {AGAIN}")
    for name in {value if isinstance(value, str) else repr(value) for value in homes.values()}:
        if not _is_plain(name):
            raise PlanError(
                f"{_shown(path)} names the file {printable(repr(name))}, which is no plain name ending in {ENDING}; "
                f"give an index of files beside it, or give weights_bytes (--weights)"
            )
    return homes


def _is_plain(name: str) -> bool:
    """Return whether a name means a file of the folder itself, on any system."""
    return name.isprintable() and name.endswith(ENDING) and name != ENDING and not set(name) & set("/\\:")


def _read_header(path: Path) -> Iterator[_Tensor]:
    """Yield the tensors of one file after checking that they fill it without gaps.

    Raises:
        PlanError: the header does not describe the file; names the file.
    """
    size = _regular_size(path)
    length = int.from_bytes(_read(path, 0, 8), "little")
    if size < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
        raise PlanError(_no_header(path, size, length))
    raw = _read(path, 8, length)
    if not raw.startswith(b"{"):
        raise PlanError(f"{_shown(path)} has a header that does not begin with an object; {AGAIN}")
    header = parse_object(raw, f"{_shown(path)}: header", AGAIN)
    header.pop("__metadata__", None)
    end = 0
    spans = sorted((_span(path, name, entry), name) for name, entry in header.items())
    for (start, stop, dimensions), name in spans:
        if start != end:
            raise PlanError(
                f"{_shown(path)}: the tensor {printable(name)!r} begins at byte {start:,} of the data, but the one "
                f"before it ends at {end:,}; {AGAIN}"
            )
        end = stop
        yield _Tensor(name, dimensions, stop - start)
    if 8 + length + end != size:
        raise PlanError(
            f"{_shown(path)} has {size:,} bytes, but its header describes {8 + length + end:,} "
            f"({'a download cut short?' if size < 8 + length + end else 'something is appended'}); {AGAIN}"
        )


def _no_header(path: Path, size: int, length: int) -> str:
    if _read(path, 0, 8) == b"version ":
        return (
            f"{_shown(path)} is a pointer to a file that was not fetched; fetch it, or give weights_bytes (--weights)"
        )
    what = f"more than the {MAX_HEADER_BYTES:,} of the format" if length > MAX_HEADER_BYTES else "more than the file"
    if size < 8:
        return f"{_shown(path)} has {size} bytes, too few for a header (a download cut short?); {AGAIN}"
    return f"{_shown(path)} has {size:,} bytes and states a header of {length:,}, {what}; {AGAIN}"


def _span(path: Path, name: str, entry: Any) -> tuple[int, int, int]:
    """Return where a tensor begins and ends in the data, and its number of dimensions."""
    where = f"{_shown(path)}: the tensor {printable(name)!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise PlanError(f"{where} has no dtype, shape and data_offsets; {AGAIN}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise PlanError(
            f"{where} has the dtype {printable(repr(dtype))}, which is not known ({', '.join(sorted(BITS))}); "
            "give weights_bytes (--weights)"
        )
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise PlanError(f"{where} has the shape {printable(repr(shape), 60)}, which is no list of sizes; {AGAIN}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise PlanError(f"{where} has data_offsets {printable(repr(offsets), 60)}, which are no begin and end; {AGAIN}")
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise PlanError(
            f"{where} takes {offsets[1] - offsets[0]:,} bytes by its data_offsets, but {dtype} x {shape} makes "
            f"{bits / 8:,.15g}; {AGAIN}"
        )
    return offsets[0], offsets[1], len(shape)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _regular_size(path: Path) -> int:
    """Return the size of a file; a link is followed, as caches of models link to where they keep the bytes."""
    try:
        found = path.stat()
    except FileNotFoundError:
        raise PlanError(f"{_shown(path)} is missing; download it, or give weights_bytes (--weights)") from None
    except OSError as error:
        raise PlanError(_unreadable(path, error)) from error
    if not stat.S_ISREG(found.st_mode):
        raise PlanError(f"{_shown(path)} is no regular file; {AGAIN}")
    return found.st_size


def _read(path: Path, start: int, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(count)
    except OSError as error:
        raise PlanError(_unreadable(path, error)) from error


def _unreadable(path: Path, error: OSError) -> str:
    reason = printable(error.strerror or str(error))
    return f"{_shown(path)} cannot be read: {reason}; give a file that can be, or give weights_bytes (--weights)"


def _shown(path: Path) -> str:
    return printable(str(path))
