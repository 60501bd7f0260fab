"""Does a head draft as a trained one would? What shapes cannot show, measured on texts of its target.

The head's first drafts are compared with the target's choices, and with drafts that need no head. Then everything that
could be wrong behind right shapes is undone, one at a time (models/head_faults.py): what makes the drafts better by
more than chance is named. The comparison is paired by text, because positions of one text are not independent.

The texts come with what the target computed on them (`CapturedText`): one causal pass of the head over a text gives its
first draft at every position. Where the target does not fit, the engine drafts against one that says the captured texts
again (`ReplayTarget`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor, nn

from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.engine.sequence import Completion, Stats
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.head_faults import HeadTensors, Suspicion, suspicions
from trtspec.models.head_weights import assemble
from trtspec.models.kimi import KimiModel, TargetOutput
from trtspec.models.layers import LatentCache, TextPiece
from trtspec.models.stream import similar_length
from trtspec.specs import HeadSpec

FALSE_ALARMS = 0.01  # of checks of a sound head: chance that anything is named; kinds share it equally
LEAST_GAIN = 0.01  # of agreement; less is not worth a finding
# of the share of drafts that stand: a head that was trained briefly without the final norm may gain 0.013 from it by
# chance, and one that was trained with it loses 0.28 and more without
LEAST_LATER_GAIN = 0.05
MOST_FAULTS = 3
SIEVE, CLEARLY_WORSE = 16, 0.03  # a suspicion that makes so many texts so much worse is not tried on the others
BATCH = 8  # texts at a time


@dataclass(frozen=True)
class Trial:
    """One suspicion tried. `before` and `after`: share of drafts that agree, as the file is and with it undone."""

    suspicion: Suspicion
    before: float
    after: float
    chance: float  # of a gain like this when undoing it changes nothing
    named: bool

    @property
    def gain(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class Baseline:
    """Drafts that need no trained head: `agreement` of theirs, and the `chance` of a lead like the head's if it had
    none."""

    agreement: float
    chance: float


@dataclass(frozen=True)
class HeadCheck:
    """`agreement`: share of `positions` at which the head's first draft is what the target takes. `faults` are the
    trials that are named, each tried with those before it undone; `trials` all of the first round; `untried` are
    suspicions for which the states were not captured."""

    positions: int
    agreement: float
    baselines: dict[str, Baseline]
    faults: list[Trial]
    trials: list[Trial]
    untried: list[Suspicion]


def draft_freely(
    target: KimiModel, head: Eagle3Head, prompts: list[list[int]], *, draft_len: int, max_tokens: int
) -> list[Completion]:
    """Greedy answers of the target to prompts of token ids, drafted for by the head; with the counts of each."""
    longest = max(len(prompt) for prompt in prompts) + max_tokens
    engine = Engine(target, head, EngineOptions("eagle3", draft_len, min(BATCH, len(prompts)), longest + 1))
    requests = [GenerationRequest(str(number), prompt, max_tokens) for number, prompt in enumerate(prompts)]
    done = engine.generate(requests)
    return [done[request.id] for request in requests]


def check_head(
    spec: HeadSpec,
    tensors: HeadTensors,
    target: KimiModel,
    texts: list[CapturedText],
    *,
    draft_len: int,
    seed: int = 0,
    advance: Callable[[int], None] = lambda _: None,
) -> HeadCheck:
    """Measures a head of shape `spec` from `tensors` (on the device and in the type to compute in).

    `target` lends embedding and lm_head and may lack its decoder layers. `advance` gets 1 for each trial.
    """
    judge = _Judge(target, texts, draft_len)
    own = judge.hits(spec, tensors)
    baselines = {
        "random_head": judge.hits(spec, random_tensors(tensors, seed)),
        "unigram": _followers(texts, with_previous=False),
        "bigram": _followers(texts, with_previous=True),
    }
    trials, untried = judge.trials(spec, tensors, own, advance)
    faults: list[Trial] = []
    found = trials
    while found[0].named and len(faults) < MOST_FAULTS:
        faults.append(found[0])
        spec, tensors = found[0].suspicion.spec, found[0].suspicion.tensors()
        found, _ = judge.trials(spec, tensors, judge.hits(spec, tensors), advance)
    return HeadCheck(
        positions=sum(len(hits) for hits in own),
        agreement=_share(own),
        baselines={name: Baseline(_share(hits), chance_of_gain(_leads(own, hits))) for name, hits in baselines.items()},
        faults=faults,
        trials=trials,
        untried=untried,
    )


class _Judge:
    """Measures heads on the same texts."""

    def __init__(self, target: KimiModel, texts: list[CapturedText], draft_len: int) -> None:
        self.target, self.texts, self.draft_len = target, texts, draft_len

    def hits(self, spec: HeadSpec, tensors: HeadTensors, own: list[Tensor] | None = None) -> list[Tensor]:
        """For each text, which first drafts agree; only of the first texts where these are clearly worse than `own`."""
        layers = tuple(spec.aux_layers or self.target.spec.default_aux_layers)
        head = self._head(spec, tensors)
        first = first_draft_hits(head, layers, self.texts[:SIEVE])
        if own is not None and _share(first) < _share(own[:SIEVE]) - CLEARLY_WORSE:
            return first
        return first + first_draft_hits(head, layers, self.texts[SIEVE:])

    def trials(
        self, spec: HeadSpec, tensors: HeadTensors, own: list[Tensor], advance: Callable[[int], None]
    ) -> tuple[list[Trial], list[Suspicion]]:
        """(every suspicion tried, the named and best first; those that these states cannot tell)."""
        suspected, drafted = suspicions(spec, tensors, self.target), None
        captured, default = set(self.texts[0].states), self.target.spec.default_aux_layers
        possible = [one for one in suspected if captured >= set(one.spec.aux_layers or default)]
        kinds, made = Counter(one.kind for one in possible), []
        for one in possible:
            if one.later:
                drafted = drafted or self._stood(spec, tensors)
                pair = drafted, self._stood(one.spec, one.tensors())
            else:
                after = self.hits(one.spec, one.tensors(), own)
                pair = own[: len(after)], after
            made.append(_trial(one, *pair, FALSE_ALARMS / len(kinds) / kinds[one.kind]))
            advance(1)
        made.sort(key=lambda trial: (not trial.named, -trial.gain))
        return made, [one for one in suspected if one not in possible]

    def _head(self, spec: HeadSpec, tensors: HeadTensors) -> Eagle3Head:
        weight = tensors["fc.weight"]
        return assemble(spec, tensors, self.target, dtype=weight.dtype, device=str(weight.device))

    def _stood(self, spec: HeadSpec, tensors: HeadTensors) -> list[Tensor]:
        """For each text, bool [steps * draft_len]: which drafts stand when it is drafted freely."""
        stats = drafted_on(self.texts, self.target, self._head(spec, tensors), self.draft_len)
        return [_stood(one, self.draft_len) for one in stats]


def _trial(suspicion: Suspicion, before: list[Tensor], after: list[Tensor], allowed: float) -> Trial:
    """Named when the chance of its gain is below `allowed`; each text counts by the share of its drafts that agree."""
    chance = chance_of_gain(_leads(after, before))
    gain = _share(after) - _share(before)
    named = gain >= (LEAST_LATER_GAIN if suspicion.later else LEAST_GAIN) and chance < allowed
    return Trial(suspicion, _share(before), _share(after), chance, named)


def chance_of_gain(differences: list[float]) -> float:
    """One-sided p of Student's t-test that the mean of paired differences is above zero.

    The tail is the normal's at Wallace's transformation of t (Biometrika 46, 1959, (8n+1)/(8n+3) sqrt(n log(1+t^2/n))),
    right to a few per cent of itself.
    """
    spread = stdev(differences) / math.sqrt(len(differences))
    mean = fmean(differences)
    if mean <= 0:
        return 1.0
    freedom = len(differences) - 1
    square = (mean / spread) ** 2 if spread else math.inf
    if square == math.inf:
        return 0.0
    z = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(square / freedom))
    return math.erfc(z / math.sqrt(2)) / 2


def random_tensors(tensors: HeadTensors, seed: int) -> HeadTensors:
    """A head of the same shape that was never trained: random matrices, norms of one, the same vocabulary and ends."""
    generator = torch.Generator().manual_seed(seed)
    made = dict(tensors)
    for name, value in tensors.items():
        if name in ("lm_head.weight", "embed_tokens.weight") or not value.is_floating_point():
            continue
        if value.dim() == 1:
            made[name] = torch.ones_like(value)
        else:
            drawn = torch.randn(value.shape, generator=generator) / math.sqrt(value.shape[-1])
            made[name] = drawn.to(value.device, value.dtype)
    return made


def _followers(texts: list[CapturedText], *, with_previous: bool) -> list[Tensor]:
    """Hits of a draft that knows only what the target takes most often in the other texts: at all, or after the
    previous token."""
    keys = [text.previous if with_previous else [0] * len(text.wanted) for text in texts]
    wanted = [text.wanted.tolist() for text in texts]
    counts = [Counter(zip(*pair, strict=True)) for pair in zip(keys, wanted, strict=True)]
    everywhere: dict[int, Counter[int]] = defaultdict(Counter)
    for count in counts:
        for (key, token), times in count.items():
            everywhere[key][token] += times
    found = []
    for number, count in enumerate(counts):
        best = {}
        for key in set(keys[number]):
            others = {token: times - count[key, token] for token, times in everywhere[key].items()}
            top = max(others, key=lambda token: others[token])
            best[key] = top if others[top] > 0 else -1
        found.append(
            torch.tensor([best[key] == token for key, token in zip(keys[number], wanted[number], strict=True)])
        )
    return found


def _stood(stats: Stats, draft_len: int) -> Tensor:
    stood = [place < accepted for accepted, times in enumerate(stats.histogram) for _ in range(times)
             for place in range(draft_len)]  # fmt: skip
    return torch.tensor(stood or [False])


def _share(hits: list[Tensor]) -> float:
    return float(torch.cat(hits).float().mean())


def _leads(better: list[Tensor], worse: list[Tensor]) -> list[float]:
    """Of the share of hits of each text."""
    return [_share([one]) - _share([other]) for one, other in zip(better, worse, strict=True)]


@dataclass(frozen=True)
class CapturedText:
    """Row t of each tensor belongs to position t.

    tokens int64 [S]; `begin` >= 1 is the first token that the target wrote; choices int64 [S]: the target's likeliest
    token after each position; states: outputs [S, Ht] of the captured layers.
    """

    tokens: Tensor
    begin: int
    choices: Tensor
    states: dict[int, Tensor]

    def aux(self, layers: Iterable[int]) -> Tensor:
        """The states of `layers` side by side, [S, n * Ht]: what a head's fc reads."""
        return torch.cat([self.states[layer] for layer in layers], -1)

    @property
    def previous(self) -> list[int]:
        """The tokens after which a first draft is judged; `wanted` holds what the target takes there."""
        return self.tokens[self.begin :].tolist()

    @property
    def wanted(self) -> Tensor:
        """int64 [S - begin]: the target's choice after each token that it wrote."""
        return self.choices[self.begin :]


@torch.inference_mode()
def capture(target: KimiModel, tokens: list[int], begin: int, layers: tuple[int, ...]) -> CapturedText:
    """Runs the target once over a text of which it wrote the tokens from `begin` on; `layers` ascend."""
    device = target.embed.weight.device
    output = target(torch.tensor([tokens], device=device), aux_layers=layers)
    assert output.aux is not None
    parts = output.aux[0].chunk(len(layers), -1)
    states = {layer: part.clone() for layer, part in zip(layers, parts, strict=True)}
    return CapturedText(torch.tensor(tokens), begin, output.logits[0].argmax(-1).cpu(), states)


@torch.inference_mode()
def first_draft_hits(head: Eagle3Head, layers: tuple[int, ...], texts: list[CapturedText]) -> list[Tensor]:
    """For each text, bool [S - begin]: whether the first draft after each written token is what the target takes.

    Row t of the head pairs the state at t with the token at t+1 and drafts the token at t+2. Texts of similar length
    run together, padded on the right: a causal pass does not see what comes later.
    """
    weight, hits = head.fc.weight, {}
    for batch in similar_length([len(text.tokens) for text in texts]):
        longest = max(len(texts[at].tokens) for at in batch)
        aux = weight.new_zeros(len(batch), longest - 1, head.fc.in_features)
        following = torch.zeros(len(batch), longest - 1, dtype=torch.int64)
        for row, at in enumerate(batch):
            count = len(texts[at].tokens) - 1
            aux[row, :count] = texts[at].aux(layers)[:-1].to(weight.device, weight.dtype)
            following[row, :count] = texts[at].tokens[1:]
        _, normed = head(head.fuse(aux), following.to(weight.device), None, None)
        for row, at in enumerate(batch):
            rows = normed[row, texts[at].begin - 1 : len(texts[at].tokens) - 1]
            hits[at] = head.to_target_ids(head.logits(rows).argmax(-1)).cpu() == texts[at].wanted
    return [hits[at] for at in range(len(texts))]


class ReplayTarget(KimiModel):
    """Answers each prompt with its text, whatever is drafted; the states are the captured ones.

    A cache row holds the number of the text that lives in it, so that it moves with the row. Prompts arrive in the
    order of `texts`.
    """

    def __init__(self, ends: KimiModel, layers: tuple[int, ...], texts: list[CapturedText]) -> None:
        """`ends` lends its embedding; it may lack its decoder layers."""
        with torch.device("meta"):
            super().__init__(ends.spec, layers=0)
        self.embed, self.lm_head, self.norm = ends.embed, nn.Identity(), nn.Identity()  # type: ignore[assignment]
        self.texts, self.captured = texts, layers
        self._next = 0

    def new_cache(self, rows: int, max_len: int) -> LatentCache:
        """One number for each row."""
        return LatentCache(1, rows, max_len, 1, torch.int64, self.embed.weight.device)

    def forward(
        self,
        tokens: Tensor,
        start: Tensor | None = None,
        cache: LatentCache | None = None,
        row: int = 0,
        aux_layers: tuple[int, ...] = (),
        last_only: bool = False,
        length: int | None = None,
    ) -> TargetOutput:
        """As KimiModel's; after each position the next token of the text is certain, whatever `tokens` are.

        The states behind a rejected draft are not its own; nothing reads them.
        """
        assert start is not None and cache is not None
        weight, states, following = self.embed.weight, [], []
        for index in range(len(tokens)):
            text = self.texts[int(cache.layer(0)[row + index, 0, 0])]
            end = len(text.tokens) - 1
            places = (int(start[index]) + torch.arange(tokens.shape[1])).clamp(max=end)
            states.append(text.aux(self.captured)[places].to(weight.device, weight.dtype))
            following.append(text.tokens[(places + 1).clamp(max=end)])
        said = torch.stack(following).to(weight.device)[:, -1 if last_only else 0 :]
        certain = torch.zeros(*said.shape, self.spec.vocab_size, device=weight.device).scatter_(2, said[..., None], 1.0)
        aux = torch.stack(states)
        return TargetOutput(certain, aux, aux)

    def prompts(
        self,
        tokens: Tensor,
        pieces: Sequence[TextPiece],
        cache: LatentCache,
        aux_layers: tuple[int, ...],
        kept: Sequence[int],
    ) -> TargetOutput:
        """As KimiModel's; each prompt that begins is the next text's."""
        logits, states, end = [], [], 0
        for piece in pieces:
            if piece.begin == 0:
                cache.layer(0)[piece.row, 0] = self._next
                self._next += 1
            begin, end = end, end + piece.end - piece.begin
            start = torch.tensor([piece.begin], device=tokens.device)
            out = self.forward(tokens[:, begin:end], start, cache, piece.row)
            logits.append(out.logits)
            states.append(out.hidden)
        aux = torch.cat(states, 1)
        return TargetOutput(torch.cat(logits, 1)[:, kept], aux[:, kept], aux)


def drafted_on(texts: list[CapturedText], ends: KimiModel, head: Eagle3Head, draft_len: int) -> list[Stats]:
    """What the head's drafts are worth on each text: a draft stands where the text goes on with it."""
    layers = tuple(head.spec.aux_layers or ends.spec.default_aux_layers)
    longest = max(len(text.tokens) for text in texts)
    options = EngineOptions("eagle3", draft_len, min(BATCH, len(texts)), longest + 1)
    engine = Engine(ReplayTarget(ends, layers, texts), head, options)
    requests = []
    for number, text in enumerate(texts):
        prompt, count = text.tokens[: text.begin].tolist(), len(text.tokens) - text.begin
        requests.append(GenerationRequest(str(number), prompt, count, ignore_eos=True))
    done = engine.generate(requests)
    return [done[request.id].stats for request in requests]
