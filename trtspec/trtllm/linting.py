"""Who a file is judged for: what the user says, else what the file itself says."""

from __future__ import annotations

from trtspec.trtllm.config import settings_in_argv
from trtspec.trtllm.document import Document
from trtspec.trtllm.finding import Subject
from trtspec.trtllm.intent import parse_intent
from trtspec.trtllm.schema import schema_for
from trtspec.trtllm.subject import choose_version, findable, head_in, load_head, load_target


def subject_of(text: str, *, version: str | None, target: str | None, head: str | None) -> tuple[Subject, str]:
    """The subject and why this version. A head or target that only the file names is used where it can be found."""
    written = parse_intent(text)
    document = Document.parse(text)
    named_head = head_in(document)
    target_name = target or (written.target if written and findable(written.target) else None)
    head_name = head or (named_head if named_head and findable(named_head) else None)
    target_spec = load_target(target_name).spec if target_name else None
    head_spec = load_head(head_name).spec if head_name else None
    if version is None and written is not None:
        chosen, reason = written.version, "the file's first line"
    else:
        chosen, reason = choose_version(version, target_spec, head_spec)
    sizes = settings_in_argv(written) if written is not None else {}
    argv = {key: value for key, value in sizes.items() if not document.has(key)}
    subject = Subject(schema_for(chosen), target_spec, target_name or "", head_spec, head_name or "", argv)
    return subject, reason
