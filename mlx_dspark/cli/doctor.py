"""`doctor`: checks that run something each, and what to do where one fails."""

from __future__ import annotations

import json

from mlx_dspark.cli.benchmark import LOW_ADVICE
from mlx_dspark.cli.ranks import refuse_ranks
from mlx_dspark.cli.show import Progress
from mlx_dspark.cli.streams import require_output
from mlx_dspark.foundation.doctor_settings import DoctorSettings, ServerToCheck
from mlx_dspark.foundation.serve_settings import DEFAULT_URL

FAILED = 2


def doctor(settings: DoctorSettings, asked: ServerToCheck) -> int:
    """Check this machine, a server, and with --pair a model with its drafter; exit code 2 where a check
    fails."""
    from mlx_dspark.doctor.machine import machine_checks
    from mlx_dspark.doctor.server import server

    refuse_ranks("doctor")
    require_output()
    progress = Progress()
    progress.tell("checking this machine")
    checks = machine_checks()
    checks += server(asked.url or DEFAULT_URL, asked.api_key, expected=asked.url is not None)
    if settings.pair is not None:
        from mlx_dspark.doctor.pair import pair

        checks += pair(str(settings.pair), progress, progress.tell, LOW_ADVICE)
    progress.clear()
    well = all(check.well for check in checks)
    if settings.json:
        told = {"ok": well, "checks": [check.as_dict() for check in checks]}
        print(json.dumps(told, ensure_ascii=False))
    else:
        for check in checks:
            print(check)
    return 0 if well else FAILED
