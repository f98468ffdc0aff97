"""How episodes ended, counted where they end: Miles' own logs see neither a dropped group nor a sample without records.

Pure but for one lock and one log line; ``nemogym_agent_function`` adds to ``TALLY``, ``nemogym_generate`` publishes it.
"""

import logging
import threading
from collections import Counter, deque

from nemogym_contract import Outcome

logger = logging.getLogger(__name__)

_WINDOW = 64
_FEWEST = 16
_BOUND = 0.5


class Tally:
    """Counts of exit statuses since they were last taken, and an alarm when most episodes give no verdict."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._verdicts = 0
        self._window: deque[Outcome] = deque(maxlen=_WINDOW)
        self._silent_for = 0

    def add(self, outcome: Outcome) -> None:
        """Count an episode. Logs at ERROR when, of the last 64, half or more have no verdict; again after 64 more."""
        with self._lock:
            self._counts[outcome.exit_status] += 1
            self._verdicts += outcome.reward is not None
            if outcome.exit_status != "Aborted":
                self._watch(outcome)

    def take(self) -> dict[str, float]:
        """Metrics of the episodes since the last call, and start anew.

        Returns:
            ``episodes``, ``no_verdict_share`` (aborted ones left out) and a count ``exit_status/<status>`` for each that
            occurred; empty when there was no episode.
        """
        with self._lock:
            counts, verdicts = self._counts, self._verdicts
            self._counts, self._verdicts = Counter(), 0
        ended = counts.total() - counts["Aborted"]
        metrics = {f"exit_status/{status}": float(count) for status, count in counts.items() if count}
        if metrics:
            metrics["episodes"] = float(counts.total())
        if ended:
            metrics["no_verdict_share"] = 1.0 - verdicts / ended
        return metrics

    def _watch(self, outcome: Outcome) -> None:
        self._window.append(Outcome(outcome.exit_status, outcome.reward, detail=outcome.detail))
        self._silent_for -= 1
        without = [seen for seen in self._window if seen.reward is None]
        share = len(without) / len(self._window)
        if share < _BOUND:
            self._silent_for = 0
        elif len(self._window) >= _FEWEST and self._silent_for <= 0:
            self._silent_for = _WINDOW
            commonest, count = Counter(seen.exit_status for seen in without).most_common(1)[0]
            example = next(seen.detail for seen in reversed(without) if seen.exit_status == commonest)
            logger.error(
                "%d of the last %d episodes have no verdict, so that their groups are dropped; commonest %s (%d): %s",
                len(without),
                len(self._window),
                commonest,
                count,
                example,
            )


TALLY = Tally()
