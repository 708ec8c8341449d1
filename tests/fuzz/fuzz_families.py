"""All ops, and how calls of each are drawn and made."""

from __future__ import annotations

import fuzz_entropy
import fuzz_experts
import fuzz_norms
import fuzz_products
import fuzz_router
import fuzz_softmax
from fuzz_plan import Family

FAMILIES: dict[str, Family] = {
    **fuzz_norms.FAMILIES,
    **fuzz_softmax.FAMILIES,
    **fuzz_entropy.FAMILIES,
    **fuzz_products.FAMILIES,
    **fuzz_experts.FAMILIES,
    **fuzz_router.FAMILIES,
}
