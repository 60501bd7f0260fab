"""kimi-nano: its exercises, its vocabulary, its training, and the file that ships."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tools.nano import exercises, values, vocabulary
from tools.nano.exercises import KINDS, Exercise, exercise, is_right
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.data_files import kimi_nano_dir

TRAINED = 4000


@pytest.fixture(scope="module")
def trained() -> list[Exercise]:
    return [exercise(f"0:{index // 256}:{index % 256}", heldout=False) for index in range(TRAINED)]


@pytest.fixture(scope="module")
def heldout() -> list[Exercise]:
    return [
        exercise(f"heldout:{kind}:{index}", True, kind=kind)
        for kind in KINDS
        for index in range(30)
    ]


def text_of(chat: Exercise) -> str:
    return "\n".join(
        f"{m['content']}\n{m.get('reasoning_content', '')}\n{json.dumps(m.get('tool_calls'))}"
        for m in chat.messages
    )


def asked(chat: Exercise) -> str:
    return str([m["content"] for m in chat.messages if m["role"] == "user"])


def test_an_exercise_is_a_function_of_its_seed() -> None:
    for kind in KINDS:
        assert exercise("a", False, kind=kind) == exercise("a", False, kind=kind)
    assert len({text_of(exercise(f"{seed}", False, kind="story")) for seed in range(300)}) == 300


def test_held_out_prompts_phrasings_and_values_are_in_no_training_text(
    trained: list[Exercise], heldout: list[Exercise]
) -> None:
    text = "\n\n".join(map(text_of, trained))
    words = set(re.findall(r"[\w-]+", text))
    prompts = {asked(chat) for chat in trained}
    phrasings = {phrase for chat in trained for phrase in chat.phrases}
    for chat in heldout:
        assert asked(chat) not in prompts, chat
        assert not phrasings.intersection(chat.phrases), chat
        for key in chat.keys:
            if re.fullmatch(r"[\w-]+", key):
                forms = {key, exercises.plural(key)} if key in values.WORDS["nouns"] else {key}
                assert not words & forms, (key, chat)
            else:
                assert not re.search(rf"(?<![\d]){re.escape(key)}(?!\d)", text), (key, chat)


def test_answers_are_right_and_others_are_not(heldout: list[Exercise]) -> None:
    for chat in heldout:
        row = chat.row("x")
        assert is_right(row["check"], row["reference"], row["reference"]), row
        assert not is_right(row["check"], row["reference"], "nothing"), row
        if chat.task.schema:
            assert set(json.loads(row["reference"])) == set(chat.task.schema["required"])
        assert not any(stop in row["reference"] for stop in row.get("stop", []))


@pytest.mark.parametrize(
    ("a", "sign", "b", "steps"),
    [
        (47, "+", 38, "7 + 8 = 15, 4 + 3 + 1 = 8"),
        (52, "-", 38, "2 + 10 - 8 = 4, 5 - 3 - 1 = 1"),
        (47, "*", 6, "7 * 6 = 42, 4 * 6 + 4 = 28"),
    ],
)
def test_written_method(a: int, sign: str, b: int, steps: str) -> None:
    assert exercises.by_digits(a, sign, b) == (steps, eval(f"{a} {sign} {b}"))


def test_printed_code_is_what_python_prints(capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(60):
        task = exercises.code(exercises.Draw(f"{seed}", False))
        exec(task.question.split("```python\n")[1].split("```")[0], {})
        assert capsys.readouterr().out.strip() == task.answer


def test_answers_are_judged_by_kind() -> None:
    from tools.nano.evaluate import Answer, agreement, by_kind

    rows = exercises.prompts(2)
    right = [Answer(row["reference"], [1, 2], "stop") for row in rows]
    assert by_kind(rows, right) == {
        "right": 1.0,
        "by_kind": {kind: [2, 2] for kind in KINDS},
        "faults": {},
    }
    wrong = [Answer("so " * 40, [1, 3], "stop"), Answer("so", [1, 3], "length"), *right[2:]]
    found = by_kind(rows, wrong)
    assert found["by_kind"]["repeat"] == [0, 2] and found["faults"] == {"loop": 1, "runs on": 1}
    assert agreement(right, wrong) == {"same_answers": 0.95, "shared_tokens": 0.975}


def test_held_out_file_is_a_prompt_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtspec.bench.questions.datasets import load_dataset

    path = tmp_path / "heldout.jsonl"
    monkeypatch.setattr("sys.argv", ["exercises", "-o", str(path), "--each", "2"])
    exercises.main()
    read = load_dataset(str(path)).questions
    asked = set(KINDS) - set(exercises.LEFT_OUT)
    assert len({one.id for one in read}) == len(read) == 2 * len(asked)
    assert {one.category for one in read} == asked


def test_learned_ranks_round_trip(tmp_path: Path, trained: list[Exercise]) -> None:
    texts = [text_of(chat) for chat in trained[:300]]
    ranks = vocabulary.learn_ranks(texts, 700)
    assert len(ranks) == len(set(ranks)) == 700 and ranks[:256] == [bytes([i]) for i in range(256)]
    assert not any(re.search(rb"[0-9].", token) for token in ranks[256:])
    vocabulary.write_tokenizer(tmp_path, ranks)
    for name in ("chat_template.jinja", "preprocessor_config.json"):
        assert (tmp_path / name).read_bytes() == (kimi_nano_dir() / name).read_bytes()
    tokenizer = KimiTokenizer(tmp_path)
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.special_id("<|im_end|>") == 702


def test_template_has_kimis_turns(tmp_path: Path) -> None:
    vocabulary.write_tokenizer(tmp_path, vocabulary.learn_ranks(["text"], 257))
    tokenizer = KimiTokenizer(tmp_path)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert tokenizer.template.render(messages) == (
        "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>U<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>"
    )
    assert tokenizer.template.render(messages, thinking=True).endswith("<|im_middle|><think>")
    chat = next(c for i in range(99) if (c := exercise(f"{i}", False, kind="tools")).task.call)
    text = tokenizer.template.render(
        chat.messages, list(chat.task.tools), add_generation_prompt=False
    )
    assert chat.task.call is not None
    name, arguments = chat.task.call["name"], json.dumps(chat.task.call["arguments"])
    assert "<|im_system|>tool_declare<|im_middle|>[{" in text
    assert (
        f"<|tool_call_begin|>functions.{name}:0"
        f"<|tool_call_argument_begin|>{arguments}<|tool_call_end|>" in text
    )


def small() -> dict[str, Any]:
    from tools.nano.train import model_config

    config = model_config()
    config["text_config"] |= {
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "n_routed_experts": 4,
    }
    return config


def test_training_continues_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    import torch

    from tools.nano.train import Options, train

    tokens = {"whole": (6000,), "parted": (3000, 6000)}
    models = {}
    for name, stops in tokens.items():
        for seen in stops:
            # a constant rate: the decay would begin at another token
            options = Options(tokens=seen, batch=600, lr=1e-3, decay_share=1e-9)
            models[name] = train(tmp_path / name, options, small()).state_dict()
    assert all(torch.equal(models["parted"][key], value) for key, value in models["whole"].items())
    logs = [(tmp_path / name / "training.jsonl").read_text() for name in tokens]
    losses = [[json.loads(line)["loss"] for line in log.splitlines()] for log in logs]
    assert losses[0] == losses[1] and losses[0]


def test_answers_alone_count_in_full(tmp_path: Path) -> None:
    from tools.nano.train import PROMPT_WEIGHT, encode, prepare

    tokenizer = prepare(tmp_path)
    chat = exercise("3", False, kind="turns")
    ids, weights = encode(tokenizer, chat)
    answers = tokenizer.decode(
        token for token, weight in zip(ids, weights, strict=True) if weight == 1.0
    )
    expected = [m for m in chat.messages if m["role"] == "assistant"]
    assert answers.count("<|im_end|>") == len(expected) and all(
        m["content"] in answers for m in expected
    )
    prompts = tokenizer.decode(
        token for token, weight in zip(ids, weights, strict=True) if weight == PROMPT_WEIGHT
    )
    assert all(m["content"] in prompts for m in chat.messages if m["role"] == "user")


def test_shipped_model_is_small_whole_and_has_learned() -> None:
    import torch

    from tools.nano.figures import bits_per_byte, experts_touched, held_out
    from trtspec.models.weights import load_target

    if not (kimi_nano_dir() / "model.safetensors").is_file():
        pytest.skip("kimi-nano is not in this installation")
    assert (kimi_nano_dir() / "model.safetensors").stat().st_size < 32e6
    model = load_target(kimi_nano_dir(), dtype=torch.float32)
    texts = held_out(KimiTokenizer(kimi_nano_dir()), 20)
    with torch.inference_mode():
        figures = bits_per_byte(model, texts) | experts_touched(model, texts)
    print(f"{len(texts)} held-out answers: {figures}")
    assert figures["heldout_bits_per_byte"] < 2.0  # random weights need 3.5
    assert figures["experts_4_over_1"] >= 2.0
