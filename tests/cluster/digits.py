"""A module with an environment, as users have it in their working directory."""

DIGITS = """
from my_words import ASK


class Digits:
    def reset(self, row, seed):
        self.turns = 0
        return [{"role": "user", "content": f"{ASK} {row['answer']} {seed % 7}"}]

    def step(self, completion):
        self.turns += 1
        given = sum(character.isdigit() for character in completion) / max(1, len(completion))
        return {"messages": [{"role": "user", "content": f"So far: {self.turns}"}], "done": self.turns == 2, "reward": given}
"""


def write_digits(folder):
    """An environment of two turns, whose module imports another one."""
    folder.mkdir(exist_ok=True)
    (folder / "my_words.py").write_text("ASK = 'Digits, please.'\n")
    (folder / "my_digits.py").write_text(DIGITS)
