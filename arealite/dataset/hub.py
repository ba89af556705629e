"""Refuses a model name within seconds if the hub's host cannot be resolved.

`huggingface_hub` retries each request for most of a minute and has no setting for the number of retries.
"""

import os
import socket
import time
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from arealite.api.errors import ConfigError

# Files of which the cache has one if the model, or its tokenizer, was downloaded.
_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")
_NUM_LOOKUPS, _PAUSE_S = 3, 1.0


def check_hub(path: str) -> None:
    """Raise `ConfigError` if a model is no folder, not in the cache, and the hub's host has no address.

    A hub that is slow, or that is reached through a proxy, is left to `huggingface_hub`.
    """
    host = urlsplit(constants.ENDPOINT).hostname
    if (
        os.path.exists(path)
        or constants.HF_HUB_OFFLINE
        or host is None
        or {"all", "http", "https"} & getproxies().keys()
    ):
        return
    try:
        if any(isinstance(try_to_load_from_cache(path, file), str) for file in _FILES):
            return
    except HFValidationError:
        # No name of the hub: transformers says so without a request.
        return
    reason = _lookup_error(host)
    if reason is not None:
        raise ConfigError(
            f"{path!r} is neither a folder nor a model in the cache ({constants.HF_HUB_CACHE}), and {host} cannot be "
            f"reached to download it ({reason}): correct the name, give the path of a folder, or connect this machine"
        )


def _lookup_error(host: str) -> str | None:
    """Return why the address of a host is not found, after several lookups; None if it is found."""
    reason = None
    for number in range(_NUM_LOOKUPS):
        time.sleep(_PAUSE_S if number else 0.0)
        try:
            socket.getaddrinfo(host, None)
            return None
        except socket.gaierror as error:
            reason = error.strerror
        except UnicodeError as error:
            return f"HF_ENDPOINT is not an address: {error}"
    return reason
