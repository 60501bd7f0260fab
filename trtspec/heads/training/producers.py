"""Who makes the target's states: the target in memory, its layers one at a time, an engine's dumps, or live servers.

Every source gives a `Features`; which one it was does not show in the loss curve.

stream    The target runs one decoder layer at a time over a chunk of samples; its states go to one file per chunk,
          which appears whole. A chunk is made when a step first asks for one of its samples. Chunks follow the order in
          which the first epoch uses the samples, so training alternates: a chunk of states, a chunk of steps. When no
          sample is used twice, files that training has passed are removed.
server    ModelOpt's streaming mode, spoken by ModelOpt's own client. A vLLM with its `RdmaHiddenStatesConnector`
          answers a completion request of one token with an id. The captured states of the prompt are read from its
          memory over NIXL: the head's layers and the residual stream after the last one. The target's final norm is
          applied here. A step's states are fetched while the step before computes; every epoch fetches them again.

What a server or an engine's dump sends has the right shape whatever model and layers it captured; so the first layers
are computed here for one sample, and what came is compared with the outputs of the wanted layer and of its neighbours.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trtspec import machine
from trtspec.checkpoint.identity import identity_digest
from trtspec.checkpoint.writer import Journal, Layout, ShardFile
from trtspec.client.client import RequestFailed, ask_once
from trtspec.client.servers import DetectedServer, detect_server
from trtspec.errors import TrtspecError
from trtspec.foreign import PlainName
from trtspec.heads.training.options import TrainingRun, TrainOptions
from trtspec.heads.training.plan import MEMORY_SHARE, TrainingPlan
from trtspec.heads.training.processes import ALONE, World, require_shared
from trtspec.heads.training.samples import MAX_HELD_OUT, Sample, TrainingData, split_data
from trtspec.heads.training.states import Features, bytes_per_token, compute_features, padded
from trtspec.models.k2 import KimiModel
from trtspec.models.stream import PREFETCH_MEMORY_LAYERS, LayerStream, States, similar_length
from trtspec.models.weights import load_target
from trtspec.report import progress_bar, remove_folder, say
from trtspec.specs import ModelSpec

CHUNK_BYTES = 256 * 2**30  # of disk that the states of a chunk may take
POLL = 0.2  # seconds between looks for the parts of other processes
DISK_SHARE = 0.3  # of the free disk that a chunk may take: there are two, and the hidden states while one is made

Fetch = Callable[[Sample], Tensor | None]
CONCURRENT = 2  # requests under way at once per process; each takes a core, because NIXL polls without a pause
ATTEMPTS = 5
PATIENCE = 1.0  # seconds before the second attempt, doubled before each further one
TOKENS = 32  # of the sample; every token of a layer costs little beside decoding its weights
DEEPEST = 4  # layers that are decoded for this; a head that reads later ones first is not checked
MOST_APART = 0.2  # of the norm: quantized and plain weights of one model differ by less, other models by more


def open_states(
    run: TrainingRun,
    model: KimiModel,
    plan: TrainingPlan,
    options: TrainOptions,
    world: World,
    journal: Journal | None = None,
) -> Features:
    """The states of all samples, from the source that the plan names. `journal` holds the servers of earlier states.

    A stream computes them and a server sends them while the head trains. Several processes stream what one process
    would keep in memory: each computes a part, and none holds all.
    """
    source, layers = plan.features, plan.spec.aux_layers or ()
    if source.way == "memory" and world.size == 1:
        with progress_bar("states of the target", plan.tokens, "tokens") as bar:
            return compute_features(model, plan.samples, layers, bar.advance)
    if source.way in ("memory", "stream"):
        stream = open_stream(run.target_dir, model.dtype, str(model.embed.weight.device), world)
        return stream_features(
            stream, plan, options, run.work, identity_digest(run.target_dir), world=world
        )
    lengths = [len(sample.tokens) for sample in plan.samples]
    if source.way == "server":
        servers = state_servers(source.urls, max(lengths))
        if journal is not None:
            identities = [server.identity for server in servers]
            journal.answered_by(
                {f"server {number}": facts for number, facts in enumerate(identities, 1)}
            )
        # ModelOpt takes many seconds to import, and a dry run does not need it
        from trtspec.heads.training.module import state_client

        client = partial(state_client, source.urls, servers[0].model, max(lengths))
        client()  # what is missing is missed before the run begins
        features: Features = ServedFeatures(
            plan.samples, model.spec, plan.spec.num_aux, model.norm, client
        )
    else:
        assert plan.dumped is not None
        features = plan.dumped
    if world.main:
        shortest = lengths.index(min(lengths))
        aux = features.states(shortest)[1]
        check_first_layers(run.target_dir, plan.samples[shortest], aux, layers, model.dtype)
    return features


def open_target(
    target_dir: Path, plan: TrainingPlan, dtype: torch.dtype, device: str
) -> tuple[KimiModel, bool]:
    """(the target, whether it has its layers). Embeddings, final norm and lm_head suffice where the states come from
    another source: streamed, from a server, or from dumps of a target that does not fit."""
    stored = sum(path.stat().st_size for path in target_dir.glob("*.safetensors"))
    large = stored > MEMORY_SHARE * machine.free_memory()
    if plan.features.with_layers and not (large and plan.features.way == "dumps"):
        return load_target(target_dir, dtype=dtype, device=device), True
    with LayerStream(target_dir, dtype=dtype, device=device) as stream:
        return stream.model_without_layers(), False


def open_stream(
    target_dir: Path, dtype: torch.dtype, device: str, world: World = ALONE
) -> LayerStream:
    """The target's layers for this process. Raises TrtspecError where a decoded layer of each process is more than the
    machine's memory."""
    threads = min(8, max(1, torch.get_num_threads() // world.local_size))
    stream = LayerStream(target_dir, dtype=dtype, device=device, threads=threads)
    layer = stream.layer_bytes(stream.num_layers - 1)
    share = machine.free_memory() / world.local_size
    stream.load_ahead = share > PREFETCH_MEMORY_LAYERS * layer
    if layer > share:
        raise TrtspecError(
            f"TS-FEATURES-MEMORY a decoded layer of the target takes {layer / 1e9:,.1f} GB, and each of "
            f"{world.local_size} processes on this machine holds one: {share / 1e9:,.1f} GB of free memory for each",
            "start fewer processes per machine, or take the states from dumps or a server",
        )
    return stream


def stream_features(
    stream: LayerStream,
    plan: TrainingPlan,
    options: TrainOptions,
    work: Path,
    target: str,
    *,
    chunk_bytes: float | None = None,
    world: World = ALONE,
) -> StreamedFeatures:
    """The features of a streamed run; one process computes nothing yet, several what they all need to the end.

    `target` is the digest of the target's weights. Without a directory of their own the chunks are in `work` and go
    with it.
    """
    place = plan.features.directory
    directory = place or work / "features"
    layers = tuple(sorted(plan.spec.aux_layers or stream.spec.default_aux_layers))
    if chunk_bytes is None:
        chunk_bytes = min(CHUNK_BYTES, DISK_SHARE * machine.free_disk(directory))
        chunk_bytes = world.agree(chunk_bytes)  # the disk fills while the others look
    chunks, kept = chunks_in_order(
        plan.samples, split_data(plan.samples, options), stream.spec, len(layers), chunk_bytes
    )
    if world.main and kept == math.inf:  # samples come again, so every chunk stays
        free = machine.free_disk(directory) + sum(
            path.stat().st_size for path in directory.glob("chunk-*")
        )
        if plan.feature_bytes > free:
            raise TrtspecError(
                f"TS-FEATURES-DISK the states of {plan.tokens:,} tokens take {plan.feature_bytes:,} bytes, kept for "
                f"later epochs, and the disk of {directory} has {free:,} free",
                "pass `epochs` 1, which removes what it has passed, or `features` stream:DIR on a larger disk",
            )
    require_shared(directory, world, "reads the states that the others compute")
    fingerprint = repr((target, layers, str(stream.dtype), stream.activation))
    features = StreamedFeatures(
        plan.samples,
        stream,
        layers,
        chunks,
        directory,
        world,
        fingerprint,
        kept=math.inf if place else kept,
    )
    if (
        world.size > 1
    ):  # held-out and later epochs' samples fall to the processes in another order than chunks have
        for number in range(int(min(kept, len(chunks)))):
            features.opened(number)
    return features


def chunks_in_order(
    samples: list[Sample], data: TrainingData, target: ModelSpec, num_aux: int, chunk_bytes: float
) -> tuple[list[list[int]], float]:
    """(sample indices by chunk in the order of first use, how many of the first chunks are needed to the end).

    The held-out samples of the evaluations come first and are needed to the end; infinity: every chunk is, because
    samples come again in later epochs. A batch lies in one chunk, so that processes which share its rows need the same
    chunk. One chunk takes all samples when they fit.
    """
    lengths = [len(sample.tokens) for sample in samples]
    batches = [batch for _, window in data.steps() for batch in window]
    used = [index for batch in batches for index in batch]
    once = len(used) == len(set(used))
    size = bytes_per_token(target, num_aux)
    if sum(lengths) * size <= chunk_bytes:
        return [list(range(len(samples)))], 1 if once else math.inf
    evaluated = data.held[:MAX_HELD_OUT]
    chunks: list[list[int]] = [[]]
    filled = 0
    placed: set[int] = set()
    for batch in [[index] for index in evaluated] + batches:
        fresh = [index for index in batch if index not in placed]
        placed.update(fresh)
        needs = sum(lengths[index] for index in fresh) * size
        if chunks[-1] and filled + needs > chunk_bytes:
            chunks.append([])
            filled = 0
        chunks[-1] += fresh
        filled += needs
    needed = sum(not set(chunk).isdisjoint(evaluated) for chunk in chunks)
    return chunks, needed if once else math.inf


class StreamedFeatures(Features):
    """`Features` whose states are files of chunks, each computed when it is first asked for: `<index>.hidden` and
    `<index>.<layer>` of each sample, bf16 [S, H].

    Several processes ask for a chunk at the same step. Each computes its part of the batches that one process would
    compute, so the bits are the same; writes a file of its part; and waits for the others'.
    """

    def __init__(
        self,
        samples: list[Sample],
        stream: LayerStream,
        aux_layers: tuple[int, ...],
        chunks: list[list[int]],
        directory: Path,
        world: World,
        fingerprint: str,
        *,
        kept: float,
    ) -> None:
        """`aux_layers` ascend; `kept`: how many of the first chunks stay on disk when training has passed them."""
        super().__init__(samples, stream.spec.hidden_size, len(aux_layers))
        self.stream, self.aux_layers, self.chunks, self.directory = (
            stream,
            aux_layers,
            chunks,
            directory,
        )
        self.world, self.fingerprint, self.kept = world, fingerprint, kept
        self._chunk_of = {index: number for number, chunk in enumerate(chunks) for index in chunk}
        self._open: dict[int, dict[int, Any]] = {}

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """As `Features.states`; computes the sample's chunk when there is no file of it."""
        file = self.opened(self._chunk_of[index])[index]
        aux = [file.get_tensor(f"{index}.{layer}") for layer in self.aux_layers]
        return file.get_tensor(f"{index}.hidden"), torch.cat(aux, -1)

    def path(self, number: int) -> Path:
        """File of a chunk; its name tells target, layers, type and tokens, so that another run's is never taken."""
        tokens = [(index, self.samples[index].tokens) for index in sorted(self.chunks[number])]
        digest = hashlib.sha256(repr((self.fingerprint, tokens)).encode()).hexdigest()[:16]
        return self.directory / f"chunk-{number:04d}-{digest}.safetensors"

    def files(self, number: int) -> list[Path]:
        """The files of a chunk, from however many processes; empty while one is missing."""
        path = self.path(number)
        if path.is_file():
            return [path]
        for first in path.parent.glob(f"{path.stem}.0-of-*.safetensors"):
            count = int(first.suffixes[0].rpartition("-")[2])
            parts = [_part(path, rank, count) for rank in range(count)]
            if all(part.is_file() for part in parts):
                return parts
        return []

    def opened(self, number: int) -> dict[int, Any]:
        """The open file of each sample of a chunk. Raises TrtspecError for a damaged one."""
        if number not in self._open:
            if not self.files(number):
                self._compute(number)
            self._open[number] = {}
            for path in self.files(number):
                try:
                    file = safe_open(path, "pt")
                except (OSError, SafetensorError) as error:
                    raise TrtspecError(
                        f"TS-FEATURES-DUMP {path} is damaged ({error})",
                        "remove it: the run makes it again",
                    ) from None
                self._open[number] |= {int(name.partition(".")[0]): file for name in file.keys()}  # noqa: SIM118
        return self._open[number]

    def _compute(self, number: int) -> None:
        world, path = self.world, self.path(number)
        for passed in range(
            number - 1
        ):  # the chunk just before stays, for a run that resumes some steps back
            if passed >= self.kept:
                self._open.pop(passed, None)
                for file in self.files(passed) if world.main else ():
                    file.unlink(missing_ok=True)
        tokens, layers = (
            sum(len(self.samples[index].tokens) for index in self.chunks[number]),
            self.stream.num_layers,
        )
        say(
            f"Chunk {number + 1} of {len(self.chunks)}: {tokens:,} tokens through the target's {layers} layers"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        mine = _part(path, world.rank, world.size)
        for unfinished in path.parent.glob(f".{mine.name}.*.partial"):
            unfinished.unlink()
        if not mine.is_file():
            self._write(mine, sorted(self.chunks[number]))
        while not self.files(number):  # the launcher ends every process when one dies
            time.sleep(POLL)

    def _write(self, path: Path, every: list[int]) -> None:
        """One file for this process's part of the samples `every`, complete or absent."""
        lengths = {index: len(self.samples[index].tokens) for index in every}
        groups = [
            [every[place] for place in group] for group in similar_length(list(lengths.values()))
        ]
        groups = groups[self.world.rank :: self.world.size]
        batches = [padded([self.samples[index] for index in group]) for group in groups]
        names, indices = (
            ("hidden", *map(str, self.aux_layers)),
            [index for group in groups for index in group],
        )
        kept: Layout = {
            f"{i}.{name}": ("BF16", (lengths[i], self.hidden_size))
            for i in indices
            for name in names
        }

        def keep(name: str, number: int, output: Tensor) -> None:
            for row, index in enumerate(groups[number]):
                file.write(f"{index}.{name}", output[row, : lengths[index]].to(torch.bfloat16))

        def on_output(layer: int, number: int, output: Tensor) -> None:
            if layer in self.aux_layers:
                keep(str(layer), number, output)

        budget = machine.free_memory() / 2 / self.world.local_size
        states_name = PlainName(f"states-{self.world.rank}")
        where = self.directory / states_name
        try:
            with (
                ShardFile(path, kept) as file,
                States(
                    batches, self.hidden_size, self.stream.dtype, budget=budget, directory=where
                ) as states,
            ):
                self.stream.embed(batches, states)
                self.stream.run(batches, states, on_output=on_output)
                norm = self.stream.model_without_layers("norm.weight").norm
                with torch.inference_mode():
                    for number in range(len(batches)):
                        keep("hidden", number, norm(states.get(number).to(self.stream.device)))
        finally:
            remove_folder(self.directory, states_name)


def _part(path: Path, rank: int, count: int) -> Path:
    """The file that process `rank` of `count` writes of the chunk `path`."""
    return path if count == 1 else path.with_name(f"{path.stem}.{rank}-of-{count}.safetensors")


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
    with LayerStream(target_dir, dtype=dtype) as stream:
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
    ids = torch.tensor([tokens])
    output = stream.model_without_layers("embed.weight").embed(ids)
    outputs = []
    for index in range(layers):
        output = stream.load(index)(output, stream.attention_step(ids))
        outputs.append(output[0].float())
    return outputs
