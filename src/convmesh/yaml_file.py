"""YAML as people write it: no tags that run code, no key twice, mistakes with their line."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from convmesh.errors import ConfigError


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML without tags that run code, in which a key may not be written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuses a mapping in which a key stands twice, with a ConstructorError."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_mapping(path: Path, *, what: str, fix: str | None = None) -> dict[str, Any]:
    """Reads a file that holds a mapping.

    Args:
        path: The file.
        what: What kind of file it is, for messages: ``"run file"``.
        fix: What to do if there is none.

    Returns:
        The mapping.

    Raises:
        ConfigError: If there is no such file, or it is not YAML, or holds something else.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), UniqueKeyLoader)
    except FileNotFoundError:
        raise ConfigError(f"there is no {what} {path}", fix=fix) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the {what} {path} can't be read", got=str(error)) from None
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"the {what} {path}{where} is not valid YAML", got=error.problem) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"the {what} {path} is not valid YAML", got=str(error)) from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"the {what} {path} holds no settings", got=type(content).__name__, expected="keys and values"
        )
    return content
