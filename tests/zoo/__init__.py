"""The zoo: every causal language model that transformers can make, built tiny, and what the pipeline does with it."""
