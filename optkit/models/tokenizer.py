"""The tokenizer of a random checkpoint: the words t0, t1, ..., one for each token id.

Random weights have no text, but a server wants a tokenizer to start and to answer with log-probabilities.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_word_tokenizer(directory: Path, vocab: int) -> None:
    """tokenizer.json and tokenizer_config.json with `vocab` words; "t5 t17" is [5, 17], any other word is token 0."""
    fast: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(vocab)}, "unk_token": "t0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(fast))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
