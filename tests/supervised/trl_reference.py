"""The first loss of TRL's SFTTrainer on a data set, as one batch.

TRL trains on whatever the template writes after the prompt, also the line break behind the end of a turn. A policy stops at the
end of its turn, so that last token gets no label here; everything else is TRL's.
"""

import warnings

from schemas.paths import resolve


def trl_first_loss(dataset, tokenizer, folder):
    """Loss on all rows before any update, and the token ids of the rows."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import SFTConfig, SFTTrainer

        settings = SFTConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=len(dataset),
            max_steps=1,
            completion_only_loss=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            learning_rate=1e-9,
            max_length=None,
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(resolve("embedded:base"), dtype="float32")
        trainer = SFTTrainer(model=model, args=settings, train_dataset=dataset, processing_class=tokenizer)
        trained_on = list(trainer.train_dataset["input_ids"])
        trainer.train_dataset = trainer.train_dataset.map(lambda row: {"labels": [*row["labels"][:-1], -100]})
        trainer.train()
    return next(line["loss"] for line in trainer.state.log_history if "loss" in line), trained_on
