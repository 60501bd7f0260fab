"""Mistyped addresses and keys are refused before anything is sent, and no secret is repeated."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import table
from tests.command_line import trtspec
from trtspec.client.addresses import bearer, server_url, shown
from trtspec.errors import UsageError
from trtspec.heads.synthesis import TargetEndpoint
from trtspec.heads.training.train_options import feature_source

SECRET = "s3cr3t"
WRONG = (
    "http://host:abc",
    "http://[::1",
    "localhost:8000:9",
    "http://127.0.0.1:99999",
    "http://h:0",
    "ftp://h",
    "http://",
    "http://a..b",
    f"http://{'a' * 70}",
    "http://ho st",
    "http://xn--",
    "/v1",
    f"http://user:{SECRET}@h:8000",
    f"{SECRET}@h",
    f"http://u:{SECRET}/x@h",
    f"http://u:{SECRET}?@h",
    f"http://h/v1?key={SECRET}",
    f"http://h#{SECRET}",
)
COMMANDS = table(__file__)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with a file of prompts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Why?"}\n')
    return tmp_path


def test_what_is_no_address_is_refused_and_a_password_is_never_shown() -> None:
    for address in WRONG:
        with pytest.raises(
            UsageError, match=r"^--base-url: .*(is not the URL of a server|holds a)"
        ) as refused:
            server_url(address, "--base-url:")
        assert SECRET not in refused.value.message and "write it as http" in refused.value.remedy


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_command_takes_a_wrong_address_or_repeats_its_password(
    words: tuple[str, ...], elsewhere: Path
) -> None:
    for address in ("http://127.0.0.1:99999", f"http://user:{SECRET}@h:8000"):
        done = trtspec(*(word.format(address) for word in words))
        assert done.status == 2 and "unexpected" not in done.stderr, (address, done.stderr)
        assert SECRET not in done.stdout + done.stderr
        assert [path.name for path in elsewhere.iterdir()] == ["prompts.jsonl"], (
            "nothing is written"
        )


@pytest.mark.parametrize(
    "key", [f"sk-{SECRET}\n", f"{SECRET}ä", f" {SECRET}", f"{SECRET}\0x", f"{SECRET}\udcff"]
)
def test_a_key_that_cannot_be_sent_is_refused_and_never_shown(key: str) -> None:
    with pytest.raises(UsageError, match="OPENAI_API_KEY .not shown. cannot be sent") as refused:
        bearer(key)
    assert SECRET not in refused.value.message + refused.value.remedy


def test_no_command_sends_or_shows_a_key_with_a_line_break(elsewhere: Path) -> None:
    key = f"sk-{SECRET}\n"
    for words in (
        ("check", "{}"),
        ("watch", "{}"),
        ("synthesize", "prompts.jsonl", "-o", "o", "--dry-run"),
    ):
        done = trtspec(*(word.format("http://127.0.0.1:9") for word in words), OPENAI_API_KEY=key)
        assert done.status == 2 and SECRET not in done.stdout + done.stderr, done.stderr
        assert "OPENAI_API_KEY" in done.stderr
    served = trtspec("serve", "nowhere", "--backend", "reference", "--api-key", key)
    assert served.status == 2 and SECRET not in served.stderr and "--api-key" in served.stderr
    done = trtspec("bench", "http://127.0.0.1:9", "-o", "out", OPENAI_API_KEY=key)
    assert done.status == 2 and not (elsewhere / "out").exists(), (
        "no journal of a run that never began"
    )


def test_what_is_taken() -> None:
    taken = {
        "h:80": "http://h:80",
        "http://[::1]:80/v1/": "http://[::1]:80",
        "https://h/pre": "https://h/pre",
        "v1": "http://v1",
    }
    assert {text: server_url(text) for text in taken} == taken
    assert (
        bearer("sk-a b") == {"Authorization": "Bearer sk-a b"} and bearer("") == bearer(None) == {}
    )
    assert shown("http://h:1") == "http://h:1"
    assert feature_source("http://a:1/, http://b:1").urls == (  # type: ignore[union-attr]
        "http://a:1",
        "http://b:1",
    )
    with pytest.raises(UsageError, match="`features`"):
        feature_source("http://a:1,http://b:one")
    assert SECRET not in repr(TargetEndpoint("http://h/v1", SECRET))


@settings(max_examples=50)
@given(
    st.text(alphabet=st.sampled_from("aZ0:/.[]%-_é\x7f \t世ß\\"), max_size=40),
    st.text(max_size=30),
)
def test_what_is_taken_can_be_sent(address: str, key: str) -> None:
    """What is accepted fails at worst to connect, by the client and the name look-up themselves."""
    try:
        url, headers = server_url(f"http://{address}"), bearer(key)
    except UsageError:
        return

    async def ask() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=json.dumps({})))
        async with httpx.AsyncClient(base_url=url, headers=headers, transport=transport) as client:
            found = await client.get("/v1/models")
            found.request.url.host.encode("idna")
            assert b"\n" not in found.request.headers.get("authorization", "").encode("ascii")

    asyncio.run(ask())
