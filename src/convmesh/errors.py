"""Typed errors that a person can act on.

Every error that a user can cause says what was wrong, what was got, what was expected and how to mend it. The command
line prints ``str(error)`` without a traceback and exits with ``error.exit_code``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ConvMeshError(Exception):
    """Base of all errors that ConvMesh raises on purpose.

    Args:
        what: What was wrong, as a sentence without its final full stop.
        got: What was found, if that helps.
        expected: What would have been right.
        fix: What to do, as an imperative.
    """

    exit_code = 2

    def __init__(self, what: str, *, got: object = None, expected: object = None, fix: str | None = None) -> None:
        self.what = what
        self.got = got
        self.expected = expected
        self.fix = fix
        super().__init__(self._sentence())

    def __reduce__(self) -> tuple[Any, ...]:
        # Built-in exceptions are rebuilt from their text, which would be taken for a new ``what``.
        return _rebuild, (type(self), self.args, self.__dict__)

    def _sentence(self) -> str:
        facts = [
            f"{label} {value}" for label, value in (("got", self.got), ("expected", self.expected)) if value is not None
        ]
        text = self.what + (f" ({', '.join(facts)})" if facts else "") + "."
        if not self.fix:
            return text
        return f"{text} {self.fix}" if self.fix.endswith((".", "?")) else f"{text} {self.fix}."


def _rebuild(kind: type[ConvMeshError], args: tuple[Any, ...], state: dict[str, Any]) -> ConvMeshError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(ConvMeshError):
    """The run file, a command-line option or a combination of both is wrong."""


class DataError(ConvMeshError):
    """Data is missing, half fetched, corrupt or does not fit the run."""


class ModelError(ConvMeshError):
    """The network can't be built, or doesn't fit the data or the weights."""


class EngineError(ConvMeshError):
    """An engine is not installed, or can't do what the run asks."""


class LaunchError(ConvMeshError):
    """Ranks could not be started, or one of them died."""


class RunFolderError(ConvMeshError):
    """The run folder holds another run, is in use, or can't be written."""


class CheckpointError(ConvMeshError):
    """A checkpoint is missing, damaged, or belongs to another network."""


class ProfileError(ConvMeshError):
    """A profile is missing, damaged, or of a kind that is not known."""


class SyncError(ConvMeshError):
    """Ranks that must hold equal tensors don't."""


class MistakeList(ConvMeshError):
    """Several errors found before anything was started.

    Args:
        errors: The errors, in the order in which a reader would mend them.
    """

    def __init__(self, errors: Sequence[ConvMeshError]) -> None:
        self.errors = tuple(errors)
        super().__init__(f"{len(self.errors)} things need mending before this run can start")

    def __str__(self) -> str:
        lines = [f"  {number}. {error}" for number, error in enumerate(self.errors, start=1)]
        return "\n".join([self.what + ":", *lines])


def brief(error: BaseException) -> str:
    """What another library's error says, on one line.

    Args:
        error: Any exception.

    Returns:
        Its type and the first line that says something; MindSpore frames its messages with rules.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -\t")]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def raise_all(errors: Sequence[ConvMeshError]) -> None:
    """Raises nothing, the only error, or all of them as one ``MistakeList``.

    Args:
        errors: What was found, possibly nothing.

    Raises:
        ConvMeshError: If ``errors`` is not empty.
    """
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise MistakeList(errors)
