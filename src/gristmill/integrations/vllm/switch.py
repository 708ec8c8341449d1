"""GRISTMILL_VLLM, as the plugin may ask for it, and what it has to say: vLLM must not be stopped,
and not be talked over."""

from __future__ import annotations

import multiprocessing

from gristmill.errors import SettingsError
from gristmill.log import logger, warn_once
from gristmill.settings import settings


def tell_once(key: str, message: str) -> None:
    """One line, by the process that the user started; each of vLLM's own knows it, too."""
    if multiprocessing.parent_process() is None:
        warn_once(f"vllm {key}", message)
    else:
        logger.info("%s", message)


def is_switched_on(part: str) -> bool:
    """Whether GRISTMILL_VLLM names `part`; a mistake in it is told and switches nothing on."""
    try:
        return part in settings().vllm
    except SettingsError as error:
        tell_once(f"settings {error}", f"vLLM: nothing is switched on: {error}")
        return False
