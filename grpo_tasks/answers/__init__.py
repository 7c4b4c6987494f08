"""What counts as an answer and when it is right. Training, the lab, validation and evaluation all ask this room.

    completion --extract.py, a format--> answer --equality.py--> equal to the ground truth?
    answer column --ground_truths.py--> ground truths that no answer can equal

No reward, no weight, no torch. Nothing in a text is ever evaluated as code.
"""
