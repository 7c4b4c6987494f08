"""A reward function of our own: does the reasoning name the currency of the row?"""

import re

REPLY = re.compile(r"\s*<reasoning>([^<]+)</reasoning>\s*<answer>[^<]*\w[^<]*</answer>\s*")
"""One reasoning block, then one answer block with a letter or digit in it, and no other tag."""


def names_currency(prompts, completions, currency, **columns):
    """1.0 for a complete reply whose reasoning names the currency, else 0.0.

    Args:
        prompts: the chats, not used here.
        completions: one reply each, as a list of messages; the last message is the assistant's.
        currency: the column `currency` of the rows, one value for each completion.
        columns: every other column of the rows, and what else the trainer passes.
    """
    replies = [REPLY.fullmatch(completion[-1]["content"]) for completion in completions]
    return [float(reply is not None and wanted in reply[1]) for reply, wanted in zip(replies, currency, strict=True)]
