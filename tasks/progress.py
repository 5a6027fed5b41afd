"""What tasks share: references to artifacts, and saying how far they are."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger


@dataclass(frozen=True)
class ArtifactRef:
    """Where an artifact lies. Never the artifact."""

    path: str
    key: str
    rows: int
    reused: bool


class Progress:
    """Says how far a long task is: a log line every few seconds, a progress artifact in the Prefect UI.

    `done` and `total` are in units of `unit`; the rate counts only what this process did, so a resumed task is honest.
    """

    LOG_S, ARTIFACT_S = 5.0, 15.0

    def __init__(
        self, key: str, what: str, total: float, unit: str, *, done: float = 0.0, since: float | None = None
    ) -> None:
        """`since`: when the work began, on `time.monotonic`'s clock, where that was before now."""
        self.logger = get_run_logger()
        self.key, self.what, self.total, self.unit = key, what, total, unit
        self.start, self.begun = since or time.monotonic(), done
        self._logged, self._shown, self._artifact = 0.0, 0.0, None
        if done:
            self.logger.info("%s: resuming at %s of %s %s", what, f"{done:,.0f}", f"{total:,.0f}", unit)

    def __call__(self, done: float, note: str = "") -> None:
        now = time.monotonic()
        if now - self._logged < self.LOG_S and done < self.total:
            return
        self._logged = now
        rate = (done - self.begun) / max(now - self.start, 1e-9)
        left = f", {_clock((self.total - done) / rate)} left" if rate > 0 and done < self.total else ""
        text = f"{done:,.0f}/{self.total:,.0f} {self.unit} ({_pace(rate)}{left})"
        self.logger.info("%s: %s%s", self.what, text, f"; {note}" if note else "")
        if now - self._shown >= self.ARTIFACT_S or done >= self.total:
            self._shown = now
            self._publish(100 * done / self.total, f"{self.what}: {text}")

    def _publish(self, percent: float, description: str) -> None:
        try:
            if self._artifact is None:
                self._artifact = create_progress_artifact(percent, key=self.key, description=description)
            else:
                update_progress_artifact(self._artifact, percent, description=description)
        except Exception as error:  # the UI's progress bar must never cost a result
            self.logger.debug("progress artifact: %s", error)


def _pace(rate: float) -> str:
    """Units per second; seconds per unit where those are slow."""
    return f"{rate:,.1f}/s" if rate >= 1 or rate <= 0 else f"{1 / rate:,.1f} s each"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


OnRecord = Callable[[dict[str, Any]], None]


def announce(name: str, path: Path, manifest: dict[str, Any] | None) -> None:
    """One line on what happens to an artifact: reused, or made now."""
    logger = get_run_logger()
    if manifest is not None:
        logger.info("%s: reusing %s (made %s)", name, path, manifest["created"])
    else:
        logger.info("%s: making %s", name, path)
