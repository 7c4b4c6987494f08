"""What an answer is: extraction from a completion, and equality with the ground truth."""
