"""What the documentation shows: its blocks of code, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = tuple(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md")))
)
OTHER_LANGUAGE = {"README.md": "README.zh-CN.md"} | {
    page: page.replace("docs/en/", "docs/zh/") for page in PAGES if page.startswith("docs/en/")
}
"""English page to the Chinese one."""
_PLACEHOLDERS = {"CONFIG": "run.yaml", "RUN": "runs/first", "N": "2", "FILE": "plan.yaml"}


@dataclass(frozen=True)
class Block:
    """A block of code.

    Args:
        page: Where it stands.
        language: ``"sh"``, ``"python"``, ``"yaml"`` or ``""``.
        text: The code.
    """

    page: str
    language: str
    text: str

    @property
    def code(self) -> str:
        """The code without comments and names of the reader's own."""
        lines = [re.sub(r"(^|\s)#.*", "", line).rstrip() for line in self.text.splitlines()]
        return re.sub(r"<[^>]+>", "<name>", "\n".join(line for line in lines if line))


def blocks(page: str, language: str | None = None) -> list[Block]:
    """The blocks of code of a page."""
    text = (ROOT / page).read_text("utf-8")
    found = [Block(page, match[1], match[2]) for match in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)]
    return [block for block in found if language in (None, block.language)]


def commands(page: str) -> Iterator[list[str]]:
    """The command lines of a page as words: those in blocks, and those of ``convmesh`` in running text."""
    for block in blocks(page, "sh"):
        for line in block.code.splitlines():
            for command in line.split("&&"):
                yield shlex.split(command)
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S)
    for match in re.finditer(r"`(convmesh\s[^`]+)`", text):
        for choice in _choices(" ".join(match[1].replace("\\|", "|").split())):
            yield [_PLACEHOLDERS.get(word, word) for word in shlex.split(choice)]


def _choices(command: str) -> list[str]:
    """``a b|c`` as ``a b`` and ``a c``."""
    words = command.split()
    for place, word in enumerate(words):
        if "|" in word:
            return [" ".join([*words[:place], choice, *words[place + 1 :]]) for choice in word.split("|")]
    return [command]
