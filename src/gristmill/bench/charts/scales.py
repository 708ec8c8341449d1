"""From numbers to places: linear and logarithmic scales, and the ticks that suit them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """`low` is drawn at `start`, `high` at `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """At most so many round numbers: 1, 2, 2.5 or 5 times a power of ten apart."""
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span / most))
        steps = (factor * power for factor in (1, 2, 2.5, 5, 10, 20))
        step = next(step for step in steps if math.floor(span / step + 1e-9) + 1 <= most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(number * step, 10) for number in range(first, last + 1)]


@dataclass(frozen=True)
class Log:
    """As `Linear`, of logarithms; only numbers above zero have a place."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 7) -> list[float]:
        """Round numbers within the scale, ever fewer to a decade until they are few enough."""
        for factors in _FACTORS:
            found = [
                round(factor * 10.0**power, 10)
                for power in range(math.floor(math.log10(self.low)) - 1, 16)
                for factor in factors
            ]
            found = [tick for tick in found if self.low <= tick * 1.0000001 <= self.high * 1.000001]
            if len(found) <= most:
                return found
        return found


# Finest first; one is in each of them.
_FACTORS = (
    (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 9.5),
    (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
    (1, 1.5, 2, 3, 5, 7),
    (1, 2, 5),
    (1, 3),
    (1,),
)
