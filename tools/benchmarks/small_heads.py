"""What the benchmarks of trained heads share: one set of answers, states computed once, heads trained side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trtspec.bench.statistics import summarize
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.client.servers import TurnCounts
from trtspec.client.text_quality import mean_distinct_ratio
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.heads.training import module as train
from trtspec.heads.training.curve import CurvePoint
from trtspec.heads.training.loop import Result, train_head
from trtspec.heads.training.options import TrainingRun, TrainOptions, new_head_spec
from trtspec.heads.training.samples import draft_vocabulary, read_samples
from trtspec.heads.training.states import Features, compute_features
from trtspec.models.eagle3 import Eagle3Head
from trtspec.models.k2 import KimiModel
from trtspec.models.weights import load_target
from trtspec.report import write_json
from trtspec.specs import HeadSpec

BATCH_ROWS = 8  # of the engine that measures


@dataclass
class Workshop:
    """The target in float32, its tokenizer, and its states on the answers."""

    directory: Path
    target: KimiModel
    tokenizer: KimiTokenizer
    features: Features

    @classmethod
    def open(cls, directory: Path, answers: Path, seq_len: int, *, whole: bool = False) -> Workshop:
        """`whole`: only samples of exactly `seq_len` tokens, for trainers that want one length."""
        target, tokenizer = load_target(directory, dtype=torch.float32), KimiTokenizer(directory)
        samples, layers = (
            read_samples(answers, tokenizer, seq_len, seq_len if whole else 8),
            target.spec.default_aux_layers,
        )
        return cls(directory, target, tokenizer, compute_features(target, samples, layers))

    def spec(self, options: TrainOptions) -> HeadSpec:
        return new_head_spec(self.target.spec, options)

    def module(self, options: TrainOptions) -> train.TrainingModule:
        """A fresh training module; its weights follow from the seed."""
        spec = self.spec(options)
        ids = None
        if spec.has_d2t:
            ids = torch.tensor(
                draft_vocabulary(self.features.samples, spec.draft_vocab_size, spec.vocab_size)
            )
        torch.manual_seed(options.seed)
        weights = self.target.embed.weight, self.target.lm_head.weight
        return train.build(spec, self.target.spec, *weights, target_ids=ids)

    def train(
        self, module: train.TrainingModule, options: TrainOptions, work: Path,
        on_step: Callable[[CurvePoint], None] = lambda _: None,
    ) -> Result:  # fmt: skip
        """Trains in place on the shared states; resumes a killed run in `work`, refuses other options."""
        fingerprint = {"options": asdict(options), "samples": len(self.features.samples)}
        run = TrainingRun(Path(), "data", work, save_every=50)
        return train_head(module, self.features, options, run, fingerprint, on_step=on_step)

    def acceptance(
        self,
        head: Eagle3Head,
        prompts: list[list[int]],
        draft_len: int,
        temperature: float,
        max_tokens: int,
    ) -> dict[str, Any]:
        """Free-running generation; 95 % interval over prompts and the distinct 4-grams of the answers."""
        longest = max(map(len, prompts)) + max_tokens
        sizes = EngineOptions(
            draft_len=draft_len, max_batch_size=BATCH_ROWS,
            max_seq_len=longest + draft_len,
        )  # fmt: skip
        engine = Engine(self.target, head, sizes, self.tokenizer)
        done = engine.generate(
            [
                GenerationRequest(str(i), ids, max_tokens, temperature=temperature, seed=i)
                for i, ids in enumerate(prompts)
            ]
        )
        stats = {name: one.stats for name, one in done.items()}
        steps, accepted = (
            sum(s.steps for s in stats.values()),
            sum(s.accepted for s in stats.values()),
        )
        turns = [
            TurnCounts(
                name,
                "",
                len(done[name].token_ids),
                s.steps,
                s.accepted,
                s.drafted,
                tuple(s.histogram),
                "engine",
            )
            for name, s in stats.items()
        ]
        return {
            "length": 1 + accepted / max(steps, 1),
            "interval": summarize(turns).acceptance_length_interval,
            "prompts": len(prompts),
            "steps": steps,
            "distinct": mean_distinct_ratio(
                [self.tokenizer.decode(done[name].token_ids) for name in done]
            ),
        }


def held_out_messages(path: Path, count: int) -> list[dict[str, Any]]:
    """Every n-th row of a prompts file, so that all its categories are there: {messages, reference, category}."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return rows[:: max(1, len(rows) // count)][:count]


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What `path` holds, made and written first when there is no such file."""
    if not path.is_file():
        write_json(path, make())
    return json.loads(path.read_text(encoding="utf-8"))


def last_agreement(curve: Path) -> list[float]:
    """Agreement with the target on held-out answers per training-time-test step, at the end of a training.jsonl."""
    points = [json.loads(line) for line in curve.read_text(encoding="utf-8").splitlines()]
    return next(point["held_out"]["accuracy"] for point in reversed(points) if "held_out" in point)
