"""A game for two: take 1, 2 or 3 sticks in turn; who takes the last one wins. The opponent moves at random."""

import random

MOVES = (1, 2, 3)


class Sticks:
    """One game. The reward is 1 for a win, paid at the end; a move that the rules forbid loses."""

    def reset(self, row, seed):  # noqa: ARG002 - all games of a group meet the same opponent
        """Lay out the sticks. The prompt of the row is the first message."""
        self.left = row["sticks"]
        self.random_numbers = random.Random(row["game"])

    def step(self, completion):
        """Make the move of the policy and answer it."""
        move = completion.strip()
        if move not in {str(count) for count in MOVES if count <= self.left}:
            return end(0.0, "not a move")
        self.left -= int(move)
        if self.left == 0:
            return end(1.0, "won")
        reply = self.random_numbers.choice([count for count in MOVES if count <= self.left])
        self.left -= reply
        if self.left == 0:
            return end(0.0, "lost")
        return {"messages": f"I take {reply}. {self.left} left."}

    def perfect(self, row):
        """The turns of a player who makes no mistake, for the reward lab."""
        self.reset(row, 0)
        return play(self, row, lambda left: left % 4)[::2]


def end(reward, result):
    """The last answer of a game."""
    return {"messages": [], "done": True, "reward": reward, "info": {"result": result}}


def play(game, row, choose):
    """The texts of one game, in turn: a move, the answer, a move ..., where `choose` moves by the number of sticks left."""
    game.reset(row, 0)
    texts = []
    while True:
        texts.append(str(choose(game.left)))
        answer = game.step(texts[-1])
        if answer.get("done"):
            return texts
        texts.append(answer["messages"])


def random_game(row):
    """A demonstration: a game of someone who knows the rules and nothing else."""
    random_numbers = random.Random(f"demonstration {row['game']}")
    texts = play(Sticks(), row, lambda left: random_numbers.choice([move for move in MOVES if move <= left]))
    return [{"role": "user" if number % 2 else "assistant", "content": text} for number, text in enumerate(texts)]
