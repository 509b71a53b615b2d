"""What plugins of hardware share: options of their own, names of backends, a live device of torch, a kernel set."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvdock import dtypes
from kvdock.device import DeviceInfo
from kvdock.errors import PlanError, nearest, nearest_model
from kvdock.layout import TARGET, Buffer
from kvdock.model import CORE_KINDS
from kvdock.plugins.loading import PluginWarning
from kvdock.pools.dsa import E4M3

if TYPE_CHECKING:
    from kvdock.kernels.interface import Kernels
    from kvdock.options import CacheOptions
    from kvdock.pools.base import Pool
    from kvdock.queries import PlanQuery, Query

Settings = TypeVar("Settings", bound=msgspec.Struct)

BACKEND_OPTIONS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "sparse_prefill_backend",
    "sparse_decode_backend",
)
"""Options that name an attention backend."""

SPARSE_BACKENDS = (
    ("sparse_prefill_backend", "prefill_attention_backend", "attention_backend"),
    ("sparse_decode_backend", "decode_attention_backend", "attention_backend"),
)
"""The options that name the backend of sparse layers in prefill, and in decode; the first that is given counts."""

SOFTWARE_FLOATS = "software_float8"
"""A device's capability of this name: it has no floats of 8 bits, so its kernels convert them one by one."""

SOFTWARE_BLOCKS = "software_blocks8"
"""A device's capability of this name: it multiplies no blocks of 8-bit floats by their scales, so its kernels do."""


def plugin_settings(options: CacheOptions, plugin: str, cls: type[Settings], takes: str) -> Settings:
    """Return what ``plugin_options[plugin]`` says, as a struct; `takes` says in words what its fields take.

    Raises:
        PlanError: an option does not exist here, or does not take the value; says which would do.
    """
    given = (options.plugin_options or {}).get(plugin, {})
    for name in given:
        if name not in cls.__struct_fields__:
            known = cls.__struct_fields__
            raise PlanError(
                f"plugin_options: {plugin} has no option {name!r}{nearest(name, known)}; there are {', '.join(known)}"
            )
    try:
        return msgspec.convert(given, cls)
    except msgspec.ValidationError as error:
        raise PlanError(f"plugin_options: {plugin} takes {takes}: {error}") from error


def refuse_settings(options: CacheOptions, variant: str) -> None:
    """Refuse ``plugin_options[variant]`` for a variant without options: what the user may say is its two plugins' to take.

    Raises:
        PlanError: such an option is given; names the plugins that take some.
    """
    given = (options.plugin_options or {}).get(variant)
    if given:
        hardware, _, family = variant.partition(".")
        raise PlanError(
            f"plugin_options: {variant} has no option {next(iter(given))!r}, nor any other; give what is for the device under "
            f"{hardware!r}, and what is for the model under {family!r}"
        )


def unknown_backend(
    query: PlanQuery, plugin: str, known: Iterable[str], names: Sequence[str] = BACKEND_OPTIONS
) -> str | None:
    """Return the objection to options `names` that name no backend of `known`; the plugin's option ``backends`` adds some.

    Layouts follow the name, so a slip would not be seen.
    """
    served = set(known)
    asked = {name: getattr(query.options, name) for name in names}
    wrong = {name: value for name, value in asked.items() if value and value not in served}
    if not wrong:
        return None
    listed = ", ".join(f"{name}={value}{nearest_model(value, served)}" for name, value in wrong.items())
    return (
        f"no attention backend of {query.device.name} is called so: {listed}; give one of "
        f"{', '.join(sorted(served))}, or name your own with "
        f"plugin_options={{'{plugin}': {{'backends': {sorted(set(wrong.values()))}}}}}"
    )


def sparse_backends(options: CacheOptions) -> tuple[tuple[str, str | None], ...]:
    """Return the option that names the backend of sparse layers, and the name, in prefill and then in decode."""
    each = [[(name, getattr(options, name)) for name in names] for names in SPARSE_BACKENDS]
    return tuple(next((pair for pair in pairs if pair[1]), (pairs[0][0], None)) for pairs in each)


def torn_rows(query: PlanQuery, raw: Collection[str], known: Collection[str]) -> str | None:
    """Return the objection to a prefill and a decode backend that read different rows of one layer.

    `raw` read rows of 8 bits without scales, the others of `known` rows with scales. Of a backend of the engine's own,
    and of one that is not named, nothing is known: it is taken to read what the other does.
    """
    is_sparse = query.worker == TARGET and any(layer.kind == "dsa" for layer in query.model.layers)
    if not is_sparse or query.kv_dtype not in E4M3:
        return None
    asked = sparse_backends(query.options)
    without = [place for place, (_, name) in enumerate(asked) if name in raw]
    scaled = [place for place, (_, name) in enumerate(asked) if name in known and name not in raw]
    if not without or not scaled:
        return None
    (reader, backend), (other, others) = asked[without[0]], asked[scaled[0]]
    option, value = dtype_option(query, "kv_cache_dtype")
    return (
        f"{reader}={backend} reads rows of {query.model.name} without scales, {other}={others} rows with scales, and with "
        f"{option}={value or query.kv_dtype} there is one or the other; give "
        f"{SPARSE_BACKENDS[scaled[0]][0]}={backend}, {SPARSE_BACKENDS[without[0]][0]}={others}, or kv_cache_dtype=bfloat16"
    )


def floats_of_8_bits(buffers: Iterable[Buffer]) -> Iterator[tuple[Buffer, str]]:
    """Yield each buffer that holds floats of 8 bits, beside scales or alone, with their encoding."""
    for buffer in buffers:
        encoding = buffer.element or buffer.dtype
        if dtypes.find(encoding).feature == "fp8":
            yield buffer, encoding


def foreign_floats(query: PlanQuery, native: Collection[str]) -> str:
    """Return what a worker's pools keep in encodings of 8 bits other than `native`, for a message; empty if nothing.

    An option that names the encoding, with its value, else the buffer.
    """
    wrong = ((buffer, encoding) for buffer, encoding in floats_of_8_bits(query.buffers) if encoding not in native)
    return ", ".join(dict.fromkeys(_named_by(query, buffer, encoding) for buffer, encoding in wrong))


def has_form(query: PlanQuery, plugin: str, pools: Iterable[type[Pool]]) -> bool:
    """Return whether a plugin's form for the family of some pools is loaded; what that lacks it says itself."""
    return any(f"{plugin}.{family}" in query.loaded for family in _families(pools))


def has_own_rows(query: PlanQuery) -> bool:
    """Return whether a model's family invented what its layers keep, so that it says in which types they can be."""
    return any(group.kind not in CORE_KINDS for group in query.groups)


def variant_advice(plugin: str, pools: Iterable[type[Pool]]) -> str:
    """Return what to do where pools of a family do not fit a plugin's devices: install its form for them."""
    extras = _families(pools)
    return f"pip install 'kvdock-{plugin}[{','.join(extras)}]'" if extras else "give another device"


def _families(pools: Iterable[type[Pool]]) -> list[str]:
    """Return the names of the plugins whose distributions pools come from."""
    packages = {pool.__module__.partition(".")[0] for pool in pools}
    return sorted(name.removeprefix("kvdock_") for name in packages if name.startswith("kvdock_"))


def _named_by(query: PlanQuery, buffer: Buffer, encoding: str) -> str:
    option, value = dtype_option(query, "index_dtype" if buffer.role == "index" else "kv_cache_dtype")
    if value and dtypes.find(value).name == encoding:
        return f"{option}={value}"
    return f"buffer {buffer.name!r} of {buffer.owner!r} in {encoding}"


def dtype_option(query: Query, name: str) -> tuple[str, str]:
    """Return the option that decides what `name` (``kv_cache_dtype`` or ``index_dtype``) is, and its value or nothing.

    Keys and values that follow the model are what ``model_dtype`` says.
    """
    follows = (name, "model_dtype") if name == "kv_cache_dtype" else (name,)
    given = ((option, getattr(query.options, option)) for option in follows)
    return next(((option, value) for option, value in given if value not in (None, "auto")), (name, ""))


def conversion_warnings(device: DeviceInfo, buffers: Iterable[Buffer]) -> tuple[str, ...]:
    """Return the warning of a plan that keeps floats of 8 bits where the device has none, or blocks of them with scales.

    Index keys have no choice.
    """
    kept = [(buffer, encoding) for buffer, encoding in floats_of_8_bits(buffers) if buffer.role != "index"]
    if SOFTWARE_FLOATS in device.capabilities:
        found = sorted({encoding for _, encoding in kept})
        lacks = "no floats of 8 bits"
    elif SOFTWARE_BLOCKS in device.capabilities:
        scaled = {buffer.owner for buffer in buffers if (buffer.element or buffer.dtype) == BLOCK_SCALE}
        found = sorted({f"{encoding} in blocks" for buffer, encoding in kept if buffer.owner in scaled})
        lacks = "no blocks of 8-bit floats with a scale that is a power of two"
    else:
        return ()
    if not found:
        return ()
    return (
        f"{device.name} has {lacks}, so each read and write of {', '.join(found)} is converted in software: "
        "that saves memory and costs time",
    )


BLOCK_SCALE = "float8_e8m0fnu"
"""The type of the scale of a block whose scales are powers of two."""


def is_ordinal(selector: str) -> bool:
    """Return whether a selector means a live device: empty, or an ordinal; else it can only be a profile's name."""
    return not selector or (selector.isascii() and selector.isdigit())


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, without a full stop."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


class LiveDevices(msgspec.Struct, frozen=True):
    """The devices that a plugin finds through a module of torch (`api`, such as ``torch.cuda``)."""

    plugin: str
    finder: str
    """Who finds them, for messages: ``torch``."""
    advice: str
    """What to do without one, for the end of a message."""

    def find(
        self, api: Any, selector: str, count: Callable[[], int], describe: Callable[[int], DeviceInfo]
    ) -> DeviceInfo:
        """Return the device of an ordinal, or the current one.

        Raises:
            PlanError: there is no such device, or it cannot be used; one line says why.
        """
        try:
            found = count()
            index = int(selector) if selector else int(api.current_device())
            if index >= found:
                raise PlanError(f"no device {self.plugin}:{index} is here: {self.finder} finds {self._listed(found)}")
            return describe(index)
        except RuntimeError as error:
            raise PlanError(
                f"no device {self.plugin}:{selector or 0} can be used here: {first_line(error)}; {self.advice}"
            ) from error

    def counted(self, api: Any, none: str) -> int:
        """Return how many devices there are; `none` says that there is none.

        Raises:
            PlanError: always then, with the driver's reason.
        """
        found: int = api.device_count()
        if found:
            return found
        try:
            api.init()  # says whether the driver is missing, too old, or shows no device
        except RuntimeError as error:
            reason = first_line(error)
        else:
            reason = "the driver shows none"
        raise PlanError(f"{none}: {reason}; {self.advice}")

    def _listed(self, count: int) -> str:
        return f"only {self.plugin}:0" if count == 1 else f"{self.plugin}:0 to {self.plugin}:{count - 1}"


def live_memory(api: Any, index: int) -> dict[str, int]:
    """Return the fields of a `DeviceInfo` that say how much memory a live device has.

    ``free_before_load_bytes`` counts what torch holds in this process, the weights if they are loaded, as free.
    """
    free_bytes, total_bytes = api.mem_get_info(index)
    free_bytes = min(free_bytes, total_bytes)  # integrated devices count the host's free memory
    return {
        "total_bytes": total_bytes,
        "free_before_load_bytes": min(total_bytes, free_bytes + api.memory_reserved(index)),
        "free_bytes": free_bytes,
    }


def triton_kernels(options: CacheOptions, install: str) -> type[Kernels] | None:
    """Return Triton's kernel set, or after a warning ``None``; `install` says how to get Triton.

    Raises:
        PlanError: it does not import, and the options are `strict`.
    """
    try:
        from kvdock.kernels.triton_set import TritonKernels
    except ImportError as error:
        why = (
            f"Triton does not import here ({error}), so torch's own operations write and move keys and values, "
            f"several launches for one of Triton's; install {install}"
        )
        if options.strict:
            raise PlanError(f"strict=true refuses a warning: {why}") from error
        warnings.warn(why, PluginWarning, stacklevel=2)
        return None
    return TritonKernels
