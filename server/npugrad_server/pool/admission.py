"""An accepted call's hold on the pool: its bytes and its place, from the header until the reply is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from npugrad_server.pool.types import PlannedCall


class Admission:
    """The bytes and the queue place of one accepted call; leaving it, or `close`, gives them back.

    Attributes:
        planned: The call.
        number: Its number in the pool.
        started: Whether its operands are complete, so that they must not change any more.
        closed: Whether its bytes were given back.
    """

    def __init__(
        self,
        number: int,
        planned: PlannedCall,
        offsets: Mapping[str, int],
        memory: memoryview,
        on_close: Callable[[Admission], None],
    ) -> None:
        """Made by `DevicePool.admit`.

        Args:
            number: Unique number.
            planned: The call.
            offsets: First byte of each operand in its memory.
            memory: Memory of the operands, which is void for the admission once it is closed.
            on_close: Called once, when it is closed.
        """
        self.planned = planned
        self.number = number
        self.started = False
        self.closed = False
        self._offsets = offsets
        self._memory = memory
        self._on_close = on_close
        self._views = [memory]

    def view(self, name: str) -> memoryview:
        """Writable memory of an operand's content, exactly its `content_bytes`; errors as of `views`."""
        return self.views((name,))[0]

    def views(self, names: Iterable[str]) -> list[memoryview]:
        """Writable memory of the contents of some operands.

        Raises:
            KeyError: An operand is null, or the operator has none of this name.
            RuntimeError: The admission was closed, or its call was started: operands do not change any more.
        """
        if self.closed or self.started:
            raise RuntimeError(
                f"{self.planned.record.name}: operands can be written only before the call runs"
            )
        found = []
        for name in names:
            meta = self.planned.call.inputs[name]
            if meta is None:
                raise KeyError(f"{self.planned.record.name}: {name} is null")
            start = self._offsets[name]
            found.append(self._memory[start : start + meta.content_bytes])
        self._views += found
        return found

    def lend(self, memory: memoryview, parts: Iterable[tuple[str, int, int]]) -> dict[str, memoryview]:
        """Views that are void once the admission is closed.

        Args:
            memory: What they are parts of, which is void then as well.
            parts: Name, first byte and length of each.
        """
        found = {name: memory[start : start + nbytes] for name, start, nbytes in parts}
        self._views += [memory, *found.values()]
        return found

    def close(self) -> None:
        """Gives every byte back; may be called again. A call that still waits or runs is cancelled.

        Views from `view` and of an outcome are released: using one of them afterwards is a ValueError, and
        not somebody else's data.
        """
        if self.closed:
            return
        self.closed = True
        while self._views:
            try:
                self._views.pop().release()
            except BufferError:
                continue  # an array was made of it, which is then the user's fault
        self._on_close(self)

    def __enter__(self) -> Admission:
        """Nothing: the bytes are reserved already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()
