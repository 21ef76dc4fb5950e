"""What runs a plan: the fused CPU engine, the reference, and the rule when a vendor's own wins."""
