"""The run file: one YAML, frozen dataclasses, checked where it enters."""

from convmesh.config.load import config_schema, dump_config, load_config, parse_config
from convmesh.config.rules import check_config
from convmesh.config.schema import RunConfig

__all__ = ["RunConfig", "check_config", "config_schema", "dump_config", "load_config", "parse_config"]
