"""Tools and environments: what answers the policy between two turns of a conversation, in worker processes with limits."""
