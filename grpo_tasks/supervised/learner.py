"""Cross entropy of the trained tokens: the loss of supervised fine-tuning.

    loss = - sum over the trained tokens of log p(token) / number of trained tokens of the update

It is the learner of the engine with another loss: gradients, ranks, clipping, optimizer and schedule are the same.
"""

from jaxtyping import Float
from torch import Tensor

from grpo_tasks.grpo.learner import Learner
from grpo_tasks.grpo.measure import UpdateFigures
from grpo_tasks.grpo.microbatches import Microbatch


class SupervisedLearner(Learner):
    """Trains the policy to write given tokens. The weights of a microbatch are 0 at tokens that it does not learn."""

    __slots__ = ()

    def _accumulate(
        self,
        microbatch: Microbatch,
        old_logps: Float[Tensor, "N T"] | None,
        threshold: Float[Tensor, ""] | None,
        figures: UpdateFigures,
    ) -> None:
        """Forward, loss and backward of one microbatch; there is no earlier policy to compare with."""
        assert old_logps is None
        assert threshold is None
        scores = self.policies.scores(microbatch.tokens, count_hits=True)
        assert scores.hits is not None
        loss = -(scores.logps * microbatch.weights).sum()
        if microbatch.idle:
            # With sharded weights the backward pass gathers and reduces on all ranks, so this rank has to make it too.
            self.ranks.accelerator.backward(0.0 * loss)
            return
        self.ranks.accelerator.backward(loss)
        figures.add_supervised(loss, microbatch.trained, scores.entropies, scores.hits)
