"""The reference backend behind `trtspec serve --backend reference`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from trtspec.errors import MissingDependency, UsageError


@dataclass(frozen=True)
class ReferenceRequest:
    """What the user typed. None leaves the choice to the server."""

    target: str
    head: str | None
    host: str
    port: int
    dtype: str
    device: str
    speculation: str | None
    draft_len: int | None
    max_batch_size: int | None
    max_seq_len: int | None
    served_model_name: str | None

    def drafter(self) -> str | None:
        """eagle3, prompt-lookup, or None for no speculation; raises UsageError where the head does not fit that."""
        wanted = self.speculation or ("eagle3" if self.head else "none")
        if wanted == "eagle3" and not self.head:
            raise UsageError("--speculation eagle3 needs a head", "pass --head")
        if wanted != "eagle3" and self.head:
            raise UsageError(f"--head is not used with --speculation {wanted}", "leave one of the two out")
        return None if wanted == "none" else wanted

    def sizes(self) -> dict[str, int]:
        sizes = {
            "draft_len": self.draft_len,
            "max_batch_size": self.max_batch_size,
            "max_seq_len": self.max_seq_len,
        }
        return {key: value for key, value in sizes.items() if value is not None}


def refuse_trtllm_options(options: dict[str, Any]) -> None:
    """What only trtllm-serve takes is refused, never ignored. `options`: flag -> value as typed (None: not typed)."""
    for flag, value in options.items():
        if value is not None:
            raise UsageError(f"{flag} belongs to the trtllm backend", "leave it out, or pass --backend trtllm")


def launch_reference(request: ReferenceRequest) -> None:
    """Fetches what is not here, then serves until a signal ends it."""
    from trtspec.checkpoint.hub import resolve
    from trtspec.trtllm.names import require_head

    drafter = request.drafter()
    try:
        from trtspec.engine.server import ServerOptions, run
    except ModuleNotFoundError as missing:
        raise MissingDependency(
            f"the reference backend needs {missing.name}", "pip install 'trtspec[reference]'"
        ) from None
    target = resolve(request.target)
    head = resolve(request.head) if request.head else None
    if target.path is None or (head is not None and head.path is None):
        raise UsageError(f"{request.target} is not on this machine", "pass its directory")
    if head is not None:
        require_head(head)
    sizes: dict[str, Any] = request.sizes()
    run(
        target.path,
        head.path if head else None,
        ServerOptions(
            host=request.host,
            port=request.port,
            dtype=request.dtype,
            device=request.device,
            drafter=drafter,  # type: ignore[arg-type]
            served_model_name=request.served_model_name or target.hub_id,
            **sizes,
        ),
    )


def show_reference(request: ReferenceRequest, json_: bool) -> None:
    """The same command with every choice written out; names are looked up, nothing is fetched."""
    import shlex

    from trtspec.checkpoint.hub import resolve
    from trtspec.report import print_json
    from trtspec.trtllm.names import require_head

    drafter = request.drafter() or "none"
    if resolve(request.target, allow_download=False).kind != "target":
        raise UsageError(f"{request.target} is not a target", "the target comes first, the head with --head")
    if request.head:
        require_head(resolve(request.head, allow_download=False))
    argv = [sys.executable, "-m", "trtspec", "serve", request.target, "--backend", "reference"]
    argv += ["--head", request.head] if request.head else []
    argv += ["--host", request.host, "--port", str(request.port), "--dtype", request.dtype]
    argv += ["--device", request.device, "--speculation", drafter]
    for key, value in request.sizes().items():
        argv += [f"--{key.replace('_', '-')}", str(value)]
    argv += ["--served-model-name", request.served_model_name] if request.served_model_name else []
    if json_:
        print_json({"argv": argv, "env": {}, "config": {}, "problems": []})
    else:
        sys.stdout.write(shlex.join(argv) + "\n")
