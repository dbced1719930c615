"""Every family that runs, in batches of every size and in every order of joining and leaving: is it exact?

    python -m benchmarks.family_matrix                       # all of it: the better part of an hour
    python -m benchmarks.family_matrix qwen3_5 gemma3_text   # these families
    python -m benchmarks.family_matrix --part 0 --of 2       # every second family, beside another process

Tiny random models and a drafter that is always wrong. For each family: a text in changing company, for
batches of up to 1, 2 … 8 rows and prompts of every length; a text that three others join in every order and
leave in every order; and, where keys may be held in few bits, batches of up to 1 to 8 rows over keys of 4 or
8 bits. `tests/company.py` says what must hold. Ends with an error if anything did not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from time import perf_counter

import mlx.core as mx

from tests.company import PROMPTS, Company, Findings, Subject, company, every_order, in_company
from tests.families_page import FEW_BITS, RUN


def runs(family: str) -> Iterator[tuple[Subject, Company]]:
    """What is done with a family."""
    subject = Subject(family)
    for rows in range(1, 9):
        yield subject, company(rows, seed=f"{family} {rows}", new=120, prompt=rows % len(PROMPTS))
    for plan in every_order():
        yield subject, plan
    if family in FEW_BITS:
        quantized = [Subject(family, bits=bits) for bits in (4, 8)]
        for rows in range(1, 9):
            seed, prompt = f"{family} {rows}", rows % len(PROMPTS)
            yield quantized[(rows + len(family)) % 2], company(rows, seed=seed, new=80, prompt=prompt)


def findings_of(family: str) -> Findings:
    """All that is found of one family, added up."""
    total = Findings()
    for subject, plan in runs(family):
        found = in_company(subject, plan)
        held = f"{subject.bits} bits, " if subject.bits else ""
        total.wrong += [f"{held}up to {plan.rows} rows: {wrong}" for wrong in found.wrong]
        total.sizes += found.sizes
        total.compared += found.compared
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types of docs/families.md (default: all that run)")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    asked = parser.parse_args()
    mx.set_default_device(mx.cpu)
    families, wrong = (asked.families or list(RUN))[asked.part :: asked.of], 0
    for family in families:
        began = perf_counter()
        found = findings_of(family)
        rounds = ", ".join(f"{found.sizes[size]} of {size}" for size in sorted(found.sizes))
        print(
            f"{family}: {sum(found.sizes.values())} rounds ({rounds} rows), {found.compared} states "
            f"compared, {len(found.wrong)} wrong, {perf_counter() - began:.0f} s",
            flush=True,
        )
        for each in found.wrong:
            print(f"  {each}", flush=True)
        wrong += len(found.wrong)
    print(f"{len(families)} families, {wrong} findings")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
