"""The worst patterns of a translated text, which no page and no report may have."""

from __future__ import annotations

from typing import Final

REJECTED: Final = {
    r"\banew\b": "again",
    r"\bin place of\b": "instead of",
    r"\blets? go\b|\bletting go\b": "release, clear",
    r"\bbehind\b": "after, in, next to",
    r"\b(?:is|are|be) told\b|\btold by\b|\bforetold\b": "reported, inferred from, predicted",
    r"\b(?:stands|lies|lie) (?:in|on|under|at|below|above|beside)\b": "is",
    r"\bbeside\b|\bbesides\b": "next to, in addition to",
    r"\bnobody vouches\b|\bfor want of\b|\breckoned\b": "untrusted, for lack of, computed",
    r"\b(?:bytes?|B|[KMG]i?B) a (?:parameter|step|logit|layer|rank|second|micro-batch)\b": "per",
    r"\b[Tt]wo censuses\b": "at step 9 and step 13",
    r"\b(?:Who|What) (?:stays|keeps|looks|goes) with\b": "If you ...",
    r"\b1 (?:storages|steps|tensors|ranks)\b": "1 storage, 1 step",
    r"\bhold(?:s)? of\b": "keep, know",
    r"(?<!here )\b(?:is|are) no (?!longer\b|more\b)": "is not a, is invalid",
    r"\bno valid\b": "invalid",
    r"\b(?:report|row|note|table|ledger|census|driver|kernel|message|log|record|run) tells?\b": "shows, says",
    r"\bgiv(?:e|es|en|ing) (?:it |them |memory )?back\b": "return, free, release",
    r"\bgo(?:es)? on\b": "continue",
    r"(?:\d %|\d) a (?:step|node|layer|rank|second|parameter)\b": "per",
}
"""Patterns, and what to write instead."""

IN_THE_SOURCE: Final = (
    r"\banew\b",
    r"\bin place of\b",
    r"\blets? go\b|\bletting go\b",
    r"\bnobody vouches\b|\bfor want of\b|\breckoned\b",
    r"\b(?:bytes?|B|[KMG]i?B) a (?:parameter|step|logit|layer|rank|second|micro-batch)\b",
)
"""Those of them that no docstring and no comment of the source has either."""
