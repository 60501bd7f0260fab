"""The target's states for one run, from the source that `features` names: memory, layers, servers or a directory.

Every source gives a `Features`; which one it was does not show in the loss curve. States that another program made are
compared with the target's own first layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from trtspec import machine
from trtspec.checkpoint.identity import identity_digest
from trtspec.errors import TrtspecError
from trtspec.heads.training import module as train
from trtspec.heads.training.features import (
    DumpedFeatures,
    Features,
    HeldFeatures,
    compute_features,
    dump_features,
    dumps_of,
    states_of,
)
from trtspec.heads.training.features_server import ServedFeatures, check_first_layers, served_model
from trtspec.heads.training.features_stream import open_stream, stream_features
from trtspec.heads.training.options import Dumped, Served, Streamed, TrainingRun, TrainOptions
from trtspec.heads.training.plan import MEMORY_SHARE, TrainingPlan
from trtspec.heads.training.processes import ALONE, World
from trtspec.heads.training.samples import Sample
from trtspec.models.kimi import KimiModel
from trtspec.models.stream import LayerStream
from trtspec.models.weights import load_target
from trtspec.report import progress_bar


def open_states(
    run: TrainingRun, model: KimiModel, plan: TrainingPlan, options: TrainOptions, world: World
) -> Features:
    """The states of all samples. A stream computes them and a server sends them while the head trains."""
    match plan.features:
        case Served(urls):
            longest = max(len(sample.tokens) for sample in plan.samples)
            client = partial(train.state_client, urls, served_model(urls, longest), longest)
            client()  # what is missing is missed before the run begins
            served = ServedFeatures(plan.samples, model.spec, plan.spec.num_aux, model.norm, client)
            shortest = min(range(len(plan.samples)), key=lambda index: len(plan.samples[index].tokens))
            _compare(run, plan, served, shortest, model.dtype, world)
            return served
        case Streamed():
            stream = open_stream(run.target_dir, model.dtype, str(model.embed.weight.device), world)
            return stream_features(stream, plan, options, run.work, identity_digest(run.target_dir), world=world)
    features = gather_features(model, plan, run.target_dir, world)
    if isinstance(features, DumpedFeatures) and features.unnamed is not None:
        _compare(run, plan, features, features.unnamed, model.dtype, world)
    return features


def gather_features(model: KimiModel, plan: TrainingPlan, target_dir: Path, world: World = ALONE) -> Features:
    """The states of all samples: from dumps where they exist, else computed (and dumped when a directory was given)."""
    if plan.dumped is not None:
        return plan.dumped
    layers = plan.spec.aux_layers or ()
    with progress_bar("states of the target", plan.tokens / world.size, "tokens") as bar:
        if not isinstance(plan.features, Dumped):
            return _compute_together(model, plan.samples, layers, bar.advance, world)
        directory, of = plan.features.directory, states_of(target_dir, layers)
        dump_features(model, plan.samples, directory, of, bar.advance, slice(world.rank, None, world.size))
    world.wait()
    dumped = dumps_of(plan.samples, directory, model.spec, plan.spec.num_aux, of)
    if dumped is None:
        raise TrtspecError(
            f"TS-FEATURES-SHARED {directory} lacks states that another process computed",
            "put it on storage that all nodes share",
        )
    return dumped


def _compute_together(
    model: KimiModel, samples: list[Sample], layers: tuple[int, ...], advance: Callable[[int], None], world: World
) -> HeldFeatures:
    """Each process runs the target over its part of the samples and hears the states of the others."""
    if world.size == 1:
        return compute_features(model, samples, layers, advance)
    bounds = [len(samples) * rank // world.size for rank in range(world.size + 1)]
    mine = compute_features(model, samples[bounds[world.rank] : bounds[world.rank + 1]], layers, advance)
    whole = HeldFeatures(samples, model.spec.hidden_size, len(layers))
    for source in range(world.size):
        rows = slice(whole.offsets[bounds[source]], whole.offsets[bounds[source + 1]])
        if source == world.rank:
            whole.hidden[rows], whole.aux[rows] = mine.hidden, mine.aux
        for part in (whole.hidden[rows], whole.aux[rows]):
            world.broadcast(part.view(torch.uint8), source)  # gloo knows no bf16
    return whole


def _compare(
    run: TrainingRun, plan: TrainingPlan, features: Features, index: int, dtype: torch.dtype, world: World
) -> None:
    """One sample of states that another program made, with the target's own first layers."""
    if world.main:
        aux, layers = features.states(index)[1], plan.spec.aux_layers or ()
        check_first_layers(run.target_dir, features.samples[index], aux, layers, dtype)


def open_target(target_dir: Path, plan: TrainingPlan, dtype: torch.dtype, device: str) -> tuple[KimiModel, bool]:
    """(the target, whether it has its layers). Embeddings, final norm and lm_head suffice where the states come from
    another source: streamed, from a server, or from dumps of a target that does not fit."""
    stored = sum(path.stat().st_size for path in target_dir.glob("*.safetensors"))
    large = stored > MEMORY_SHARE * machine.free_memory()
    apart = not plan.features.needs_layers or (large and plan.dumped is not None)
    if not apart:
        return load_target(target_dir, dtype=dtype, device=device), True
    with LayerStream(target_dir, dtype=dtype, device=device) as stream:
        return stream.ends(), False
