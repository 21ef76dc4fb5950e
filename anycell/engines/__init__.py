"""What runs a plan: the fused engines, the reference, and the rule when a vendor's own wins."""
