"""Every family that runs: hundreds of rounds of wrong drafts, in a batch that grows to 8 rows and shrinks.

`tests/company.py` says what happens and what must hold. `benchmarks/family_matrix.py` does it at every size
of a batch, in every order of joining and leaving, and longer over quantized keys.
"""

from __future__ import annotations

import pytest

from tests.company import Subject, company, in_company
from tests.families_page import FEW_BITS, RUN


@pytest.mark.parametrize("family", RUN)
def test_texts_in_changing_company_are_stock_and_leave_what_a_prefill_leaves(family: str) -> None:
    plan = company(8, seed=family)
    found = in_company(Subject(family), plan)
    assert not found.wrong, "\n".join(found.wrong)
    assert set(found.sizes) == set(range(1, 9))
    assert sum(found.sizes.values()) >= 200
    assert found.compared >= 8


@pytest.mark.parametrize("family", FEW_BITS)
def test_texts_in_changing_company_over_quantized_keys_are_stock_over_its_own(family: str) -> None:
    bits = 4 + 4 * (len(family) % 2)
    found = in_company(Subject(family, bits=bits), company(4, seed=family, new=40))
    assert not found.wrong, "\n".join(found.wrong)
    assert set(found.sizes) == set(range(1, 5))
