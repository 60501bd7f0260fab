"""One conversion shared by several machines: `--shard i/n` for each of them, `--merge` once they are done.

Part i converts every n-th shard file, counted from i, and keeps a journal of its own in the common output directory.
The lock on a journal refuses a second machine on the same part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtspec.checkpoint.journal import Journal, differences, header_of
from trtspec.errors import TrtspecError, UsageError
from trtspec.quant.conversion import Conversion
from trtspec.quant.output import JOURNAL_NAME, JOURNALS

NAMES = re.compile(r"\.trtspec-quantize\.(\d+)-of-(\d+)\.jsonl")


def parse_part(text: str) -> tuple[int, int]:
    """`i/n`, i from 0 as in a Kubernetes indexed Job; raises UsageError."""
    index, count = (int(part) for part in text.split("/")) if re.fullmatch(r"\d+/\d+", text) else (0, 0)
    if not 0 <= index < count:
        raise UsageError(f"--shard {text!r} is not i/n with 0 <= i < n", "for example --shard 0/4")
    return index, count


def journal_name(part: tuple[int, int] | None) -> str:
    return JOURNAL_NAME if part is None else f".trtspec-quantize.{part[0]}-of-{part[1]}.jsonl"


def part_of(conversion: Conversion, part: tuple[int, int] | None) -> Conversion:
    """The conversion with this part's shard files only."""
    if part is None:
        return conversion
    plans = conversion.plans[part[0] :: part[1]]
    if not plans:
        text = f"--shard {part[0]}/{part[1]} has no work: the source has {len(conversion.plans)} shard files"
        raise UsageError(text, f"use at most {len(conversion.plans)} parts")
    return replace(conversion, plans=plans)


def parts_there(output: Path) -> dict[int, set[int]]:
    """Part numbers whose journals lie in `output`, by number of parts."""
    found: dict[int, set[int]] = {}
    for path in output.glob(JOURNALS):
        if match := NAMES.fullmatch(path.name):
            found.setdefault(int(match[2]), set()).add(int(match[1]))
    return found


def check_sharing(output: Path, part: tuple[int, int] | None, merge: bool, header: dict[str, Any]) -> None:
    """Refuses to mix a whole run with parts, parts of different numbers, and parts begun with another `header`.

    Called once before this run's journal is there, and again when it is locked: of two runs that do not go together
    and start at the same moment, at least one then sees the other.
    """
    there, remove = parts_there(output), f"resume that run, or remove {output}"
    if part is None and not merge and there:
        count = min(there)
        raise UsageError(f"{output} holds a conversion in {count} parts", "pass --shard i/n for a part, or --merge")
    if part is not None and (output / JOURNAL_NAME).exists():
        raise UsageError(f"{output} holds a conversion by one machine", remove)
    if part is not None and there.keys() - {part[1]}:
        raise UsageError(f"{output} holds a conversion in {min(there.keys() - {part[1]})} parts", remove)
    if merge and len(there) != 1:
        raise UsageError(
            f"{output} holds no conversion in parts", "run `trtspec quantize SRC -o OUT --shard i/n` first"
        )
    for count, numbers in there.items():
        for number in sorted(numbers - ({part[0]} if part else set())):
            _compare(output, (number, count), header)


def _compare(output: Path, other: tuple[int, int], header: dict[str, Any]) -> None:
    begun = header_of(output / journal_name(other))
    if begun is not None and (changed := differences(begun, header)):
        raise UsageError(
            f"part {other[0]}/{other[1]} of {output} was begun with something else: {'; '.join(changed)}",
            f"repeat the options of that part, or remove {output} and start all parts again",
        )


@contextmanager
def journal_of(
    output: Path, part: tuple[int, int] | None, header: dict[str, Any], *, restart: bool
) -> Iterator[Journal]:
    """This run's journal, locked, once it is sure that nothing else goes on in `output` that does not go with it."""
    path = output / journal_name(part)
    with Journal(path, header, restart=restart) as journal:
        try:
            check_sharing(output, part, False, header)
        except UsageError:
            if not journal.done:  # the refused run leaves no trace that would refuse its correction
                path.unlink(missing_ok=True)
            raise
        yield journal


@contextmanager
def finished_parts(conversion: Conversion, header: dict[str, Any]) -> Iterator[dict[str, dict[str, Any]]]:
    """Every shard's record from the parts' journals, which stay locked meanwhile.

    Raises UsageError when a part is still running or was begun with something else, TrtspecError when one is missing
    or unfinished.
    """
    (count, numbers), records = next(iter(parts_there(conversion.output).items())), dict[str, dict[str, Any]]()
    missing = sorted(set(range(min(count, len(conversion.plans)))) - numbers)
    if missing:
        text = f"parts {', '.join(f'{number}/{count}' for number in missing)} of {conversion.output} were never begun"
        raise TrtspecError(text, f"run `trtspec quantize` with --shard {missing[0]}/{count}, then --merge again")
    with ExitStack() as stack:
        for number in sorted(numbers):
            path = conversion.output / journal_name((number, count))
            journal = stack.enter_context(Journal(path, header, remedy=f"convert part {number}/{count} again"))
            wanted = [plan.shard for plan in conversion.plans[number::count]]
            if unfinished := [shard for shard in wanted if shard not in journal.done]:
                text = f"part {number}/{count} has not finished {len(unfinished)} shards, first {unfinished[0]}"
                raise TrtspecError(text, f"run `trtspec quantize` with --shard {number}/{count}, then --merge again")
            records |= {shard: journal.done[shard] for shard in wanted}
        yield records
