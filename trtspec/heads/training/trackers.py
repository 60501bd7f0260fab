"""Experiment trackers, through accelerate's own: their names, packages and settings are its business.

A tracker reads its account from its own environment variables or login file (WANDB_API_KEY, MLFLOW_TRACKING_URI, ...);
nothing of the kind passes through a command line here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trtspec.errors import MissingDependency, UsageError
from trtspec.heads.training.curve import CurvePoint
from trtspec.heads.training.options import TrainingRun, TrainOptions
from trtspec.heads.training.processes import World

PROJECT = "trtspec-train"


def check_trackers(names: tuple[str, ...]) -> None:
    """Raises UsageError for a tracker that accelerate does not know, MissingDependency for one without its package."""
    if not names:
        return
    try:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    except ImportError as missing:
        raise MissingDependency(
            f"--log-with needs accelerate ({missing})", "install it: pip install 'trtspec[modelopt]'"
        ) from None
    known, there = sorted(map(str, LOGGER_TYPE_TO_CLASS)), {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in known:
            raise UsageError(f"--log-with {name}: no such tracker", f"one of {', '.join(known)}")
        if name not in there:
            package = {"comet_ml": "comet-ml"}.get(name, name)
            raise MissingDependency(f"--log-with {name}: {package} is not installed", f"pip install {package}")


@contextmanager
def tracked(run: TrainingRun, options: TrainOptions, world: World) -> Iterator[Callable[[CurvePoint], None]]:
    """The function that tells every step to the run's trackers, while the block runs; one that does nothing where there
    are none, and in all processes but the main one."""
    if not (run.log_with and world.main):
        yield lambda _: None
        return
    check_trackers(run.log_with)
    from accelerate import Accelerator

    accelerator = Accelerator(
        log_with=list(run.log_with), project_dir=run.output, cpu=not run.device.startswith("cuda")
    )
    told = {key: value for key, value in options.to_dict().items() if isinstance(value, (str, int, float, bool))}
    accelerator.init_trackers(PROJECT, config=told | {"target": run.target_dir.name, "data": run.data})
    try:
        yield lambda point: accelerator.log(point.figures(), step=point.step)
    finally:
        accelerator.end_training()
