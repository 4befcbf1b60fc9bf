"""The configuration reference: a page in Markdown, made from the JSON Schema of the run file.

The texts are the docstring lines of `convmesh.config.schema`. Their Chinese wording stands in ``reference_zh.yaml``,
found by the English text, so that a text that changes loses its translation and a test notices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from convmesh.config.load import config_schema
from convmesh.errors import ConfigError

Schema = Mapping[str, Any]

LANGUAGES = ("en", "zh")
"""Languages of the reference."""


@dataclass(frozen=True)
class Section:
    """One table of the reference.

    Args:
        path: Keys that lead to it, joined by dots; empty for the top of the file.
        text: What it is about.
        rows: Per setting: key, kind of value, default, meaning.
    """

    path: str
    text: str
    rows: tuple[tuple[str, str, str, str], ...]


def config_reference(language: str = "en") -> str:
    """Writes the configuration reference.

    Args:
        language: ``"en"`` or ``"zh"``.

    Returns:
        The page in Markdown.

    Raises:
        ConfigError: If there is no reference in that language.
    """
    if language not in LANGUAGES:
        raise ConfigError(
            "there is no reference in this language", got=repr(language), expected=" or ".join(map(repr, LANGUAGES))
        )
    say = _Words(language)
    parts = [f"# {say('Configuration reference')}", say(_INTRODUCTION), f"<!-- {say(_ORIGIN)} -->"]
    for section in _sections(say):
        parts.append(f"## {f'`{section.path}`' if section.path else say('Top of the file')}")
        parts.append(section.text)
        parts.append(_table(section, say))
    return "\n\n".join(parts) + "\n"


def untranslated(language: str) -> list[str]:
    """Texts of the reference that a language has no words for yet, and words that no text needs any more.

    Args:
        language: One of ``LANGUAGES``.

    Returns:
        The texts; empty if the translation is whole.
    """
    say = _Words(language)
    for section in _sections(say):
        _table(section, say)
    for text in ("Configuration reference", "Top of the file", _INTRODUCTION, _ORIGIN):
        say(text)
    return sorted(say.missing | (say.known - say.used))


_INTRODUCTION = (
    "A run is described by one YAML file. Every setting has a default unless it says *required*; an unknown key is an "
    "error that names the nearest known one. `--set a.b=value` changes one setting on the command line, and "
    "`convmesh config schema` prints the JSON Schema for editors."
)
_ORIGIN = "Written by `convmesh config reference`; change the docstrings of the schema instead."


class _Words:
    """Says a text in a language, in English where it has no other words, and notes what it was asked for."""

    def __init__(self, language: str) -> None:
        self._words = _translations(language)
        self.known = set(self._words)
        self.used: set[str] = set()
        self.missing: set[str] = set()
        self.is_english = language == "en"

    def __call__(self, text: str, **values: object) -> str:
        self.used.add(text)
        if text not in self._words and not self.is_english:
            self.missing.add(text)
        said = self._words.get(text, text)
        return said.format(**values) if values else said


@cache
def _translations(language: str) -> dict[str, str]:
    if language == "en":
        return {}
    text = resources.files("convmesh.config").joinpath(f"reference_{language}.yaml").read_text("utf-8")
    return {str(english): str(words) for english, words in yaml.safe_load(text).items()}


def _sections(say: _Words) -> Iterator[Section]:
    schema = config_schema()
    definitions = schema["$defs"]
    root = definitions["RunConfig"] if "properties" not in schema else schema
    yield from _walk(root, definitions, path="", say=say)


def _walk(part: Schema, definitions: Mapping[str, Schema], *, path: str, say: _Words) -> Iterator[Section]:
    rows, inner = [], []
    required = part.get("required", ())
    for key, setting in part["properties"].items():
        target = definitions.get(str(setting.get("$ref", "")).rpartition("/")[2])
        # pydantic leaves the text of a section out where it equals that of its class.
        meaning = say(str(setting.get("description") or (target or {}).get("description", "")))
        if target is None:
            kind, default = _kind(setting, say), _default(setting, say)
        else:
            kind, default = say("section, see below"), ""
            inner.append((f"{path}.{key}" if path else key, target))
        rows.append((key, kind, say("*required*") if key in required else default, meaning))
    yield Section(path, say(str(part.get("description", ""))), tuple(rows))
    for name, target in inner:
        yield from _walk(target, definitions, path=name, say=say)


def _kind(setting: Schema, say: _Words) -> str:
    options = [option for option in setting.get("anyOf", ()) if option.get("type") != "null"]
    if options:
        return " / ".join(_kind(option, say) for option in options)
    if "enum" in setting or "const" in setting:
        return ", ".join(f"`{value}`" for value in setting.get("enum", [setting.get("const")]))
    kind = setting.get("type")
    if kind == ["integer", "string"]:
        return say("number of bytes, or a size such as `25MiB`")
    if kind == "array":
        return _list_kind(setting, say)
    if kind == "object":
        return _mapping_kind(setting, say)
    words = {"integer": "whole number", "number": "number", "boolean": "`true`, `false`", "string": "text"}
    return say(words.get(str(kind), "any value")) + _bounds(setting, say)


def _mapping_kind(setting: Schema, say: _Words) -> str:
    values = setting.get("additionalProperties")
    if isinstance(values, Mapping) and values:
        return say("keys and values ({kind})", kind=_kind(values, say))
    return say("keys and values")


def _list_kind(setting: Schema, say: _Words) -> str:
    items = setting.get("items") or (setting.get("prefixItems") or [{}])[0]
    inner = _kind(items, say)
    if "minItems" in setting and setting.get("minItems") == setting.get("maxItems"):
        return say("list of {count}: {kind}", count=setting["minItems"], kind=inner)
    return say("list: {kind}", kind=inner)


def _bounds(setting: Schema, say: _Words) -> str:
    words = {"minimum": "from {bound}", "exclusiveMinimum": "above {bound}", "maximum": "up to {bound}"}
    words["exclusiveMaximum"] = "below {bound}"
    found = [say(text, bound=f"{setting[key]:g}") for key, text in words.items() if key in setting]
    return f" {say(', ').join(found)}" if found else ""


def _default(setting: Schema, say: _Words) -> str:
    value = setting.get("default")
    if value is None and setting.get("type") == "object":
        return "`{}`"
    if value is None:
        return say("none")
    if isinstance(value, float) and value >= 2**16 and value == int(value):
        return f"`{int(value)}`"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _table(section: Section, say: _Words) -> str:
    heads = [say(word) for word in ("Setting", "Value", "Default", "Meaning")]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for key, kind, default, meaning in section.rows:
        lines.append(_row([f"`{key}`", kind, default, meaning.replace("``", "`")]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
