"""Engines: MindSpore and PyTorch behind one contract. Importing this package imports neither."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from convmesh.errors import EngineError, brief

if TYPE_CHECKING:
    from convmesh.engines.contract import Engine, Launcher

ENGINES = ("mindspore", "torch")


def is_installed(name: str) -> bool:
    """Whether the framework of an engine can be found, without importing it."""
    return importlib.util.find_spec(name) is not None


def load_engine(name: str) -> Engine:
    """Imports an engine and its framework.

    Args:
        name: ``"mindspore"`` or ``"torch"``.

    Returns:
        The engine, not started.

    Raises:
        EngineError: If its framework is not installed, or can't be imported.
    """
    if not is_installed(name):
        raise EngineError(
            f"the engine '{name}' is not installed", fix=f"Install it with: pip install 'convmesh[{name}]'"
        )
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise EngineError(
            f"the engine '{name}' is installed but can't be imported",
            got=brief(error),
            fix=f"Install it anew: pip install --force-reinstall 'convmesh[{name}]'",
        ) from error
    engine: Engine = _module(name, "engine").create_engine()
    return engine


def load_launcher(name: str) -> Launcher:
    """The launch rules of an engine; imports no framework."""
    launcher: Launcher = _module(name, "launch").create_launcher()
    return launcher


def has_part(name: str, part: str) -> bool:
    """Whether an engine has a module of this name, without importing its framework."""
    return importlib.util.find_spec(f"convmesh.engines.{name}.{part}") is not None


def engine_of(network: object) -> str:
    """The engine that a network belongs to.

    Args:
        network: An ``nn.Cell`` or an ``nn.Module``.

    Returns:
        ``"mindspore"`` or ``"torch"``.

    Raises:
        EngineError: If it is neither.
    """
    for base in type(network).__mro__:
        root = base.__module__.partition(".")[0]
        if root in ENGINES:
            return root
    raise EngineError(
        "this is not a network of a known engine", got=type(network).__name__, expected="an nn.Cell or nn.Module"
    )


def _module(name: str, part: str) -> Any:
    return importlib.import_module(f"convmesh.engines.{name}.{part}")
