"""A real op on the CPU, for seeing what happens when it meets a problem for the first time."""

from __future__ import annotations

import torch

import gristmill
from gristmill.select import Table, device_of
from gristmill.select.tables import user_table_path

CPU = device_of("cpu")
KEY = "rms_norm rows=16 N=64 x=float32 weight=float32 out=float32"


def norm(rows: int = 20, columns: int = 64) -> torch.Tensor:
    return gristmill.rms_norm(torch.ones(rows, columns), torch.ones(columns))


def in_file() -> Table:
    return Table.load(user_table_path(CPU))
