"""Opens the target's states: from the target in memory or layer by layer, dumps, or live servers.

Every source gives a `Features`. The loss curve does not depend on the source.
"""

from __future__ import annotations

from functools import partial

from trtspec.checkpoint.identity import identity_digest
from trtspec.checkpoint.writer import Journal
from trtspec.heads.training.first_layers import check_first_layers
from trtspec.heads.training.ranks import Ranks
from trtspec.heads.training.served import ServedFeatures, state_servers
from trtspec.heads.training.states import Features, compute_features
from trtspec.heads.training.streamed import open_stream, stream_features
from trtspec.heads.training.train_options import TrainingRun, TrainOptions
from trtspec.heads.training.training_plan import TrainingPlan
from trtspec.models.k2 import KimiModel
from trtspec.report import progress_bar


def open_states(
    run: TrainingRun,
    model: KimiModel,
    plan: TrainingPlan,
    options: TrainOptions,
    ranks: Ranks,
    journal: Journal | None = None,
) -> Features:
    """Opens the hidden states of all samples, from the source that the plan names.

    Raises TrtspecError if the states are not the target's.

    Args:
        journal: journal of the run, which names the servers of earlier states. A resumed run must
            ask the same servers. None in processes other than the main process.
    """
    way = plan.features.way
    samples = plan.samples
    layers = plan.spec.aux_layers or ()
    if way == "memory" and ranks.size == 1:
        with progress_bar("states of the target", plan.tokens, "tokens") as bar:
            return compute_features(model, samples, layers, bar.advance)
    # Several processes stream even for "memory": each computes a share, and no process holds all.
    if way in ("memory", "stream"):
        device = str(model.embed.weight.device)
        stream = open_stream(run.target_dir, model.dtype, device, ranks)
        digest = identity_digest(run.target_dir)
        return stream_features(stream, plan, options, run.work, digest, ranks=ranks)
    lengths = [len(sample.tokens) for sample in samples]
    if way == "server":
        features: Features = _open_served(model, plan, max(lengths), journal)
    else:
        assert plan.dumped is not None
        features = plan.dumped
    if ranks.main:
        # Dumps and servers may have captured another model or other layers.
        shortest = lengths.index(min(lengths))
        aux = features.states(shortest)[1]
        check_first_layers(run.target_dir, samples[shortest], aux, layers, model.dtype)
    return features


def _open_served(
    model: KimiModel, plan: TrainingPlan, longest: int, journal: Journal | None
) -> ServedFeatures:
    """Checks the servers that the plan names, and opens the hidden states that they send.

    Raises TrtspecError if a server does not fit. Raises UsageError if the journal names other
    servers.

    Args:
        longest: number of tokens of the longest sample.
        journal: journal of the run, which records the servers. None: nothing is recorded.
    """
    urls = plan.features.urls
    servers = state_servers(urls, longest)
    if journal is not None:
        identities = {}
        for number, server in enumerate(servers, 1):
            identities[f"server {number}"] = server.identity
        journal.answered_by(identities)
    # The other sources do not need ModelOpt.
    from trtspec.heads.training.module import state_client

    client = partial(state_client, urls, servers[0].model, longest)
    client()  # raises MissingDependency now, not in a thread of the running training
    return ServedFeatures(plan.samples, model.spec, plan.spec.num_aux, model.norm, client)
