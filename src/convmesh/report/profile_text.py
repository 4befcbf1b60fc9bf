"""The words of a profile's report, in English and Chinese: files of texts, read when a report is written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import yaml

from convmesh.errors import ConfigError

LANGUAGES = ("en", "zh")


@cache
def texts(language: str) -> Mapping[str, str]:
    """The texts of a language by key; ``{...}`` in them are filled in.

    Raises:
        ConfigError: If there are none in this language.
    """
    if language not in LANGUAGES:
        raise ConfigError("reports are not written in this language", got=language, expected=" or ".join(LANGUAGES))
    found: Mapping[str, str] = yaml.safe_load(
        (files("convmesh.report") / "texts" / f"profile_{language}.yaml").read_text("utf-8")
    )
    return found
