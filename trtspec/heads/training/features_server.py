"""States that another program computes. `--features http://HOST:PORT` fetches them from a live server while the head
trains; nothing is stored.

This is ModelOpt's streaming mode, spoken by ModelOpt's own client: a vLLM with ModelOpt's `RdmaHiddenStatesConnector`
answers a completion request of one token with an id, and the captured states of the prompt are read from its memory
over NIXL: the head's layers and the residual stream after the last one. The target's final norm is applied here.
A step's states are fetched while the step before computes. Every epoch fetches them again.

What a server or an engine's dump sends has the right shape whatever model and layers it captured; so the first layers
are computed here for one sample, and what came is compared with the outputs of the wanted layer and of its neighbours.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import torch
from torch import Tensor, nn

from trtspec.client.client import RequestFailed, ask_once, first_model
from trtspec.errors import TrtspecError
from trtspec.heads.training.features import Features
from trtspec.heads.training.samples import Sample
from trtspec.models.stream import LayerStream, States
from trtspec.report import say
from trtspec.specs import ModelSpec

Fetch = Callable[[Sample], Tensor | None]
CONCURRENT = 2  # requests under way at once per process; each takes a core, because NIXL polls without a pause
ATTEMPTS = 5
PATIENCE = 1.0  # seconds before the second attempt, doubled before each further one
TOKENS = 32  # of the sample; every token of a layer costs little beside decoding its weights
DEEPEST = 4  # layers that are decoded for this; a head that reads later ones first is not checked
MOST_APART = 0.2  # of the norm: quantized and plain weights of one model differ by less, other models by more


def served_model(urls: tuple[str, ...], longest: int) -> str:
    """The name under which all servers know their model. Raises TrtspecError when one does not answer, serves another
    model than the first, or takes fewer than `longest` tokens and the one that is asked for."""
    names = {}
    for url in urls:
        try:
            model = ask_once(url, first_model, headers={})
        except RequestFailed as failure:
            raise TrtspecError(
                f"TS-FEATURES-SERVER {url} does not name its model ({failure.message})",
                "start the command that `trtspec train --dry-run` prints, and wait until it is ready",
            ) from None
        names[url], room = model["id"], model.get("max_model_len")
        if isinstance(room, int) and room <= longest:
            raise TrtspecError(
                f"TS-FEATURES-SERVER {url} takes {room} tokens, and the longest sample has {longest} and one more",
                f"start it with --max-model-len {longest + 1}, or pass a smaller `seq_len`",
            )
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{url} has {name}" for url, name in names.items())
        raise TrtspecError(f"TS-FEATURES-SERVER the servers have different models: {listed}", "serve one model")
    return names[urls[0]]


class ServedFeatures(Features):
    """`Features` whose states are on a server until a step needs them."""

    def __init__(
        self, samples: list[Sample], spec: ModelSpec, num_aux: int, norm: nn.Module, client: Callable[[], Fetch]
    ) -> None:
        """client: makes the function that fetches one sample's planes [S, n_aux + 1, H]; called once per thread.
        norm: the target's final norm."""
        super().__init__(samples, spec.hidden_size, num_aux)
        self.norm = norm
        self._client, self._own = client, threading.local()
        self._coming: dict[int, Future[tuple[Tensor, Tensor]]] = {}
        self._threads = ThreadPoolExecutor(CONCURRENT, "states")

    def expect(self, indices: list[int]) -> None:
        """Begins to fetch what is not under way."""
        for index in indices:
            if index not in self._coming:
                self._coming[index] = self._threads.submit(self._states, self.samples[index])

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """As `Features.states`. Raises TrtspecError when the server stays away, or captures something else."""
        self.expect([index])
        return self._coming.pop(index).result()

    def close(self) -> None:
        """Ends the threads, and with them the clients, whose own threads poll the network without a pause."""
        self._threads.shutdown(cancel_futures=True)

    @torch.inference_mode()
    def _states(self, sample: Sample) -> tuple[Tensor, Tensor]:
        planes = self._fetched(sample)[: len(sample.tokens)]  # vLLM may add the one token that was asked for
        wanted = (len(sample.tokens), self.num_aux + 1, self.hidden_size)
        if tuple(planes.shape) != wanted:
            raise TrtspecError(
                f"TS-FEATURES-SERVER the server captured {tuple(planes.shape)} for {sample.id}, wanted {wanted}: "
                f"tokens, {self.num_aux} layers and the last one, width",
                "start it with the layers that `trtspec train --dry-run` prints for this head",
            )
        if not torch.isfinite(planes).all():
            raise TrtspecError(
                f"TS-FEATURES-NAN the server sent NaN or infinity among the states of {sample.id}",
                "look at the engine: an overflow in its dtype, or a connector that misreads its cache",
            )
        weight = next(self.norm.parameters())
        hidden = self.norm(planes[:, -1].to(weight.device, weight.dtype))
        return hidden.to("cpu", torch.bfloat16), planes[:, :-1].flatten(1).to(torch.bfloat16)

    def _fetched(self, sample: Sample) -> Tensor:
        """The planes, after as many attempts as are worth it."""
        if not hasattr(self._own, "fetch"):
            self._own.fetch = self._client()
        for attempt in range(ATTEMPTS):
            reason: object = "no states for it"
            try:
                planes = self._own.fetch(sample)
                if planes is not None:
                    return planes
            except (httpx.HTTPError, OSError) as error:
                reason = error
            except RuntimeError as error:  # other tokens than ours, or slots too small for them: no attempt helps
                raise TrtspecError(f"TS-FEATURES-SERVER {error}", "start the server for this `seq_len`") from None
            except Exception as error:  # the client reads whatever JSON a server sends, and NIXL has errors of its own
                raise TrtspecError(
                    f"TS-FEATURES-SERVER the answer for {sample.id} brings no states ({type(error).__name__}: {error})",
                    "start the command that `trtspec train --dry-run` prints: a plain server captures none",
                ) from None
            time.sleep(PATIENCE * 2**attempt)
        raise TrtspecError(
            f"TS-FEATURES-SERVER the server gave no states of {sample.id} in {ATTEMPTS} attempts ({reason})",
            "look at its log, then run the same command again to resume",
        )


class _Enough(Exception):
    """Raised where no further layer is needed."""


def check_first_layers(
    target_dir: Path, sample: Sample, aux: Tensor, layers: tuple[int, ...], dtype: torch.dtype
) -> float | None:
    """The relative difference of the first captured plane from the target's own; None where it was not looked at.

    aux [S, n_aux*H] as a head gets it. Raises TrtspecError when another layer or another model fits better.
    """
    layer = min(layers)
    if layer >= DEEPEST:
        say(f"The states are not compared with the target: the first captured layer is {layer}")
        return None
    count = min(TOKENS, len(sample.tokens))
    with LayerStream(target_dir, dtype=dtype, load_ahead=False) as stream:
        ours = first_outputs(stream, sample.tokens[:count], min(layer + 2, stream.num_layers))
        came = aux[:count, : stream.spec.hidden_size].float()
    apart = [float((own - came).norm() / own.norm()) for own in ours]
    nearest = min(range(len(apart)), key=apart.__getitem__)
    if apart[nearest] > MOST_APART:
        raise TrtspecError(
            f"TS-FEATURES-OTHER the states of {sample.id} are of no early layer of {target_dir.name}: the nearest "
            f"differs by {apart[nearest]:.0%} of its norm",
            "serve this target, or dump its states",
        )
    if nearest != layer:
        raise TrtspecError(
            f"TS-FEATURES-OTHER the states of {sample.id} labelled as layer {layer} are the outputs of layer "
            f"{nearest} ({apart[nearest]:.1%} apart, layer {layer} {apart[layer]:.1%})",
            "capture the layers that `trtspec train --dry-run` prints: vLLM counts one more",
        )
    say(f"States compared with the target: layer {layer} differs by {apart[layer]:.1%} of its norm")
    return apart[layer]


def first_outputs(stream: LayerStream, tokens: tuple[int, ...], layers: int) -> list[Tensor]:
    """Outputs [S, H] of the first layers for one sequence, float32."""
    batches, outputs = [torch.tensor([tokens])], []

    def on_output(layer: int, _: int, output: Tensor) -> None:
        outputs.append(output[0].float().cpu())
        if layer + 1 == layers:
            raise _Enough

    with States(batches, stream.spec.hidden_size, stream.dtype) as states:
        stream.embed(batches, states)
        with contextlib.suppress(_Enough):
            stream.run(batches, states, on_output=on_output)
    return outputs
