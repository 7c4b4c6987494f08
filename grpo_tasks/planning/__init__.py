"""What a stage will need, before it runs: bytes by kind, and the largest microbatch that fits."""
