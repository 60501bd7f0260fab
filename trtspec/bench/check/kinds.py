"""Table of the faults that `trtspec check` looks for.

The probes, the rows of the report, the verdict and docs/reference/fault-kinds.md use the table.

A probe is what a request tests. Its name is the `kind` of an exchange, the `run` of an exchange
that repeats a request, or a property of all answers.
"""

from __future__ import annotations

from typing import NamedTuple

TABLE = """\
| row | kind | what a user sees | probes |
|---|---|---|---|
| TS-CHECK-ANSWERS | failures | an error, or half an answer | request |
| TS-CHECK-ANSWERS | streams | a text that comes all at once | streams |
| TS-CHECK-PROMPTS | text | another question is answered | text |
| TS-CHECK-PROMPTS | system, thinking | instructions without effect | prompt reasoning |
| TS-CHECK-PROMPTS | second turn | the first turn is forgotten | turn-2 |
| TS-CHECK-PROMPTS | call | a function that is offered is unknown | call |
| TS-CHECK-PROMPTS | follow-up | the result of a call is unknown | follow-up |
| TS-CHECK-PROMPTS | special names | names of special tokens in a text end the turn | special |
| TS-CHECK-PROMPTS | white space | leading blanks and line ends change | blanks |
| TS-CHECK-PROMPTS | composed characters | accents and wide letters change | composed |
| TS-CHECK-PROMPTS | content in parts | the model reads how the parts are written | parts |
| TS-CHECK-PROMPTS | long | the beginning is forgotten | limit long |
| TS-CHECK-GREEDY | text | words that the model would not write | text prompt stop |
| TS-CHECK-GREEDY | long | the same with long documents | long |
| TS-CHECK-GREEDY | near the limit | the same with a prompt near the server's limit | limit |
| TS-CHECK-GREEDY | long answer | an answer that decays | answer |
| TS-CHECK-GREEDY | second turn | the same in a second turn | turn-2 |
| TS-CHECK-GREEDY | call | another function or argument | call follow-up |
| TS-CHECK-GREEDY | warm | the same with a known prompt, from the prefix cache | warm |
| TS-CHECK-GREEDY | crowd | the same among many requests | crowd |
| TS-CHECK-GREEDY | after the crowd | the same after many requests | later |
| TS-CHECK-SAMPLED | distribution | too tame or too wild: temperature, top_k, rejected drafts |\
 places |
| TS-CHECK-SAMPLED | tail | rare words never come: a top_p that nobody asked for | tail |
| TS-CHECK-SAMPLED | n | its choices are equal, or fewer | n |
| TS-CHECK-SAMPLED | seed | it does not repeat an answer, or all seeds give one | seed |
| TS-CHECK-TRANSPORT | text | a text other than its tokens, whole or streamed | text |
| TS-CHECK-TRANSPORT | system, thinking | the same behind a system prompt | prompt |
| TS-CHECK-TRANSPORT | second turn | the same in a second turn | turn-2 |
| TS-CHECK-TRANSPORT | long | the same behind a long prompt | limit long |
| TS-CHECK-TRANSPORT | reasoning | thoughts in the text, or text in the thoughts | reasoning |
| TS-CHECK-TRANSPORT | calls | a call that is lost or altered | call follow-up |
| TS-CHECK-TRANSPORT | several calls | calls in a row that lose an argument, or each other | calls |
| TS-CHECK-TRANSPORT | spoken call | the text before a call is lost | spoken |
| TS-CHECK-TRANSPORT | arguments | arguments of another order, spelling or schema | arguments |
| TS-CHECK-TRANSPORT | characters | emoji, accents or Han that break | characters |
| TS-CHECK-TRANSPORT | json | an answer outside its schema | json |
| TS-CHECK-TRANSPORT | stop | a text that runs on, or ends early | stop |
| TS-CHECK-TRANSPORT | several stops | a stop string after the first is ignored | stops |
| TS-CHECK-TRANSPORT | begun stop | the end of a text is lost that begins a stop string | begun |
| TS-CHECK-TRANSPORT | finish reason | length for stop, or stop for length | finish |
| TS-CHECK-TRANSPORT | usage | a wrong bill | usage |
| TS-CHECK-TRANSPORT | ids of calls | calls that share an id or have none | ids |
| TS-CHECK-TRANSPORT | picture | no answer to a picture | picture |
| TS-CHECK-PARAMETERS | max_tokens | no effect | max_tokens |
| TS-CHECK-PARAMETERS | min_tokens | no effect | min_tokens |
| TS-CHECK-PARAMETERS | logit_bias | no effect | logit_bias |
| TS-CHECK-PARAMETERS | stop_token_ids | no effect | stop_token_ids |
| TS-CHECK-PARAMETERS | frequency_penalty | no effect | frequency_penalty |
| TS-CHECK-PARAMETERS | presence_penalty | no effect | presence_penalty |
| TS-CHECK-PARAMETERS | repetition_penalty | no effect | repetition_penalty |
| TS-CHECK-PARAMETERS | top_k | no effect | top_k |
| TS-CHECK-PARAMETERS | top_p | no effect | top_p |
| TS-CHECK-PARAMETERS | min_p | no effect | min_p |
| TS-CHECK-ACCEPTANCE | floor | slow answers | floor |
| TS-CHECK-ACCEPTANCE | forced | the same number of tokens in each step | forced |
| TS-CHECK-ACCEPTANCE | warm | slower with a known prompt | warm |
| TS-CHECK-ACCEPTANCE | crowd | slower among many requests | crowd |
| TS-CHECK-ACCEPTANCE | after the crowd | slower after many requests | later |
| TS-CHECK-ACCEPTANCE | long | no drafts behind a long prompt | long |
"""
# faults that check does not look for
NEVER_ASKED = (
    "log-probabilities, cancelled requests, prompts beyond the limit, penalties of a prompt's own "
    "words, counters of drafts, stops in the step that reaches max_tokens"
)


class FaultKind(NamedTuple):
    """Fault that check looks for: a line of TABLE.

    code: problem code of the report's row that shows the fault
    name: short name of the fault
    symptom: effect that a user of the server sees
    probes: names of the probes that look for the fault, separated by blanks
    """

    code: str
    name: str
    symptom: str
    probes: str

    @property
    def row(self) -> str:
        """Name of the report's row that shows the fault, such as `greedy`."""
        return self.code.removeprefix("TS-CHECK-").lower()


KINDS = [FaultKind(*line.strip("| ").split(" | ")) for line in TABLE.splitlines()[2:]]
CODES = {fault.row: fault.code for fault in KINDS}


def page() -> str:
    """Returns the text of docs/reference/fault-kinds.md."""
    title = "# Kinds of faults\n\nWhat `trtspec check` looks for, by row.\n\n"
    return f"{title}{TABLE}\nNever asked: {NEVER_ASKED}.\n"
