"""Plans as YAML files.

```yaml
schema_version: 1
mesh: {data: 2, channel: 2}
opaque: refuse                      # or gather
operators:                          # later entries win
  conv1: {channel: out_channels}
  layer4.*: {channel: {split: in_channels, partition: [3, 3, 2, 2]}}
  fc: {channel: {split: in_channels, output: whole}}
  head.*: {data: out_channels}      # all samples, own channels
accumulation: 4                     # these four go before the run file's strategy; what is left out stays as it says
optimizer_sharding: true
bucket_bytes: 25MiB
recompute: [layer1.*, layer2.0]     # or none, or blocks
network: {...}                      # what the plan was made for; may be left out
foretold: {...}                     # what the planner expects of it, and why it chose it; may be left out
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from convmesh.errors import ConfigError, ConvMeshError, raise_all
from convmesh.mesh import Mesh
from convmesh.plan.plan import SCHEMA_VERSION, Choice, Entry, Execution, Foretold, NetworkFacts, Partition, Plan, Split
from convmesh.units import read_bytes
from convmesh.yaml_file import read_mapping

_STRICT = ConfigDict(extra="forbid")
_DEFAULTS = {entry.name: entry.default for entry in dataclasses.fields(Choice) if entry.name != "split"}


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class _ChoiceFile:
    split: Split
    partition: Partition = "contiguous"
    keep_input: bool = False
    output: Literal["sharded", "whole", "samples"] = "sharded"


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class _NetworkFile:
    fingerprint: str
    input_shape: tuple[int, ...]
    operators: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class _ForetoldFile:
    cluster: str
    global_batch: int
    seconds: float
    seconds_by_kind: dict[str, float]
    memory_bytes: int
    memory_by_kind: dict[str, int]
    memory_limit_bytes: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, config=_STRICT, kw_only=True)
class _PlanFile:
    schema_version: int
    mesh: dict[str, int]
    opaque: Literal["gather", "refuse"] = "refuse"
    operators: dict[str, dict[str, Split | _ChoiceFile]] = Field(default_factory=dict)
    accumulation: Annotated[int, Field(ge=1, strict=True)] | None = None
    optimizer_sharding: Annotated[bool, Field(strict=True)] | None = None
    bucket_bytes: Annotated[int, BeforeValidator(read_bytes), Field(ge=1)] | None = None
    recompute: Literal["none", "blocks"] | tuple[str, ...] | None = None
    network: _NetworkFile | None = None
    foretold: _ForetoldFile | None = None


_ADAPTER: TypeAdapter[_PlanFile] = TypeAdapter(_PlanFile)


def load_plan(path: str | Path) -> Plan:
    """Reads a plan file.

    Args:
        path: A YAML file.

    Returns:
        The plan.

    Raises:
        ConfigError: If the file can't be read, is of another version, or one setting is wrong.
        MistakeList: If several are wrong; all are listed.
    """
    content = read_mapping(
        Path(path), what="plan", fix="Write one with: convmesh check CONFIG --mesh channel=2 --write-plan FILE"
    )
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"the plan {path} was written for another version of ConvMesh",
            got=f"schema_version {version}",
            expected=SCHEMA_VERSION,
            fix=f"Write 'schema_version: {SCHEMA_VERSION}' if it is a plan of today, or make a new one",
        )
    try:
        parsed = _ADAPTER.validate_python(content)
    except ValidationError as error:
        mistakes: list[ConvMeshError] = [_explain(detail, path) for detail in _distinct(error)]
        raise_all(mistakes)
        raise
    return _plan_of(parsed)


def dump_plan(plan: Plan) -> str:
    """Writes a plan as YAML that ``load_plan`` reads back to an equal plan."""
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "mesh": _Inline(plan.mesh.sizes),
        "opaque": plan.opaque,
        "operators": {
            entry.pattern: _Inline({axis: _dump_choice(choice) for axis, choice in entry.axes.items()})
            for entry in plan.entries
        },
    }
    content |= _dump_execution(plan.execution)
    if plan.network is not None:
        content["network"] = {
            "fingerprint": plan.network.fingerprint,
            "input_shape": list(plan.network.input_shape),
            "operators": dict(plan.network.operators),
        }
    if plan.foretold is not None:
        content["foretold"] = _dump_foretold(plan.foretold)
    return yaml.dump(
        content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100_000, default_flow_style=False
    )


class _Inline(dict[str, Any]):
    """A mapping that is written in one line."""


class _Block(tuple[str, ...]):
    """A list that is written in one line per entry."""


class _Dumper(yaml.SafeDumper):
    """Writes lists and the choices of one operator in one line."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=not isinstance(sequence, _Block))


_Dumper.add_representer(
    _Inline, lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True)
)

_Dumper.add_representer(_Block, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data))


def _plan_of(parsed: _PlanFile) -> Plan:
    facts = parsed.network
    return Plan(
        mesh=Mesh(parsed.mesh),
        opaque=parsed.opaque,
        entries=tuple(
            Entry(pattern=pattern, axes={axis: _choice_of(choice) for axis, choice in axes.items()})
            for pattern, axes in parsed.operators.items()
        ),
        execution=Execution(
            accumulation=parsed.accumulation,
            optimizer_sharding=parsed.optimizer_sharding,
            bucket_bytes=parsed.bucket_bytes,
            recompute=None if parsed.recompute is None else patterns_of(parsed.recompute),
        ),
        network=None
        if facts is None
        else NetworkFacts(
            fingerprint=facts.fingerprint, input_shape=facts.input_shape, operators=dict(facts.operators)
        ),
        foretold=None if parsed.foretold is None else Foretold(**vars(parsed.foretold)),
    )


def patterns_of(recompute: str | Sequence[str]) -> tuple[str, ...]:
    """Names and patterns of blocks from what files say: ``none``, ``blocks``, or a list of them."""
    if isinstance(recompute, str):
        return ("*",) if recompute == "blocks" else ()
    return tuple(recompute)


def _dump_execution(execution: Execution) -> dict[str, Any]:
    said = {entry.name: getattr(execution, entry.name) for entry in dataclasses.fields(execution)}
    said = {name: value for name, value in said.items() if value is not None}
    if "recompute" in said:
        forms: dict[tuple[str, ...], Any] = {(): "none", ("*",): "blocks"}
        said["recompute"] = forms.get(said["recompute"], list(said["recompute"]))
    return said


def _dump_foretold(foretold: Foretold) -> dict[str, Any]:
    said = {entry.name: getattr(foretold, entry.name) for entry in dataclasses.fields(foretold)}
    by_kind = {name: _Inline(value) for name, value in said.items() if isinstance(value, Mapping)}
    return {**said, **by_kind, "reasons": _Block(foretold.reasons)}


def _choice_of(choice: Split | _ChoiceFile) -> Choice:
    if isinstance(choice, str):
        return Choice(split=choice)
    return Choice(split=choice.split, partition=choice.partition, keep_input=choice.keep_input, output=choice.output)


def _dump_choice(choice: Choice) -> Any:
    changed = {name: getattr(choice, name) for name, default in _DEFAULTS.items() if getattr(choice, name) != default}
    if "partition" in changed and not isinstance(choice.partition, str):
        changed["partition"] = [list(part) if isinstance(part, tuple) else part for part in choice.partition]
    return _Inline({"split": choice.split, **changed}) if changed else choice.split


def _distinct(error: ValidationError) -> list[Any]:
    """One detail per setting: of a choice, either form is tried, and what is wrong with the nearer one counts."""
    found: dict[tuple[Any, ...], Any] = {}
    for detail in error.errors(include_url=False):
        location = tuple(part for part in detail["loc"] if not str(part).startswith(_FORMS))
        is_text = isinstance(detail["input"], str)
        if location not in found or (detail["type"] == "literal_error") == is_text:
            found[location] = {**detail, "loc": location}
    inner = {location[:length] for location in found for length in range(len(location))}
    return [detail for location, detail in found.items() if location not in inner]


_FORMS = ("_ChoiceFile", "literal[", "tuple[")
"""How pydantic names the forms of a value that it has tried."""


def _explain(detail: Mapping[str, Any], path: str | Path) -> ConfigError:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return ConfigError(f"the setting '{where}' of the plan {path} is unknown")
    expected = str(detail["msg"]).removeprefix("Input should be ").replace("dictionary", "mapping of axis to split")
    if where == "recompute":
        expected = "none, blocks, or a list of names and patterns of blocks"
    if where.endswith("partition"):
        expected = "contiguous, round_robin, a number of channels per rank, or a list of channels per rank"
    return ConfigError(
        f"the setting '{where}' of the plan {path} is wrong", got=repr(detail["input"]), expected=expected
    )
