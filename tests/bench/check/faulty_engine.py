"""The reference server with faults in its engine, to see what `trtspec check` says of them.

    python tests/bench/check/faulty_engine.py FAULT,FAULT serve kimi-nano \\
        --backend reference --dtype bfloat16 --head kimi-nano-eagle3 --draft-len 3 --port 8001

A fault is a function here, without arguments, that changes the engine before it starts. Its
docstring begins with the row and the kind of docs/reference/fault-kinds.md that should name it, and
a colon. Most faults put a function in place of another with `wrap(owner, name)`. The shortest is
`top_p_ignored`, with the docstring "parameters top_p: no effect."

test_live.py then runs it against check, alone. `-s` shows the verdict, also of a fault whose row
nobody knows yet ("sampled tail" is as good as any other then).

    python -m pytest -m slow -s tests/bench/check/test_live.py -k FAULT
"""

import sys
import unicodedata
from collections.abc import Callable
from typing import Any

import torch

from trtspec.checkpoint import tokenizer
from trtspec.cli.app import main
from trtspec.engine import engine, prepare, sampling, sequence

BEYOND = 1400  # tokens of a prompt, from which on two faults begin
Patch = Callable[..., Any]


def wrap(owner: Any, name: str) -> Callable[[Patch], None]:
    """Puts a function, which gets the exact one as its first argument, in place of `owner.name`."""
    exact = getattr(owner, name)
    return lambda patch: setattr(owner, name, lambda *args, **more: patch(exact, *args, **more))


def temperature_ignored() -> None:
    """sampled distribution: every request is greedy."""
    sequence.MIN_TEMPERATURE = float("inf")  # type: ignore[misc]


def drafts_kept() -> None:
    """sampled distribution: drafts are kept where the target gives them more than 0.1."""

    @wrap(engine, "accept_sampled")
    def _(
        exact: Patch, target: torch.Tensor, drafts: torch.Tensor, probs: Any,
        uniform: torch.Tensor, **more: Any,
    ) -> Any:  # fmt: skip
        width = drafts.shape[1]
        p = target[:, :width].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
        kept = torch.where(p > 0.1, 0.0, uniform[:, :width])
        return exact(target, drafts, probs, torch.cat((kept, uniform[:, width:]), 1), **more)


def one_draft_too_many() -> None:
    """greedy text: a rejected draft is kept."""

    @wrap(engine.Engine, "_accept")
    def _(
        exact: Patch,
        self: engine.Engine,
        logits: torch.Tensor,
        drafts: torch.Tensor,
        offered: list[int],
    ) -> Any:
        tokens, accepted = exact(self, logits, drafts, offered)
        # JSON stays whole, so that one row of the gate is at fault
        free = torch.tensor([sequence.steering is None for sequence in self.batch.sequences])
        return tokens, torch.where(
            free, torch.minimum(accepted + 1, torch.tensor(offered)), accepted
        )


def requests_changed(change: Callable[[Any, Any], None]) -> None:
    @wrap(prepare.Preparation, "_choices")
    def _(exact: Patch, *args: Any, **more: Any) -> Any:
        requests = exact(*args, **more)
        for request in requests:
            change(request, requests[0])
        return requests


def choices_equal() -> None:
    """sampled n: all choices have one seed."""
    requests_changed(lambda request, first: setattr(request, "seed", first.seed))


def held_text_lost() -> None:
    """transport begun stop: text that begins a stop string is lost at the end."""

    @wrap(sequence.TextStream, "finish")
    def _(exact: Patch, self: sequence.TextStream) -> Any:
        return "" if self.stop else exact(self)


def seed_ignored() -> None:
    """sampled seed: every answer is drawn anew."""
    sequence.Sequence.uniform = lambda self, count: torch.rand(count)  # type: ignore[method-assign]


def top_k_ignored() -> None:
    """parameters top_k: no effect."""
    sampling.keep_top_k = lambda scaled, *_: scaled


def first_stop_only() -> None:
    """transport several stops: the second stop string is ignored."""

    @wrap(sequence.TextStream, "__init__")
    def _(exact: Patch, self: sequence.TextStream, tokens: Any, stop: Any = ()) -> None:
        exact(self, tokens, stop[:1])


def special_names_parsed() -> None:
    """prompts special names: names of special tokens in a text become tokens."""

    @wrap(tokenizer.KimiTokenizer, "encode_chat")
    def _(
        exact: Patch, self: tokenizer.KimiTokenizer, messages: Any, *args: Any, **more: Any
    ) -> Any:
        text = self.template.render(messages, *args, **more)
        return text, self.encode(text, allow_special=True)


def messages_changed(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    @wrap(tokenizer.KimiTokenizer, "encode_chat")
    def _(exact: Patch, self: Any, messages: Any, *args: Any, **more: Any) -> Any:
        return exact(self, change(messages), *args, **more)


def contents_changed(change: Callable[[str], str]) -> None:
    messages_changed(
        lambda messages: [one | {"content": change(one["content"])} for one in messages]
    )


def prompt_stripped() -> None:
    """prompts white space: messages are stripped."""
    contents_changed(str.strip)


def prompt_normalized() -> None:
    """prompts composed characters: messages are NFKC."""
    contents_changed(lambda text: unicodedata.normalize("NFKC", text))


def history_lost() -> None:
    """prompts second turn: the first turn is lost."""
    messages_changed(
        lambda messages: (
            messages[-1:] if sum(one["role"] == "user" for one in messages) > 1 else messages
        )
    )


def prompt_cut() -> None:
    """prompts long: the beginning is cut."""

    @wrap(prepare.Preparation, "_choices")
    def _(exact: Patch, self: Any, asked: Any, prompt: list[int], *args: Any, **more: Any) -> Any:
        return exact(self, asked, prompt[-BEYOND:], *args, **more)


def cache_in_2_bits() -> None:
    """greedy near the limit: keys and values are coarse beyond a number of tokens."""

    @wrap(engine.Engine, "step")
    def _(exact: Patch, self: engine.Engine) -> Any:
        outputs = exact(self)
        entries = self.cache.data[:, :, BEYOND:]
        scale = entries.abs().amax(-1, keepdim=True).clamp(min=1e-6)
        entries.copy_((entries / scale).round() * scale)
        return outputs


def long_answer_corrupted() -> None:
    """greedy long answer: a wrong token a step, after 128 of them."""

    @wrap(engine.Engine, "_accept")
    def _(exact: Patch, self: engine.Engine, logits: torch.Tensor, *args: Any) -> Any:
        tokens, accepted = exact(self, logits, *args)
        for row, one in enumerate(self.batch.sequences):
            if len(one.token_ids) > 128:
                tokens[row, accepted[row]] = logits[row, accepted[row]].topk(9).indices[8]
        return tokens, accepted


def characters_broken() -> None:
    """transport characters: those that span tokens are broken."""

    @wrap(tokenizer.Detokenizer, "push")
    def _(exact: Patch, self: tokenizer.Detokenizer, ids: Any) -> str:
        return "".join(exact(self, [token]) + self.flush() for token in ids)


def tail_cut() -> None:
    """sampled tail: a top_p of 0.95 that nobody asked for."""

    @wrap(sampling.BatchSampling, "probabilities")
    def _(exact: Patch, self: sampling.BatchSampling, logits: torch.Tensor) -> torch.Tensor:
        return sampling.keep_top_p(exact(self, logits), torch.full((1,), 0.95))


def top_k_added() -> None:
    """sampled distribution: a top_k of 20 that nobody asked for."""

    @wrap(sampling.BatchSampling, "probabilities")
    def _(exact: Patch, self: sampling.BatchSampling, logits: torch.Tensor) -> torch.Tensor:
        return exact(self, sampling.keep_top_k(logits, torch.full((1,), 20), 0))


def penalties_dropped() -> None:
    """parameters frequency_penalty: no effect."""
    requests_changed(lambda request, _: setattr(request, "frequency_penalty", 0.0))


def top_p_ignored() -> None:
    """parameters top_p: no effect."""
    sampling.keep_top_p = lambda probs, *_: probs


FAULTS = {
    name: patch.__doc__.partition(":")[0]
    for name, patch in list(globals().items())
    if getattr(patch, "__module__", "") == __name__ and not patch.__code__.co_argcount
}

if __name__ == "__main__":
    for fault in filter(None, sys.argv.pop(1).split(",")):
        globals()[fault]()
    main()
