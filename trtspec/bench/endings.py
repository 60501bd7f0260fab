"""Rows of the gate on how answers end: at a stop string, and with the `finish_reason` of the server without speculation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trtspec.bench.asking import NOT_ASKED, declined
from trtspec.bench.battery import stop_word
from trtspec.bench.gate import SHOWN, UNLIKELY, CheckResult, more_often, pass_or_fail, result
from trtspec.bench.transcript import Recording, ToolReply, Transcript
from trtspec.bench.visible import by_question, own_rounding, parted

BOUNDARY = {"stop", "length"}  # an end of the answer in the last place of the limit is both


def check_stops(got: Recording, expected: Recording | None, limit: float, same_weights: bool = True) -> CheckResult:
    """An answer ends where a stop string begins, and not before; where it took another way than the answer without the
    string, it did so at a near-tie under `limit`. The plain server's answers count for that only with `same_weights`."""
    name, remedy = "stop-strings", "ask with speculation off; a stop string may lie across the end of a draft"
    mine, theirs = ([reply for reply in side.stops if reply.error != NOT_ASKED] if side else [] for side in (got, expected))
    if not mine:
        return result(name, "skipped", "no answer is long enough to be cut by a stop string")
    also = {q for q, fault in _stop_faults(expected, theirs).items() if fault} if expected else set()
    found = {question: fault for question, fault in _stop_faults(got, mine).items() if question not in also}
    refused = [reply for reply in mine if reply.error]
    alone = [reply for reply in refused if _refused_stop(reply, mine, theirs)]
    ways = _other_ways(got, found, expected if same_weights else None, limit)
    moved = [fault for fault in _stop_faults(expected, theirs).values()] if expected else []
    p = more_often(len(ways["unjudged"]), len(found), moved.count(None), len(moved))
    faults = [f"{reply.question}: {'refused' if declined(reply.error) else 'failed'}: {reply.error}" for reply in alone]
    faults += [f"{question}: {fault}" for question, fault in found.items() if fault]
    faults += [f"{question}: it is another text where the target is sure of itself" for question in ways["real"]]
    if p < UNLIKELY:
        faults += [f"{question}: it is another text than without the stop string" for question in ways["unjudged"]]
    judged = sum(fault is not None for fault in found.values()) + len(alone) + len(faults_of_ways(ways, p))
    if not judged:
        message = "every answer parted from the earlier one before its stop string"
        message = f"not shown: the server refused stop: {refused[0].error}" if refused else message
        message += "; the plain server is wrong as well" if also else ""
        return result(name, "skipped", message)
    message = f"{judged - len(faults)} of {judged} answers end at their stop string"
