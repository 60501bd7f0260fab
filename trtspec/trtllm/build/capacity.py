"""How many requests the cache of an intended server holds, by the memory model of `trtspec plan`."""

from __future__ import annotations

from trtspec.data_files import gpu_spec
from trtspec.errors import CheckFailed
from trtspec.planning.layout import Layout
from trtspec.planning.memory import memory
from trtspec.specs import HeadSpec, ModelSpec
from trtspec.trtllm.intent import Intent


def held_requests(intent: Intent, target: ModelSpec, head: HeadSpec | None, fraction: float) -> int:
    """Requests of max_seq_len tokens that the whole server holds. Raises CheckFailed when it holds none."""
    layout = Layout(intent.tp_size, (intent.ep_size or 1) > 1, intent.attention_dp)
    gpu = gpu_spec(intent.gpu or "")
    room = memory(target, head, gpu, layout, fraction=fraction, max_num_tokens=intent.tokens)
    held = room.sequences(intent.seq_len)
    if held < 1:
        message = f"{intent.target} with one request of {intent.seq_len} tokens does not fit on {intent.tp_size} x "
        remedy = "use more GPUs or larger ones, or a smaller --max-seq-len; see `trtspec plan`"
        raise CheckFailed(message + gpu.name.upper(), remedy)
    return held
