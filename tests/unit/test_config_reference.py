"""The configuration reference: complete, up to date, in both languages; and the commands that print it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from convmesh.cli.config import app
from convmesh.config import RunConfig
from convmesh.config.reference import LANGUAGES, config_reference, untranslated
from convmesh.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"


def settings_of(section: type) -> list[str]:
    return [entry.name for entry in dataclasses.fields(section)]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_setting_has_a_row_with_a_meaning(language: str) -> None:
    page = config_reference(language)
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    keys = [row[0].strip("|` ") for row in rows]
    for section in ("model", "data", "strategy", "precision", "optimizer", "schedule", "train"):
        assert section in keys
        assert f"## `{section}`" in page
        owner = next(entry.type for entry in dataclasses.fields(RunConfig) if entry.name == section)
        from convmesh.config import schema

        for name in settings_of(getattr(schema, str(owner))):
            assert name in keys, f"{section}.{name}"
    assert "## `data.augment`" in page
    assert all(len(row) == 4 and row[3].strip("| ") for row in rows)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_in_docs_is_up_to_date(language: str) -> None:
    path = DOCS / language / "configuration.md"
    fix = f"run: convmesh config reference --language {language} --output docs/{language}/configuration.md"
    assert path.read_text("utf-8") == config_reference(language), fix


def test_every_text_has_chinese_words() -> None:
    assert untranslated("zh") == []


def test_values_and_defaults_are_told() -> None:
    page = config_reference()
    assert "| `compute` | `float32`, `float16`, `bfloat16` | `float32` |" in page
    assert "| `initial` | number from 1 | `16777216` |" in page
    assert "| `betas` | list of 2: number from 0, below 1 | `[0.9, 0.999]` |" in page
    assert "| `source` | `cifar10`, `image_folder`, `idx`, `digits` | *required* |" in page


def test_unknown_language_is_refused() -> None:
    with pytest.raises(ConfigError, match="no reference in this language"):
        config_reference("fr")


def test_schema_is_printed_or_written(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["schema"])
    assert shown.exit_code == 0
    assert "engine" in json.dumps(json.loads(shown.stdout))
    file = tmp_path / "schema.json"
    assert CliRunner().invoke(app, ["schema", "--output", str(file)]).exit_code == 0
    assert json.loads(file.read_text("utf-8")) == json.loads(shown.stdout)


def test_a_file_that_cannot_be_written_is_an_error_for_people(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reference", "--output", str(tmp_path / "no" / "page.md")])
    assert isinstance(result.exception, ConfigError)
