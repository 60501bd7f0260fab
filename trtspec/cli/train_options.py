"""The options of `trtspec train`, so that the command itself reads on one screen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Option = typer.Option

TargetArgument = Annotated[str | None, typer.Argument(help="The target: a checkpoint directory or hub id.")]
DataArgument = Annotated[
    Path | None, typer.Argument(help="Conversations answered by the target (jsonl), or ModelOpt dumps.")
]
OutputOption = Annotated[Path, Option("--output", "-o", help="Directory of the new head.")]
AttentionOption = Annotated[Literal["mha", "mla"] | None, Option(help="Attention of the head [mla].")]
EagleOption = Annotated[Literal["3", "3.1"] | None, Option(help="EAGLE version [3].")]
DraftVocabOption = Annotated[int | None, Option(min=1, help="Draft from the most frequent tokens only.")]
IntermediateOption = Annotated[int | None, Option(min=1, help="Width of the MLP [the target's].")]
AuxLayersOption = Annotated[str | None, Option(help="Captured layer outputs, 0-based [1,L//2-1,L-4].")]
TttOption = Annotated[int | None, Option(min=1, help="Training-time-test steps [3].")]
FeaturesOption = Annotated[
    str | None,
    Option(help="The target's states: auto, memory, a directory, stream, stream:DIR or a server's URL [auto]."),
]
EpochsOption = Annotated[int | None, Option(min=1, help="Passes over the data [3].")]
StepsOption = Annotated[int | None, Option(min=1, help="Optimizer steps, in place of epochs.")]
LrOption = Annotated[float | None, Option(help="Peak learning rate [by width: 2e-3 at 256, 7e-5 at 7168].")]
SeqLenOption = Annotated[int | None, Option(min=8, help="Longest sequence in tokens [2048].")]
BatchOption = Annotated[int | None, Option(min=1, help="Sequences per step, over all processes [8].")]
SeedOption = Annotated[int | None, Option(help="Of the initial weights and the order of the data [0].")]
AnswerOnlyOption = Annotated[
    bool | None, Option("--answer-only/--all-tokens", help="Count the loss on the target's own tokens only [all].")
]
InitOption = Annotated[Path | None, Option(help="Start from this head's weights.")]
ConfigOption = Annotated[
    Path | None, Option(help="YAML file of these options, target and data; the command line wins.")
]
SaveEveryOption = Annotated[int, Option(min=1, help="Steps between saved states.")]
DeviceOption = Annotated[str, Option(help="cpu or cuda.")]
AcceptancePromptsOption = Annotated[int, Option(min=0, help="Held-out prompts of the final measurement; 0: none.")]
GpuOption = Annotated[str, Option(help="GPU that --dry-run reckons with.")]
RestartOption = Annotated[bool, Option("--restart", help="Forget an interrupted run.")]
