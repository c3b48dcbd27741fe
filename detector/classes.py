"""Classes are told by their names: their numbers are each data set's own."""

import re
from collections.abc import Sequence


def order_of(names: Sequence[str], known: Sequence[str]) -> list[int] | None:
    """The number that each of `names` has in `known`; None where the two are not the same names.

    Names that occur twice can only be told by their place: then the lists must be equal.
    """
    if list(names) == list(known):
        return list(range(len(names)))
    if sorted(names) != sorted(known) or len(set(names)) < len(names):
        return None
    return [list(known).index(name) for name in names]


def differing(names: Sequence[str], known: Sequence[str]) -> str:
    """In words, how two lists of names that are not the same differ."""
    parts = [
        f"{title} {', '.join(only[:5])}{', ...' if len(only) > 5 else ''}"
        for title, only in (
            ("only here", [name for name in names if name not in known]),
            ("only there", [name for name in known if name not in names]),
        )
        if only
    ]
    return "; ".join(parts) or "a name stands for two classes"


def matches(names: Sequence[str], known: Sequence[str]) -> list[int | None]:
    """The number that each of `names` has in `known`, spaces around it and case aside; None where it is not there.

    The same names in the same order are the same classes. Else a name must be one: what stands in for names that nobody
    gave (class_0, item), and what occurs twice, matches nothing.
    """
    order = order_of(names, known)
    if order is not None:
        return list(order)
    ours, theirs = ([name.strip().casefold() for name in some] for some in (names, known))
    return [
        theirs.index(name)
        if theirs.count(name) == ours.count(name) == 1 and not re.fullmatch(r"class_?\d+|item|\d+", name)
        else None
        for name in ours
    ]
