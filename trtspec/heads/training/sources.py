"""Where the target's states come from: the target in memory, its layers one at a time, an engine's dumps, or live
servers.

Every source gives a `Features`; which one it was does not show in the loss curve.
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
    """The states of all samples, from the source that the plan names. `journal` holds the servers of earlier states.

    A stream computes them and a server sends them while the head trains. Several processes stream what one process
    would keep in memory: each computes a part, and none holds all.
    """
    source, layers = plan.features, plan.spec.aux_layers or ()
    if source.way == "memory" and ranks.size == 1:
        with progress_bar("states of the target", plan.tokens, "tokens") as bar:
            return compute_features(model, plan.samples, layers, bar.advance)
    if source.way in ("memory", "stream"):
        stream = open_stream(run.target_dir, model.dtype, str(model.embed.weight.device), ranks)
        return stream_features(
            stream, plan, options, run.work, identity_digest(run.target_dir), ranks=ranks
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
    if ranks.main:
        shortest = lengths.index(min(lengths))
        aux = features.states(shortest)[1]
        check_first_layers(run.target_dir, plan.samples[shortest], aux, layers, model.dtype)
    return features
