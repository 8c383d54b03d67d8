"""Extra headers and keys: what is accepted, and that a key is never shown."""

from __future__ import annotations

import pytest

from taut_deploy import api_key
from taut_deploy.validate import CouldNotValidateError
from taut_deploy.validate.headers import parse_headers, request_headers

FLAG = "--candidate-header"


def test_headers_are_read_as_name_and_value():
    given = ["X-Taut-Variant: w8a8", "X-Url:http://a:1/b"]
    assert parse_headers(given, FLAG) == (("X-Taut-Variant", "w8a8"), ("X-Url", "http://a:1/b"))
    assert parse_headers([], FLAG) == ()


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        (["sk-secret"], "expected 'Name: value'"),
        ([": value"], "expected 'Name: value'"),
        (["Name:"], "expected 'Name: value'"),
        (["Bad name: v"], "expected 'Name: value'"),
        (["A: b\r\nC: d"], "expected 'Name: value'"),
        (["A: ü"], "expected 'Name: value'"),
        (["authorization: Bearer sk-secret"], "keys do not belong on a command line"),
        (["Host: a"], "Host cannot be set"),
        (["content-length: 3"], "content-length cannot be set"),
        (["A: b", "a: c"], "a is given twice"),
    ],
)
def test_wrong_headers_are_refused_and_not_repeated(given, fragment):
    with pytest.raises(CouldNotValidateError) as caught:
        parse_headers(given, FLAG)
    message = str(caught.value)
    assert message.startswith(FLAG)
    assert fragment in message
    assert "secret" not in message
    assert "\n" not in message


def read_api_key(file, environment):
    return api_key.read_api_key(file, environment, CouldNotValidateError)


def test_the_key_comes_from_a_file_or_the_environment(tmp_path):
    file = tmp_path / "key"
    file.write_text("sk-1\n")
    assert read_api_key(file, {}) == "sk-1"
    assert read_api_key(None, {"TAUT_API_KEY": "sk-2"}) == "sk-2"
    assert read_api_key(None, {}) is None
    assert read_api_key(None, {"TAUT_API_KEY": ""}) is None
    with pytest.raises(CouldNotValidateError, match="TAUT_API_KEY is set too"):
        read_api_key(file, {"TAUT_API_KEY": "sk-2"})


@pytest.mark.parametrize("content", [b"", b"\n", b"two keys", b"a\nb", "schlüssel".encode()])
def test_a_file_without_one_key_is_refused(tmp_path, content):
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(CouldNotValidateError, match="expected one key"):
        read_api_key(file, {})


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(CouldNotValidateError, match="gone: No such file"):
        read_api_key(tmp_path / "gone", {})
    with pytest.raises(CouldNotValidateError, match="Is a directory"):
        read_api_key(tmp_path, {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(CouldNotValidateError, match="not a text file"):
        read_api_key(tmp_path / "binary", {})


def test_key_and_headers_go_together():
    assert request_headers("k", [("A", "b")]) == {"Authorization": "Bearer k", "A": "b"}
    assert request_headers(None, []) == {}
