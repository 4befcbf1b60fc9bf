"""Networks of users: a function named in the run file is imported and called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from convmesh.errors import ModelError, brief


def call_factory(factory: str, args: Mapping[str, Any], *, base: type, engine: str) -> Any:
    """Calls a user's factory.

    Args:
        factory: ``package.module:function``.
        args: Its keyword arguments.
        base: What it must return an instance of: the engine's class of networks.
        engine: The engine, for the message.

    Returns:
        The network.

    Raises:
        ModelError: If it can't be imported, raises, or returns something else.
    """
    module_name, _, attribute = factory.partition(":")
    try:
        function: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"the module of model.factory '{factory}' can't be imported",
            got=brief(error),
            fix="Install its package, or put its folder on PYTHONPATH",
        ) from error
    try:
        for part in attribute.split("."):
            function = getattr(function, part)
    except AttributeError as error:
        raise ModelError(
            f"the module '{module_name}' of model.factory has no '{attribute}'",
            fix="Write the name of a function that stands in it",
        ) from error
    try:
        network = function(**args)
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"model.factory '{factory}' failed", got=brief(error), fix="Mend the function, or 'model.args'"
        ) from error
    if not isinstance(network, base):
        raise ModelError(
            f"model.factory '{factory}' did not return a network of {engine}",
            got=type(network).__name__,
            expected=f"a {base.__module__.partition('.')[0]}.nn.{base.__name__}",
            fix="Return one, or set 'engine' to the framework of the network",
        )
    return network
