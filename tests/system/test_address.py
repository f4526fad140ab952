"""Addresses that hold a secret: it is on no screen and on no disk, and nobody waits for a refusal."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.test_remote import OK, server
from vitctl.data.source.locate import expand, locate_splits
from vitctl.data.source.stores import ImageFiles
from vitctl.errors import DataError, LaunchError, RecipeError, VitctlError
from vitctl.jobs.inputs.weights import find_weights
from vitctl.models.weights.download import fetch
from vitctl.recipe.load import Override, load_recipe, parse_override
from vitctl.recipe.write import to_toml
from vitctl.system import address, remote
from vitctl.system.address import VARIABLE, with_query, without_queries
from vitctl.system.remote import check_address, read_file

SECRET = "S3CR3T"
ATTACKS = {
    "user and password": "https://user:S3CR3T@h.invalid/x",
    "token as user": "https://S3CR3T@h.invalid/x",
    "encoded colon": "https://a%3AS3CR3T@h.invalid/x",
    "encoded at": "https://user:S3CR3T%40h.invalid/x",
    "two ats": "https://user@S3CR3T@h.invalid/x",
    "backslash before at": "https://h.invalid\\@S3CR3T/x",
    "backslash in a path": "https://h.invalid/a\\b?S3CR3T",
    "password with a slash": "https://user:12/S3CR3T@h.invalid/x",
    "password with a question mark": "https://user:12?S3CR3T@h.invalid/x",
    "password with a hash": "https://user:12#S3CR3T@h.invalid/x",
    "uppercase scheme": "HTTPS://USER:S3CR3T@H.INVALID/x",
    "bucket with keys": "s3://AKIA:S3C/R3T+S3CR3T@bucket/x",
    "token of the hub": "hf://user:S3CR3T@datasets/o/n/x",
    "ftp": "ftp://user:S3CR3T@h.invalid/x",
    "ftp with a query": "ftp://h.invalid/x?S3CR3T",
    "no scheme": "://user:S3CR3T@h.invalid/x",
    "a digit before the scheme": "1https://user:S3CR3T@h.invalid/x",
    "one slash": "https:/user:S3CR3T@h.invalid/x",
    "no slash": "https:user:S3CR3T@h.invalid/x",
    "empty host": "https:///x?S3CR3T",
    "only a query": "https://?S3CR3T",
    "IPv6 with a user": "https://u:S3CR3T@[::1]/x",
    "open IPv6": "https://[::1/x?S3CR3T",
    "IPv6 with a zone": "https://[fe80::1%25S3CR3T]/x",
    "port too large": "https://h.invalid:65536/x?S3CR3T",
    "port of letters": "https://h.invalid:S3CR3T/x",
    "space in the path": "https://h.invalid/a b?S3CR3T",
    "space in the query": "https://h.invalid/a?b S3CR3T",
    "newline in the query": "https://h.invalid/a?b\r\nX: S3CR3T",
    "escape in the query": "https://h.invalid/a?\x1b[2JS3CR3T",
    "tab in the scheme": "ht\ttps://user:S3CR3T@h.invalid/x",
    "query in braces": "https://h.invalid/{a.tar?S3CR3T,b.tar?S3CR3T}",
    "braces in the query": "https://h.invalid/a.tar?{S3CR3T,b}",
    "user in a list": "https://h.invalid/a.tar,https://user:S3CR3T@h.invalid/b.tar",
    "user in an answer": "data.mixture=[{path = 'https://user:S3CR3T@h.invalid/x'}]",
    "wide at": "https://user:S3CR3T\uff20h.invalid/x",
    "letters that become a slash": "https://h.invalid\u2100S3CR3T/x",
    "plain http": "http://h.invalid/x?S3CR3T",
    "parent folder": "https://h.invalid/../x?S3CR3T",
    "command": "pipe:curl https://h.invalid/x?S3CR3T",
}
DOORS: dict[str, Callable[[str], object]] = {
    "command line": without_queries,
    "recipe": lambda text: load_recipe("smoke", [Override("data.path", text)]),
    "--set": lambda text: load_recipe("smoke", [parse_override(f"data.path={text}")]),
    "data": lambda text: locate_splits(text, "train"),
    "list": lambda text: list(expand(text)),
    "shard": lambda text: read_file(text, 9),
    "image": lambda text: ImageFiles([text]).names,
    "weights": lambda text: find_weights(text),
    "download": fetch,
}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """No host is found; gives the hosts that were looked up."""
    asked: list[str] = []

    def getaddrinfo(host: str, *_: object, **_named: object) -> None:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return asked


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_attacks__are_refused_at_every_door_without_the_secret(
    attack: str, offline: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, door in DOORS.items():
        began = time.monotonic()
        try:
            shown = repr(door(attack))
        except VitctlError as error:
            shown = str(error)
            assert "\n" not in shown or name in ("recipe", "--set"), name
        assert SECRET not in shown and "S3C/R3T" not in shown, name
        assert time.monotonic() - began < 5, name
    (tmp_path / "recipe.toml").write_text(f"data.path = {attack!r}\n".replace("\\x1b", "\\u001b"))
    with pytest.raises(VitctlError) as caught:
        load_recipe(tmp_path / "recipe.toml", job="pretrain")
    assert SECRET not in str(caught.value).replace(attack, "")
    (tmp_path / "recipe.toml").unlink()
    assert SECRET not in "".join(capfd.readouterr())
    assert [
        path
        for path in tmp_path.rglob("*")
        if SECRET in str(path) or (path.is_file() and SECRET in path.read_text())
    ] == []
    assert offline == []


@pytest.mark.parametrize(
    "location",
    [
        "https://user:S3CR3T@evil.invalid/x",
        "//user:S3CR3T@evil.invalid/x",
        "http://evil.invalid/x?S3CR3T",
        "file:///etc/passwd?S3CR3T",
        "https://evil.invalid:port/x?S3CR3T",
        "https://[::1/x?S3CR3T",
        "https://evil\u2100.invalid/S3CR3T",
        "gopher://S3CR3T@evil.invalid",
    ],
)
def test_redirects__are_refused_without_the_secret(location: str) -> None:
    began = time.monotonic()
    reply = b"HTTP/1.1 302 S3CR3T\r\nContent-Length: 0\r\nLocation: " + location.encode() + b"\r\n\r\n"
    with server(lambda connection: connection.sendall(reply)) as url, pytest.raises(DataError) as caught:
        read_file(f"{url}?S3CR3T", 9)
    assert SECRET not in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(url)  # of thousands of shards, which one
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("reply", [b"HTTP/1.1 403 S3CR3T\r\nContent-Length: 0\r\n\r\n", b"S3CR3T\r\n\r\n"])
def test_answers__that_repeat_the_secret_are_not_shown(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LEAST_ATTEMPTS", 1)
    monkeypatch.setattr(remote, "PATIENCE", [0.0])
    with server(lambda connection: connection.sendall(reply)) as url, pytest.raises(DataError) as caught:
        read_file(f"{url}?S3CR3T", 9)
    assert SECRET not in str(caught.value)


def test_token__that_no_header_takes_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_S3CR3T\n")
    with pytest.raises(DataError, match="HF_TOKEN") as caught:
        read_file("hf://datasets/o/n/x", 9)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "text", "asked"),
    [
        (
            "https://H.org/m.npz?a=1",
            "https://h.org/m.npz",
            {"https://h.org/m.npz": "a=1", "https://h.org/n.npz": ""},
        ),
        ("--from=HTTPS://h.org/m?a#b", "--from=https://h.org/m", {"https://h.org/m": "a"}),
        ("https://h.org/m?raw=1#S3CR3T", "https://h.org/m", {"https://h.org/m": "raw=1"}),
        ("https://h.org/m#S3CR3T", "https://h.org/m", {"https://h.org/m": ""}),
        (
            "https://h.org/data/?sas",
            "https://h.org/data/",
            {"https://h.org/data/train/index.json": "sas", "https://h.org/data2/x": ""},
        ),
        (
            "https://h.org/t/{000..127}.tar?x",
            "https://h.org/t/{000..127}.tar",
            {
                "https://h.org/t/005.tar": "x",
                "https://h.org/t/index.json": "x",
                "https://h.org/index.json": "",
            },
        ),
        (
            "https://h.org/t/a.tar?x,https://h.org/t/b.tar?y",
            "https://h.org/t/a.tar,https://h.org/t/b.tar",
            {"https://h.org/t/a.tar": "x", "https://h.org/t/b.tar": "y"},
        ),
        (
            'data.mixture=[{path = "https://a.org/d?x"}, {path = "https://b.org/d?y"}]',
            'data.mixture=[{path = "https://a.org/d"}, {path = "https://b.org/d"}]',
            {"https://a.org/d/index.json": "x", "https://b.org/d": "y"},
        ),
        ("https://[::1]:80/m?x", "https://[::1]:80/m", {"https://[::1]:80/m": "x", "https://[::1]/m": ""}),
        ("https://x.tar?S3CR3T", "https://x.tar", {"https://other.org/x": ""}),
        ("see https://h.org/m?x for more", "see https://h.org/m for more", {"https://h.org/m": "x"}),
        ("https://H.org:80:Test[:50%]", "https://h.org:80:Test[:50%]", {}),
        ("hf://datasets/o/n@v1/x", "hf://datasets/o/n@v1/x", {}),
        ("photos/a?.jpg:b", "photos/a?.jpg:b", {}),
    ],
)
def test_without_queries(given: str, text: str, asked: dict[str, str]) -> None:
    assert without_queries(given) == [text] == without_queries(text)
    assert {one: with_query(one).partition("?")[2] for one in asked} == asked


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "hf"])
def test_without_queries__a_number_sign_in_a_store_is_refused(scheme: str) -> None:
    """It may be part of a name there; without what follows it is another file."""
    with pytest.raises(RecipeError, match=f"{scheme}://bucket/.* has a '#'; rename"):
        without_queries(f"{scheme}://bucket/set#2/train")


def test_without_queries__one_query_for_an_address() -> None:
    with pytest.raises(RecipeError, match=r"https://h.org/get: is given with two queries"):
        without_queries("https://h.org/get?id=1", "https://h.org/get?id=2")
    without_queries("https://h.org/m?old")
    without_queries("https://h.org/m?older", over=False)
    assert with_query("https://h.org/m") == "https://h.org/m?old"
    without_queries("https://h.org/m?new")
    assert with_query("https://h.org/m") == "https://h.org/m?new"
    many = [f"https://h.org/{number}?{'x' * 1000}" for number in range(200)]
    with pytest.raises(RecipeError, match="100,000 letters"):
        without_queries(*many)
    same = [f"https://h.org/t/{number}.tar?{'x' * 1000}" for number in range(200)]
    without_queries(*same)
    assert len(os.environ[VARIABLE]) < 3000


def test_environment__gives_queries_and_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "https://h.org/a?x\n https://h.org/t/{0..9}.tar?y")
    assert with_query("https://h.org/a") == "https://h.org/a?x"
    assert with_query("https://h.org/t/index.json") == "https://h.org/t/index.json?y"
    monkeypatch.setenv(VARIABLE, "https://user:S3CR3T@h.org/a?x")
    with pytest.raises(LaunchError, match=rf"{VARIABLE}: https://\.\.\.: names a user") as caught:
        with_query("https://h.org/a")
    assert SECRET not in str(caught.value)


def test_recipe__holds_texts_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'extends = "smoke"\nnote = "from https://h.org/n?S3CR3T and"\n[data]\npath = '
        '"https://h.org/d?S3CR3T"\n'
    )
    loaded = load_recipe(file)
    assert SECRET not in to_toml(loaded) + repr(loaded)
    assert with_query("https://h.org/d/train/index.json").endswith("?S3CR3T")


@pytest.mark.slow
def test_lookup__of_a_host_that_does_not_exist_ends_soon(offline: list[str]) -> None:
    doors = (lambda url: read_file(url, 9), fetch)
    for door in doors:
        began, offline[:] = time.monotonic(), []
        with (
            remote.patient(600),  # in a run too: it never answered
            pytest.raises(VitctlError, match=r"h.invalid cannot be reached \(.*; check the address"),
        ):
            door("https://h.invalid/x")  # type: ignore[no-untyped-call]
        assert time.monotonic() - began < 5
        assert 3 <= len(offline) <= 4


def test_lookup__of_a_host_that_answered_is_repeated(
    offline: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_ANSWERED", {"h.invalid"})
    monkeypatch.setattr(remote, "_DOWN", {})
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 0.2)
    with pytest.raises(DataError, match="gave up after"):
        read_file("https://h.invalid/x", 9)
    assert len(offline) > remote.LEAST_ATTEMPTS


def test_query__is_sent_to_its_address_and_not_where_it_redirects() -> None:
    asked: list[str] = []

    def elsewhere(connection: socket.socket) -> None:
        connection.sendall(OK + b"Content-Length: 2\r\n\r\nok")

    with server(elsewhere) as other:

        def redirect(connection: socket.socket) -> None:
            connection.sendall(
                b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + other.encode() + b"\r\n\r\n"
            )

        with server(redirect) as url, pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote, "with_query", lambda text: asked.append(with_query(text)) or asked[-1])
            assert read_file(f"{url}?download=true", 9) == b"ok"
        assert asked == [f"{url}?download=true"]
        assert with_query(other) == other
    assert check_address(f"{url}?x") == url and address.split(f"{url}?x", DataError) == (url, "x")


@pytest.mark.parametrize(
    "text", ["hf:org/model?token=SECRET", "pipe:curl -H SECRET http://x", "https:x?SECRET"]
)
def test_address__without_slashes_is_refused_and_not_printed(text: str) -> None:
    with pytest.raises(RecipeError, match=r"is the start of an address|are never run") as caught:
        without_queries(text)
    assert "SECRET" not in str(caught.value)
