"""Reading without a model: a page's sentences, ranked by BM25 against the question and the query that found it."""

import math
import re
from collections import Counter

from scrl.handler.reading_agent.reader import ReadTask
from scrl.handler.web_search_agent.local_index import content_words

MAX_NOTES = 2000  # characters taken of a page
MAX_SENTENCE = 400  # characters; a longer one is cut into pieces, at a space where it has one
_K1, _B = 1.2, 0.75

# After a full stop (and a closing quote) at a space, after one of the scripts that write none, at the end of a line.
_ENDS = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)\]]))\s+|(?<=[。！？])|\n+")


class ExtractiveReader:
    """Takes the best sentences, up to MAX_NOTES characters, in the page's order. A page that fits is taken whole."""

    name = "extractive"

    def read(self, task: ReadTask) -> list[str]:
        """See Reader. Takes milliseconds and keeps no deadline."""
        sentences = [s for s in dict.fromkeys(split_sentences("\n".join(task.views))) if s not in task.known]
        if sum(map(len, sentences)) <= MAX_NOTES:
            return sentences
        scores = bm25(f"{task.question}\n{task.query}", sentences)
        # Where nothing matches, the page's beginning says what it is about: equal scores keep the page's order.
        best = sorted(range(len(sentences)), key=lambda i: -scores[i])
        matching = [i for i in best if scores[i] > 0] or best
        taken, left = [], MAX_NOTES
        for i in matching:
            if len(sentences[i]) <= left:
                taken.append(i)
                left -= len(sentences[i])
            if left < 20:
                break
        return [sentences[i] for i in sorted(taken)]

    def close(self) -> None:
        pass


def split_sentences(text: str) -> list[str]:
    """The sentences of ``text``, none empty, none over MAX_SENTENCE characters. In linear time."""
    pieces = []
    for sentence in _ENDS.split(text):
        sentence = sentence.strip()
        while len(sentence) > MAX_SENTENCE:
            cut = sentence.rfind(" ", MAX_SENTENCE // 2, MAX_SENTENCE)
            cut = cut if cut > 0 else MAX_SENTENCE
            pieces.append(sentence[:cut])
            sentence = sentence[cut:].lstrip()
        if sentence:
            pieces.append(sentence)
    return pieces


def bm25(query: str, documents: list[str]) -> list[float]:
    """BM25 of each document (Robertson and Zaragoza 2009, eq. 3.15; Lucene's idf, which is never negative).

    ``Σ_t n_t · ln(1 + (N − df_t + ½)/(df_t + ½)) · tf/(tf + k1·(1 − b + b·length/mean length))`` over the query's
    terms t, each as often as it stands there (n_t).
    """
    terms = Counter(content_words(query[:10_000]))
    counted = [Counter(content_words(document)) for document in documents]
    lengths = [counts.total() for counts in counted]
    mean = sum(lengths) / len(lengths) if any(lengths) else 1.0
    scores = [0.0] * len(documents)
    for term, times in terms.items():
        frequency = sum(term in counts for counts in counted)
        idf = math.log1p((len(documents) - frequency + 0.5) / (frequency + 0.5))
        for i, counts in enumerate(counted):
            if tf := counts[term]:
                scores[i] += times * idf * tf / (tf + _K1 * (1 - _B + _B * lengths[i] / mean))
    return scores
