"""A journal holds answers of one server.

After `kill -9`, a command refuses another server by name, and a second run.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.matrix import Recorder
from tests.command_line import TRTSPEC, trtspec, wait_for
from trtspec.checkpoint.writer import lock_file

# command -> its words but for the URL, its journal, what starts over, and the beginning of a
# foreign record
COMMANDS = {
    "check": ("{url} --record {out}/r --tokenizer kimi-nano --samples 2 --context-tokens 8",
              "r.part", "remove", "exchange"),
    "synthesize": ("{out}/p.jsonl -o {out}/d --base-url {url} --concurrency 2",
                   ".d.synthesize/.trtspec-synthesize.jsonl", "--restart", "row"),
    "bench": ("{url} -o {out}/b --resume --dataset nano --samples 9 --concurrency 2",
              "b/answers.jsonl", "--force", "answer"),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_answers_of_two_servers_never_mix(tmp_path: Path, command: str) -> None:
    line, journal_name, remedy, field = COMMANDS[command]
    server, moved = Recorder(), Recorder()
    pages = server.pages | {"/version": '{"version": "1.0"}'}
    server.pages = moved.pages = pages
    out = tmp_path / "out"
    out.mkdir()
    (out / "p.jsonl").write_text("".join(f'{{"prompt": "question {n}"}}\n' for n in range(99)))

    def words(url: str, tokens: int = 16) -> list[str]:
        return [command, *line.format(url=url, out=out).split(), "--max-tokens", str(tokens)]

    journal = out / journal_name
    with subprocess.Popen([*TRTSPEC, *words(server.url)], stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 5)
        process.kill()
    data = journal.read_bytes()
    record = b'{"key": "x", "round": "endpoint|1|0", "%s": {"\x1b[2J": 5}}\n' % field.encode()
    whole = data[: data.rfind(b"\n") + 1]
    last = len(whole.splitlines()) + 1
    cases = [
        (words(moved.url), pages, whole, f'url was "{server.url}", now "{moved.url}"'),
        (words(server.url, 8), pages, whole, "max_tokens was 16, now 8"),
        (words(server.url), pages | {"/v1/models": '{"data": [{"id": "b"}]}'}, whole,
         'model was "tiny", now "b"'),
        (words(server.url), pages | {"/version": '{"version": "2.0"}'}, whole,
         'version was "1.0", now "2.0"'),
        (words(server.url), pages, whole + record.replace(b"\x1b", b"\\u001b"),
         f"line {last}: {field}"),
        (words(server.url), pages, whole + record, f"(line {last})"),
    ]  # fmt: skip
    for arguments, server.pages, content, message in cases:
        journal.write_bytes(content)
        refused = trtspec(*arguments)
        assert refused.status == 2 and message in refused.stderr, refused.stderr
        assert remedy in refused.stderr
    journal.write_bytes(data)
    file = os.open(journal, os.O_RDWR)
    lock_file(file, journal)
    assert "another run is writing" in trtspec(*words(server.url)).stderr
    os.close(file)
    server.pages = {name: pages[name] for name in pages if name != "/version"}  # it is not known
    resumed = trtspec(*words(server.url))
    assert resumed.status in (0, 3), resumed.stderr
