"""What stages learn from, section by section: demonstrations and the kinds of stages, a judge, the difficulty of prompts."""
