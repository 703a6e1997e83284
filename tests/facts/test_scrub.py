"""What is scrubbed never reads as a secret, a home folder or a host again, and ordinary words stay."""

import getpass
import socket
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fp8doctor.facts import scrub as module
from fp8doctor.facts.scrub import LIMIT, scrub

ALNUM = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
PREFIXES = ("hf_", "sk-", "ghp_", "github_pat_", "glpat-", "xoxb-")
tokens = st.one_of(
    st.tuples(st.sampled_from(PREFIXES), st.text(ALNUM, min_size=36, max_size=60)).map("".join),
    st.text("0123456789abcdef", min_size=40, max_size=40),
)
around = st.text(" \n\t=:,;\"'()[]{}/\\.@abcXYZ", max_size=12)
names = st.text("abcdefghijklmnopqrstuvwxyz0123456789äé-_.", min_size=1, max_size=20).filter(
    lambda name: name.strip(".")
)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Names of host, user and home are read once a process; a test that changes them reads them anew."""
    module._homes.cache_clear()
    module._names.cache_clear()
    yield
    module._homes.cache_clear()
    module._names.cache_clear()


@pytest.mark.slow
@given(
    before=around.filter(lambda text: not text or text[-1] not in "abcXYZ"),
    token=tokens,
    after=around.filter(lambda text: not text or text[0] not in "abcXYZ"),
)
@example(before="TOKEN=", token="hf_" + "a" * 34, after="")
@example(before="https://x/?t=", token="0" * 40, after="&x=1")
def test_a_token_never_survives(before: str, token: str, after: str) -> None:
    assert token not in scrub(before + token + after)


@given(
    word=st.sampled_from(["key=", "api_key: ", "TOKEN=", "token='", "password=", '"secret": "', "Bearer "]),
    value=st.text(ALNUM + "+/=", min_size=20, max_size=80),
)
def test_a_long_value_after_the_name_of_a_secret_never_survives(word: str, value: str) -> None:
    if not value.isdigit() and any(letter.isalpha() for letter in value):
        assert value not in scrub(f"{word}{value}")


@given(
    folder=st.sampled_from(["/home/", "/Users/", "/mnt/home/", "C:\\Users\\"]),
    name=names,
    rest=st.sampled_from(["", "/x.py", "/a/b: no such file", "\\x", "' is not a file"]),
)
def test_a_home_folder_never_survives(folder: str, name: str, rest: str) -> None:
    scrubbed = scrub(f"cannot read '{folder}{name}{rest}")
    assert folder + name not in scrubbed
    assert "~" in scrubbed


@pytest.mark.slow
@given(
    pieces=st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=5),
    length=st.integers(LIMIT, LIMIT * 3),
)
def test_the_length_is_bounded(pieces: list[str], length: int) -> None:
    text = "".join(pieces)
    assert len(scrub((text * length)[:length])) <= LIMIT


@pytest.mark.usefixtures("fresh")
def test_the_home_of_this_process_becomes_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    home = tmp_path / "John Smith"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert scrub(f"{home}/models/x.py") == "~/models/x.py"
    assert scrub(f"in {home}") == "in ~"
    assert scrub(f"{home}son/x") == f"{home}son/x"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("host", "text", "scrubbed"),
    [
        ("gpu17.corp.example", "on gpu17.corp.example: gpu17 failed", "on <host>: <host> failed"),
        ("gpu17", "GPU17 and gpu175", "<host> and gpu175"),
        ("localhost", "http://localhost:8080", "http://localhost:8080"),
        ("pc", "a pc", "a pc"),
    ],
)
def test_the_host_is_a_whole_word(
    monkeypatch: pytest.MonkeyPatch, host: str, text: str, scrubbed: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert scrub(text) == scrubbed


@pytest.mark.usefixtures("fresh")
def test_the_user_goes_out_of_paths_and_stays_in_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "alice")
    assert (
        scrub("/scratch/alice/run, /tmp/torchinductor_alice")
        == "/scratch/<user>/run, /tmp/torchinductor_<user>"
    )
    assert scrub("ask alice") == "ask alice"


def test_an_address_keeps_its_host_and_loses_its_password() -> None:
    assert scrub("https://bob:pass12@pypi.example/simple") == "https://<secret>@pypi.example/simple"
