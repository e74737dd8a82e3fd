"""Between which values a routing diagnostic can lie, whatever the router does: what a claim about it can be about.

Not for: computing diagnostics (`routing`), or refusing claims (`claims`).
"""

from __future__ import annotations

import math


def reach(metric: str, num_experts: int, top_k: int) -> tuple[float, float]:
    """The smallest and the largest value of a diagnostic of a layer with E experts, K of them per token.

    A token goes to K different experts, so no share f_e of the T·K assignments exceeds 1/K; at one end all shares are
    1/E, at the other K experts have 1/K each. A mean or a largest value over layers lies between the same ends. `log_z`
    has none: both infinite. Diagnostics are defined in `routing.diagnose`.

    >>> reach("busiest_frac", 4, 2), reach("topk_share", 4, 1)
    ((0.25, 0.5), (0.25, 1.0))
    """
    even, full = 1 / num_experts, 1 / top_k
    lowest_entropy = math.log(top_k) / math.log(num_experts) if num_experts > 1 else 1.0
    return {
        "busiest_frac": (even, full),
        "usage_variance": (0.0, even * (full - even)),
        "load_cv": (0.0, math.sqrt(num_experts / top_k - 1)),
        "max_vio": (0.0, num_experts / top_k - 1),
        "usage_entropy": (lowest_entropy, 1.0),
        "router_entropy": (0.0 if num_experts > 1 else 1.0, 1.0),
        "log_z": (-math.inf, math.inf),
        "topk_share": (top_k / num_experts, 1.0),
    }[metric]
