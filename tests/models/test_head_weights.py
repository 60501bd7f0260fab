"""Loading a head: both namings, the target's loans, and each misfit refused in one message.

The message has the misfit's code.
"""

from pathlib import Path

import pytest
import torch

from tests.json_files import edit_json
from tests.tiny import make_head, read_tensors, write_tensors
from trtspec.errors import TrtspecError
from trtspec.models.head_weights import load_head
from trtspec.models.weights import load_target


@pytest.fixture(scope="module")
def target(target_dir):
    return load_target(target_dir, dtype=torch.float32)


def edit(head: Path, change_tensors=None, **config) -> Path:
    tensors = read_tensors(head)
    if change_tensors:
        change_tensors(tensors)
        write_tensors(head, tensors)
    edit_json(head / "config.json", **config)
    return head


def outputs(head, seed=0):
    torch.manual_seed(seed)
    x = head.fuse(torch.randn(2, 6, head.spec.num_aux * head.spec.target_hidden_size))
    tokens = torch.randint(0, head.spec.vocab_size, (2, 6))
    return head.logits(head(x, tokens, None, None)[1])


def test_the_target_lends_lm_head_and_embedding(tmp_path, target_dir, target):
    path = edit(
        make_head(tmp_path / "head", target_dir), lambda tensors: tensors.pop("lm_head.weight")
    )
    head = load_head(path, target, dtype=torch.float32)
    assert head.lm_head is target.lm_head
    assert head.embed is target.embed


def test_an_embedding_of_its_own_is_used(tmp_path, target_dir, target):
    path = make_head(tmp_path / "head", target_dir)
    own = (target.embed.weight * 1.05).to(torch.bfloat16)
    edit(path, lambda tensors: tensors.update({"embed_tokens.weight": own}))
    head = load_head(path, target, dtype=torch.float32)
    assert torch.equal(head.embed.weight, own.float())


def test_all_misfits_stand_in_one_message(tmp_path, target_dir, target):
    path = make_head(tmp_path / "head", target_dir, attention="mha")

    def spoil(tensors):
        for name in ("gate", "down"):
            shape = tensors[f"layers.0.mlp.{name}_proj.weight"].shape
            tensors[f"layers.0.mlp.{name}_proj.weight"] = torch.zeros(
                shape[0], shape[1] + 1, dtype=torch.bfloat16
            )

    with pytest.raises(TrtspecError) as refused:
        load_head(edit(path, spoil), target, dtype=torch.float32)
    assert "gate_proj" in refused.value.message
    assert "down_proj" in refused.value.message
