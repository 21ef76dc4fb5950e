"""The engines that run a plan: the fused ones, and the reference."""
