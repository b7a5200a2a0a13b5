"""Samples in the terminal: supervised tokens in colour, and how many of the tokens they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from drafttrain.corpus.chat import ChatTokenizer
from drafttrain.corpus.dataset import Corpus
from drafttrain.corpus.types import Sample

_CONTEXT, _FIRST, _LABELS = "dim", "bold black on yellow", ("black on green", "black on cyan")


def sample_text(sample: Sample, tokenizer: ChatTokenizer) -> Text:
    """The sample's text. Context is dim. In a span the first token, which no draft proposes, is yellow; the
    labels are green and cyan in turn, so that token boundaries show.
    """
    text = Text()
    position = 0
    for first, last in sample.spans:
        text.append(_decode(tokenizer, sample, position, first), style=_CONTEXT)
        for offset, piece in enumerate(_pieces(tokenizer, sample, first, last + 1)):
            style = _FIRST if offset == 0 else _LABELS[offset % 2]
            text.append(piece.replace("\n", "⏎\n"), style=style)
        position = last + 1
    text.append(_decode(tokenizer, sample, position, len(sample.ids)), style=_CONTEXT)
    return text


def inspect_samples(samples: Sequence[Sample], tokenizer: ChatTokenizer) -> Group:
    """Each sample under a heading with its share of supervised tokens."""
    parts: list[Text] = []
    for sample in samples:
        share, spans = sample.supervised / len(sample.ids), len(sample.spans)
        counts = f"{len(sample.ids)} tokens, {spans} span{'' if spans == 1 else 's'}, {share:.1%} supervised"
        parts.append(Text(f"── {sample.id}: {counts}"))
        parts += [sample_text(sample, tokenizer), Text()]
    return Group(*parts)


def corpus_table(corpus: Corpus) -> Table:
    """Counts of a corpus: conversations, samples, rejects by reason, tokens, share of supervised tokens."""
    table = Table("corpus", "", show_header=False)
    table.add_row("conversations", f"{corpus.conversations:,}")
    table.add_row("samples", f"{len(corpus.samples):,}")
    for reason, count in Counter(reject.reason for reject in corpus.rejects).most_common(8):
        table.add_row("rejected", f"{count:,}: {reason}")
    table.add_row("tokens", f"{corpus.tokens:,}")
    table.add_row("supervised", f"{corpus.supervised:,} ({corpus.supervised / corpus.tokens:.1%})")
    return table


def _decode(tokenizer: ChatTokenizer, sample: Sample, first: int, end: int) -> str:
    return str(tokenizer.decode(sample.ids[first:end].tolist(), skip_special_tokens=False))


def _pieces(tokenizer: ChatTokenizer, sample: Sample, first: int, end: int) -> list[str]:
    """Text of each token; a character that spans several tokens is given to the last of them."""
    pieces, pending = [], first
    for index in range(first, end):
        piece = _decode(tokenizer, sample, pending, index + 1)
        if piece.endswith("�") and index + 1 < end:
            pieces.append("")
            continue
        pieces.append(piece)
        pending = index + 1
    return pieces
