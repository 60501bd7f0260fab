"""`trtspec train` as it is typed: a head on disk, measured in the engine; and what it refuses."""

import pytest

from tests.command_line import succeeded, trtspec
from tests.json_files import read_json
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.identity import identity

SMALL = ["--seq-len", "96", "--steps", "6", "--acceptance-prompts", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, target_dir, data):
    output = tmp_path_factory.mktemp("trained") / "head"
    options = ["--attention", "mha", "--eagle", "3.1", "--draft-vocab-size", "64"]
    done = succeeded("train", target_dir, data, "-o", output, *options, *SMALL, "--json")
    return output, done.json


def test_the_record_names_the_weights_that_it_learned_from(trained, target_dir):
    source = read_json(trained[0] / "provenance.json")["source"]
    marks = identity(Checkpoint.open(target_dir))
    assert source["target_samples"] == [marks["sample"]]
    assert source["target_tensors"] == marks["tensors"] and "commit" not in source


def test_the_command_writes_and_measures_a_head(trained):
    output, record = trained
    (row, *_) = record["acceptance"]["rows"]
    assert (
        row["prompts"] == 2 and row["acceptance_length_interval"] is None
    )  # too few prompts for one
    assert row["steps"] == sum(row["histogram"])
    assert row["acceptance_length"] == pytest.approx(
        1 + row["accepted"] / row["steps"], abs=5e-5
    )  # four digits are written
    assert {path.name for path in output.iterdir()} == {
        "config.json", "model.safetensors", "provenance.json", "README.md", "training.jsonl",
        "best", ".trtspec", ".trtspec-train.jsonl",
    }  # fmt: skip
    assert read_json(output / "provenance.json")["acceptance"] == record["acceptance"]
    card = (output / "README.md").read_text()
    assert "acceptance length" in card
    assert "trtspec serve" in card
    assert "vllm serve" in card


def test_the_checkpoint_room_reads_what_was_written(trained, target_dir):
    done = trtspec("inspect", trained[0], "--against", target_dir, "--json")
    found = done.json
    assert (found["kind"], found["eagle"], found["attention"]) == ("head", "3.1", "mha")
    assert (found["dialect"], found["draft_vocab_size"]) == ("modelopt", 64)
    assert [problem for problem in found["problems"] if problem["severity"] == "error"] == []


def test_a_finished_head_is_not_overwritten(trained, target_dir, data):
    done = trtspec("train", target_dir, data, "-o", trained[0], *SMALL)
    assert done.status == 2
    assert "--force" in done.stderr


def test_a_dry_run_writes_nothing(tmp_path, target_dir, data):
    output = tmp_path / "head"
    done = trtspec("train", target_dir, data, "-o", output, "--dry-run", "--json")
    plan = done.json
    assert plan["feature_bytes"] == plan["tokens"] * 4 * 64 * 2
    assert plan["aux_layers"] == [1, 3, 4]
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--aux-layers", "1,9"], "capture layers"),
        (["--draft-vocab-size", "100000"], "draft vocabulary"),
        (["--aux-layers", "one"], "not a list of numbers"),
    ],
)
def test_what_cannot_be_is_a_usage_error(tmp_path, target_dir, data, arguments, message):
    done = trtspec("train", target_dir, data, "-o", tmp_path / "head", "--dry-run", *arguments)
    assert done.status == 2
    assert message in done.stderr


def test_options_come_from_a_file_and_unknown_ones_are_refused(tmp_path):
    from trtspec.cli.train import TrainCommand, with_file
    from trtspec.errors import UsageError

    path = tmp_path / "train.yaml"
    path.write_text(
        "eagle: 3.1\n"
        "ttt-steps: 5\n"
        "lr: 1.0e-4\n"
        "save-every: 7\n"
        "aux_layers: [1, 2, 3]\n"
        "answer_only: true\n"
    )
    command, _, told = with_file(TrainCommand(output=tmp_path / "head", config=path, ttt_steps=7))
    assert (command.eagle, command.ttt_steps, command.lr, command.answer_only) == (
        "3.1",
        7,
        1e-4,
        True,
    )
    assert (command.save_every, command.aux_layers.values) == (7, (1, 2, 3))
    assert told == {"eagle", "lr", "save_every", "aux_layers", "answer_only"}
    for text, message in [
        ("learning_rate: 1\n", "learning_rate"),
        ("epochs: three\n", "`epochs` three"),
    ]:
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            with_file(TrainCommand(output=tmp_path / "head", config=path))


def test_what_a_file_sets_and_the_run_does_not_use_is_refused(tmp_path, target_dir, data):
    path = tmp_path / "train.yaml"
    path.write_text("gpu: h200\n")
    words = (
        "train",
        str(target_dir),
        str(data),
        "-o",
        str(tmp_path / "head"),
        "--config",
        str(path),
    )
    done = trtspec(*words)
    assert done.status == 2 and "gpu (--gpu) is not used by a training run" in done.stderr
    assert "Ways on h200" in trtspec(*words, "--dry-run").stdout
