"""How the tokens of prompts and completions attend to each other, in training and in decoding; it knows no model and no batch."""
