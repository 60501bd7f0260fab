"""Text streams of answers: stop strings in every possible split."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.sequence import TextStream

WORDS = st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=300)
@given(text=st.text("ab\u00e9", max_size=30), stop=WORDS, sizes=st.lists(st.integers(1, 5)))
def test_any_grouping_cuts_at_the_first_completed_stop(
    tokenizer: KimiTokenizer, text: str, stop: list[str], sizes: list[int]
) -> None:
    ids = tokenizer.encode(text)
    stream, shown, used = TextStream(tokenizer, stop), "", 0
    rest = list(ids)
    for size in [*sizes, len(ids) or 1]:
        piece, taken = stream.push(rest[:size])
        shown, used, rest = shown + piece, used + taken, rest[size:]
        assert not any(word in shown for word in stop)
        if stream.stopped or not rest:
            break
    shown += stream.finish()
    first = next(
        (
            n
            for n in range(len(ids) + 1)
            if any(word in tokenizer.decode(ids[:n]).rstrip("\ufffd") for word in stop)
        ),
        None,
    )
    if first is None:
        assert (shown, used, stream.stopped) == (text, len(ids), False)
    else:
        complete = tokenizer.decode(ids[:first])
        assert stream.stopped and used == first
        assert shown == complete[: min(complete.find(word) for word in stop if word in complete)]
