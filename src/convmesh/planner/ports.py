"""Ports that follow each other: where an item makes one port tell another, both become one.

Operators that work on whatever placement they get tie the placement of their output to that of their input. After
merging, a residual stream or a block of concatenations is one port with a handful of values, however many operators it
passes through.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

Ports = Mapping[str, Hashable]
"""Port to its value."""


def merge_ports(items: Sequence[Sequence[Ports]]) -> list[list[dict[str, int] | None]]:
    """Numbers the values of all ports and merges ports of which one tells the other.

    Args:
        items: Per item, per option: port to value.

    Returns:
        The same items and options in the same order, with fewer ports and numbers from 0 for values; None for an option
        that can't be chosen, since ports that have become one would need different values.
    """
    merger = _Merger(items)
    merger.run()
    return merger.numbered()


class _Merger:
    """Each port belongs to a class; a value of a port is a value of its class, renamed."""

    def __init__(self, items: Sequence[Sequence[Ports]]) -> None:
        self._items = items
        self._class: dict[str, str] = {}
        self._renamed: dict[str, dict[Hashable, Hashable]] = {}
        self._members: dict[str, list[str]] = {}
        for options in items:
            for ports in options:
                for port, value in ports.items():
                    self._class.setdefault(port, port)
                    self._members.setdefault(port, [port])
                    self._renamed.setdefault(port, {}).setdefault(value, value)

    def run(self) -> None:
        """Merges: one pass is enough, since a merge renames values and leaves what options allow as it is."""
        for options in self._items:
            ports = list(options[0]) if options else []
            for other in ports[1:]:
                self._merge(options, ports[0], other)

    def _merge(self, options: Sequence[Ports], first: str, other: str) -> None:
        pairs = {(self._value(ports, first), self._value(ports, other)) for ports in options}
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

    def _value(self, ports: Ports, port: str) -> Hashable:
        return self._renamed[port][ports[port]]

    def numbered(self) -> list[list[dict[str, int] | None]]:
        """The items with class and number of value instead of port and value."""
        numbers: dict[str, dict[Hashable, int]] = {}
        return [[self._joined(ports, numbers) for ports in options] for options in self._items]

    def _joined(self, ports: Ports, numbers: dict[str, dict[Hashable, int]]) -> dict[str, int] | None:
        joined: dict[str, int] = {}
        for port in ports:
            own = numbers.setdefault(self._class[port], {})
            number = own.setdefault(self._value(ports, port), len(own))
            if joined.setdefault(self._class[port], number) != number:
                return None
        return joined
