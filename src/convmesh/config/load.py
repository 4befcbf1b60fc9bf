"""Reading and writing run files: YAML outside, frozen dataclasses inside."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from convmesh.config.schema import RunConfig
from convmesh.errors import ConfigError, ConvMeshError, raise_all
from convmesh.yaml_file import UniqueKeyLoader, read_mapping

_ADAPTER: TypeAdapter[RunConfig] = TypeAdapter(RunConfig)


def load_config(path: str | Path, *, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a run file.

    Args:
        path: A YAML file.
        overrides: Settings as ``a.b=value``, the value in YAML; they win over the file.

    Returns:
        The run, with defaults filled in.

    Raises:
        ConfigError: If the file can't be read or one setting is wrong.
        MistakeList: If several are wrong; all are listed.
    """
    settings = read_mapping(Path(path), what="run file", fix="Copy one from the folder examples/")
    for override in overrides:
        _override(settings, override)
    return parse_config(settings)


def parse_config(settings: Mapping[str, Any]) -> RunConfig:
    """Checks settings given as nested mappings.

    Args:
        settings: What a run file would hold.

    Returns:
        The run, with defaults filled in.

    Raises:
        ConfigError: If one setting is wrong.
        MistakeList: If several are wrong; all are listed.
    """
    try:
        return _ADAPTER.validate_python(dict(settings))
    except ValidationError as error:
        mistakes: list[ConvMeshError] = [_explain(detail) for detail in error.errors(include_url=False)]
        raise_all(mistakes)
        raise


def with_settings(run: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """A run with some settings changed.

    Args:
        run: The run.
        changes: Setting as ``a.b`` to its value, as a run file would hold it.

    Returns:
        The run with these settings.

    Raises:
        ConfigError: If one setting is wrong.
        MistakeList: If several are wrong; all are listed.
    """
    settings = plain_config(run)
    for path, value in changes.items():
        *sections, name = path.split(".")
        inner = settings
        for section in sections:
            inner = inner[section]
        inner[name] = value
    return parse_config(settings)


def dump_config(run: RunConfig) -> str:
    """Writes a run as YAML that ``load_config`` reads back to an equal run."""
    return yaml.safe_dump(plain_config(run), sort_keys=False, allow_unicode=True)


def plain_config(run: RunConfig) -> dict[str, Any]:
    """A run as nested plain values, defaults included."""
    plain: dict[str, Any] = _ADAPTER.dump_python(run, mode="json")
    return plain


def dotted(settings: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names, as ``--set`` names them; lists and empty mappings are values.

    Args:
        settings: Mappings in mappings.
        prefix: Stands before every name.

    Returns:
        ``{"train.epochs": 6}`` for ``{"train": {"epochs": 6}}``.
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= dotted(value, prefix=f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def config_schema() -> dict[str, Any]:
    """The JSON Schema of the run file, for editors and other tools."""
    schema = _ADAPTER.json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "ConvMesh run file"}


def _override(settings: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError("an override is not written as a.b=value", got=repr(override))
    *parents, last = path.strip().split(".")
    for parent in parents:
        inner = settings.setdefault(parent, {})
        if inner is None:
            inner = settings[parent] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"the override '{override}' goes through '{parent}', which is a value, not a section")
        settings = inner
    try:
        settings[last] = yaml.load(text, UniqueKeyLoader)
    except yaml.YAMLError:
        raise ConfigError(f"the value of the override '{path}' is not valid YAML", got=repr(text)) from None


def _explain(detail: Mapping[str, Any]) -> ConfigError:
    location = [str(part) for part in detail["loc"]]
    path = ".".join(location)
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return _unknown_key(location)
    if detail["type"] in ("missing", "missing_argument"):
        return ConfigError(f"the setting '{path}' is missing", fix=f"Add '{path}:' to the run file")
    expected = str(detail["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    got = repr(detail["input"])
    return ConfigError(
        f"the setting '{path}' is wrong", got=got if len(got) < 80 else got[:77] + "...", expected=expected
    )


def _unknown_key(location: list[str]) -> ConfigError:
    known = _fields_at(location[:-1])
    nearest = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
    fix = f"Did you mean '{nearest[0]}'?" if nearest else f"Known here: {', '.join(known)}"
    return ConfigError(f"the setting '{'.'.join(location)}' is unknown", fix=fix)


def _fields_at(path: list[str]) -> list[str]:
    section: Any = RunConfig
    for name in path:
        section = get_type_hints(section).get(name, section)
    return [entry.name for entry in dataclasses.fields(section)] if dataclasses.is_dataclass(section) else []
