"""The settings of this plugin (``plugin_options={"dsv4": {…}}``), and the options of the core that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from kvdock import dtypes
from kvdock.checked import check_fields, show
from kvdock.errors import PlanError, nearest
from kvdock.options import CacheOptions
from kvdock.queries import Query

PLUGIN = "dsv4"
STATE_DTYPES = ("float32", "bfloat16")
PAGE_SIZE = 256
SWA_RATIO = 0.1
KV_DTYPE = "float8_e4m3fn"
FP4 = "float4_e2m1fn_x2"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may say to this plugin; every field has a default.

    `state_dtype` (float32 or bfloat16) is of all compression states and `fp4_indexer` halves the indexer's keys:
    both stand for options of the core (`state_dtype`, `index_dtype`). `online_compress` keeps of each request's
    128 tokens a running maximum, sum and row instead of a ring of them.
    """

    state_dtype: str | None = None
    online_compress: bool = False
    fp4_indexer: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self, f"plugin_options[{PLUGIN!r}]")
        if self.state_dtype is not None:
            _known_state_dtype(self.state_dtype, f"plugin_options[{PLUGIN!r}]: state_dtype")


def given_settings(options: CacheOptions) -> Settings | None:
    """Return what the user said to this plugin, or ``None``.

    Raises:
        PlanError: a setting that does not exist, or a value that does not fit.
    """
    given = (options.plugin_options or {}).get(PLUGIN)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise PlanError(f"plugin_options[{PLUGIN!r}]={show(given)} is no object of settings")
    known = Settings.__struct_fields__
    for name in given:
        if name not in known:
            raise PlanError(
                f"plugin_options[{PLUGIN!r}] has no setting {show(name)}{nearest(str(name), known)}; there are "
                f"{', '.join(known)}"
            )
    return Settings(**given)


def settings_of(query: Query) -> Settings:
    """Return the settings of a plan, defaults filled in."""
    return given_settings(query.options) or Settings()


def option_defaults(options: CacheOptions) -> dict[str, Any]:
    """Return the defaults of this family, and the options that the user's settings stand for.

    Raises:
        PlanError: a setting does not fit, or the user set an option of the core to something else.
    """
    found: dict[str, Any] = {
        "page_size": PAGE_SIZE,
        "swa_full_tokens_ratio": SWA_RATIO,
        "kv_cache_dtype": "fp8_e4m3",  # the short name: a draft's own layers keep the encoding of the device
    }
    settings = given_settings(options) or Settings()
    if settings.state_dtype is not None:
        found["state_dtype"] = dtypes.find(settings.state_dtype).name
    if settings.fp4_indexer is not None:
        found["index_dtype"] = FP4 if settings.fp4_indexer else KV_DTYPE
    for name in ("state_dtype", "index_dtype"):
        _refuse_both(name, getattr(options, name), found.get(name))
    return found


def _refuse_both(name: str, given: str | None, ours: str | None) -> None:
    """Refuse an option and a setting that contradict each other."""
    if given is None or ours is None or (given != "auto" and dtypes.find(given).name == ours):
        return
    raise PlanError(f"{name}={given} and plugin_options[{PLUGIN!r}] ask for different types ({ours}); give one of them")


def is_online(query: Query) -> bool:
    """Return whether the states of ratio 128 are a running maximum, sum and row."""
    return settings_of(query).online_compress


def state_dtype(query: Query) -> str:
    """Return the type of compression states: float32 unless `state_dtype` names bfloat16.

    Raises:
        PlanError: another type.
    """
    chosen = query.options.state_dtype
    return STATE_DTYPES[0] if chosen in (None, "auto") else _known_state_dtype(str(chosen), "state_dtype")


def _known_state_dtype(name: str, what: str) -> str:
    found = dtypes.find(name, option=what).name
    if found not in STATE_DTYPES:
        raise PlanError(f"{what}={name!r} cannot hold compression states; give {' or '.join(STATE_DTYPES)}")
    return found
