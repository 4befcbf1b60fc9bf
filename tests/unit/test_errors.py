"""Errors read as sentences, travel between processes, and come all at once."""

import pickle

import pytest

from convmesh.errors import ConfigError, ConvMeshError, DataError, MistakeList, brief, raise_all


def test_a_sentence_holds_everything():
    error = ConfigError("the batch is odd", got=3, expected="an even number", fix="Use 4")
    assert str(error) == "the batch is odd (got 3, expected an even number). Use 4."
    assert str(ConfigError("it is gone")) == "it is gone."
    assert str(ConfigError("unknown", fix="Did you mean 'x'?")) == "unknown. Did you mean 'x'?"


def test_one_error_is_raised_as_itself_and_several_as_a_list():
    raise_all([])
    first, second = ConfigError("a"), DataError("b")
    with pytest.raises(ConfigError):
        raise_all([first])
    with pytest.raises(MistakeList) as caught:
        raise_all([first, second])
    assert str(caught.value).splitlines()[1:] == ["  1. a.", "  2. b."]


@pytest.mark.parametrize("error", [DataError("x", got=1, fix="Do y"), MistakeList([ConfigError("a"), DataError("b")])])
def test_an_error_survives_pickling(error):
    back = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert isinstance(back, ConvMeshError)
    assert back.exit_code == 2


def test_what_other_libraries_say_fits_on_one_line():
    assert brief(ValueError("\n-----\n- what happened\n-----\nmore")) == "ValueError: - what happened"
    assert brief(KeyError()) == "KeyError"
