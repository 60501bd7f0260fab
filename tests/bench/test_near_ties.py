"""Which divergences are near-ties: tokens of any rank within the bound, and the bound where no rounding shows."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import inf

import numpy as np
import pytest

from tests.bench import cheats
from trtspec.bench.asking import PAIR, TOP, Asker, read_token
from trtspec.bench.check import GateLimits, check_lossless
from trtspec.bench.lossless import SPACING, compare_transcripts, tokens_show
from trtspec.bench.transcript import RecordedPass, Recording, Token, Transcript
from trtspec.bench.visible import check_stream

THIRD = {"b": 1e-5, "c": 2e-5, "d": 0.2, "e": 3.0}


def answer(*tokens: Token, text: str | None = None, told: bool = True, question: str = "q") -> Transcript:
    text = "".join(token.text for token in tokens) if text is None else text
    return Transcript(question, "c", [{"role": "user", "content": "?"}], text, "stop", list(tokens) if told else None)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(
    ("came", "own", "real"),
    [("b", {"a": 2e-5}, 0), ("c", {"b": 1e-5, "a": 2e-5}, 0), ("d", {"a": 0.2}, 1), ("e", {"a": 3.0}, 1),
     ("z", {"a": 1e-5}, 1)],
)  # fmt: skip
def test_a_token_within_the_bound_is_a_near_tie_whatever_its_rank(
    came: str, own: dict[str, float], real: int, told: bool
) -> None:
    plain = answer(Token("a", "b", 1e-5, THIRD))
    got = answer(Token(came, next(iter(own)), next(iter(own.values())), own), told=told)
    found = compare_transcripts([plain], [got], 0.5, [[plain]])
    assert (found.real, found.near_ties) == (real, 1 - real), found


def test_both_servers_must_see_a_near_tie() -> None:
    """A server that takes another token than its own best is no near-tie, though the plain one lists it closely."""
    plain = answer(Token("a", "b", 1e-5, THIRD))
    unsure = answer(Token("c", "a", 2.0, {"a": 0.0, "b": 1.0}, behind=2.0))
    assert compare_transcripts([plain], [unsure], 0.5, [[plain]]).real == 1
    unlisted = answer(Token("c", "b", 1e-5, {"b": 1e-5}))
    assert compare_transcripts([plain], [unlisted], 0.5, [[plain]]).real == 1


@pytest.mark.parametrize(("gap", "real"), [(1e-5, 0), (1.0, 1)])
def test_the_end_of_an_answer_may_be_the_third_token(gap: float, real: int) -> None:
    plain = answer(Token("a ", "x", 2.0), Token("b", "c", 1e-6, {"c": 1e-6, "<|im_end|>": gap}))
    for told in (True, False):
        found = compare_transcripts([plain], [answer(Token("a ", "x", 2.0), told=told)], 0.5, [[plain]])
        assert found.real == real, found


ASKED = 60


@pytest.mark.parametrize(
    ("gap", "parted", "own", "real"),
    [
        (0.3, 1, 0, 0),  # five times the usual rounding, which the plain server reaches once in its answers
        (0.3, 6, 0, 0),
        (0.3, 7, 0, 7),  # so many are no accident (Fisher: 0.0065)
        (0.3, 12, 6, 0),  # its own answers do the same
        (0.3, 30, 6, 30),
        (1.7, 1, 0, 1),  # beyond all reach
    ],
)
def test_rare_divergences_are_excused_one_by_one(gap: float, parted: int, own: int, real: int) -> None:
    """One difference of 0.4 nats among 1,200, as another expert of a mixture brings: 4 times that far a single answer
    may part. Judged in answers, and in streams where the plain server's recording tells."""

    def passed(others: range, noise: float, largest: float) -> list[Transcript]:
        found = []
        for i in range(ASKED):
            last = Token("y", "x", gap) if i in others else Token("x", "y", gap)
            first = Token("a ", "b", 2.0 + (largest if i == ASKED - 1 else noise))
            found.append(answer(first, *[Token("a ", "b", 2.0 + noise)] * 20, last, question=str(i)))
        return found

    plain, again = passed(range(0), 0.0, 0.0), passed(range(own), 0.02, 0.4)
    got = passed(range(own, own + parted), 0.02, 0.02)
    found = compare_transcripts(plain, got, 0.5, [again])
    too_often = real if gap < 1 else 0
    assert (found.real, found.rare, found.too_often) == (real, 0 if real else parted, too_often), found
    assert compare_transcripts(plain, got, 0.5).real == parted, "one pass does not tell how often that is"
    expected = Recording("p", {}, 8, plain, repeats=[RecordedPass(4, again)])
    streamed = [replace(item, tokens=None) for item in got]
    rows = check_stream(Recording("g", {}, 8, plain, streamed=streamed), expected, 0.5)
    assert [row.status for row in rows] == ["fail" if real else "pass", "pass"], rows
    recorded = Recording("p", {}, 8, plain, streamed=streamed, repeats=[RecordedPass(4, again)])
    assert check_stream(recorded, None, 0.5) == rows, "a recording has passes of its own"
    said = check_lossless(Recording("g", {}, 8, got), expected, GateLimits()).message
    assert ("too many for chance" in said) == bool(too_often), said
    assert ("sure of itself" in said) == bool(real and not too_often), said


@pytest.mark.parametrize(
    ("last", "parted", "own", "real"),
    [
        (0.6, 1, 0, 0),  # as an honest server did whose passes had not differed by more than 0.125 nats
        (0.6, 7, 0, 7),
        (0.6, 12, 6, 0),
        (3.0, 1, 0, 1),  # the last of five is further behind than rounding reaches, so this one is as well
    ],
)
def test_an_unlisted_token_may_be_as_near_as_the_last_one_listed(last: float, parted: int, own: int, real: int) -> None:
    """1,200 differences of 0.0625 nats show nothing of the tail: 40 times that far a single answer may part."""

    def passed(others: int, noise: float) -> list[Transcript]:
        found, five = [], {"a": 0.47, "b": 0.5, "c": 0.56, "d": last}
        for i in range(ASKED):
            end = Token("z", "x", 0.03, {"x": 0.03, "a": 0.1}) if i < others else Token("x", "a", 0.47, five)
            found.append(answer(*[Token("a ", "b", 2.0 + noise)] * 20, end, question=str(i)))
        return found

    plain, again = passed(0, 0.0), passed(own, 0.0625)
    found = compare_transcripts(plain, [*plain[:own], *passed(own + parted, 0.0)[own:]], 0.5, [again])
    assert (found.real, found.rare) == (real, 0 if real else parted), found


def rounded(logits: np.ndarray, noise: np.random.Generator, other: np.ndarray | None = None) -> list[Token]:
    """Greedy tokens of logits of shape (positions, 6) with independent noise on each; behind the first token that is
    not `other`'s, the text is another one."""
    drawn = logits + noise.normal(0, 0.03, logits.shape)
    found, mark = [], ""
    for place, row in enumerate(drawn):
        order = [int(index) for index in np.argsort(-row)]
        names = [f"{index}{mark}." for index in order]
        gaps = {name: round(float(row[order[0]] - row[index]), 6) for name, index in zip(names, order, strict=True)}
        gaps.pop(names[0])
        found.append(Token(names[0], names[1], gaps[names[1]], dict(list(gaps.items())[: TOP - 1])))
        if other is not None and not mark and order[0] != other[place]:
            mark = f"'{order[0]}"
    return found


@pytest.mark.parametrize("told", [True, False])
def test_three_way_ties_of_an_honest_server_are_no_defects(told: bool) -> None:
    """Noise on every logit, drawn anew for each pass, is all that differs; one place in fifty is a tie of three."""
    dice, noise = np.random.default_rng(7), np.random.default_rng(8)
    plain, again, got, wrong = [], [], [], []
    for index in range(60):
        logits = -np.cumsum(dice.exponential(1.5, (64, 6)), axis=1)
        logits[:, :3] = np.where(dice.random((64, 1)) < 0.02, dice.normal(0, 0.02, (64, 3)), logits[:, :3])
        first = rounded(logits, noise)
        best = np.array([int(token.text[:-1]) for token in first])
        passes = [rounded(logits, noise, best) for _ in range(2)]
        name = f"q{index}"
        plain.append(answer(*first, question=name))
        again.append(answer(*passes[0], question=name))
        got.append(answer(*passes[1], question=name, told=told))
        spoilt = [replace(token, text="5.") if place == 30 else token for place, token in enumerate(first)]
        wrong.append(answer(*spoilt, question=name, told=told))
    found = compare_transcripts(plain, got, 0.5, [again])
    assert found.real == 0 and found.near_ties > 10, found
    assert compare_transcripts(plain, wrong, 0.5, [again]).real > 55


@pytest.mark.parametrize(("gap", "status"), [(0.004, "pass"), (0.05, "pass"), (0.2, "fail"), (2.0, "fail")])
def test_passes_that_never_differ_do_not_show_that_nothing_is_rounded(gap: float, status: str) -> None:
    def one(name: str) -> list[Token]:
        return [Token(f"{name} {place}.", f"{name} other.", gap if place == 9 else 2.0) for place in range(20)]

    plain, got = [], []
    for name in map(str, range(12)):
        tokens = one(name)
        taken = [*tokens[:9], Token(tokens[9].second or "", tokens[9].text, gap), Token("and so on", "x", 2.0)]
        plain.append(answer(*tokens, question=name))
        got.append(answer(*(taken if name in "37" else tokens), question=name))
    expected = Recording("u", {}, 20, plain, repeats=[RecordedPass(16, plain)])
    found = check_lossless(Recording("u", {}, 20, got), expected, GateLimits())
    assert found.status == status and f"bound {SPACING:g} nats" in found.message
    assert "240 positions of the plain server's own passes differ nowhere" in found.message
    low = check_lossless(Recording("u", {}, 20, got), expected, GateLimits(near_tie=0.001))
    assert low.status == "fail" and "bound 0.001 nats" in low.message
    moved = [replace(item, tokens=[replace(t, gap=(t.gap or 0) + 1e-6) for t in item.tokens or []]) for item in plain]
    measured = replace(expected, repeats=[RecordedPass(16, moved)])
    found = check_lossless(Recording("u", {}, 20, got), measured, GateLimits())
    assert found.status == "fail" and "bound 0.0001 nats: measured over 240 positions" in found.message


def test_what_a_server_tells_of_a_token() -> None:
    def told(token: str, logprob: float, **others: float) -> Token:
        top = [{"token": name, "logprob": value} for name, value in others.items()]
        return read_token({"token": token, "logprob": logprob, "top_logprobs": top})

    five = told("a", -0.5, a=-0.5, c=-0.75, b=-0.625, d=-2.0, e=-inf)
    assert five == Token("a", "b", 0.125, {"b": 0.125, "c": 0.25, "d": 1.5})
    json.dumps(asdict(five), allow_nan=False)  # what a grammar rules out is no distance
    assert told("c", -0.75, a=-0.5, b=-0.625, c=-0.75) == Token("c", "a", 0.125, {"a": 0.0, "b": 0.125}, 0.25)
    assert told("z", -3.5, a=-0.5, b=-0.625).behind == 3.0  # sampled from beyond the list
    assert told("a", -0.5) == Token("a", None, None) and told("a", -0.5, a=-0.5) == Token("a", None, None)


@pytest.mark.parametrize(("options", "most"), [pytest.param((), TOP, marks=pytest.mark.slow), (("few-told",), PAIR)])
def test_a_server_that_tells_fewer_is_asked_for_fewer(
    cheating: str, options: tuple[str, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, reply = [], Asker.reply

    async def heard(self: Asker, body: dict[str, object]) -> dict[str, object]:
        found = await reply(self, body)
        asked.append(body.get("top_logprobs", most))  # behind the reply: what was refused is not noted
        return found

    monkeypatch.setattr(Asker, "reply", heard)
    got = cheats.recorded(cheats.at(cheating, "plain", "honest", 1, *options), 3, True)
    assert got.withheld is None and set(asked) == {most}
    assert all(item.tokens for item in [*got.transcripts, *got.repeats[0].transcripts])


@pytest.mark.parametrize(
    ("tokens", "text", "shows"),
    [
        (["你好世界", "\ufffd", "\ufffd", "!"], "完全不同的文字在这里!", False),
        (["你好", "\ufffd", "\ufffd", "!"], "你好界!", True),
        (["你好", "\ufffd", "\ufffd", "!"], "你好x!", False),
        (["a ", "é", " b"], "a \ufffd b", True),
        (["\ufffd", "\ufffd"], "完", None),
        (["one ", "two ", "three ", "four ", "five ", "six"], "onetwothreefourfivesix", False),
        (["one", "two", "three", "four", "five", "six"], "one two three four five six", True),
        (["hm so it is, I see.\n", "</think>", "\n\nyes"], "hm so it is, I see.yes", True),
    ],
)
def test_what_tokens_show_of_a_text(tokens: list[str], text: str, shows: bool | None) -> None:
    """Pieces of characters leave the rest to be compared, and a text without white space is another."""
    assert tokens_show(answer(*[Token(token, None, None) for token in tokens], text=text)) is shows
