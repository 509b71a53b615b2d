"""Where configs come from: a file, a model folder, data in hand, or the hub. No code of a model is ever run."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from kvdock.errors import PlanError, printable
from kvdock.strictjson import check_depth, parse_object

CONFIG_NAME = "config.json"
HUB_PREFIX = "hf:"
MAX_BYTES = 16 * 2**20
"""Largest config that is read; published ones are a few kilobytes."""

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)

Fetch = Callable[[str], "str | os.PathLike[str]"]


def load_config(source: Any, *, fetch: Fetch | None = None) -> tuple[str, dict[str, Any]]:
    """Return a name for the model and its config as data.

    Args:
        source: a ``config.json``, a model folder, a config as data, or ``hf:org/name`` (``hf:org/name@revision``).
        fetch: downloads one repository's ``config.json`` and returns its path, instead of the hub's own client.

    Raises:
        PlanError: there is no readable config; names the source and says what to do.
    """
    if isinstance(source, Mapping):
        return _from_data(source)
    try:
        text = os.fspath(source)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text:
        raise PlanError(
            f"model {printable(repr(source))} is no config; give a path to config.json, a model folder, "
            "hf:org/name, or the config as a dict"
        )
    if text.startswith(HUB_PREFIX):
        repository = text.removeprefix(HUB_PREFIX)
        return repository, _read(Path(_fetched(repository, fetch or fetch_from_hub)))
    path = _find(text)
    return _name(path).encode("utf-8", "replace").decode(), _read(path)


def _from_data(source: Mapping[Any, Any]) -> tuple[str, dict[str, Any]]:
    data = dict(source)
    for key in data:
        if not isinstance(key, str):
            raise PlanError(f"model: the config has a key {printable(repr(key))} that is no text; keys are field names")
    check_depth(data, "model", f"give the model's {CONFIG_NAME}")
    name = data.get("_name_or_path")
    return (name if isinstance(name, str) and name else "config"), data


def _find(text: str) -> Path:
    """Return the config file that a path means."""
    path = Path(text)
    shown = printable(text)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            path = path / CONFIG_NAME
            mode = path.stat().st_mode
    except FileNotFoundError:
        raise PlanError(_missing(path, shown)) from None
    except (OSError, ValueError) as error:
        raise PlanError(f"{shown} cannot be read: {_reason(error)}; give a path to config.json") from error
    if not stat.S_ISREG(mode):
        raise PlanError(f"{printable(str(path))} is no regular file; give a path to config.json or a model folder")
    return path


def _missing(path: Path, shown: str) -> str:
    if path.name == CONFIG_NAME and str(path) != shown and path.parent.is_dir():
        return f"{shown} is a folder without {CONFIG_NAME}; give a model folder that has one, or a path to the file"
    if _REPOSITORY.fullmatch(shown):
        return f"there is no file or folder {shown}; for a model on the hub write {HUB_PREFIX}{shown}"
    return f"there is no file or folder {shown}; give a path to config.json, a model folder, or hf:org/name"


def _name(path: Path) -> str:
    """Return the folder's name for a ``config.json``, else the file's name without its ending."""
    if path.name != CONFIG_NAME:
        return path.stem
    try:
        return path.resolve().parent.name or path.stem
    except OSError:
        return path.parent.name or path.stem


def _read(path: Path) -> dict[str, Any]:
    shown = printable(str(path))
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise PlanError(_too_large(shown, f"{size:,} bytes"))
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PlanError(f"{shown} cannot be read: {_reason(error)}; give a config.json that can be") from error
    if len(raw) > MAX_BYTES:
        raise PlanError(_too_large(shown, f"more than {MAX_BYTES:,} bytes"))
    return parse_object(raw, shown, f"give the model's {CONFIG_NAME}", allow_infinity=True)


def _too_large(shown: str, size: str) -> str:
    return f"{shown} has {size}, more than the {MAX_BYTES:,} of any config; give the model's config.json"


def _reason(error: Exception) -> str:
    return printable(error.strerror) if isinstance(error, OSError) and error.strerror else printable(str(error))


def _fetched(repository: str, fetch: Fetch) -> str | os.PathLike[str]:
    shown = printable(repository)
    if not _REPOSITORY.fullmatch(repository):
        raise PlanError(f"{HUB_PREFIX}{shown} names no model of the hub; write hf:org/name or hf:org/name@revision")
    try:
        return fetch(repository)
    except PlanError:
        raise
    except Exception as error:  # the client raises errors of its own, of its network library, and OSError
        lines = str(error).strip().splitlines()
        raise PlanError(
            f"{HUB_PREFIX}{shown} could not be fetched ({type(error).__name__}: "
            f"{printable(lines[0]) if lines else 'no reason given'}); check the name and the network, "
            f"or download its {CONFIG_NAME} and give the path"
        ) from error


def fetch_from_hub(repository: str) -> str:
    """Return the path of a repository's ``config.json`` in the hub client's cache; nothing else is fetched.

    Raises:
        PlanError: the hub's client is not installed.
    """
    try:
        hub = import_module("huggingface_hub")
    except ImportError as error:
        raise PlanError(
            f"{HUB_PREFIX}{repository} needs the hub's client; install it with pip install 'kvdock[hub]', "
            f"or download the model's {CONFIG_NAME} and give its path"
        ) from error
    name, _, revision = repository.partition("@")
    return str(hub.hf_hub_download(repo_id=name, filename=CONFIG_NAME, revision=revision or None))
