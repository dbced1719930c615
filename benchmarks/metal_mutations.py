"""Plants every known mistake in every Metal kernel and prints what finds it:
`python -m benchmarks.metal_mutations`.

Each mistake is tried under all schedules, under both sanitizers and with its traffic counted. The exit status
is 1 where nothing finds one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests import attention_mutations, small_m_trials
from tests.metal_shim import Mode
from tests.metal_shim.mutations import Mutation, Trial, table

KERNELS: dict[str, tuple[Sequence[Mutation], Sequence[Trial]]] = {
    "metal-small-m": (small_m_trials.MUTATIONS, small_m_trials.MUTATION_TRIALS),
    "metal-attention": (attention_mutations.MUTATIONS, attention_mutations.MUTATION_TRIALS),
}
_MODES = (Mode.PLAIN, Mode.ADDRESS, Mode.THREAD, Mode.TRAFFIC)


def main() -> int:
    missed, total = [], 0
    counts = dict.fromkeys(_MODES, 0)
    print("| kernel | mistake |", " | ".join(mode.value for mode in _MODES), "|")
    print("|---|---|" + "---|" * len(_MODES))
    for kernel, (mutations, trials) in KERNELS.items():
        for mutation, told in table(mutations, trials):
            cells = [told.get(mode, "").replace("|", "/")[-90:] for mode in _MODES]
            print(f"| {kernel} | {mutation.name} |", " | ".join(cells), "|", flush=True)
            total += 1
            for mode in told:
                counts[mode] += 1
            if not told:
                missed.append(f"{kernel}: {mutation.name}")
    print(
        f"\n{total - len(missed)} of {total} found;", ", ".join(f"{m.value} {n}" for m, n in counts.items())
    )
    for each in missed:
        print(f"not found: {each}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
