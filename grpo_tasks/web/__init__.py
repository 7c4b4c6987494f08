"""What a server of ours answers to: requests from its own pages and from programs on this machine."""
