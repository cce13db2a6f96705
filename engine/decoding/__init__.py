"""Pure functions of logits and hidden states: which positions, which tokens, steering, attribution."""
