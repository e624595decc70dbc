"""What was worked out lately, so that it need not be worked out again, up to a size.

A hit costs the look-up of a dictionary. There are two generations: when the younger is full it becomes the older, and what
nobody asks for until the next is full is forgotten.
"""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """The younger generation; `older` and `keep` are for what `get` does not find in it.

    Args:
        capacity: of a generation, in the unit of the sizes that `keep` is told.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._held = 0
        self._sizes: dict[K, int] = {}
        self._older: dict[K, tuple[V, int]] = {}

    @property
    def held(self) -> int:
        """Sizes of all that is remembered."""
        return self._held + sum(size for _, size in self._older.values())

    def older(self, key: K) -> V | None:
        """The value of a key in the older generation, which belongs to the younger from now on."""
        if (found := self._older.pop(key, None)) is None:
            return None
        return self.keep(key, *found)

    def keep(self, key: K, value: V, size: int) -> V:
        """Remember a value, and give it back."""
        if self._held + size > self._capacity:
            self._older = {known: (value, self._sizes[known]) for known, value in self.items()}
            self._held = 0
            self._sizes.clear()
            self.clear()
        self[key] = value
        self._sizes[key] = size
        self._held += size
        return value
