"""What NVFP4 costs a real (small) model: perplexity, divergence, acceptance of its Eagle3 head.

    python -m tools.benchmarks.quantization_quality [--texts 24] [--prompts 12] [--tokens 48]

kimi-nano, once from its BF16 checkpoint and once with its routed experts stored as INT4, is
calibrated on its training prompts and quantized with `trtspec`'s own commands' code (policy k2.5,
every MLP). Each row is measured on the same held-out answers: perplexity of a token given its
prompt, mean KL divergence of the next-token distribution from the source's in nats with its
standard error over texts, and the acceptance length of greedy drafting (3 drafts a step). A wrong
input scale is wrong by the same factor in every linear. Compute type float32 throughout.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.tiny_formats import INT4_CONFIG, quantize_tensors
from tools.nano.figures import held_out
from trtspec.calibrate import CalibrationOptions, calibrate_checkpoint
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.data_files import DATA, kimi_nano_dir
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.request import GenerationRequest
from trtspec.models.head_weights import load_head
from trtspec.models.k2 import KimiModel
from trtspec.models.w4a4 import NVFP4Linear
from trtspec.models.weights import load_target
from trtspec.quant.conversion_plan import ConversionOptions
from trtspec.quant.policy import load_policy
from trtspec.quant.run import quantize_checkpoint

HEAD = DATA / "kimi-nano-eagle3"
POLICY = load_policy("k2.5")
DRAFTS = 3
Text = tuple[list[int], list[int], int]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--texts", type=int, default=24, help="held-out answers for perplexity and KL"
    )
    parser.add_argument(
        "--prompts", type=int, default=12, help="held-out prompts for acceptance; 0 leaves it out"
    )
    parser.add_argument("--tokens", type=int, default=48, help="tokens generated for each")
    parser.add_argument("--samples", type=int, default=128, help="calibration texts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    texts = [
        (p[-256:], a[:160], n)
        for p, a, n in held_out(KimiTokenizer(kimi_nano_dir()), options.texts)
    ]
    print(
        f"{len(texts)} texts, {sum(len(answer) for _, answer, _ in texts)} tokens; "
        f"{options.prompts} prompts\n"
    )
    print(
        "| source | weight scales | activations | perplexity | "
        "KL to the source | acceptance length |"
    )
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("BF16", "INT4"):
            source = kimi_nano_dir() if name == "BF16" else as_int4(Path(folder) / "int4")
            measure_source(name, source, Path(folder) / name, texts, options)
    print(f"\n{time.monotonic() - began:.0f} s")


def measure_source(
    name: str, source: Path, folder: Path, texts: list[Text], options: argparse.Namespace
) -> None:
    folder.mkdir()
    reference = load_target(source, dtype=torch.float32)
    logits = [answer_logits(reference, text) for text in texts]

    def show(weights: str, activations: str, model: KimiModel) -> None:
        rows = [
            compare(answer_logits(model, text), text, expected)
            for text, expected in zip(texts, logits, strict=True)
        ]
        tokens = sum(len(text[1]) for text in texts)
        perplexity = math.exp(sum(loss for loss, _ in rows) / tokens)
        each = [
            divergence / len(text[1]) for (_, divergence), text in zip(rows, texts, strict=True)
        ]
        mean, error = (
            sum(d for _, d in rows) / tokens,
            statistics.stdev(each) / math.sqrt(len(each)),
        )
        length = f"{acceptance(model, texts, options):.2f}" if options.prompts else "-"
        print(
            (
                f"| {name} | {weights} | {activations} | {perplexity:.3f} "
                f"| {mean:.4f} ± {error:.4f} | {length} |"
            ),
            flush=True,
        )

    show("-", "as stored", reference)
    for weights in ("max", "mse"):
        for activations, model in variants(source, folder / weights, weights, options.samples):
            show(weights, activations, model)


def variants(
    source: Path, folder: Path, weights: str, samples: int
) -> Iterator[tuple[str, KimiModel]]:
    """Every way of computing one quantized checkpoint; the same weights in all of them."""
    scales = folder.with_name("scales.safetensors")
    if not scales.exists():
        data = kimi_nano_dir() / "prompts_train.jsonl"
        chosen = CalibrationOptions(samples=samples, seq_len=256, dtype=torch.float32)
        calibrate_checkpoint(source, data, scales, POLICY, chosen)
    for activations, file in (("W4A4, scales one", None), ("W4A4, calibrated", scales)):
        out = folder.with_name(f"{folder.name}-{activations[-10:].strip(', ')}")
        quantize_checkpoint(
            source,
            out,
            POLICY,
            ConversionOptions(
                kv_cache=None,
                input_scales=file,
                weight_scales=weights,
                workers=1,
            ),
        )
        model = load_target(out, dtype=torch.float32)
        linears = [module for module in model.modules() if isinstance(module, NVFP4Linear)]
        if file is None:
            set_activation(linears, "weight-only")
            yield "weight-only", model
            set_activation(linears, "w4a4")
        yield activations, model
    right = [linear.input_scale.clone() for linear in linears]
    wrong = [(1 / 16, "16 times too small"), (16, "16 times too large")]
    wrong += [(65536, "65536 times too large")] if weights == "max" else []
    for factor, text in wrong:
        for linear, scale in zip(linears, right, strict=True):
            linear.input_scale.copy_(scale * factor)
        yield f"W4A4, calibrated, {text}", model
    if weights == "max":
        for linear in linears:
            linear.input_scale.fill_(256.0)
        yield "W4A4, scales 256", model


def set_activation(linears: list[NVFP4Linear], activation: str) -> None:
    for linear in linears:
        linear.activation = activation


@torch.inference_mode()
def answer_logits(model: KimiModel, text: Text) -> torch.Tensor:
    """float32 [answer tokens, V]: the logits that predict each token of the answer."""
    prompt, answer, _ = text
    return model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].clone()


def compare(logits: torch.Tensor, text: Text, expected: torch.Tensor) -> tuple[float, float]:
    """(cross-entropy of the answer, KL from the source), summed over tokens, in nats."""
    ours, theirs = logits.log_softmax(-1), expected.log_softmax(-1)
    loss = F.nll_loss(ours, torch.tensor(text[1]), reduction="sum").item()
    return loss, F.kl_div(ours, theirs, log_target=True, reduction="sum").item()


def acceptance(model: KimiModel, texts: list[Text], options: argparse.Namespace) -> float:
    """1 + accepted drafts per step, pooled over the prompts, greedy."""
    head = load_head(HEAD, model, dtype=torch.float32)
    sizes = {"max_batch_size": 8, "max_seq_len": 256 + options.tokens + DRAFTS + 8}
    engine = Engine(model, head, EngineOptions(draft_len=DRAFTS, **sizes))  # type: ignore[arg-type]
    requests = [
        GenerationRequest(str(i), prompt, options.tokens)
        for i, (prompt, _, _) in enumerate(texts[: options.prompts])
    ]
    stats = [completion.stats for completion in engine.generate(requests).values()]
    return 1 + sum(one.accepted for one in stats) / max(1, sum(one.steps for one in stats))


def as_int4(directory: Path) -> Path:
    """kimi-nano as Kimi-K2.5 is published: routed experts INT4, pack-quantized, in groups of 32."""
    source = kimi_nano_dir()
    shutil.copytree(source, directory)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["quantization_config"] = INT4_CONFIG
    (directory / "config.json").write_text(json.dumps(config))
    tensors = quantize_tensors(load_file(source / "model.safetensors"), "int4")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


if __name__ == "__main__":
    main()
