"""What `python -m serve_app.run` refuses before it starts anything; test_end_to_end.py starts it."""

from __future__ import annotations

import socket

import pytest
import yaml

from serve_app.run import DEFAULT_CONFIG, asks_for_key, check_port, first_request, main, read_config


def with_keys(tmp_path, **api_keys):
    """The shipped config, which asks for keys."""
    content = yaml.safe_load(DEFAULT_CONFIG.read_text())
    content["applications"][0].setdefault("args", {})["ingress"] = {"api_keys": api_keys}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    return config


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_that_is_taken_ends_it_at_once_and_is_named(tmp_path, taken, capsys):
    content = yaml.safe_load(DEFAULT_CONFIG.read_text())
    content["http_options"]["port"] = taken
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    assert main([str(config)]) == 2
    message = capsys.readouterr().err
    assert "http_options: Address already in use" in message
    assert str(taken) in message


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_is_free_again_once_its_holder_has_ended(host):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), pytest.raises(ValueError, match="another port"):
            check_port({"http_options": {"host": host, "port": port}})
    check_port({"http_options": {"host": host, "port": port}})


@pytest.mark.parametrize(
    ("api_keys", "words"),
    [
        ({"file": "/nowhere/keys"}, "api_keys.file /nowhere/keys cannot be read"),
        ({"environment": "GLASSBLOCK_TEST_ABSENT"}, "GLASSBLOCK_TEST_ABSENT, which is not set"),
        ({"file": "/dev/null"}, "no key is given"),
    ],
)
def test_keys_that_are_not_there_end_it_at_once(tmp_path, capsys, api_keys, words):
    """The ingress would refuse to start for them, and the cluster would have come up for nothing."""
    assert main([str(with_keys(tmp_path, **api_keys))]) == 2
    assert words in capsys.readouterr().err


def test_the_first_request_carries_a_key_where_one_is_asked_for(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    url = "http://127.0.0.1:8000"
    asking, open_to_all = read_config(with_keys(tmp_path, file=str(keys))), read_config(DEFAULT_CONFIG)
    assert "$GLASSBLOCK_API_KEY" in first_request(url, asks_for_key=asks_for_key(asking))
    assert "authorization" not in first_request(url, asks_for_key=asks_for_key(open_to_all))
