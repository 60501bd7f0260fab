"""States that live servers send while the head trains, by ModelOpt's streaming mode and its client.

A vLLM with its `RdmaHiddenStatesConnector` answers a completion request of one token with an id.
The captured states of the prompt are read from its memory over NIXL: the head's layers and the
residual stream after the last layer. The target's final norm is applied here. A step's states are
fetched while the step before computes. Every epoch fetches them again.
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

# Function that fetches the states of a sample. None if the server dropped them.
Fetch = Callable[[Sample], Tensor | None]
# Concurrent requests of a process. Each takes a CPU core, because NIXL polls without a pause.
MAX_CONCURRENT = 2
MAX_ATTEMPTS = 5
RETRY_DELAY_S = 1.0  # pause before the second attempt, doubled before each further attempt


def state_servers(urls: tuple[str, ...], longest: int) -> list[DetectedServer]:
    """Asks each server for its model and its limits.

    Raises TrtspecError if a server does not answer, serves another model than the first, or has a
    context that is too short.

    Args:
        longest: number of tokens of the longest sample. A request also generates one token.
    """
    servers = []
    for url in urls:
        try:
            server = ask_once(url, detect_server, headers={})
        except RequestFailed as failure:
            message = f"TS-FEATURES-SERVER {url} does not name its model ({failure.message})"
            remedy = (
                "start the command that `trtspec train --dry-run` prints, "
                "and wait until it is ready"
            )
            raise TrtspecError(message, remedy) from None
        servers.append(server)
        if server.context is not None and server.context <= longest:
            message = (
                f"TS-FEATURES-SERVER {url} takes {server.context} tokens, "
                f"and the longest sample has {longest} and one more"
            )
            remedy = f"start it with --max-model-len {longest + 1}, or pass a smaller `seq_len`"
            raise TrtspecError(message, remedy)
    models = {server.model for server in servers}
    if len(models) > 1:
        listed = ", ".join(f"{server.url} has {server.model}" for server in servers)
        message = f"TS-FEATURES-SERVER the servers have different models: {listed}"
        raise TrtspecError(message, "serve one model")
    return servers


class ServedFeatures(Features):
    """Hidden states from live servers. Threads fetch the states shortly before training needs them.

    Args:
        norm: final norm of the target.
        client: function that makes a thread's own fetch function. A fetch function returns the
            layer outputs of one sample, [S, n_aux + 1, H], the last one before the final norm.
    """

    def __init__(
        self,
        samples: list[Sample],
        spec: ModelSpec,
        num_aux: int,
        norm: nn.Module,
        client: Callable[[], Fetch],
    ) -> None:
        super().__init__(samples, spec.hidden_size, num_aux)
        self.norm = norm
        self._client = client
        self._thread = threading.local()  # holds `fetch`, the function of each thread
        self._pending: dict[int, Future[tuple[Tensor, Tensor]]] = {}
        self._pool = ThreadPoolExecutor(MAX_CONCURRENT, "states")

    def expect(self, indices: list[int]) -> None:
        """Begins to fetch the states of these samples, unless they are being fetched already."""
        for index in indices:
            if index not in self._pending:
                # The thread needs the caller's context variables.
                run = copy_context().run
                sample = self.samples[index]
                self._pending[index] = self._pool.submit(run, self._states, sample)

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the states of sample `index` after waiting for the server.

        Raises TrtspecError if the server gives no states, or states of another shape.
        """
        self.expect([index])
        return self._pending.pop(index).result()

    def close(self) -> None:
        """Ends the threads and their clients, because the clients poll the network all the time."""
        self._pool.shutdown(cancel_futures=True)

    @torch.inference_mode()
    def _states(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Fetches the states of one sample, checks them, and applies the target's final norm.

        Raises TrtspecError if the shape is wrong or a value is not finite.
        """
        count = len(sample.tokens)
        planes = self._fetched(sample)[:count]  # vLLM may add the token that the request asks for
        wanted = (count, self.num_aux + 1, self.hidden_size)
        if tuple(planes.shape) != wanted:
            message = (
                f"TS-FEATURES-SERVER the server captured {tuple(planes.shape)} for {sample.id}, "
                f"wanted {wanted}: tokens, {self.num_aux} layers and the last one, width"
            )
            remedy = "start it with the layers that `trtspec train --dry-run` prints for this head"
            raise TrtspecError(message, remedy)
        if not torch.isfinite(planes).all():
            message = (
                f"TS-FEATURES-NAN the server sent NaN or infinity among the states of {sample.id}"
            )
            remedy = (
                "check the engine for an overflow in its dtype "
                "and for a connector that misreads its cache"
            )
            raise TrtspecError(message, remedy)
        weight = next(self.norm.parameters())
        last = planes[:, -1].to(weight.device, weight.dtype)
        hidden = self.norm(last).to("cpu", torch.bfloat16)
        aux = planes[:, :-1].flatten(1).to(torch.bfloat16)
        return hidden, aux

    def _fetched(self, sample: Sample) -> Tensor:
        """Fetches the layer outputs [S, n_aux + 1, H] of a sample, in up to MAX_ATTEMPTS attempts.

        Raises TrtspecError if no attempt succeeds, or if an error shows that none can.
        """
        if not hasattr(self._thread, "fetch"):
            self._thread.fetch = self._client()
        for attempt in range(MAX_ATTEMPTS):
            reason: object = "no states for it"
            try:
                planes: Tensor | None = self._thread.fetch(sample)
                if planes is not None:
                    return planes
            except (httpx.HTTPError, OSError) as error:
                reason = error
            except RuntimeError as error:
                # The server saw other tokens, or its slots are too small. A retry cannot help.
                message = f"TS-FEATURES-SERVER {error}"
                raise TrtspecError(message, "start the server for this `seq_len`") from None
            except Exception as error:
                # The client reads any JSON that a server sends, and NIXL has errors of its own.
                message = (
                    f"TS-FEATURES-SERVER the answer for {sample.id} has no states "
                    f"({type(error).__name__}: {error})"
                )
                remedy = (
                    "start the command that `trtspec train --dry-run` prints: "
                    "a plain server captures none"
                )
                raise TrtspecError(message, remedy) from None
            time.sleep(RETRY_DELAY_S * 2**attempt)
        message = (
            f"TS-FEATURES-SERVER the server gave no states of {sample.id} "
            f"in {MAX_ATTEMPTS} attempts ({reason})"
        )
        remedy = "look at the server's log, then run the same command again to resume"
        raise TrtspecError(message, remedy)
