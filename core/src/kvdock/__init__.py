"""KV-cache planner, pools and allocators for LLM inference engines, with plugins for hardware and models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdock.builder import build as build
    from kvdock.cache import KVCache as KVCache
    from kvdock.choices import compare as compare
    from kvdock.choices import smallest_tp as smallest_tp
    from kvdock.choices import survey as survey
    from kvdock.compat import compatible as compatible
    from kvdock.compat import layout_fingerprint as layout_fingerprint
    from kvdock.deployment import Deployment as Deployment
    from kvdock.deployment import plan_ranks as plan_ranks
    from kvdock.device import DeviceInfo as DeviceInfo
    from kvdock.differences import diff as diff
    from kvdock.edge import plan as plan
    from kvdock.errors import BudgetError as BudgetError
    from kvdock.errors import BuildError as BuildError
    from kvdock.errors import KVDockError as KVDockError
    from kvdock.errors import PlanError as PlanError
    from kvdock.errors import PluginError as PluginError
    from kvdock.errors import SlotError as SlotError
    from kvdock.errors import UnsupportedCombination as UnsupportedCombination
    from kvdock.hookspecs import CONTRACT as CONTRACT
    from kvdock.hookspecs import hookimpl as hookimpl
    from kvdock.layout import Buffer as Buffer
    from kvdock.layout import LayerGroup as LayerGroup
    from kvdock.layout import Share as Share
    from kvdock.layout import SizeRule as SizeRule
    from kvdock.layout import Space as Space
    from kvdock.layout import Unit as Unit
    from kvdock.model import LayerParams as LayerParams
    from kvdock.model import LayerSpec as LayerSpec
    from kvdock.model import MHAParams as MHAParams
    from kvdock.model import MLAParams as MLAParams
    from kvdock.model import ModelSpec as ModelSpec
    from kvdock.options import CacheOptions as CacheOptions
    from kvdock.options import Draft as Draft
    from kvdock.options import Parallelism as Parallelism
    from kvdock.planner import CachePlan as CachePlan
    from kvdock.planner import plan_from as plan_from
    from kvdock.plugins.loading import Registry as Registry
    from kvdock.questions import longest as longest
    from kvdock.questions import serves as serves

__version__ = "0.1.0"

_HOMES = {
    "builder": "build",
    "choices": "compare smallest_tp survey",
    "compat": "compatible layout_fingerprint",
    "deployment": "Deployment plan_ranks",
    "device": "DeviceInfo",
    "differences": "diff",
    "edge": "plan",
    "errors": "BudgetError BuildError KVDockError PlanError PluginError SlotError UnsupportedCombination",
    "hookspecs": "CONTRACT hookimpl",
    "layout": "Buffer LayerGroup Share SizeRule Space Unit",
    "model": "LayerParams LayerSpec MHAParams MLAParams ModelSpec",
    "options": "CacheOptions Draft Parallelism",
    "planner": "CachePlan plan_from",
    "plugins.loading": "Registry",
    "questions": "longest serves",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()} | {"KVCache": "cache"}

__all__ = sorted([*_HOME_OF, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use, so that the command line starts quickly."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
