"""The two forms of a prompt, which are TRL's: chat messages (conversational), or one plain string (standard)."""

PLAIN = "plain"
"""Role of the only message of a prompt in the standard format. Its content is tokenised as it stands, without a chat template,
and reward functions receive the prompt and the completions as strings."""
