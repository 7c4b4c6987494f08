"""The two forms of a prompt, which are TRL's: chat messages (conversational), or one plain string (standard). And its samples."""

PLAIN = "plain"
"""Role of the only message of a prompt in the standard format. Its content is tokenised as it stands, without a chat template,
and reward functions receive the prompt and the completions as strings."""

GREEDY = -1
"""Number of the greedy completion among the samples of a held-out prompt; the others count from 0."""
