"""Where configs come from, and what is said of those that cannot be read."""

import json
import os
import sys

import pytest
from kvdock.errors import PlanError
from kvdock.families import read_model
from kvdock.families.config import MAX_BYTES, load_config
from kvdock.queries import ModelQuery

GOOD = b'{"num_hidden_layers": 2}'


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def refused(source, **options):
    with pytest.raises(PlanError) as caught:
        load_config(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_file_is_read_and_named_after_itself(tmp_path):
    assert load_config(write(tmp_path / "tiny-1b.json", GOOD)) == ("tiny-1b", {"num_hidden_layers": 2})


def test_a_model_folder_is_read_and_named_after_the_folder(tmp_path):
    folder = tmp_path / "Tiny-1B"
    folder.mkdir()
    write(folder / "config.json", GOOD)
    assert load_config(str(folder)) == ("Tiny-1B", {"num_hidden_layers": 2})
    assert load_config(folder / "config.json")[0] == "Tiny-1B"


def test_data_in_hand_is_taken_as_it_is_and_not_changed():
    config = {"_name_or_path": "tiny", "num_hidden_layers": 2}
    assert load_config(config) == ("tiny", {"_name_or_path": "tiny", "num_hidden_layers": 2})
    assert load_config({})[0] == "config"


def test_a_byte_order_mark_is_no_obstacle(tmp_path):
    assert load_config(write(tmp_path / "c.json", b"\xef\xbb\xbf" + GOOD))[1] == {"num_hidden_layers": 2}


def test_a_missing_file_is_named(tmp_path):
    message = refused(tmp_path / "nowhere.json")
    assert "there is no file or folder" in message
    assert "nowhere.json" in message
    assert "config.json" in message


def test_a_folder_without_config_is_named(tmp_path):
    assert refused(tmp_path).startswith(f"{tmp_path} is a folder without config.json; give")


def test_a_bare_hub_name_is_told_how_to_write_it():
    assert "write hf:meta-llama/Llama-3.1-8B" in refused("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b'{"a": 1, "b": [1, 2', "ends too early"),
        (b'{"a": "tex', "ends too early"),
        (b"{", "ends too early"),
        (b"layers: 3", "is not JSON"),
        (b'{"a": 1} extra', "is not JSON"),
        (b"\xff\xfe{}", "is not UTF-8 text (byte 0)"),
        (b"[1, 2]", "holds a list, not an object"),
        (b"null", "holds null, not an object"),
        (b"3", "holds a number, not an object"),
        (b'{"heads": 1, "heads": 2}', "the key 'heads' is there twice"),
        (b'{"text_config": {"x": 1, "x": 1}}', "the key 'x' is there twice"),
        (b'{"a": NaN}', "the number NaN"),
        (b'{"a": 1e999}', "the number 1e999 is not finite"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "a number has 100000 digits"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong_and_what_to_do(tmp_path, data, said):
    message = refused(write(tmp_path / "broken.json", data))
    assert message.startswith(str(tmp_path / "broken.json"))
    assert said in message
    assert any(advice in message for advice in ("give ", "keep ", "needs "))


def test_an_open_limit_is_read_but_is_no_count(tmp_path):
    """Published configs of state-space models hold ``"time_step_limit": [0.0, Infinity]``."""
    path = write(tmp_path / "open.json", b'{"time_step_limit": [0.0, Infinity], "num_hidden_layers": Infinity}')
    assert load_config(path)[1]["time_step_limit"][1] == float("inf")
    with pytest.raises(PlanError, match=r"num_hidden_layers=inf is not a whole number"):
        read_model(
            ModelQuery(
                config=load_config(path)[1] | {"max_position_embeddings": 8, "num_attention_heads": 1, "head_dim": 8}
            )
        )


@pytest.mark.parametrize("depth", [65, 1_000, 200_000])
def test_deep_nesting_is_refused_without_a_recursion_error(tmp_path, depth):
    deep = b'{"a": ' + b"[" * depth + b"]" * depth + b"}"
    assert "is nested deeper than 64 levels" in refused(write(tmp_path / "deep.json", deep))


def test_nesting_up_to_the_limit_is_read(tmp_path):
    name, config = load_config(write(tmp_path / "deep.json", b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}"))
    assert (name, list(config)) == ("deep", ["a"])


def test_data_that_holds_itself_is_refused():
    config = {"a": 1}
    config["self"] = [config, config]
    assert "is nested deeper than 64 levels" in refused(config)


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    assert "has 16,777,217 bytes, more than the 16,777,216" in refused(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is no regular file" in refused(tmp_path / "pipe")


@pytest.mark.parametrize("source", [None, 7, "", b"bytes", ["a"], {1: 2}, "nul\0byte", "x" * 5000])
def test_what_is_no_source_is_refused(source):
    assert refused(source)


def test_control_characters_of_a_path_never_reach_the_terminal():
    assert "\x1b" not in refused("model\x1b[31m.json")
    assert "\x1b" not in refused("hf:\x1b[31m")


def test_control_characters_of_a_key_never_reach_the_terminal(tmp_path):
    data = json.dumps("\x1b[31m")
    assert "\x1b" not in refused(write(tmp_path / "c.json", f"{{{data}: 1, {data}: 2}}"))


def test_a_hub_name_is_fetched_and_keeps_its_name(tmp_path):
    path = write(tmp_path / "config.json", GOOD)
    assert load_config("hf:org/tiny", fetch=lambda name: path) == ("org/tiny", {"num_hidden_layers": 2})


def test_a_failed_fetch_says_why_and_what_else_works():
    def offline(name):
        raise ConnectionError("no route to host\nmore lines")

    message = refused("hf:org/tiny", fetch=offline)
    assert "hf:org/tiny could not be fetched (ConnectionError: no route to host)" in message
    assert "give the path" in message


@pytest.mark.parametrize("name", ["tiny", "", "a/b/c", "../../etc/passwd", "org/", "org/na me"])
def test_what_is_no_hub_name_is_refused(name):
    message = refused(f"hf:{name}", fetch=lambda name: pytest.fail("fetched"))
    assert "names no model of the hub; write hf:org/name" in message


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Put a hub client with the given source on the path."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "huggingface_hub"}
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda source: write(tmp_path / "huggingface_hub.py", source)
    sys.modules.pop("huggingface_hub", None)
    sys.modules.update(kept)


def test_without_the_client_the_extra_is_named(client):
    client("raise ImportError('not here')")
    assert "pip install 'kvdock[hub]'" in refused("hf:org/tiny")


def test_the_client_is_asked_for_the_config_alone(client, tmp_path):
    write(tmp_path / "fetched.json", GOOD)
    client(
        "from pathlib import Path\n"
        "def hf_hub_download(**asked):\n"
        "    assert asked == {'repo_id': 'org/tiny', 'filename': 'config.json', 'revision': 'v2'}, asked\n"
        "    return str(Path(__file__).with_name('fetched.json'))\n"
    )
    assert load_config("hf:org/tiny@v2") == ("org/tiny@v2", {"num_hidden_layers": 2})
