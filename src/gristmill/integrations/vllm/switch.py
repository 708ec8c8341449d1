"""GRISTMILL_VLLM, as the plugin may ask for it: an exception would stop vLLM."""

from __future__ import annotations

from gristmill.errors import SettingsError
from gristmill.log import warn_once
from gristmill.settings import settings


def is_switched_on(part: str) -> bool:
    """Whether GRISTMILL_VLLM names `part`; a mistake in it is told and switches nothing on."""
    try:
        return part in settings().vllm
    except SettingsError as error:
        warn_once(f"vllm settings {error}", f"vLLM: nothing is switched on: {error}")
        return False
