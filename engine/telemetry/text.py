"""Strings that nodes and jobs print are untrusted: nothing that a terminal would act on gets through."""

from __future__ import annotations

import unicodedata

# Control, format (bidi overrides, zero width), surrogate, private, unassigned, line and paragraph separators.
_DROPPED = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def clean(text: str, limit: int = 200) -> str:
    """`text` on one line, printable, at most `limit` characters."""
    if text.isascii() and text.isprintable() and len(text) <= limit:
        return text
    kept = "".join(" " if c in "\t\n\r" else c for c in text[: 4 * limit] if c in "\t\n\r" or _shown(c))
    kept = " ".join(kept.split())
    return kept if len(kept) <= limit else kept[: limit - 1] + "…"


def _shown(character: str) -> bool:
    return unicodedata.category(character) not in _DROPPED
