"""The reference target against transformers' classes on equal weights: prefill and steps."""

from pathlib import Path

import pytest
import torch

from tests.json_files import read_json, write_json
from tests.tiny import make_target, read_tensors, write_tensors
from trtspec.errors import TrtspecError
from trtspec.models.k2 import KimiModel
from trtspec.models.weights import load_target

TOKENS = 48


def prompts(vocab: int = 512) -> torch.Tensor:
    return torch.randint(0, vocab, (3, TOKENS), generator=torch.Generator().manual_seed(7))


def transformers_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of transformers' class for this checkpoint, float32, eager experts and attention."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = read_json(directory / "config.json")
    if (
        config["model_type"] == "kimi_k2"
    ):  # transformers knows the text model under DeepSeek's name only
        config["model_type"] = "deepseek_v3"
        write_json(directory / "config.json", config)
    model = (
        transformers.AutoModelForImageTextToText
        if "text_config" in config
        else transformers.AutoModelForCausalLM
    )
    loaded = model.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    assert type(loaded).__name__ in ("DeepseekV3ForCausalLM", "Kimi_K25ForConditionalGeneration")
    with torch.no_grad():
        return loaded(input_ids=tokens, use_cache=False).logits


@torch.no_grad()
def stepwise_logits(
    model: KimiModel, tokens: torch.Tensor, sizes: tuple[int, ...] = (5, 1, 1, 4, 3)
) -> torch.Tensor:
    """Logits with a cache, in chunks of cycling sizes, in rows 2.. of a larger cache."""
    cache = model.new_cache(len(tokens) + 3, TOKENS + 8)
    cache.data.copy_(torch.randn(cache.data.shape))  # stale entries must not matter
    pieces, begin, turn = [], 0, 0
    while begin < tokens.shape[1]:
        size = min(sizes[turn % len(sizes)], tokens.shape[1] - begin)
        start = torch.full((len(tokens),), begin)
        pieces.append(model(tokens[:, begin : begin + size], start, cache, row=2).logits)
        begin, turn = begin + size, turn + 1
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("nested", [False, True], ids=["deepseek_v3", "kimi_k25"])
def test_logits_equal_transformers(tmp_path: Path, nested: bool) -> None:
    directory = make_target(tmp_path / "model", nested=nested, experts=8)
    model = load_target(directory, dtype=torch.float32)
    tokens = prompts()
    reference = transformers_logits(directory, tokens)
    with torch.no_grad():
        prefill = model(tokens).logits
    stepwise = stepwise_logits(model, tokens)
    scale = reference.abs().max()
    for name, ours in (("prefill", prefill), ("step by step", stepwise)):
        difference = ((ours - reference).abs().max() / scale).item()
        print(f"{name}: largest difference {difference:.2e} of the largest logit {scale:.2f}")
        assert difference < 1e-5


@pytest.mark.parametrize("format", ["int4", "fp8-block"])
def test_decoded_formats_equal_transformers_on_decoded_weights(tmp_path: Path, format: str) -> None:

    from tools.nano.train import checkpoint_tensors
    from trtspec.checkpoint.headers import Checkpoint
    from trtspec.checkpoint.target_problems import target_spec

    model = load_target(
        make_target(tmp_path / format, format=format, nested=False), dtype=torch.float32
    )
    assert target_spec(Checkpoint.open(tmp_path / format)).quant.format == format
    plain = make_target(tmp_path / "bf16", nested=False, shards=1)
    write_tensors(plain, checkpoint_tensors(model))
    tokens = prompts()
    with torch.no_grad():
        ours = model(tokens).logits
    reference = transformers_logits(plain, tokens)
    assert ((ours - reference).abs().max() / reference.abs().max()).item() < 1e-5


def test_captured_states_are_the_layer_outputs(tmp_path: Path) -> None:
    model = load_target(make_target(tmp_path), dtype=torch.float32)
    tokens, seen = prompts(), []
    hooks = [
        model.layers[i].register_forward_hook(lambda _m, _i, out: seen.append(out)) for i in (1, 3)
    ]
    with torch.no_grad():
        aux = model(tokens, aux_layers=(1, 3)).aux
    for hook in hooks:
        hook.remove()
    assert aux is not None and torch.equal(aux, torch.cat(seen, -1))


def test_rows_do_not_see_each_other_and_move(tmp_path: Path) -> None:
    model = load_target(make_target(tmp_path), dtype=torch.float32)
    tokens = prompts()
    cache = model.new_cache(4, 64)
    with torch.no_grad():
        lengths = (10, 20, 31)
        for row, length in enumerate(lengths):
            model(tokens[row : row + 1, :length], torch.zeros(1, dtype=torch.long), cache, row=row)
        cache.move(2, 0, 31)  # the first sequence ends; the last takes its row
        step = torch.stack([tokens[2, 31:33], tokens[1, 20:22]])
        together = model(step, torch.tensor([31, 20]), cache).logits
        alone = model(tokens[2:3, :33]).logits[:, 31:33]
    torch.testing.assert_close(together[:1], alone, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_nvfp4_with_fp8_cache_runs_and_a_wrong_scale_shows(tmp_path: Path) -> None:
    directory = make_target(tmp_path, format="nvfp4", shards=1)
    tokens = prompts()
    weight_only = load_target(directory, dtype=torch.float32, activation="weight-only")
    w4a4 = load_target(directory, dtype=torch.float32)
    assert w4a4.new_cache(1, 8).data.dtype == torch.float8_e4m3fn
    assert stepwise_logits(w4a4, tokens).isfinite().all()

    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    reference, mlp = weight_only.layers[0].mlp(x), w4a4.layers[0].mlp

    def error() -> float:
        return ((mlp(x) - reference).norm() / reference.norm()).item()

    right = error()
    assert 0.01 < right < 0.25  # E2M1 has steps of up to a quarter of a block's largest value
    mlp.gate_up_proj.input_scale.mul_(2.0**-12)  # block scales now saturate
    assert error() > 3 * right


@torch.no_grad()
def test_fp8_cache_saturates_instead_of_nan(tmp_path: Path) -> None:
    model = load_target(make_target(tmp_path), dtype=torch.float32)
    model.kv_dtype = torch.float8_e4m3fn
    model.layers[0].self_attn.kv_a_layernorm.weight.mul_(10_000)
    assert stepwise_logits(model, prompts()).isfinite().all()


def test_missing_tensors_are_named_at_once(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    directory = make_target(tmp_path, nested=False, shards=1)
    tensors = read_tensors(directory)
    for name in ("model.norm.weight", "model.layers.2.mlp.experts.3.up_proj.weight"):
        tensors.pop(name)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(TrtspecError, match=r"model\.norm\.weight.*1 more: .*experts\.3\.up_proj"):
        load_target(directory)
