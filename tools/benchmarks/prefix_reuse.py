"""What prefix reuse saves: prompts computed and acceptance, with it and without.

    python -m tools.benchmarks.prefix_reuse [--conversations 48] [--turns 3] [--new-tokens 48] [--temperature 0]

kimi-nano with its shipped head, float32, conversations from the held-out prompts; each turn's prompt holds the answers
before it. The first turn begins alike for all. Counts do not depend on the machine, seconds do.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import torch

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.data_files import DATA, kimi_nano_dir
from trtspec.engine.engine import Engine, EngineOptions
from trtspec.engine.prefix import PREFIX_BYTES
from trtspec.engine.request import GenerationRequest
from trtspec.models.head_weights import load_head
from trtspec.models.weights import load_target

SYSTEM = {
    "role": "system",
    "content": "You answer questions about Python's standard library, briefly and exactly. " * 6,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(kimi_nano_dir(), dtype=torch.float32)
    head = load_head(DATA / "kimi-nano-eagle3", target, dtype=torch.float32)
    sizes = EngineOptions(max_batch_size=options.concurrency, max_seq_len=1536)
    for name, reuse in (("off", False), ("warm", True)):
        engine = Engine(target, head, replace(sizes, prefix_bytes=PREFIX_BYTES if reuse else 0))
        began = time.process_time()
        by_turn = converse(engine, options)
        seconds, totals = time.process_time() - began, engine.totals
        lengths = ", ".join(f"{length:.2f}" for length in by_turn)
        hits = engine.prefix.stats.hit_rate if engine.prefix else 0.0
        print(
            f"{name:4} {totals.prompt_tokens:7} prompt tokens computed, {hits:4.0%} reused; "
            f"acceptance length {1 + totals.accepted / totals.steps:.3f} over {totals.steps} rounds, "
            f"by turn {lengths}; {seconds:.1f} CPU s",
            flush=True,
        )


def converse(engine: Engine, options: argparse.Namespace) -> list[float]:
    """Runs all conversations turn by turn; the acceptance length of each turn."""
    tokenizer = KimiTokenizer(kimi_nano_dir())
    rows = (kimi_nano_dir() / "prompts_heldout.jsonl").read_text(encoding="utf-8").splitlines()
    says = [json.loads(row)["messages"][0]["content"][:400] for row in rows]
    talks = [[SYSTEM] for _ in range(options.conversations)]
    lengths = []
    for turn in range(options.turns):
        requests = []
        for number, talk in enumerate(talks):
            talk.append(
                {"role": "user", "content": says[(number * options.turns + turn) % len(says)]}
            )
            prompt = tokenizer.encode_chat(talk)[1]
            fields = {"temperature": options.temperature, "seed": number, "ignore_eos": True}
            requests.append(GenerationRequest(str(number), prompt, options.new_tokens, **fields))
        done = engine.generate(requests)
        for number, talk in enumerate(talks):
            answer = tokenizer.decode(done[str(number)].token_ids, skip_special=True)
            talk.append({"role": "assistant", "content": answer})
        stats = [completion.stats for completion in done.values()]
        lengths.append(1 + sum(s.accepted for s in stats) / sum(s.steps for s in stats))
    return lengths


if __name__ == "__main__":
    main()
