"""The run file: what is read, what is refused, and how the refusal reads."""

import dataclasses

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from convmesh.config import check_config, config_schema, dump_config, load_config, parse_config
from convmesh.config.rules import resolve_mesh
from convmesh.errors import ConfigError, MistakeList
from convmesh.mesh import Mesh

MINIMAL = {"model": {"name": "cnn-small"}, "data": {"source": "digits"}}


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def settings(**sections):
    return {**MINIMAL, **sections}


def test_a_minimal_file_gets_every_default(tmp_path):
    run = load_config(write(tmp_path, "model: {name: cnn-small}\ndata: {source: digits}\n"))
    assert run.engine == "mindspore"
    assert run.precision.loss_scale.initial == 2**24
    assert run.precision.loss_scale.window == 200
    assert run.strategy.bucket_bytes == 25 * 2**20


def test_a_written_run_reads_back_equal():
    run = parse_config(settings(strategy={"mesh": {"data": 4}, "bucket_bytes": "5MiB"}, data={"source": "cifar10"}))
    assert parse_config(yaml.safe_load(dump_config(run))) == run


def test_overrides_win_over_the_file_and_create_sections(tmp_path):
    path = write(tmp_path, "model: {name: cnn-small}\ndata: {source: digits}\ntrain: {epochs: 3}\n")
    run = load_config(path, overrides=["train.epochs=7", "strategy.mesh.data=2", "data.augment.flip=true"])
    assert (run.train.epochs, run.strategy.mesh, run.data.augment.flip) == (7, {"data": 2}, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {nam: x}\ndata: {source: digits}", ["model.nam", "Did you mean 'name'?"]),
        ("model: {name: cnn-small}\ndata: {source: digits, augment: {flp: true}}", ["data.augment.flp", "flip"]),
        ("model: {name: cnn-small}", ["'data' is missing"]),
        ("model: {name: resnet1}\ndata: {source: digits}", ["model.name", "'resnet1'", "resnet18"]),
        ("model: {name: cnn-small}\ndata: {source: digits}\nstrategy: {bucket_bytes: 5 Mi}", ["'5 Mi'", "25MiB"]),
        ("model: [\n", ["line 2", "YAML"]),
        ("model: {name: cnn-small}\nmodel: {name: resnet18}\n", ["line 2", "'model' stands twice"]),
        ("- 1\n", ["holds no settings"]),
        ("model: {name: cnn-small}\ndata: {source: digits}\ntrain: {epochs: yes}", ["train.epochs", "not yes or no"]),
        ("model: {name: cnn-small}\ndata: {source: digits}\ntrain: {seed: 99999999999999}", ["train.seed"]),
        ("model: {name: cnn-small}\ndata: {source: digits}\noptimizer: {learning_rate: .inf}", ["learning_rate"]),
        ("model: {factory: nocolon}\ndata: {source: digits}", ["model.factory"]),
        ("x: !!python/object/apply:os.system ['true']", ["YAML"]),
    ],
)
def test_a_wrong_file_is_explained(tmp_path, text, words):
    with pytest.raises((ConfigError, MistakeList)) as caught:
        load_config(write(tmp_path, text))
    for word in words:
        assert word in str(caught.value)


def test_all_mistakes_are_listed_at_once(tmp_path):
    with pytest.raises(MistakeList) as caught:
        load_config(write(tmp_path, "modle: {}\nmodel: {name: x}\ndata: {source: y}\n"))
    assert len(caught.value.errors) == 3


def test_a_missing_file_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="there is no run file"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize("override", ["noequals", "=3", "train.epochs.x=3", "engine.name=torch"])
def test_a_wrong_override_is_a_sentence(tmp_path, override):
    path = write(tmp_path, "engine: torch\nmodel: {name: cnn-small}\ndata: {source: digits}\ntrain: {epochs: 3}\n")
    with pytest.raises(ConfigError):
        load_config(path, overrides=[override])


@pytest.mark.parametrize(
    ("sections", "mesh", "words"),
    [
        ({"model": {}}, {"data": 1}, "a name or a factory"),
        ({"model": {"name": "cnn-small", "factory": "a:b"}}, {"data": 1}, "a name or a factory"),
        ({"data": {"source": "digits", "mean": [0.5]}}, {"data": 1}, "belong together"),
        ({"data": {"source": "image_folder", "image_size": 8}}, {"data": 1}, "data.path"),
        ({}, {"data": 2, "height": 2}, "along 'height'"),
        ({"train": {"global_batch": 10}}, {"data": 4}, "'train.global_batch: 8 or 12'"),
        ({"train": {"global_batch": 2}}, {"data": 4}, "'train.global_batch: 4'"),
        ({"train": {"global_batch": 8}, "strategy": {"accumulation": 3}}, {"data": 1}, "1 ranks x 3 micro-batches"),
        ({"strategy": {"optimizer_sharding": True}}, {"data": 1}, "more than one rank"),
        ({"schedule": {"name": "steps"}}, {"data": 1}, "milestones"),
        ({"schedule": {"name": "steps", "milestones": [5, 2]}}, {"data": 1}, "must rise"),
        ({"schedule": {"warmup_epochs": 10}}, {"data": 1}, "warm-up"),
    ],
)
def test_rules_over_several_settings(sections, mesh, words):
    mistakes = check_config(parse_config(settings(**sections)), mesh=Mesh(mesh))
    assert any(words in str(mistake) for mistake in mistakes), mistakes


def test_a_good_run_has_no_mistakes():
    assert check_config(parse_config(MINIMAL), mesh=Mesh({"data": 2})) == []


def test_ranks_stretch_a_data_mesh_but_not_another():
    run = parse_config(settings(strategy={"mesh": {"data": 4}}))
    assert resolve_mesh(run, num_ranks=None) == Mesh({"data": 4})
    assert resolve_mesh(run, num_ranks=2) == Mesh({"data": 2})
    assert resolve_mesh(parse_config(MINIMAL), num_ranks=None) == Mesh({"data": 1})
    with pytest.raises(ConfigError, match="--ranks 4"):
        resolve_mesh(run, num_ranks=3, mesh=Mesh({"data": 2, "channel": 2}))


def test_the_schema_documents_every_setting():
    schema = config_schema()
    for name, section in schema["$defs"].items():
        assert section["additionalProperties"] is False, name
        for key, entry in section["properties"].items():
            assert "description" in entry or "$ref" in entry, f"{name}.{key}"


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.integers(), min_size=1, max_size=3))
def test_unknown_sections_never_pass(extra):
    known = {field.name for field in dataclasses.fields(type(parse_config(MINIMAL)))}
    if set(extra) - known:
        with pytest.raises((ConfigError, MistakeList)):
            parse_config({**MINIMAL, **extra})
