"""Ports that follow each other: where an item makes one port tell another, both become one.

Operators that work on whatever placement they get tie the placement of their output to that of their input. After
merging, a residual stream or a block of concatenations is one port with a handful of values, however many operators it
passes through.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

Numbered = tuple[dict[str, int], float]
"""Port to number of its value, and cost."""


def merge_ports(items: Sequence[Sequence[tuple[Mapping[str, Hashable], float]]]) -> list[list[Numbered]] | None:
    """Numbers the values of all ports and merges ports of which one tells the other.

    Args:
        items: Per item, per option: port to value, and cost.

    Returns:
        The same items and options in the same order, with fewer ports; an option with the cost ``inf`` can't be chosen.
        None if no option of an item can be.
    """
    merger = _Merger(items)
    merger.run()
    return merger.numbered()


class _Merger:
    """Each port belongs to a class; a value of a port is a value of its class, renamed."""

    def __init__(self, items: Sequence[Sequence[tuple[Mapping[str, Hashable], float]]]) -> None:
        self._items = items
        self._class: dict[str, str] = {}
        self._renamed: dict[str, dict[Hashable, Hashable]] = {}
        self._members: dict[str, list[str]] = {}
        for options in items:
            for ports, _ in options:
                for port, value in ports.items():
                    self._class.setdefault(port, port)
                    self._members.setdefault(port, [port])
                    self._renamed.setdefault(port, {}).setdefault(value, value)

    def run(self) -> None:
        """Merges until nothing changes: one pass is enough, since a merge only renames values."""
        for options in self._items:
            possible = [ports for ports, cost in options if cost < float("inf")]
            ports = list(possible[0]) if possible else []
            for other in ports[1:]:
                self._merge(possible, ports[0], other)

    def _merge(self, possible: Sequence[Mapping[str, Hashable]], first: str, other: str) -> None:
        pairs = {(self._value(ports, first), self._value(ports, other)) for ports in possible}
        forward, backward = dict(pairs), {after: before for before, after in pairs}
        if len(forward) != len(pairs) or len(backward) != len(pairs):
            return
        target, gone = self._class[first], self._class[other]
        if target == gone:
            return
        for port in self._members.pop(gone):
            # A value that no option of this item has stays apart, so that it can't be taken for another one.
            self._renamed[port] = {
                value: backward.get(name, ("", gone, name)) for value, name in self._renamed[port].items()
            }
            self._class[port] = target
            self._members[target].append(port)

    def _value(self, ports: Mapping[str, Hashable], port: str) -> Hashable:
        return self._renamed[port][ports[port]]

    def numbered(self) -> list[list[Numbered]] | None:
        """The items with class and number of value instead of port and value."""
        numbers: dict[str, dict[Hashable, int]] = {}
        found = []
        for options in self._items:
            entries = []
            for ports, cost in options:
                joined = self._joined(ports, numbers)
                entries.append(({}, float("inf")) if joined is None else (joined, cost))
            if all(cost == float("inf") for _, cost in entries):
                return None
            found.append(entries)
        return found

    def _joined(self, ports: Mapping[str, Hashable], numbers: dict[str, dict[Hashable, int]]) -> dict[str, int] | None:
        """None if ports that have become one would need different values."""
        joined: dict[str, int] = {}
        for port in ports:
            own = numbers.setdefault(self._class[port], {})
            number = own.setdefault(self._value(ports, port), len(own))
            if joined.setdefault(self._class[port], number) != number:
                return None
        return joined
