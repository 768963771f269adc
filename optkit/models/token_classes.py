"""Token classes of a tokenizer: ids whose text is equal up to case, accents, compatibility forms and spacing.

Engram hashes classes, not tokens. The rule is that of DeepSeek-V4.1's inference code: NFKC, NFD, accents stripped,
lower case, runs of blanks, tabs and line breaks collapsed to one blank, blanks at the ends dropped (a lone blank stays);
a token that is no text by itself (part of a UTF-8 character) keeps its own name; classes are numbered in order of first
appearance. Also writes a small tokenizer.json with given classes, for random checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

BLANK_RUN, LONE_BLANK = r"[ \t\r\n]+", "\ue000"


def token_classes(path: Path) -> Tensor:
    """i32 [tokens] class of every token id of a tokenizer.json. Raises ValueError if it cannot be read."""
    try:
        from tokenizers import Regex, Tokenizer, normalizers
    except ImportError:
        raise ValueError(f"{path}: the package tokenizers is needed to read it") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exception
        raise ValueError(f"{path}: damaged: {e}") from None
    rule = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(BLANK_RUN), " "),
            normalizers.Replace(Regex("^ $"), LONE_BLANK),
            normalizers.Strip(),
            normalizers.Replace(LONE_BLANK, " "),
        ]
    )
    first: dict[str | None, int] = {}
    classes = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        name = tokenizer.id_to_token(token) if "\ufffd" in text else rule.normalize_str(text) or text
        classes.append(first.setdefault(name, len(first)))
    return torch.tensor(classes, dtype=torch.int32)


def synthetic_classes(tokens: int, classes: int) -> Tensor:
    """i32 [tokens]: the first `classes` ids are classes of their own, later ids repeat them in turn."""
    return (torch.arange(tokens) % classes).int()


def write_tokenizer(path: Path, classes: Tensor) -> None:
    """A word-level tokenizer.json whose tokens have the given classes: w7, W7, w7 with accents.

    Raises ValueError for classes that are not numbered by first appearance or occur more than three times.
    """
    forms = ("w{}", "W{}", "ẃ{}")
    seen: dict[int, int] = {}
    vocab = {}
    for token, c in enumerate(classes.tolist()):
        n = seen[c] = seen.get(c, 0) + 1
        if n > len(forms) or (n == 1 and c != len(seen) - 1):
            raise ValueError(f"token {token} of class {c}: expected classes in order, at most {len(forms)} tokens each")
        vocab[forms[n - 1].format(c)] = token
    body = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }
    path.write_text(json.dumps(body, ensure_ascii=False))
