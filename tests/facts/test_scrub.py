"""What is scrubbed never reads as a secret, a home folder or a host again, and ordinary words stay."""

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fp8doctor
from fp8doctor.facts import Arm, Facts, Network, Trial
from fp8doctor.facts import scrub as module
from fp8doctor.facts.scrub import LIMIT, REPLACEMENTS, scrub
from fp8doctor.finding import Outcome
from tests.recordings import files, text_of

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


MIXED = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8s9T0u1V2w3X4y5Z6"
HEX = "0123456789abcdef0123456789abcdef01234567"

TOKEN_PREFIXES = """
    hf_34 api_org_34 sk-48 sk-proj-48 sk-ant-api03-50 ghp_36 gho_36 ghu_36 ghs_36 ghr_36 github_pat_50
    glpat-20 gldt-20 npm_36 pypi-AgEI50 nvapi-50 gsk_50 r8_37 sk_live_24 sk_test_24 rk_live_24 whsec_32
    ya29.50 1//040 GOCSPX-28 AIza35 wandb_v1_50 xoxb-40 xoxp-40 xapp-1-40 dckr_pat_27 dop_v1_50 hvs.40
    dp.pt.40 glsa_32 tgp_v1_40 pplx-48 xai-50 lsv2_pt_32 lin_api_40 shpat_32 ntn_40 ATATT3x50 jina_40
"""
"""How the tokens of services begin, and how many letters follow, in two digits."""

SECRETS: dict[str, tuple[str, str]] = {
    # kind: (what may not survive, the text it stands in)
    **{
        each[:-2]: (MIXED[: int(each[-2:])], f"401 for {each[:-2]}{MIXED[: int(each[-2:])]}, see above")
        for each in TOKEN_PREFIXES.split()
    },
    "Weights & Biases": (HEX, f"wandb: {HEX} is no member"),
    "Databricks": (HEX[:32], f"dapi{HEX[:32]}"),
    "Twilio": (HEX[:32], f"SK{HEX[:32]}"),
    "Mailgun": (HEX[:32], f"key-{HEX[:32]} refused"),
    "Telegram": (MIXED[:33], f"bot 123456789:AA{MIXED[:33]}"),
    "SendGrid": (MIXED[20:42], f"SG.{MIXED[:22]}.{MIXED[20:42]}"),
    "AWS access": ("Q3EGRIMNZ5JKLWXY", "AKIAQ3EGRIMNZ5JKLWXY"),
    "AWS temporary": ("Q3EGRIMNZ5JKLWXY", "ASIAQ3EGRIMNZ5JKLWXY"),
    "AWS secret": ("wJalr/XUtnFEMI", f"aws_secret_access_key = wJalr/XUtnFEMI{MIXED[:26]}"),
    "AWS session": ("FwoGZXIvYXdzEJr", f'"SessionToken": "FwoGZXIvYXdzEJr{MIXED}"'),
    "JSON web token": (
        "cThIIoDvwdueQB468K5x",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.cThIIoDvwdueQB468K5x",
    ),
    "Neptune": (MIXED, f"eyJhcGlf{MIXED}=="),
    "Azure client": (MIXED[:34], f"abc8Q~{MIXED[:34]}"),
    "Azure storage": ("EbyEXAMPLE+key/x", f"AccountName=x;AccountKey=EbyEXAMPLE+key/x{MIXED}==;Suffix=y"),
    "Azure bus": ("EbyEXAMPLE+key/x", f"SharedAccessKey=EbyEXAMPLE+key/x{MIXED[:20]}="),
    "Azure SAS": (
        "Zm9vYmFyMTIz%2Bx",
        "https://x.blob.core.windows.net/c?sv=2024-01-01&sig=Zm9vYmFyMTIz%2Bx%3D",
    ),
    "bare sig": ("Zm9vYmFyMTIzcXV4", "the signature sig=Zm9vYmFyMTIzcXV4 is wrong"),
    "S3 signature": ("deadbeef99aa", "https://b.s3.amazonaws.com/m?X-Amz-Signature=deadbeef99aa&x=1"),
    "S3 credential": ("Q3EGRIMNZ5JK", "https://b.s3.amazonaws.com/m?X-Amz-Credential=Q3EGRIMNZ5JK%2F2026"),
    "GCS signature": ("deadbeef99aa", "https://storage.googleapis.com/m?X-Goog-Signature=deadbeef99aa"),
    "CloudFront": (
        "deadbeef99aa",
        "https://d1.cloudfront.net/m?Expires=1&Signature=deadbeef99aa&Key-Pair-Id=K",
    ),
    "query token": ("s3cr", "GET https://x.example/a?access_token=s3cr&b=1"),
    "Slack hook": ("B0AAAAAAA", "https://hooks.slack.com/services/T0AAAAAAA/B0AAAAAAA/XyZ"),
    "Discord hook": ("1234567890", "https://discord.com/api/webhooks/1234567890/abcDEF"),
    "Teams hook": ("4711-aa", "https://corp.webhook.office.com/webhookb2/4711-aa@bb/IncomingWebhook/cc"),
    "RSA key": ("MIIEow", "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nx\n-----END RSA PRIVATE KEY----- read"),
    "PKCS8 key": ("MIIEow", "-----BEGIN PRIVATE KEY-----\\nMIIEow\\n-----END PRIVATE KEY-----\\n"),
    "OpenSSH key, cut": ("b3BlbnNz", "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz\naaa"),
    "PGP key": (
        "lQOYBF",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\nlQOYBF\n-----END PGP PRIVATE KEY BLOCK-----",
    ),
    "Basic": ("dXNlcjpwdw", "Authorization: Basic dXNlcjpwdw=="),
    "Bearer header": ("abc.def", "headers {'Authorization': 'Bearer abc.def'}"),
    "Bearer": ("0a1b2c3d4e5f6a7b8c9d", "sent Bearer 0a1b2c3d4e5f6a7b8c9d"),
    "API header": ("q1w2", "X-Api-Key: q1w2"),
    "cookie": ("abc123", "Set-Cookie: session=abc123; Path=/"),
    "password": ("hunter2", "password=hunter2"),
    "password, spoken": ("hunter2", "login failed (password: hunter2)"),
    "password in JSON": ("pw!1", '{"user": "x", "password": "pw!1"}'),
    "passwd": ("x1", "passwd='x1'"),
    "pwd": ("x1y", "Server=x;Pwd=x1y;"),
    "PGPASSWORD": ("tiger", "PGPASSWORD=tiger psql"),
    "option": ("tiger", "mysql --password tiger db"),
    "option with =": ("tiger", "mysql --db-password=tiger db"),
    "token option": ("abc123def", "cli login --token abc123def"),
    "curl": ("tiger", "curl -u scott:tiger http://x"),
    "client secret": ("sh0rt-one", "client_secret=sh0rt-one"),
    "API key": ("sh0rt1", "api_key: 'sh0rt1'"),
    "variable": ("abcd1234", "WANDB_API_KEY=abcd1234 python train.py"),
    "long key": (MIXED[:30], f"key={MIXED[:30]}"),
    "user in address": ("s3cr", "https://bob:s3cr@pypi.example/simple"),
    "token in address": ("t0k3n", "cannot clone https://t0k3n@git.example/x.git"),
    "database": ("s3cr", "postgresql://bob:s3cr@db/x"),
    "redis": ("s3cr", "redis://:s3cr@cache:6379/0"),
    "Sentry": ("deadbeef", "https://deadbeef@o1.ingest.sentry.io/2"),
    "e-mail": ("alice.smith", "ask alice.smith+x@corp.example.com"),
    "IPv4 with port": ("203.0.113.7", "Connection to 203.0.113.7:29500 refused"),
    "IPv4, private": ("192.168.4.17", "rank 3 (192.168.4.17) is gone"),
    "IPv4, said": ("10.1.2.3", "connecting to 10.1.2.3 failed"),
    "IPv4 in address": ("10.1.2.3", "tcp://10.1.2.3/x"),
    "EC2 host": ("10-1-2-3", "on ip-10-1-2-3.ec2.internal"),
    "IPv6": ("db8:85a3", "from 2001:db8:85a3::8a2e:370:7334"),
    "IPv6, link": ("fe80", "on fe80::1ff:fe23:4567:890a"),
    "IPv6 with port": ("db8", "[2001:db8::1]:29500"),
    "MAC": ("3e:4f:5a", "eth0 aa:1b:2c:3e:4f:5a"),
    "host, said": ("gpu-a12", "MASTER_ADDR=gpu-a12 is unknown"),
    "host, internal": ("gpu-a12", "gpu-a12.corp.example does not answer"),
    "home": ("alice", "/home/alice/x.py"),
    "home, deep": ("alice", "/private/home/alice/x.py"),
    "home of a Mac": ("alice", "/Users/alice/x.py"),
    "home with a space": ("Smith", "C:\\Users\\Alice Smith\\x.py is gone"),
    "home, small letters": ("alice", "c:\\users\\alice\\x.py"),
    "home, slashes": ("alice", "D:/Users/alice/x.py"),
    "scratch": ("alice", "/scratch/alice/run1"),
    "lustre": ("alice", "in /lustre/projects/alice/x.py"),
    "mount": ("alice", "cannot read '/mnt/nfs/alice/weights.bin'"),
    "AWS role": ("Q3EGRIMNZ5JKLWXY", "AROAQ3EGRIMNZ5JKLWXY:session"),
    "AWS user": ("Q3EGRIMNZ5JKLWXY", "user AIDAQ3EGRIMNZ5JKLWXY is unknown"),
    "AWS access, behind a letter": ("Q3EGRIMNZ5JKLWXY", "xAKIAQ3EGRIMNZ5JKLWXY"),
    "AWS secret, alone": ("UtnFEMI/K7MDENG", "got wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLzKEY back"),
    "AWS secret, quoted": ("UtnFEMIaK7MDENG", "('wJalrXUtnFEMIaK7MDENGcbPxRfi9CY1xAMPL7KE')"),
    "64 hexadecimal digits": (HEX[:32], f"denied for {HEX[:32] * 2}"),
    "40 large hexadecimal digits": (HEX.upper(), f"denied for {HEX.upper()}"),
    "digits": ("31415926535897932384", "token 31415926535897932384 expired"),
    "digits, alone": ("31415926535897932384", "31415926535897932384"),
    "password of words": ("battery", 'password="correct horse battery staple"'),
    "password of words, JSON": ("battery", '{"password": "correct horse battery staple", "x": 1}'),
    "password of words, option": ("battery", "mysql --password 'correct horse battery staple' db"),
    "secret of words": ("battery", "client_secret = 'correct horse battery staple'"),
    "behind a letter": (MIXED[:34], "token" + "hf" + "_" + MIXED[:34]),
    "behind an escape": (MIXED[:36], "\\n" + "gh" + "p_" + MIXED[:36]),
    "home of an old Windows": ("alice", "C:\\Documents and Settings\\alice\\x.py"),
    "home on a share": ("alice", "\\\\srv\\c$\\Users\\alice\\x.py"),
    "second home": ("alice", "/home2/alice/x.py"),
    "homes": ("alice", "/homes/alice/x.py"),
    "home, short": ("alice", "~alice/x.py is gone"),
    "home, short, alone": ("alice", "cannot enter ~alice"),
    "IPv4, alone": ("10.1.2.3", "rank 3 (10.1.2.3) is gone"),
    "IPv4, first": ("10.1.2.3", "10.1.2.3 is gone"),
    "IPv4, listed": ("10.1.2.4", "ranks on 10.1.2.3, 10.1.2.4"),
    "home with a colon": ("smith", "/home/alice:smith/x.py"),
    "UNC": ("fileserver", "\\\\fileserver\\alice\\x.py"),
}


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_never_survives_and_the_words_around_it_do(kind: str) -> None:
    secret, text = SECRETS[kind]
    assert secret in text
    once = scrub(text)
    assert secret not in once
    assert "<" in once or "~" in once
    assert scrub(once) == once


@given(st.sampled_from(REPLACEMENTS).flatmap(lambda each: st.tuples(st.just(each), st.from_regex(each[1]))))
@settings(max_examples=100, deadline=None)
@pytest.mark.slow
def test_whatever_a_pattern_matches_has_what_it_is_looked_for_by(found: tuple[Any, str]) -> None:
    (contained, pattern, _), text = found
    assert re.search(contained, text) or not re.search(pattern, text)


HARMLESS = (
    "2.11.0.1",
    "nvidia-cublas-cu12 12.4.5.8 and nvidia-curand-cu12 10.3.5.147",
    "nvidia-curand-cu12==10.3.5.147",
    "cuDNN version 9.10.2.21",
    "torch 2.11.0+cu130, torchao 0.18.0.dev20261101",
    "127.0.0.1:29500 and 0.0.0.0 and localhost:6006",
    "[1, 4096, 11008] x [11008, 4096]",
    "x[1::2], x[::2], x[1024::2048], x[0:10:2]",
    "c10::Half, c10::d10, ad::be, dead::beef",
    "sk_live_block.weight and hf_backbone.layer and npm_head",
    "sk-learn, r8_block, gsk_layer, ghp_module",
    "key: model.embed_tokens.weight",
    "missing key: decoder_layer_norm_weight",
    "KeyError: 'transformer_engine_torch'",
    "KeyError: 'hidden_states_of_the_decoder'",
    "token AutoModelForTokenClassification",
    "max_tokens=16384",
    "num_tokens: 4096, pad_token_id=None, token_type_ids",
    "password=None",
    "secret: None",
    "api_key=null",
    "PWD=/opt/models",
    "--batch 8 --seq 4096 --max-tokens 4096",
    "-u train.py",
    "https://huggingface.co/meta-llama/Llama-3.1-8B",
    "https://github.com/pytorch/ao/issues/1234#issuecomment-1",
    "https://pytorch.org/docs/stable/generated/torch.compile.html?highlight=compile&page=2",
    "git@github.com:pytorch/ao.git",
    "ssh://git@github.com/pytorch/ao",
    "@torch.compile, @torch.no_grad()",
    "memcpy@@GLIBC_2.14",
    "undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs",
    "/opt/conda/lib/python3.11/site-packages/torch/nn/modules/linear.py:125",
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1: cannot open shared object file",
    "a\\nb and C:\\Program Files\\NVIDIA",
    "Bearer of bad news",
    "the cookie: none",
    "image sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "torch 2.11.0a0+git0123456789abcdef0123456789abcdef01234567",
    "requested 18446744073709551615 bytes, 9223372036854775807 at most",
    "0.12345678901234567890123 and 1234567890123456789",
    "nvidia-curand-cu12 (10.3.5.147), libcurand 10.3.5.147, curand: 10.3.5.147",
    "runs/Llama3/Checkpoints/Step4000/Optimizer7/Shard12",
    "~half of the step, ~0.5 ms, ~ms",
    "password = 'required'",
    "the token is 'a word' of the vocabulary",
)


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text_stays_as_it_is(text: str) -> None:
    assert scrub(text) == text


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)


@pytest.mark.slow
def test_every_text_of_every_recording_stays_as_it_is() -> None:
    recordings = Path(__file__).parents[1] / "patients" / "recorded"
    found = {text for file in files(recordings) for text in texts(json.loads(text_of(file)))}
    assert len(found) > 2000
    assert {text: scrub(text) for text in found if len(text) <= LIMIT and scrub(text) != text} == {}


TOKEN = "hf" + "_" + MIXED[:34]
SAID = f"no access with token {TOKEN} in /home/alice/x"
CLEAN = "no access with token <secret> in ~/x"


def test_prose_of_a_record_is_scrubbed_whoever_fills_it() -> None:
    trial = Trial(reason=SAID, gaps={"trial.rows": SAID}, arms=(Arm(name="as_is", reason=SAID),))
    facts = Facts(trial=trial, gaps={"network": SAID}, network=Network(quantization=SAID))
    assert TOKEN not in json.dumps(facts.to_dict())
    assert facts.trial.reason == facts.trial.gaps["trial.rows"] == facts.network.quantization == CLEAN
    assert Outcome(code="X", outcome="crashed", reason=SAID).reason == CLEAN
    assert Facts.from_dict(facts.to_dict()) == facts


@pytest.mark.slow
def test_what_a_step_says_in_a_worker_is_neither_printed_nor_saved(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "class Refuses(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        f"        raise RuntimeError({SAID!r})\n"
        "model = Refuses(32, 32)\n"
        "def example_batch():\n"
        "    return torch.randn(8, 32)\n"
    )
    command = (sys.executable, "-m", "fp8doctor", "model.py", "--device", "cpu", "-v", "--save", "saved.json")
    here = {**os.environ, "PYTHONPATH": str(Path(fp8doctor.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=here, timeout=600)
    assert done.returncode == 2
    for text in (done.stdout, done.stderr, (tmp_path / "saved.json").read_text()):
        assert CLEAN in " ".join(text.replace("│", " ").split())
        assert TOKEN not in text
        assert "alice" not in text
