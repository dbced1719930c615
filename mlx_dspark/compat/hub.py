"""Seam: huggingface_hub changes its HTTP library between majors, and with it the base of its errors.

Versions: huggingface-hub 1 (httpx) and 2 (httpx2). Reason: a refused proxy or a dropped connection surfaces
as that library's `HTTPError`, which is neither an OSError nor one of the hub's own. Delete when every error
of `snapshot_download` has a hub class.
"""

from __future__ import annotations

from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]
)

HUB_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    EntryNotFoundError,
    HFValidationError,
    HfHubHTTPError,
    HTTPError,
)
"""What `snapshot_download` may raise when the hub, the network or the disk fails."""
