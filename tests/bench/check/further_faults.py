"""The reference server with one more fault in its engine, each drawn from a public issue of vLLM, SGLang or
TensorRT-LLM: python further_faults.py FAULT[,FAULT] serve kimi-nano --backend reference ..."""

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from trtspec.checkpoint import tokenizer
from trtspec.checkpoint.chat_parser import CALL_BEGIN, CALL_END
from trtspec.cli.app import main
from trtspec.engine import answers, batch, bodies, engine, prefix, prepare, sequence, steering
from trtspec.engine.request import RequestRefused
from trtspec.engine.sequence import TokenLogprobs
from trtspec.models import layers

Patch = Callable[..., Any]


def wrap(owner: Any, name: str) -> Callable[[Patch], None]:
    """Puts a function, which gets the exact one as its first argument, in place of `owner.name`."""
    exact = getattr(owner, name)
    return lambda patch: setattr(owner, name, lambda *args, **more: patch(exact, *args, **more))


# Speculative decoding and caches


def bias_first_position() -> None:
    """SGLang #10617: with EAGLE, logit_bias is not applied to every token: only the first position of a block has it."""

    @wrap(steering.Steering, "apply")
    def _(exact: Patch, self: Any, logits: Any, drafts: Any) -> Any:
        if len(self.biased) and len(logits) > 1:
            logits[1:, self.biased] -= self.biases.to(logits.device)
        return exact(self, logits, drafts)


def min_tokens_first_position() -> None:
    """vLLM PR #32642 (and #26317): `min_tokens` does not reach the drafted positions: an end that was drafted is kept."""

    @wrap(steering.Steering, "apply")
    def _(exact: Patch, self: Any, logits: Any, drafts: Any) -> Any:
        ends = logits[1:, self.ends].clone()
        result = exact(self, logits, drafts)
        if self.request.min_tokens:
            result[1:, self.ends] = ends
        return result


def grammar_first_position() -> None:
    """vLLM #15554: drafts are not held to the grammar; what breaks it is only logged, and the form is lost from there."""

    @wrap(steering.Steering, "apply")
    def _(exact: Patch, self: Any, logits: Any, drafts: Any) -> Any:
        free = logits[1:].clone()
        result = exact(self, logits, drafts)
        if self.guided:
            result[1:] = free
        return result

    @wrap(steering.Steering, "advance")
    def _(exact: Patch, self: Any, tokens: Any) -> None:
        length = self.length
        self.dead_end = None
        try:
            exact(self, tokens)
        except RequestRefused:
            self.guided, self.length = False, length + len(tokens)
            self.counts.update(tokens)


def length_before_stop() -> None:
    """SGLang #31599: the length is checked before the stops. A block that ends at `max_tokens` and has a stop inside it
    ends as "length" and shows what was accepted behind the stop."""

    @wrap(sequence.Sequence, "emit")
    def _(exact: Patch, self: Any, tokens: Any, offered: Any = None) -> Any:
        if offered and len(tokens) > 1 and len(self.token_ids) + len(tokens) >= self.limit:
            self.ends = frozenset()
            if self.text.stop:
                self.text.stop = ("\0" * 8,)
        return exact(self, tokens, offered)


def draft_logprobs_zero() -> None:
    """vLLM #17876 (and #34497): the log-probability of a token that was a draft is 0.0."""

    @wrap(engine.Engine, "_emit")
    def _(exact: Patch, self: Any, row: Any, tokens: Any, offered: Any, logits: Any) -> Any:
        output = exact(self, row, tokens, offered, logits)
        drafted = len(tokens) - 1
        output.logprobs = [
            TokenLogprobs(one.token, 0.0, one.ids, one.values) if at < drafted else one
            for at, one in enumerate(output.logprobs)
        ]
        return output


def prompt_scores_of_later_chunks() -> None:
    """vLLM #53488: with a drafter, the prompt's log-probabilities are those of the neighbour from the second chunk on."""

    @wrap(engine.Engine, "_compute")
    def _(exact: Patch, self: Any, chunks: Any) -> Any:
        result = exact(self, chunks)
        for chunk in chunks:
            scores = chunk.logprobs
            if self.draft_len and chunk.piece.begin and scores:
                chunk.logprobs = [
                    TokenLogprobs(one.token, other.logprob, other.ids, other.values)
                    for one, other in zip(scores, [scores[-1], *scores[:-1]], strict=True)
                ]
        return result


def prompt_scores_stale() -> None:
    """vLLM #42019 (PR #42245): the prompt's log-probabilities at cached positions are what another request left in the
    buffer."""
    left: list[TokenLogprobs] = []

    @wrap(engine.Engine, "_next_prompt")
    def _(exact: Patch, self: Any, row: Any, beside: Any) -> Any:
        taken = exact(self, row, beside)
        if taken is not None and taken.request.prompt_logprobs and self.prefix is not None:
            ids = taken.request.prompt_ids
            known = self.prefix.load(ids, row)
            taken.prefilled = taken.cached_tokens = known
            for at in range(known):
                token = ids[at + 1]
                old = left[at] if at < len(left) else TokenLogprobs(token, 0.0, [token], [0.0])  # type: ignore[arg-type]
                taken.prompt_logprobs.append(TokenLogprobs(token, old.logprob, old.ids, old.values))
        return taken

    @wrap(engine.Engine, "_advance_prompt")
    def _(exact: Patch, self: Any, chunk: Any) -> Any:
        outputs = exact(self, chunk)
        if chunk.done and chunk.sequence.request.prompt_logprobs:
            left[:] = [*chunk.sequence.prompt_logprobs, *left[len(chunk.sequence.prompt_logprobs) :]]
        return outputs


def draft_cache_lost() -> None:
    """SGLang #8726 (and PR #10846, #19796): on a prefix hit the drafter's cache is not that of the prefix: fewer drafts
    are accepted for a prompt that was seen before."""

    @wrap(prefix.PrefixCache, "load")
    def _(exact: Patch, self: Any, tokens: Any, row: Any) -> Any:
        reused = exact(self, tokens, row)
        for store in self.stores[1:]:
            store.cache[:, row, :reused] = 0
        return reused


def reuse_in_fp8() -> None:
    """TensorRT-LLM #2699: wrong outputs where a prompt's cache is reused in FP8 (here with a scale that is lost)."""
    scale = 0.7

    @wrap(prefix.PrefixCache, "__init__")
    def _(exact: Patch, self: Any, target: Any, *more: Any) -> None:
        exact(self, target, *more)
        self.entries = target.data

    @wrap(prefix.PrefixCache, "load")
    def _(exact: Patch, self: Any, tokens: Any, row: Any) -> Any:
        reused = exact(self, tokens, row)
        kept = self.entries[:, row, :reused]
        rounded = (kept.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        kept.copy_(rounded.to(kept.dtype))
        return reused


def later_chunk_context() -> None:
    """vLLM #26042: incorrect outputs in MLA with chunked prefill: what a chunk (or the rest behind a cached prefix) sees
    of the context before it is merged with a wrong weight."""

    @wrap(layers.PackedStep, "__init__")
    def _(exact: Patch, self: Any, pieces: Any, *more: Any) -> None:
        exact(self, pieces, *more)
        for piece, mask in zip(pieces, self.masks, strict=True):
            mask.blocked[..., : piece.begin] -= 3.0


def acceptance_past_end() -> None:
    """vLLM #56101: accepted drafts behind the end of an answer are counted as accepted."""

    @wrap(sequence.Stats, "count")
    def _(exact: Patch, self: Any, offered: Any, accepted: Any) -> None:
        exact(self, offered, getattr(self, "whole", accepted))

    @wrap(sequence.Sequence, "emit")
    def _(exact: Patch, self: Any, tokens: Any, offered: Any = None) -> Any:
        self.stats.whole = len(tokens) - 1
        output = exact(self, tokens, offered)
        if offered is not None:
            output.round = offered, len(tokens) - 1
        return output


# Sampling and parameters


def seed_ignored_with_drafts() -> None:
    """vLLM #6038: speculative decoding does not respect a request's seed."""

    @wrap(sequence.Sequence, "uniform")
    def _(exact: Patch, self: Any, count: int) -> Any:
        return torch.rand(count) if count > 1 else exact(self, count)


def unseeded_share_stream() -> None:
    """TensorRT-LLM #19487: with a drafter, requests without a seed get the same random numbers: independent samples of one
    prompt are the same text."""

    @wrap(sequence.Sequence, "__init__")
    def _(exact: Patch, self: Any, request: Any, *, draft_len: int, seed: int, **more: Any) -> None:
        exact(self, request, draft_len=draft_len, seed=1 if draft_len else seed, **more)


def seed_lost_beside_unseeded() -> None:
    """vLLM #51226: a seed is ignored while another request of the batch has none."""
    mixed = [False]

    @wrap(batch.DecodeBatch, "advance")
    def _(exact: Patch, self: Any, *more: Any) -> None:
        mixed[0] = any(one.sampled and one.request.seed is None for one in self.sequences)
        exact(self, *more)
        mixed[0] = False

    @wrap(sequence.Sequence, "uniform")
    def _(exact: Patch, self: Any, count: int) -> Any:
        return torch.rand(count) if mixed[0] else exact(self, count)


def penalties_see_no_output() -> None:
    """vLLM #27878 (vllm-ascend #7769): penalties do not see the generated tokens: frequency and presence do nothing,
    repetition knows the prompt alone."""

    @wrap(steering.Steering, "_penalize")
    def _(exact: Patch, self: Any, row: Any, counts: Any) -> None:
        exact(self, row, Counter())


def penalties_count_prompt() -> None:
    """TensorRT-LLM PR #5623: frequency and presence penalties count the tokens of the prompt."""

    @wrap(steering.Steering, "_penalize")
    def _(exact: Patch, self: Any, row: Any, counts: Any) -> None:
        exact(self, row, counts + Counter(self.request.prompt_ids))


def choices_alike() -> None:
    """vLLM #14280 (#12584): `n` choices override each other: they are all the same."""

    @wrap(prepare.Preparation, "_choices")
    def _(exact: Patch, self: Any, *args: Any, **more: Any) -> Any:
        requests = exact(self, *args, **more)
        seed = requests[0].seed
        seed = random.getrandbits(62) if seed is None else seed
        return [one.model_copy(update={"seed": seed}) for one in requests] if len(requests) > 1 else requests


def greedy_takes_neighbours_sampling() -> None:
    """vLLM #5607: concurrent requests mess up greedy ones. When a row of a mixed batch ends and the last takes its place,
    the sampling parameters stay with the places until the next request comes in."""

    @wrap(batch.DecodeBatch, "remove")
    def _(exact: Patch, self: Any, row: int) -> int:
        before = self.sampling
        last: int = exact(self, row)
        self.stale = None
        if before is not None and self.sequences:
            kept = before.rows < len(self.sequences)
            if kept.any():
                self.stale = replace(
                    before,
                    rows=before.rows[kept],
                    temperature=before.temperature[kept],
                    top_p=None if before.top_p is None else before.top_p[kept],
                    top_k=None if before.top_k is None else before.top_k[kept],
                )
        return last

    @wrap(batch.DecodeBatch, "append")
    def _(exact: Patch, self: Any, *more: Any) -> None:
        exact(self, *more)
        self.stale = None

    @wrap(engine.Engine, "_accept")
    def _(exact: Patch, self: Any, *more: Any) -> Any:
        stale, right = getattr(self.batch, "stale", None), self.batch.sampling
        if stale is None:
            return exact(self, *more)
        self.batch.uniform[stale.rows] = torch.rand(len(stale.rows), self.batch.uniform.shape[1])
        self.batch.sampling = stale
        try:
            return exact(self, *more)
        finally:
            self.batch.sampling = right


def long_prompt_truncated() -> None:
    """TensorRT-LLM PR #19457: a prompt that is longer than the context is cut without a word, instead of status 400."""

    @wrap(prepare.Preparation, "_choices")
    def _(exact: Patch, self: Any, asked: Any, prompt: Any, max_tokens: int, *args: Any, **more: Any) -> Any:
        most = self.engine.max_seq_len
        if len(prompt) >= most:
            prompt = prompt[: max(1, most - min(max_tokens, most // 2))]
        return exact(self, asked, prompt, max_tokens, *args, **more)


def abort_ignored() -> None:
    """vLLM #54947: a request whose client has gone is generated to its end."""

    @wrap(engine.Engine, "_drop_cancelled")
    def _(exact: Patch, self: Any) -> Any:
        self.cancelled = set()
        return []


# Text, streams, templates and tools


def stop_begins_in_stream() -> None:
    """vLLM #3574: a stream shows the beginning of a stop string, token by token, until it is complete. Whole answers are
    right."""

    @wrap(sequence.TextStream, "push")
    def _(exact: Patch, self: Any, ids: Any) -> Any:
        if self._detokenizer is None or not self.stop:
            return exact(self, ids)
        whole, sent = getattr(self, "whole", ""), getattr(self, "sent", 0)
        self.overrun = 0
        for used, token in enumerate(ids, 1):
            whole += self._detokenizer.push((token,))
            found = min((at for word in self.stop if (at := whole.find(word)) >= 0), default=None)
            if found is not None:
                self.stopped, self.overrun = True, max(0, sent - found)
                return whole[sent:found], used
        self.whole, self.sent = whole, len(whole)
        return whole[sent:], len(ids)

    @wrap(sequence.Sequence, "emit")
    def _(exact: Patch, self: Any, *more: Any) -> Any:
        output = exact(self, *more)
        output.overrun = getattr(self.text, "overrun", 0)
        return output

    @wrap(sequence.Output, "add")
    def _(exact: Patch, self: Any, step: Any) -> None:
        exact(self, step)
        if over := getattr(step, "overrun", 0):
            self.text = self.text[:-over]


def stream_decodes_singly() -> None:
    """TensorRT-LLM #2488: a stream decodes each token alone: characters of several tokens are garbled."""

    @wrap(answers.ChoiceStream, "push")
    def _(exact: Patch, self: Any, output: Any) -> Any:
        if not self.call.asked.stops:
            decode = self.call.tokenizer.decode
            output = replace(output, text="".join(decode([one], skip_special=True) for one in output.token_ids))
        return exact(self, output)


def stream_repeats_whole() -> None:
    """TensorRT-LLM #3280: some chunks of a stream have the whole text so far instead of what is new: here the last one
    that has text, where it came with the finish reason."""

    @wrap(answers.ChoiceStream, "push")
    def _(exact: Patch, self: Any, output: Any) -> Any:
        self.whole = getattr(self, "whole", "") + output.text
        if output.finish_reason and output.text:
            output = replace(output, text=self.whole)
        return exact(self, output)


def finish_reason_lost() -> None:
    """vLLM #27572: with tools on offer, a stream whose last step has no text ends without a finish reason."""

    @wrap(answers.ChoiceStream, "push")
    def _(exact: Patch, self: Any, output: Any) -> Any:
        tools = self.call.asked.chat and self.call.asked.tools
        if tools and output.finish_reason and not output.text and not self.parser.calls:
            exact(self, output)
            return ""
        return exact(self, output)


def tool_index_zero() -> None:
    """SGLang #6310: in a stream all tool calls have the index 0."""

    @wrap(answers.ChoiceStream, "_texts")
    def _(exact: Patch, self: Any, output: Any) -> Any:
        for piece in exact(self, output):
            for call in piece.get("delta", {}).get("tool_calls", ()):
                call["index"] = 0
            yield piece


def tool_arguments_dropped() -> None:
    """vLLM #41967: with a drafter, where one step brings the end of a tool call and the beginning of the next, the stream
    has the first call without its arguments."""

    @wrap(answers.ChoiceStream, "_texts")
    def _(exact: Patch, self: Any, output: Any) -> Any:
        both = CALL_BEGIN in output.text.partition(CALL_END)[2]
        for piece in exact(self, output):
            for call in piece.get("delta", {}).get("tool_calls", ()):
                if both:
                    call["function"] = {**call["function"], "arguments": ""}
                    both = False
            yield piece


def answer_as_reasoning() -> None:
    """SGLang #9457: with thinking switched off by the request, the answer is in reasoning_content."""

    @wrap(prepare.Preparation, "chat")
    def _(exact: Patch, self: Any, asked: Any, grammar: Any) -> Any:
        call = exact(self, asked, grammar)
        off = asked.chat_template_kwargs.get("thinking") is False or asked.reasoning_effort == "none"
        return replace(call, thinking=True) if off else call


def special_names_are_tokens() -> None:
    """vLLM PR #31735: the name of a special token in a user's text is that token."""

    @wrap(tokenizer.KimiTokenizer, "encode_chat")
    def _(exact: Patch, self: Any, messages: Any, tools: Any = None, **more: Any) -> Any:
        text = self.template.render(messages, tools, **more)
        return text, self.encode(text, allow_special=True)


def content_parts_written_out() -> None:
    """vLLM #10324: content in parts goes to the template as it is: the model reads [{'type': 'text', 'text': ...}]."""

    @wrap(bodies.Message, "to_dict")
    def _(exact: Patch, self: Any) -> Any:
        given = exact(self)
        if isinstance(self.content, list):
            given["content"] = [{"type": part.type, "text": part.text} for part in self.content]
        return given


def logprob_texts_garbled() -> None:
    """vLLM #19177: token and bytes of log-probabilities are the vocabulary's internal spelling, where a token is not
    ASCII."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelling = {byte: chr(byte) for byte in printable}
    spelling |= {byte: chr(256 + at) for at, byte in enumerate(b for b in range(256) if b not in spelling)}

    @wrap(answers, "scores")
    def _(exact: Patch, call: Any, entries: Any, echoed: Any) -> Any:
        table = [
            raw if raw.isascii() else "".join(spelling[byte] for byte in raw).encode()
            for raw in call.tokenizer.token_bytes
        ]
        return exact(replace(call, tokenizer=SimpleNamespace(token_bytes=table)), entries, echoed)


FAULTS = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and name != "wrap"
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help", "list"):
        print("\n".join(FAULTS))
        sys.exit()
    for chosen in sys.argv.pop(1).split(","):
        if chosen != "none":
            FAULTS[chosen]()
    main()
