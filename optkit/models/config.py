"""Reading a checkpoint's config.json strictly: every mistake of one file is collected and reported together."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

_MISSING = object()


class ConfigError(ValueError):
    """A config.json that this architecture cannot take; one line per mistake."""


class Reader:
    """Typed access to one (possibly nested) config mapping; mistakes are kept until `check` raises them."""

    def __init__(self, data: Mapping[str, Any], where: str = "config.json", mistakes: list[str] | None = None) -> None:
        self.data, self.where = data, where
        self.mistakes: list[str] = [] if mistakes is None else mistakes

    def _get(self, key: str, expected: str, default: Any) -> Any:
        if key in self.data and (self.data[key] is not None or default is _MISSING):
            return self.data[key]
        if default is _MISSING:
            near = difflib.get_close_matches(key, self.data, 1, 0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.mistakes.append(f"{self.where}: {key}: missing: expected {expected}{hint}")
        return default

    def _wrong(self, key: str, value: Any, expected: str) -> None:
        self.mistakes.append(f"{self.where}: {key}: {value!r}: expected {expected}")

    def integer(self, key: str, default: Any = _MISSING, low: int = 1) -> int:
        """An integer >= low."""
        expected = f"an integer >= {low}"
        v = self._get(key, expected, default)
        if v is _MISSING:
            return low
        if isinstance(v, bool) or not isinstance(v, int) or v < low:
            self._wrong(key, v, expected)
            return low
        return v

    def number(self, key: str, default: Any = _MISSING, positive: bool = True) -> float:
        """A number, > 0 unless positive is False."""
        expected = "a number > 0" if positive else "a number"
        v = self._get(key, expected, default)
        if v is _MISSING:
            return 1.0
        if isinstance(v, bool) or not isinstance(v, int | float) or (positive and v <= 0):
            self._wrong(key, v, expected)
            return 1.0
        return float(v)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers."""
        v = self._get(key, "a list of integers", _MISSING)
        if v is _MISSING:
            return ()
        if not isinstance(v, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in v):
            self._wrong(key, v, "a list of integers")
            return ()
        return tuple(v)

    def boolean(self, key: str, default: Any = _MISSING) -> bool:
        """true or false."""
        v = self._get(key, "true or false", default)
        if v is not _MISSING and not isinstance(v, bool):
            self._wrong(key, v, "true or false")
        return v is True

    def only(self, key: str, allowed: Any, default: Any = _MISSING) -> None:
        """The one value that this architecture's decode step covers."""
        v = self._get(key, repr(allowed), default)
        if v is not _MISSING and (v != allowed or isinstance(v, bool) != isinstance(allowed, bool)):
            self._wrong(key, v, f"{allowed!r} (nothing else is covered)")

    def sub(self, key: str, default: Any = _MISSING) -> Reader:
        """A nested mapping; mistakes go to the same list, but those that only follow from its absence are dropped."""
        v = self._get(key, "a mapping", default)
        if isinstance(v, Mapping):
            return Reader(v, f"{self.where}: {key}", self.mistakes)
        if v is not _MISSING:
            self._wrong(key, v, "a mapping")
        return Reader({}, f"{self.where}: {key}", [])

    def require(self, ok: bool, key: str, value: Any, expected: str) -> None:
        """A rule across keys."""
        if not ok:
            self._wrong(key, value, expected)

    def check(self) -> None:
        """Raises ConfigError if anything was wrong."""
        if self.mistakes:
            raise ConfigError("\n".join(self.mistakes))


def divides(family: str, ranks: int, **sizes: int) -> None:
    """Raises ValueError unless `ranks` divides every named size; one line per offender."""
    if ranks < 1:
        raise ValueError(f"tp: {ranks}: expected >= 1")
    bad = [
        f"tp: {ranks}: does not divide {name.replace('_', ' ')} {n} of {family}; expected a divisor of {n}"
        for name, n in sizes.items()
        if n % ranks
    ]
    if bad:
        raise ValueError("\n".join(bad))
