"""How much one request may ask for, for the engine and for whoever checks before it and may allow less."""

from __future__ import annotations

MAX_LOGPROBS = 20
"""Likeliest tokens listed with each token."""
MAX_END_TOKENS = 64
"""Stop token ids a request may name."""
MAX_STEERING_GROUPS = 8
"""Interventions that are left once those of one layer and schedule are summed."""
MAX_INTERVENTIONS = 128
"""Of one request. Each costs a product with the whole of lm_head."""
MAX_SUPPRESSIONS = 256
MAX_CONCEPTS = 4096
"""Of one intervention."""
MAX_OVERRIDES = 32
MAX_CFG_SCALE = 100.0
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 2**63 - 1
MAX_INSPECTED_CONCEPTS = 1024
"""Of each head, for each token of an inspected text."""
MAX_SAMPLES = 1024
"""Of a likelihood: forward passes."""
MAX_TARGETS = 256
"""Tokens whose logits are attributed to inputs at once."""
MAX_INTEGRATION_STEPS = 256
"""Points of a path from masks to the text."""
