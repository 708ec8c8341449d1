"""Timing the variants of problems and keeping the winners: in a region of code, or ahead of time.

`region.py`: `gristmill.tune`. `jobs.py`: what is tuned ahead of time, by shapes or by a recording.
`ahead.py`: doing it. `report.py`: what was won. `listing.py`: what the tables hold.
"""

from gristmill.tune.region import tune
from gristmill.tune.report import TuneReport

__all__ = ["TuneReport", "tune"]
