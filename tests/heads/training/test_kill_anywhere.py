"""kill -9 at twenty random moments of synthesize and train changes nothing in their output.

Each run is a process of its own, forked from one that has imported everything, so that twenty
starts cost seconds.
"""

import json
import math
import random
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.command_line import calls_of, killed_at
from tests.heads.data.test_synthesize import asked, serving, write
from tests.heads.training.test_training import OPTIONS, curve, train_once
from tests.tiny import read_tensors
from trtspec.cli.synthesize import SynthesizeOptions, synthesize
from trtspec.heads.synthesis import read_prompts
from trtspec.heads.training.curve import is_finished

KILLS = 20


def quiet_synthesize(prompts: Path, output: Path, url: str) -> None:
    options = {"base_url": url, "concurrency": 3, "max_tokens": 8, "timeout": 60.0}
    synthesize(SynthesizeOptions(prompts=str(prompts), output=output, **options))


@pytest.mark.slow
def test_synthesize_killed_twenty_times(tmp_path):
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": f"question {n}"} for n in range(150)])
    text = {prompt.id: prompt.turns[0][0]["content"] for prompt in read_prompts(prompts)}
    log, output = tmp_path / "requests.jsonl", tmp_path / "data.jsonl"
    journal = tmp_path / ".data.jsonl.synthesize" / ".trtspec-synthesize.jsonl"
    shuffle, kills, rounds, repeated = random.Random(0), 0, 0, 0
    with serving(log, "0", "0.01") as url:
        calls = calls_of(partial(quiet_synthesize, prompts, tmp_path / "whole.jsonl", url))
        want = (tmp_path / "whole.jsonl").read_bytes()
        while kills < KILLS or not output.exists() or journal.exists():
            before, done = len(asked(log)), set()
            if journal.exists():
                lines = journal.read_bytes().split(b"\n")[:-1]
                entries = [json.loads(line) for line in lines[1:]]  # the first names the server
                done = {text[entry["key"]] for entry in entries if "key" in entry}
            call = shuffle.uniform(0, 0.4 * calls) if kills < KILLS else math.inf
            kills += killed_at(call, partial(quiet_synthesize, prompts, output, url))
            requested = [body["messages"][0]["content"] for body in asked(log)[before:]]
            repeated += len(done.intersection(requested))
            if (
                output.exists() and not journal.exists() and kills < KILLS
            ):  # done, if only just before the kill
                assert output.read_bytes() == want
                output.unlink()
                rounds += 1
    print(
        f"synthesize: {kills} kills over {rounds + 1} runs to the end, "
        f"{repeated} journalled answers asked again"
    )
    assert output.read_bytes() == want
    assert repeated == 0


def quiet_train(target_dir: Path, data: Path, output: Path) -> None:
    torch.set_num_threads(1)
    train_once(target_dir, data, output, OPTIONS)


@pytest.mark.slow
def test_train_killed_twenty_times(tmp_path, target_dir, data):
    torch.set_num_threads(1)
    whole = tmp_path / "whole"
    calls = calls_of(partial(quiet_train, target_dir, data, whole))
    want = read_tensors(whole)
    shuffle, kills, finished = random.Random(1), 0, [tmp_path / "head-0"]
    while True:
        call = shuffle.uniform(0, 0.7 * calls) if kills < KILLS else math.inf
        if killed_at(call, partial(quiet_train, target_dir, data, finished[-1])):
            kills += 1
            done = is_finished(finished[-1])  # killed behind its last write
        else:
            done = True
            if kills >= KILLS:
                break
        if done:
            finished.append(tmp_path / f"head-{len(finished)}")
    for output in finished:
        assert curve(output) == curve(whole)
        ours = read_tensors(output)
        assert all(torch.equal(ours[name], want[name]) for name in want)
        assert (output / "provenance.json").read_bytes() == (whole / "provenance.json").read_bytes()
    print(
        f"train: {kills} kills over {len(finished)} runs to the end, "
        f"{len(curve(whole))} equal points of the curve each"
    )
