"""Live view of the last seconds of a run."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table
from rich.text import Text

from npugrad_client.bench.sketch import Sketch, known_s
from npugrad_client.bench.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, RenderableType

    from npugrad_client.bench.engine import LoadProgress
    from npugrad_client.bench.scenario import Scenario

_SPAN_S = 5.0
_COLUMNS = 48
_BARS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 32


class Recent:
    """What the workers reported of the last seconds.

    Args:
        scenario: What is sent.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._said: deque[tuple[float, LoadProgress]] = deque()
        self._slowest: deque[float] = deque(maxlen=_COLUMNS)
        self._total: Counter[str] = Counter()
        self._second = 0.0
        self.at_s = -scenario.warm_up_s

    def add(self, at_s: float, progress: LoadProgress) -> None:
        """Adds a worker's report at a time of the run."""
        self.at_s = max(at_s, self.at_s)
        self._said.append((at_s, progress))
        while self._said[0][0] < at_s - _SPAN_S:
            self._said.popleft()
        for name in ("intended", "answered", "failed", "dropped"):
            self._total[name] += getattr(progress, name)
        if at_s >= self._second + 1.0:
            self._second = at_s
            self._slowest.append(self._latency(1.0).percentile_s(100.0))

    def _latency(self, span_s: float) -> Sketch:
        merged = Sketch()
        for at_s, progress in self._said:
            if at_s > self.at_s - span_s:
                merged.merge(progress.latency)
        return merged

    def view(self) -> RenderableType:
        """The view as it is now."""
        span_s = max(min(_SPAN_S, self.at_s + self._scenario.warm_up_s), 0.5)
        rates = {
            name: sum(getattr(progress, name) for _, progress in self._said) / span_s
            for name in ("intended", "answered")
        }
        last = [progress.in_flight for _, progress in list(self._said)[-self._scenario.workers :]]
        latency = self._latency(_SPAN_S)
        table = Table.grid(padding=(0, 3, 0, 0))
        table.add_row("time", self._bar())
        table.add_row("rate", f"{rates['intended']:.1f}/s sent, {rates['answered']:.1f}/s answered")
        shown = [f"p{p:g} {format_seconds(known_s(latency, p))}" for p in (50.0, 99.0)]
        table.add_row("latency", f"{', '.join(shown)} in the last {_SPAN_S:g} s" if latency.count else "-")
        table.add_row("slowest", self._spark())
        table.add_row("in flight", str(sum(last)))
        wrong = self._total["failed"] + self._total["dropped"]
        text = (
            f"{self._total['failed']} failed, {self._total['dropped']} dropped of {self._total['intended']}"
        )
        table.add_row("errors", Text(text, style="bold red" if wrong else ""))
        return table

    def _bar(self) -> str:
        whole = self._scenario.duration_s + self._scenario.warm_up_s
        done = min(max((self.at_s + self._scenario.warm_up_s) / whole, 0.0), 1.0)
        filled = round(done * _BAR_WIDTH)
        part = "warm-up" if self.at_s < 0 else f"{self.at_s:.0f} of {self._scenario.duration_s:g} s"
        return f"{'━' * filled}{'─' * (_BAR_WIDTH - filled)} {part}"

    def _spark(self) -> str:
        top = max(self._slowest, default=0.0)
        if not top:
            return "-"
        bars = "".join(_BARS[round(each / top * (len(_BARS) - 1))] for each in self._slowest)
        return f"{bars} up to {format_seconds(top)}"


@contextmanager
def live_view(console: Console, scenario: Scenario) -> Iterator[Callable[[float, LoadProgress], None] | None]:
    """Shows a run live; yields the callable to report to, or None if there is no terminal."""
    if not console.is_terminal:
        yield None
        return
    recent = Recent(scenario)
    with Live(console=console, refresh_per_second=4, transient=True, get_renderable=recent.view):
        yield recent.add
