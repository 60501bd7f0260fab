"""Speed-up over draft length, one line per concurrency, as an image file. Needs matplotlib (the `report` extra)."""

from __future__ import annotations

from pathlib import Path

from trtspec.errors import UsageError
from trtspec.planning.points import LayoutPlan

FORMATS = (".png", ".svg", ".pdf")


def check_format(path: Path) -> None:
    if path.suffix not in FORMATS:
        raise UsageError(
            f"{path.name}: a plot is one of {', '.join(FORMATS)}", f"for example -o {path.stem or 'plan'}.svg"
        )


def draw(item: LayoutPlan, title: str, path: Path) -> None:
    """Speed-up where acceptance is known, else what a step costs in plain steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    known = item.acceptance is not None
    for concurrency in item.workload.concurrency:
        points = item.at(concurrency)
        values = [point.speedup or 1.0 if known else point.cost_ratio for point in points]
        axes.plot([point.draft_len for point in points], values, marker="o", label=f"concurrency {concurrency}")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("draft tokens per step")
    axes.set_ylabel("speed-up over plain decoding" if known else "cost of a step, in plain steps")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
