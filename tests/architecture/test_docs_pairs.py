"""Documentation exists in both languages, page for page."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def pages(language: str) -> set[str]:
    folder = ROOT / "docs" / language
    return {str(path.relative_to(folder)) for path in folder.rglob("*.md")}


def test_every_page_has_its_other_language() -> None:
    assert pages("en")
    assert pages("en") == pages("zh")


def test_the_readme_has_its_other_language() -> None:
    assert (ROOT / "README.md").is_file()
    assert (ROOT / "README.zh-CN.md").is_file()


def test_chinese_pages_are_chinese() -> None:
    for page in pages("zh"):
        text = (ROOT / "docs" / "zh" / page).read_text("utf-8")
        assert any("\u4e00" <= letter <= "\u9fff" for letter in text), f"docs/zh/{page} is not translated"
