"""What `python -m serve_app.run` refuses before it starts anything; test_end_to_end.py starts it."""

from __future__ import annotations

import socket

import pytest
import yaml

from serve_app.run import DEFAULT_CONFIG, check_port, main


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
