"""What becomes of a sequence whose request forbids every token.

Each constraint alone leaves something; together they may not: a grammar is at its end and ``min_tokens`` forbids to
end, or the only text that it allows is a bad word. Nobody sees that before the place is reached.
"""

from __future__ import annotations

from engine_worker.sampling.grammar_masks import GrammarMatcher
from engine_worker.sequence import Sequence
from engine_worker.step import RequestAtFault


def without_a_token(sequence: Sequence, matcher: GrammarMatcher | None) -> int | RequestAtFault | None:
    """The token that ends the text, where the grammar is content with it; else why the request cannot go on.

    None: the request forbids nothing, so that this is not its fault.
    """
    end = matcher.end if matcher is not None else None
    if end is not None:
        return end
    names = _constraints(sequence)
    if not names:
        return None
    after = f"after {sequence.num_output_tokens} tokens"
    together = f"{', '.join(names)} together" if len(names) > 1 else names[0]
    return RequestAtFault(f"{together}: {after}, no token is left that may come next", param=names[0])


def _constraints(sequence: Sequence) -> list[str]:
    sampling = sequence.sampling
    grammar = sampling.grammar
    found = [(grammar.param or grammar.kind) if grammar is not None else ""]
    found.append("allowed_token_ids" if sampling.allowed_token_ids else "")
    found.append("bad_words" if sampling.bad_words_token_ids else "")
    found.append("min_tokens" if sampling.min_tokens else "")
    return [name for name in found if name]
