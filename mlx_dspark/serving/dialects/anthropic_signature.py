"""What ends a block of thinking. It signs nothing, but carries thinking that is not shown, so that the model
finds it in the next turn."""

from __future__ import annotations

import base64
import binascii

SIGNATURE = "bWx4LWRzcGFyaw=="
"""Of thinking that is shown: some clients drop a block that has none."""
_CARRIED = "bWx4LWRzcGFyay50"


def carrying(thinking: str) -> str:
    """The signature of thinking that is not shown."""
    return _CARRIED + base64.b64encode(thinking.encode("utf-8", "replace")).decode()


def carried(signature: str) -> str:
    """The thinking that a signature carries; of anybody else's, none."""
    if not signature.startswith(_CARRIED):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_CARRIED), validate=True).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return ""
