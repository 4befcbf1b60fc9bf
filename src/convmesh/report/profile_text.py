"""The words of all pages, in English and Chinese: files of texts, read when a page is written."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import yaml

from convmesh.errors import ConfigError

LANGUAGES = ("en", "zh")


@cache
def texts(language: str, page: str = "profile") -> Mapping[str, str]:
    """The texts of a language by key; ``{...}`` in them are filled in.

    Args:
        language: ``"en"`` or ``"zh"``.
        page: Whose: ``"profile"``, ``"report"`` or ``"comparison"``.

    Returns:
        Key to text.

    Raises:
        ConfigError: If there are none in this language.
    """
    if language not in LANGUAGES:
        raise ConfigError("reports are not written in this language", got=language, expected=" or ".join(LANGUAGES))
    found: Mapping[str, str] = yaml.safe_load(
        (files("convmesh.report") / "texts" / f"{page}_{language}.yaml").read_text("utf-8")
    )
    return found
