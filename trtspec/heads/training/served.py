"""States that live servers send while the head trains: ModelOpt's streaming mode, spoken by ModelOpt's own client.

A vLLM with its `RdmaHiddenStatesConnector` answers a completion request of one token with an id. The captured states of
the prompt are read from its memory over NIXL: the head's layers and the residual stream after the last one. The
target's final norm is applied here. A step's states are fetched while the step before computes; every epoch fetches
them again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context

import httpx
import torch
from torch import Tensor, nn

from trtspec.client.client import RequestFailed, ask_once
from trtspec.client.servers import DetectedServer, detect_server
from trtspec.errors import TrtspecError
from trtspec.heads.training.samples import Sample
from trtspec.heads.training.states import Features
from trtspec.specs import ModelSpec

Fetch = Callable[[Sample], Tensor | None]
CONCURRENT = 2  # requests under way at once per process; each takes a core, because NIXL polls without a pause
ATTEMPTS = 5
PATIENCE = 1.0  # seconds before the second attempt, doubled before each further one


def state_servers(urls: tuple[str, ...], longest: int) -> list[DetectedServer]:
    """Asks each server what it serves. Raises TrtspecError if one does not answer, serves another model than the first,
    or does not take `longest` tokens and the one that is asked for."""
    servers = []
    for url in urls:
        try:
            server = ask_once(url, detect_server, headers={})
        except RequestFailed as failure:
            raise TrtspecError(
                f"TS-FEATURES-SERVER {url} does not name its model ({failure.message})",
                "start the command that `trtspec train --dry-run` prints, and wait until it is ready",
            ) from None
        servers.append(server)
        if server.context is not None and server.context <= longest:
            raise TrtspecError(
                f"TS-FEATURES-SERVER {url} takes {server.context} tokens, and the longest sample has {longest} "
                "and one more",
                f"start it with --max-model-len {longest + 1}, or pass a smaller `seq_len`",
            )
    if len({server.model for server in servers}) > 1:
        listed = ", ".join(f"{server.url} has {server.model}" for server in servers)
        raise TrtspecError(
            f"TS-FEATURES-SERVER the servers have different models: {listed}", "serve one model"
        )
    return servers


class ServedFeatures(Features):
    """`Features` whose states are on a server until a step needs them."""

    def __init__(
        self,
        samples: list[Sample],
        spec: ModelSpec,
        num_aux: int,
        norm: nn.Module,
        client: Callable[[], Fetch],
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
                self._coming[index] = self._threads.submit(
                    copy_context().run, self._states, self.samples[index]
                )

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """As `Features.states`. Raises TrtspecError when the server stays away, or captures something else."""
        self.expect([index])
        return self._coming.pop(index).result()

    def close(self) -> None:
        """Ends the threads, and with them the clients, whose own threads poll the network without a pause."""
        self._threads.shutdown(cancel_futures=True)

    @torch.inference_mode()
    def _states(self, sample: Sample) -> tuple[Tensor, Tensor]:
        planes = self._fetched(sample)[
            : len(sample.tokens)
        ]  # vLLM may add the one token that was asked for
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
        """Fetches the hidden states, retrying up to ATTEMPTS times."""
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
            except (
                RuntimeError
            ) as error:  # other tokens than ours, or slots too small for them: no attempt helps
                raise TrtspecError(
                    f"TS-FEATURES-SERVER {error}", "start the server for this `seq_len`"
                ) from None
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
